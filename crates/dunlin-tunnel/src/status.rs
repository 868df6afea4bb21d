//! The status of a tunnel's trunks, relays and routes.

use std::net::SocketAddr;

use dunlin_lane::peers::Peer;

use crate::failure::Failure;
use crate::meter::Traffic;
use crate::route::{Listen, Target};

/// The status of one trunk, or of one channel of a relay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// The peer's name.
    pub peer: String,
    /// Selects the peer, for [`Tunnel::set_peer_rate`](crate::Tunnel::set_peer_rate).
    pub selector: Peer,
    /// The peer's address.
    pub at: SocketAddr,
    /// The route of each open channel.
    pub channels: Vec<String>,
    /// The number of open lanes in both directions.
    pub lanes: usize,
    /// What each of these lanes has carried; empty for a channel of a relay.
    pub by_lane: Vec<LaneStatus>,
    /// Bytes that wait on this side for consumers.
    pub held_bytes: u64,
    /// Bytes sent and not acknowledged.
    pub unacknowledged_bytes: u64,
    /// The limit of the rate at which this side sends to the peer, in bytes per second.
    pub rate: Option<u64>,
    /// Why the peer gets no new channel; `None` if the peer gets new channels, and for a channel of
    /// a relay.
    pub refused: Option<String>,
    /// Why a lane cannot be opened, with the address. Set while the most recent attempt to open a
    /// lane of either direction is a failed one. This side or the peer made the attempt.
    pub trouble: Option<String>,
}

/// An open lane of a trunk, and what its connection has carried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneStatus {
    /// The lane's number, which is unique within its direction.
    pub lane: u16,
    /// Whether this side sends on the lane.
    pub sends: bool,
    /// Bytes that the connection has carried in the lane's direction, including TLS records and
    /// headers. Sent bytes count when they are acknowledged.
    pub bytes: u64,
    /// The number of segments that this side sent again.
    pub retransmits: u32,
}

/// A route on this side.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RouteStatus {
    /// The route's name.
    pub route: String,
    /// Where the route listens. Listeners that were opened on demand are in
    /// [`Tunnel::on_demand_listeners`](crate::Tunnel::on_demand_listeners).
    pub listens: Option<Listen>,
    /// Why the route does not listen at present, although it should.
    pub lost: Option<Failure>,
    /// The peer's address, if the route has an entrance on this side. A redirected route can have
    /// several addresses, separated by commas.
    pub to: Option<String>,
    /// Why the most recent attempt to connect to the peer's tunnel failed; `None` if it succeeded,
    /// and before the first attempt.
    pub trouble: Option<String>,
    /// The target, if the route has an exit on this side.
    pub target: Option<Target>,
    /// The limit of the rate at which this side sends on the route, in bytes per second.
    pub rate: Option<u64>,
    /// The route's traffic since the tunnel started.
    pub traffic: Traffic,
}
