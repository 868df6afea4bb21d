//! Events that the tunnel reports to the program that runs it.

use std::fmt;
use std::net::SocketAddr;

use dunlin_proto::fault::FaultCode;

use super::failure::Failure;

/// An event of the tunnel. Its `Display` is one log line.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// A trunk is up.
    TrunkUp {
        /// The peer's name.
        peer: String,
        /// The peer's address.
        at: SocketAddr,
    },
    /// No trunk to a peer could be made; the connections that waited for it are closed.
    TrunkFailed {
        /// The peer's address, as configured.
        to: String,
        /// Why.
        failure: Failure,
    },
    /// A trunk has ended.
    TrunkEnded {
        /// The peer's name.
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
        /// The peer's name.
        peer: String,
    },
    /// A connection was refused before the channel was open, and is closed.
    Refused {
        /// The route.
        route: String,
        /// Why.
        failure: Failure,
    },
    /// A channel has ended in both directions, in order.
    Closed {
        /// The route.
        route: String,
        /// The channel's number in its trunk.
        channel: u32,
        /// The peer's name.
        peer: String,
    },
    /// A channel has ended, but a hypervisor closed its connection and left the last few bytes of
    /// one direction unread.
    LeftUnread {
        /// The route.
        route: String,
        /// The channel's number in its trunk.
        channel: u32,
        /// The peer's name.
        peer: String,
        /// Whether that hypervisor is on the peer's host.
        by_peer: bool,
    },
    /// A channel was aborted.
    Aborted {
        /// The route.
        route: String,
        /// The channel's number in its trunk.
        channel: u32,
        /// The peer's name.
        peer: String,
        /// Why, and who is at fault.
        failure: Failure,
    },
    /// A lane could not be opened or was lost; the other lanes continue.
    LaneLost {
        /// The lane's number.
        lane: u16,
        /// The peer's name.
        peer: String,
        /// Why.
        why: String,
    },
    /// The control lane was lost; it may be resumed.
    ControlLost {
        /// The peer's name.
        peer: String,
        /// Why.
        failure: Failure,
    },
    /// The control lane was resumed.
    ControlResumed {
        /// The peer's name.
        peer: String,
    },
    /// A connection to the tunnel's port was rejected.
    Rejected {
        /// The peer's address or kind.
        from: String,
        /// Why.
        why: String,
    },
    /// Something is wrong, and the tunnel continues.
    Warning(String),
}

impl fmt::Display for Event {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TrunkUp { peer, at } => write!(formatter, "trunk to {peer} at {at}"),
            Self::TrunkFailed { to, failure } => {
                write!(formatter, "cannot make a trunk to {to}: {failure}")
            }
            Self::TrunkEnded { peer, fault } => {
                write!(formatter, "trunk to {peer} ended: {fault}")
            }
            Self::Opened { route, channel, .. } => {
                write!(formatter, "route {route}: channel {channel} is open")
            }
            Self::Refused { route, failure } => {
                write!(
                    formatter,
                    "route {route}: a connection was refused: {failure}"
                )
            }
            Self::Closed { route, channel, .. } => {
                write!(formatter, "route {route}: channel {channel} is closed")
            }
            Self::LeftUnread {
                route,
                channel,
                by_peer,
                ..
            } => {
                let host = if *by_peer {
                    "the peer's host"
                } else {
                    "this host"
                };
                write!(
                    formatter,
                    "route {route}: channel {channel} is closed: the hypervisor on {host} left the \
                     last bytes unread, as QEMU does with its own TLS"
                )
            }
            Self::Aborted {
                route,
                channel,
                failure,
                ..
            } => write!(
                formatter,
                "route {route}: channel {channel} was aborted: {failure}"
            ),
            Self::LaneLost { lane, why, .. } => write!(formatter, "lane {lane} is lost: {why}"),
            Self::ControlLost { peer, failure } => {
                write!(formatter, "control lane to {peer} is lost: {failure}")
            }
            Self::ControlResumed { peer } => {
                write!(formatter, "control lane to {peer} resumed")
            }
            Self::Rejected { from, why } => {
                write!(formatter, "connection from {from} was rejected: {why}")
            }
            Self::Warning(text) => write!(formatter, "warning: {text}"),
        }
    }
}
