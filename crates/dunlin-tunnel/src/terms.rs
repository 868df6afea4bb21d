//! What the two sides of a trunk have agreed on.

use std::net::SocketAddr;

use dunlin_lane::peers::PeerIdentity;
use dunlin_proto::negotiate::{LaneSecurity, SessionId, SessionSecret};
use dunlin_proto::stripe::Side;

use super::route::Destination;

pub(super) struct Terms {
    pub(super) origin: Origin,
    pub(super) session: SessionId,
    pub(super) version: u16,
    /// The security of the lanes.
    pub(super) security: LaneSecurity,
    /// The peer's identity at the handshake. A lane's handshake may admit any certificate of this
    /// name, because either certificate may have been renewed: certificates are looked up when a
    /// lane is opened, and [`Terms::is_the_peer`] decides.
    pub(super) peer: PeerIdentity,
    /// The address to which this side's lanes connect.
    pub(super) lanes_at: SocketAddr,
    /// Authenticates the peer's lanes.
    pub(super) own_secret: SessionSecret,
    /// Authenticates this side's lanes.
    pub(super) peer_secret: SessionSecret,
    /// The number of lanes that this side opens.
    pub(super) lanes: u16,
    /// The maximum number of this side's lanes that the peer accepts.
    pub(super) peer_lanes: u16,
}

/// Which side dialled the trunk. That side also redials a lost control lane.
pub(super) enum Origin {
    /// This side, and the address it dials.
    Dialled(Destination),
    /// The peer.
    Accepted,
}

impl Terms {
    pub(super) fn side(&self) -> Side {
        match self.origin {
            Origin::Dialled(_) => Side::Connecting,
            Origin::Accepted => Side::Accepting,
        }
    }

    pub(super) fn is_dialled(&self) -> bool {
        self.side() == Side::Connecting
    }

    /// Whether `other` is the peer of this trunk.
    pub(super) fn is_the_peer(&self, other: &PeerIdentity) -> bool {
        other.is(&self.peer.principal())
    }

    /// The peer's name, escaped for a log.
    pub(super) fn peer_name(&self) -> String {
        dunlin_proto::text::harmless(&self.peer.to_string())
    }
}
