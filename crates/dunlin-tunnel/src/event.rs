//! What the tunnel reports to the program that runs it.

use std::fmt;
use std::net::SocketAddr;

use dunlin_proto::fault::FaultCode;

use super::failure::Failure;

/// Something that happened. Prints as one line for a log.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// A trunk is up.
    TrunkUp {
        /// Who the peer is.
        peer: String,
        /// Where it is.
        at: SocketAddr,
    },
    /// There is no trunk with a peer, and connections for it are closed.
    TrunkFailed {
        /// Where the peer was to be.
        to: String,
        /// Why.
        failure: Failure,
    },
    /// A trunk has ended.
    TrunkEnded {
        /// Who the peer was.
        peer: String,
        /// Why.
        fault: FaultCode,
    },
    /// A channel carries bytes.
    Opened {
        /// The route.
        route: String,
        /// The channel's number in its trunk.
        channel: u32,
    },
    /// A connection found no other half and was closed.
    Refused {
        /// The route.
        route: String,
        /// Why.
        failure: Failure,
    },
    /// A channel has ended both ways, in order.
    Closed {
        /// The route.
        route: String,
        /// The channel's number in its trunk.
        channel: u32,
    },
    /// A channel has ended, but for a few bytes before the end of one direction: the hypervisor
    /// there had closed its connection without reading them.
    LeftUnread {
        /// The route.
        route: String,
        /// The channel's number in its trunk.
        channel: u32,
        /// Whether that hypervisor is the peer's.
        by_peer: bool,
    },
    /// A channel was aborted.
    Aborted {
        /// The route.
        route: String,
        /// The channel's number in its trunk.
        channel: u32,
        /// Why, and whose fault it is.
        failure: Failure,
    },
    /// A lane could not be opened or was lost; the others carry on.
    LaneLost {
        /// The lane's number.
        lane: u16,
        /// Why.
        why: String,
    },
    /// The control lane was lost; a new one may take its place.
    ControlLost {
        /// Who the peer is.
        peer: String,
        /// Why.
        failure: Failure,
    },
    /// A new control lane has taken its place.
    ControlResumed {
        /// Who the peer is.
        peer: String,
    },
    /// A connection to the tunnel's port was rejected.
    Rejected {
        /// Where from.
        from: String,
        /// Why.
        why: String,
    },
    /// Something is not as it should be, and the tunnel goes on.
    Warning(String),
}

impl fmt::Display for Event {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TrunkUp { peer, at } => write!(formatter, "trunk to {peer} at {at}"),
            Self::TrunkFailed { to, failure } => {
                write!(formatter, "no trunk to {to}: {failure}")
            }
            Self::TrunkEnded { peer, fault } => {
                write!(formatter, "the trunk to {peer} has ended: {fault}")
            }
            Self::Opened { route, channel } => {
                write!(formatter, "route {route}: channel {channel} is open")
            }
            Self::Refused { route, failure } => {
                write!(
                    formatter,
                    "route {route}: a connection was refused: {failure}"
                )
            }
            Self::Closed { route, channel } => {
                write!(formatter, "route {route}: channel {channel} is closed")
            }
            Self::LeftUnread {
                route,
                channel,
                by_peer,
            } => {
                let host = if *by_peer {
                    "the peer's host"
                } else {
                    "this host"
                };
                write!(
                    formatter,
                    "route {route}: channel {channel} is closed: the hypervisor on {host} closed \
                     its connection at the other end's last bytes, as QEMU does with its own TLS"
                )
            }
            Self::Aborted {
                route,
                channel,
                failure,
            } => write!(
                formatter,
                "route {route}: channel {channel} was aborted: {failure}"
            ),
            Self::LaneLost { lane, why } => write!(formatter, "lane {lane} is lost: {why}"),
            Self::ControlLost { peer, failure } => {
                write!(formatter, "the control lane to {peer} is lost: {failure}")
            }
            Self::ControlResumed { peer } => {
                write!(formatter, "a new control lane to {peer} stands")
            }
            Self::Rejected { from, why } => {
                write!(formatter, "a connection from {from} was rejected: {why}")
            }
            Self::Warning(text) => write!(formatter, "warning: {text}"),
        }
    }
}
