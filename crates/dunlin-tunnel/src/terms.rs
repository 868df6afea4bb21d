//! What the two sides of a trunk have agreed on.

use std::net::SocketAddr;

use dunlin_lane::peers::{PeerIdentity, Principal};
use dunlin_proto::negotiate::{LaneSecurity, SessionId, SessionSecret};
use dunlin_proto::stripe::Side;

use super::route::Destination;

pub(super) struct Terms {
    pub(super) origin: Origin,
    pub(super) session: SessionId,
    pub(super) version: u16,
    /// What protects the lanes.
    pub(super) security: LaneSecurity,
    /// A lane's handshake may admit any peer of this name: both certificates may be renewed, so
    /// both are looked up when a lane is made, and [`Terms::is_the_peer`] decides.
    pub(super) peer: PeerIdentity,
    /// The only peer that may be at the other end of a lane.
    pub(super) principal: Principal,
    /// Where this side's lanes go.
    pub(super) lanes_at: SocketAddr,
    /// Authenticates the peer's lanes.
    pub(super) own_secret: SessionSecret,
    /// Authenticates this side's lanes.
    pub(super) peer_secret: SessionSecret,
    /// Lanes that this side opens.
    pub(super) lanes: u16,
    /// The most that the peer accepts.
    pub(super) peer_lanes: u16,
}

/// Which side made the trunk, and makes a lost control lane anew.
pub(super) enum Origin {
    /// This one, and where it dials.
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

    /// Whether this is the peer that the trunk is with.
    pub(super) fn is_the_peer(&self, other: &PeerIdentity) -> bool {
        other.is(&self.principal)
    }

    /// The peer's name for a log.
    pub(super) fn peer_name(&self) -> String {
        dunlin_proto::text::harmless(&self.peer.to_string())
    }
}
