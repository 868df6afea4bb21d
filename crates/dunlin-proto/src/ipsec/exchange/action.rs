//! What an exchange decides, and how a peer breaks it.

use std::collections::HashSet;

use crate::fault::FaultCode;
use crate::ipsec::message::{Message, Terms};
use crate::ipsec::{Grant, Sender, Slot};

/// Something to be done, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send this to the peer.
    Send(Message),
    /// Check the peer's terms; install what stands before everything else, and call
    /// [`Exchange::begun`](super::Exchange::begun).
    Begin(Terms),
    /// Install the SAs of what the peer sends; call [`Exchange::inbound_installed`](super::Exchange::inbound_installed).
    InstallInbound {
        /// Their epoch.
        epoch: u32,
        /// The SAs.
        slots: Vec<Slot>,
    },
    /// Install the SAs of what this side sends, and its policies; call
    /// [`Exchange::outbound_installed`](super::Exchange::outbound_installed).
    InstallOutbound {
        /// Their epoch.
        epoch: u32,
        /// The SAs.
        grants: Vec<Grant>,
        /// Whether they are the first of their epoch, so that traffic goes over to it.
        first: bool,
        /// Who had an SA in the epoch before.
        known: Vec<Sender>,
    },
    /// Remove these; nothing is sent by them any more.
    RetireOutbound {
        /// Their epoch.
        epoch: u32,
        /// The SAs.
        grants: Vec<Grant>,
        /// Whether what they were for is over, and not merely goes by another SA.
        over: bool,
    },
    /// Remove these soon: packets that the peer sent by them may still be under way.
    RetireInbound {
        /// Their epoch.
        epoch: u32,
        /// The SAs.
        grants: Vec<Grant>,
    },
    /// Both sides' traffic is protected. Once.
    Up,
    /// Take everything back. The last action.
    Over(Ending),
}

/// What the peer did wrong.
pub(super) struct Breach(pub(super) FaultCode, pub(super) String);

/// Whether no two are the same.
pub(super) fn distinct<T: std::hash::Hash + Eq>(mut items: impl Iterator<Item = T>) -> bool {
    let mut seen = HashSet::new();
    items.all(|item| seen.insert(item))
}

pub(super) fn malformed(text: &str) -> Breach {
    Breach(FaultCode::Malformed, text.to_owned())
}

/// Why a session is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ending {
    /// Whether the peer ended it, and said what follows.
    pub by_peer: bool,
    /// The reason as a code.
    pub fault: FaultCode,
    /// The reason in words. A peer's are to be escaped before they reach a terminal.
    pub text: String,
}
