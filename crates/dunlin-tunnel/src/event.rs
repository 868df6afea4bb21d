//! Events that the tunnel reports to the program that runs it.

use std::fmt;
use std::net::SocketAddr;

use dunlin_proto::fault::FaultCode;

use super::failure::Failure;
use super::route::Listen;

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
    /// No trunk to a peer could be established; the connections that waited for it are
    /// closed.
    TrunkFailed {
        /// The peer's address, as configured.
        to: String,
        /// The reason why no trunk could be established.
        failure: Failure,
    },
    /// A trunk has ended.
    TrunkEnded {
        /// The peer's name.
        peer: String,
        /// The reason why the trunk ended.
        fault: FaultCode,
        /// The address and the reason if lanes could not be opened.
        why: Option<String>,
    },
    /// A channel is open: both of its ends are connected.
    Opened(ChannelId),
    /// A connection was refused before the channel was open, and is closed.
    Refused {
        /// The route.
        route: String,
        /// The reason for the refusal.
        failure: Failure,
    },
    /// Both directions of a channel have ended cleanly.
    Closed(ChannelId),
    /// A channel has ended. One hypervisor closed its connection before it had read the last few
    /// bytes.
    LeftUnread {
        /// The channel.
        id: ChannelId,
        /// Whether that hypervisor is on the peer's host.
        by_peer: bool,
    },
    /// A channel was aborted.
    Aborted {
        /// The channel.
        id: ChannelId,
        /// The reason, and the party at fault.
        failure: Failure,
    },
    /// A lane could not be opened or was lost; the other lanes continue.
    LaneLost {
        /// The lane's number.
        lane: u16,
        /// The peer's name.
        peer: String,
        /// The reason why the lane was lost or could not be opened.
        why: String,
    },
    /// The peer of a trunk has not answered for a fifth of
    /// [`Limits::vanished`](crate::Limits::vanished), or the peer of a relay has taken none of the
    /// waiting bytes for that time.
    PeerSilent {
        /// The peer's name.
        peer: String,
        /// Whether the peer's host acknowledges what it receives.
        host_answers: bool,
        /// The fault code, and a text that says which connections are silent and what the tunnel
        /// does.
        failure: Failure,
    },
    /// The control lane was lost; it may be resumed.
    ControlLost {
        /// The peer's name.
        peer: String,
        /// The reason for the loss.
        failure: Failure,
    },
    /// The control lane was resumed.
    ControlResumed {
        /// The peer's name.
        peer: String,
    },
    /// The unix socket of a listener was removed or replaced, and the tunnel cannot listen there
    /// again. It tries again every second.
    ListenerLost {
        /// The route.
        route: String,
        /// The reason why the tunnel cannot listen.
        failure: Failure,
    },
    /// A listener has created its unix socket anew, because the socket was removed or replaced, or
    /// because the configuration gives it other permissions.
    ListenerRestored {
        /// The route.
        route: String,
        /// The address.
        listen: Listen,
    },
    /// The tunnel rejected a connection at its port for peers, at a relay's port, or at a port for
    /// redirected connections.
    Rejected {
        /// For a control lane, the peer's name. For a data lane, the text "a peer that opened a
        /// lane". For any other connection, the client's address.
        from: String,
        /// The reason's code.
        fault: FaultCode,
        /// Why.
        why: String,
    },
    /// Something failed, but the tunnel continues.
    Warning(String),
}

/// Identifies a channel in an event.
#[derive(Clone, Debug)]
pub struct ChannelId {
    /// The route.
    pub route: String,
    /// The channel's number in its trunk.
    pub channel: u32,
    /// The peer's name.
    pub peer: String,
}

impl Event {
    /// Reports a silent peer. `what` names what is silent and what follows. `more` is a possible
    /// reason, in addition to the one that `host_answers` implies.
    pub(super) fn peer_silent(peer: String, host_answers: bool, what: &str, more: &str) -> Self {
        let why = match host_answers {
            true => "its host answers, so its process is stopped or gets no processor time",
            false => "its host does not answer either",
        };
        let failure = Failure::new(FaultCode::ControlLost, format!("{what}: {why}{more}"));
        Self::PeerSilent {
            peer,
            host_answers,
            failure,
        }
    }

    /// The fault code of an event that reports a failure.
    #[must_use]
    pub fn fault(&self) -> Option<FaultCode> {
        match self {
            Self::TrunkFailed { failure, .. }
            | Self::Refused { failure, .. }
            | Self::Aborted { failure, .. }
            | Self::PeerSilent { failure, .. }
            | Self::ControlLost { failure, .. }
            | Self::ListenerLost { failure, .. } => Some(failure.code()),
            Self::TrunkEnded { fault, .. } | Self::Rejected { fault, .. } => Some(*fault),
            Self::LaneLost { .. } => Some(FaultCode::LaneLost),
            _ => None,
        }
    }
}

impl fmt::Display for ChannelId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "route {}: channel {}", self.route, self.channel)
    }
}

impl fmt::Display for Event {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TrunkUp { peer, at } => write!(formatter, "trunk to {peer} at {at}"),
            Self::TrunkFailed { to, failure } => {
                write!(formatter, "cannot establish a trunk to {to}: {failure}")
            }
            Self::TrunkEnded { peer, fault, why } => {
                write!(formatter, "trunk to {peer} ended: {fault}")?;
                match why {
                    Some(why) => write!(formatter, ": {why}"),
                    None => Ok(()),
                }
            }
            Self::Opened(id) => write!(formatter, "{id} is open"),
            Self::Refused { route, failure } => {
                write!(
                    formatter,
                    "route {route}: a connection was refused: {failure}"
                )
            }
            Self::Closed(id) => write!(formatter, "{id} is closed"),
            Self::LeftUnread { id, by_peer } => {
                let host = if *by_peer {
                    "the peer's host"
                } else {
                    "this host"
                };
                write!(
                    formatter,
                    "{id} is closed: the hypervisor on {host} left the \
                     last bytes unread, as QEMU does with its own TLS"
                )
            }
            Self::Aborted { id, failure } => write!(formatter, "{id} was aborted: {failure}"),
            Self::LaneLost { lane, why, .. } => write!(formatter, "lane {lane} is lost: {why}"),
            Self::ControlLost { peer, failure } => {
                write!(formatter, "control lane to {peer} is lost: {failure}")
            }
            Self::ControlResumed { peer } => {
                write!(formatter, "control lane to {peer} resumed")
            }
            Self::PeerSilent { failure, .. } | Self::ListenerLost { failure, .. } => {
                write!(formatter, "{failure}")
            }
            Self::ListenerRestored { route, listen } => {
                write!(formatter, "route {route} listens on {listen} again")
            }
            Self::Rejected { from, why, .. } => {
                write!(formatter, "connection from {from} was rejected: {why}")
            }
            Self::Warning(text) => write!(formatter, "warning: {text}"),
        }
    }
}
