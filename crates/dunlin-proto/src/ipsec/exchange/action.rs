//! The actions of an exchange, and violations by the peer.

use std::collections::HashSet;

use crate::fault::FaultCode;
use crate::ipsec::message::{Message, Terms};
use crate::ipsec::{Grant, Sender, Slot};

/// An action for the caller, to be performed in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send this to the peer.
    Send(Message),
    /// Check the peer's terms, install the initial policies, and call
    /// [`Exchange::begun`](super::Exchange::begun).
    Begin(Terms),
    /// Install inbound SAs, and call
    /// [`Exchange::inbound_installed`](super::Exchange::inbound_installed).
    InstallInbound {
        /// The epoch of the SAs.
        epoch: u32,
        /// The SAs.
        slots: Vec<Slot>,
    },
    /// Install outbound SAs and their policies, and call
    /// [`Exchange::outbound_installed`](super::Exchange::outbound_installed).
    InstallOutbound {
        /// The epoch of the SAs.
        epoch: u32,
        /// The SAs.
        grants: Vec<Grant>,
        /// Whether they are the first of their epoch, so that traffic switches to it.
        first: bool,
        /// The senders that had an SA in the previous epoch.
        known: Vec<Sender>,
    },
    /// Remove these SAs; this side no longer sends with them.
    RetireOutbound {
        /// The epoch of the SAs.
        epoch: u32,
        /// The SAs.
        grants: Vec<Grant>,
        /// Whether the SAs' senders have ended, instead of switching to another SA.
        over: bool,
    },
    /// Remove these SAs soon: packets of the peer may still be in flight.
    RetireInbound {
        /// The epoch of the SAs.
        epoch: u32,
        /// The SAs.
        grants: Vec<Grant>,
    },
    /// The traffic in both directions is protected. Returned once.
    Up,
    /// Remove everything. The last action.
    Over(Ending),
}

/// A protocol violation by the peer.
pub(super) struct Breach(pub(super) FaultCode, pub(super) String);

/// Whether all items differ.
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
