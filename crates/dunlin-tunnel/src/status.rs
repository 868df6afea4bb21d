//! What a tunnel carries now.

use std::net::SocketAddr;

use crate::meter::Traffic;
use crate::route::{Listen, Target};

/// What a trunk carries now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// Who the peer is.
    pub peer: String,
    /// Where it is.
    pub at: SocketAddr,
    /// Its channels that are open, by their routes' names.
    pub channels: Vec<String>,
    /// Lanes of both sides.
    pub lanes: usize,
    /// Bytes that wait here for consumers.
    pub held_bytes: u64,
    /// Bytes that were sent and not acknowledged.
    pub unacknowledged_bytes: u64,
}

/// A route on this side.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RouteStatus {
    /// Its name.
    pub route: String,
    /// Where it listens; one that was opened for a purpose is in
    /// [`Tunnel::on_demand_listeners`](crate::Tunnel::on_demand_listeners).
    pub listens: Option<Listen>,
    /// Where its connections go, if any come in here.
    pub to: Option<String>,
    /// What the peers' connections are made to, if any go out here.
    pub target: Option<Target>,
    /// What it has carried since the tunnel began.
    pub traffic: Traffic,
}
