//! What the two sides of a trunk have agreed on.

use std::net::SocketAddr;
use std::time::SystemTime;

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
    /// The peer's identity at the handshake of the trunk. Both sides can renew their certificates
    /// while the trunk exists. Each lane's handshake therefore uses the current certificates, and
    /// admits any certificate of this name. [`Terms::is_the_peer`] then decides whether the lane is
    /// from this peer.
    pub(super) peer: PeerIdentity,
    /// The end of the validity of the certificate with which this side dialled the trunk; `None` if
    /// the peer dialled it. After that time the peer refuses new channels on this trunk.
    pub(super) own_until: Option<SystemTime>,
    /// The address to which this side's lanes connect.
    pub(super) lanes_at: SocketAddr,
    /// Authenticates the lanes that the peer opens.
    pub(super) own_secret: SessionSecret,
    /// Authenticates the lanes that this side opens.
    pub(super) peer_secret: SessionSecret,
    /// The number of lanes on which this side sends.
    pub(super) lanes: u16,
    /// The maximum number of this side's lanes that the peer accepts.
    pub(super) peer_lanes: u16,
}

/// Which side dialled the trunk. That side also redials a lost control lane.
pub(super) enum Origin {
    /// This side dialled the trunk, at this address.
    Dialled(Destination),
    /// The peer dialled the trunk.
    Accepted,
}

impl Terms {
    pub(super) fn side(&self) -> Side {
        match self.origin {
            Origin::Dialled(_) => Side::Connecting,
            Origin::Accepted => Side::Accepting,
        }
    }

    /// Whether the side that dialled the trunk opens the lanes of both directions.
    pub(super) fn has_one_opener(&self) -> bool {
        one_opener(self.version, self.security)
    }

    pub(super) fn is_dialled(&self) -> bool {
        self.side() == Side::Connecting
    }

    /// Whether the certificate with which this side dialled the trunk has expired.
    pub(super) fn is_own_expired(&self) -> bool {
        self.own_until
            .is_some_and(|until| SystemTime::now() > until)
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

/// Whether the side that dialled a trunk opens the lanes of both directions. With lanes over IPsec
/// each side opens its own, because a keying session protects the ports of the side that begins it.
pub(super) fn one_opener(version: u16, security: LaneSecurity) -> bool {
    version >= 2 && security != LaneSecurity::Ipsec
}
