//! The actions of an exchange, and violations by the peer.

use std::collections::HashSet;

use crate::fault::FaultCode;
use crate::ipsec::message::{Message, Terms};
use crate::ipsec::{Grant, Sender, Slot};

/// What the caller does next. The caller performs the actions in the order in which they are
/// returned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Sends this message to the peer.
    Send(Message),
    /// Checks the peer's terms, installs the initial policies, and calls
    /// [`Exchange::begun`](super::Exchange::begun).
    Begin(Terms),
    /// Installs inbound SAs, and calls
    /// [`Exchange::inbound_installed`](super::Exchange::inbound_installed).
    InstallInbound {
        /// The epoch of the SAs.
        epoch: u32,
        /// The SAs.
        slots: Vec<Slot>,
    },
    /// Installs outbound SAs and their policies, and calls
    /// [`Exchange::outbound_installed`](super::Exchange::outbound_installed).
    InstallOutbound {
        /// The epoch of the SAs.
        epoch: u32,
        /// The SAs.
        grants: Vec<Grant>,
        /// Whether these are the first SAs of their epoch. If so, traffic switches to this epoch.
        first: bool,
        /// The senders that had an SA in the previous epoch.
        known: Vec<Sender>,
    },
    /// Removes these SAs, because this side no longer sends with them.
    RetireOutbound {
        /// The epoch of the SAs.
        epoch: u32,
        /// The SAs.
        grants: Vec<Grant>,
        /// True if the senders of these SAs have ended. False if the senders go on with the SAs of
        /// a newer epoch.
        over: bool,
    },
    /// Removes these SAs after a delay, because packets of the peer may be in flight.
    RetireInbound {
        /// The epoch of the SAs.
        epoch: u32,
        /// The SAs.
        grants: Vec<Grant>,
    },
    /// Reports that the traffic in both directions is protected. Returned only once in a session.
    Up,
    /// Removes everything that the session installed. The last action.
    Over(Ending),
}

/// A protocol violation by the peer.
pub(super) struct Breach(pub(super) FaultCode, pub(super) String);

/// Whether no two items are equal.
pub(super) fn distinct<T: std::hash::Hash + Eq>(mut items: impl Iterator<Item = T>) -> bool {
    let mut seen = HashSet::new();
    items.all(|item| seen.insert(item))
}

pub(super) fn malformed(text: &str) -> Breach {
    Breach(FaultCode::Malformed, text.to_owned())
}

/// Why a session ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ending {
    /// Whether the peer ended the session and sent the fields below.
    pub by_peer: bool,
    /// The fault code.
    pub fault: FaultCode,
    /// The reason as text. The peer's text must be escaped before it is written to a terminal.
    pub text: String,
}
