//! How two sides agree on SAs, add some, renew their keys and take them back.
//!
//! [`Exchange`] is one side. It has no clock and touches nothing: it says what is to
//! be done, and is told when that is.
//!
//! * Commands: [`Exchange::want`], [`Exchange::release`], [`Exchange::rekey`],
//!   [`Exchange::end`].
//! * What happened: [`Exchange::handle_message`], [`Exchange::begun`],
//!   [`Exchange::inbound_installed`], [`Exchange::outbound_installed`].
//! * What is to be done: [`Exchange::poll_action`], until there is nothing. Every
//!   action is carried out, and the call made that it names, before the next message
//!   is handed over. One that fails is [`Exchange::end`].
//!
//! ```text
//!             Terms                 begun()
//!  greeting ─────────▶ beginning ───────────▶ running ──▶ over
//!      └───────────────────┴── End, a breach, end() ───────▲
//! ```
//!
//! What is kept is bounded by [`MAX_SAS`] for each direction and epoch, of which there
//! are two at most. A peer that breaks the order, counts backwards, wants one SA twice
//! or more than it was allowed is told so, and the session is over.

use std::collections::{BTreeSet, VecDeque};

use super::message::{Kind, Message, Terms};
use super::plan::Udp;
use super::{Grant, Mode, Sender, Slot};
use crate::fault::FaultCode;
use crate::limits::{MAX_SAS, MAX_TEXT_BYTES};
use crate::mistake::{Mistake, planted};

mod action;
mod receiving;
mod sending;
#[cfg(test)]
pub(super) mod tests;

pub use action::{Action, Ending};
use action::{Breach, malformed};
use receiving::Receiving;
use sending::Sending;

/// What a side waits for the peer to say. Of two that differ, the later one has not been
/// waited for as long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Awaited {
    /// The message's name.
    pub word: &'static str,
    /// Of SAs that are to be granted, the first one's number; otherwise 0.
    pub index: u32,
}

/// How a session stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The peer's terms have not come.
    Greeting,
    /// They have, and what stands before everything else is being installed.
    Beginning,
    /// SAs come and go.
    Running,
    /// Nothing is said or heard any more.
    Over,
}

/// One side of a session.
#[derive(Debug)]
pub struct Exchange {
    phase: Phase,
    own: Own,
    /// Terms that both have.
    agreed: Option<Terms>,
    sending: Sending,
    receiving: Receiving,
    peer_ready: bool,
    up: bool,
    actions: VecDeque<Action>,
}

/// What this side brings along.
#[derive(Debug)]
enum Own {
    Initiator(Terms),
    Responder { sas_max: u16, udp: Option<Udp> },
}

impl Exchange {
    /// The side that asks, with its terms, and for whom it wants an SA beside the
    /// fallback.
    #[must_use]
    pub fn initiator(terms: Terms, senders: Vec<Sender>) -> Self {
        let mut exchange = Self::new(Own::Initiator(terms), senders);
        exchange
            .actions
            .push_back(Action::Send(Message::Terms(terms)));
        exchange
    }

    /// The side that is asked. It installs up to `sas_max` SAs in an epoch, and has
    /// ports for ESP in UDP if it is able to do that. Of `senders` those count that the
    /// mode has which it is asked for.
    #[must_use]
    pub fn responder(sas_max: u16, udp: Option<Udp>, senders: Vec<Sender>) -> Self {
        let sas_max = sas_max.clamp(1, MAX_SAS);
        Self::new(Own::Responder { sas_max, udp }, senders)
    }

    fn new(own: Own, senders: Vec<Sender>) -> Self {
        let senders = senders.into_iter().collect::<BTreeSet<_>>();
        Self {
            phase: Phase::Greeting,
            own,
            agreed: None,
            sending: Sending::new(senders),
            receiving: Receiving::default(),
            peer_ready: false,
            up: false,
            actions: VecDeque::new(),
        }
    }

    // What is known.

    /// What this side waits for the peer to say, so that the caller can bound the wait.
    #[must_use]
    pub fn waits_for(&self) -> Option<Awaited> {
        let first = |kind: Kind| Awaited {
            word: kind.name(),
            index: 0,
        };
        let granted = |index| Awaited {
            word: Kind::Granted.name(),
            index,
        };
        match self.phase {
            Phase::Over => None,
            Phase::Greeting => Some(first(Kind::Terms)),
            _ => match self.sending.awaits_grant() {
                Some(index) => Some(granted(index)),
                None if !self.peer_ready => Some(first(Kind::Ready)),
                None => None,
            },
        }
    }

    /// The SAs of what this side sends, and their epoch.
    #[must_use]
    pub fn outbound(&self) -> (u32, &[Grant]) {
        self.sending.live()
    }

    /// The SAs of what the peer sends, and their epoch.
    #[must_use]
    pub fn inbound(&self) -> (u32, &[Grant]) {
        self.receiving.live()
    }

    // Commands.

    /// Wants an SA for `sender`, unless it has one. Where the agreed mode has none
    /// such, the fallback serves; so it does while the peer has no room for it, and the SA is
    /// asked for when another is released.
    pub fn want(&mut self, sender: Sender) {
        if self.phase != Phase::Over && self.agreed.is_none_or(|terms| fits(&terms, sender)) {
            self.sending.wish(sender);
            self.go_on();
        }
    }

    /// Gives the SA of `sender` back: it sends no more.
    pub fn release(&mut self, sender: Sender) {
        if self.phase != Phase::Over {
            self.sending.release(sender);
            self.go_on();
        }
    }

    /// Renews the keys of everything that this side sends.
    pub fn rekey(&mut self) {
        if self.phase != Phase::Over {
            self.sending.rekey();
            self.go_on();
        }
    }

    /// Ends the session for a reason that the peer is told.
    pub fn end(&mut self, fault: FaultCode, text: &str) {
        self.give_up(fault, text);
    }

    // What happened.

    /// What stands before everything else is installed.
    pub fn begun(&mut self) {
        if self.phase != Phase::Beginning {
            return;
        }
        self.phase = Phase::Running;
        if let (Own::Responder { .. }, Some(terms)) = (&self.own, self.agreed) {
            self.actions.push_back(Action::Send(Message::Terms(terms)));
        }
        self.go_on();
    }

    /// The SAs of an [`Action::InstallInbound`] are installed, each under its SPI.
    pub fn inbound_installed(&mut self, spis: &[u32]) {
        if self.phase != Phase::Running {
            return;
        }
        match self.receiving.installed(spis) {
            Some((epoch, spis)) => {
                let granted = Message::Granted { epoch, spis };
                self.actions.push_back(Action::Send(granted));
            }
            None => self.give_up(FaultCode::Internal, "SAs were installed that nobody wanted"),
        }
    }

    /// The SAs and policies of an [`Action::InstallOutbound`] are installed.
    pub fn outbound_installed(&mut self) {
        if self.phase != Phase::Running {
            return;
        }
        self.sending.installed(&mut self.actions);
        self.come_up();
        self.go_on();
    }

    /// The peer says something.
    pub fn handle_message(&mut self, message: Message) {
        let result = match (self.phase, message) {
            (Phase::Over, _) => Ok(()),
            (_, Message::End { fault, text }) => {
                self.over(Ending {
                    by_peer: true,
                    fault,
                    text,
                });
                Ok(())
            }
            (Phase::Greeting, Message::Terms(terms)) => self.agree(&terms),
            (Phase::Running, Message::Want { epoch, slots }) => self.wanted(epoch, slots),
            (Phase::Running, Message::Granted { epoch, spis }) => {
                let old = self.sending.live().0;
                if planted(Mistake::RetiredBeforeSwitch) && old > 0 && epoch > old {
                    let retire = Message::Retire { epoch: old };
                    self.actions.push_back(Action::Send(retire));
                }
                self.sending
                    .granted(epoch, &spis)
                    .map(|action| self.actions.push_back(action))
            }
            (Phase::Running, Message::Ready) => self.heard_ready(),
            (Phase::Running, Message::Retire { epoch }) => self
                .receiving
                .retire(epoch)
                .map(|action| self.actions.push_back(action)),
            (Phase::Running, Message::Release { indices }) => self
                .receiving
                .release(&indices)
                .map(|action| self.actions.push_back(action)),
            (_, message) => Err(Breach(
                FaultCode::Malformed,
                format!("*{}* comes where it means nothing", message.kind()),
            )),
        };
        if let Err(Breach(fault, text)) = result {
            self.give_up(fault, &text);
        }
    }

    // What is to be done.

    /// The next action; none when there is nothing to do.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    fn agree(&mut self, peers: &Terms) -> Result<(), Breach> {
        let agreed = match &self.own {
            Own::Initiator(own) => {
                let same = own.mode == peers.mode
                    && own.ports == peers.ports
                    && own.udp.is_some() == peers.udp.is_some();
                if !same {
                    let text = "the answer's terms are others than were asked for";
                    return Err(Breach(FaultCode::Malformed, text.to_owned()));
                }
                if (own.own, own.other) != (peers.other, peers.own) {
                    let text = format!(
                        "this side is {} to itself and {} to the peer, which is {} to itself and {} to this side",
                        own.own, peers.other, peers.own, own.other
                    );
                    return Err(Breach(FaultCode::AddressTranslated, text));
                }
                *own
            }
            Own::Responder { sas_max, udp } => {
                if peers.udp.is_some() && udp.is_none() {
                    let text = "ESP in UDP is asked for, and this side has no port for it";
                    return Err(Breach(FaultCode::FeatureMissing, text.to_owned()));
                }
                Terms {
                    own: peers.other,
                    other: peers.own,
                    sas_max: *sas_max,
                    udp: peers.udp.and(*udp),
                    ..*peers
                }
            }
        };
        self.agreed = Some(agreed);
        self.sending.most(peers.sas_max);
        self.sending.keep(|sender| fits(&agreed, sender));
        self.receiving.most(agreed.sas_max);
        self.phase = Phase::Beginning;
        self.actions.push_back(Action::Begin(*peers));
        Ok(())
    }

    fn wanted(&mut self, epoch: u32, slots: Vec<Slot>) -> Result<(), Breach> {
        let Some(terms) = self.agreed else {
            return Err(malformed("SAs are wanted before terms are agreed on"));
        };
        if let Some(other) = slots.iter().find(|slot| !fits(&terms, slot.sender)) {
            let text = format!(
                "an SA for {} is wanted in a session by {} for ports {}",
                other.sender, terms.mode, terms.ports
            );
            return Err(Breach(FaultCode::Malformed, text));
        }
        let action = self.receiving.wanted(epoch, slots)?;
        self.actions.push_back(action);
        Ok(())
    }

    fn heard_ready(&mut self) -> Result<(), Breach> {
        if self.peer_ready || self.receiving.live().0 == 0 {
            return Err(malformed("*ready* comes twice, or before any SA"));
        }
        self.peer_ready = true;
        self.come_up();
        Ok(())
    }

    fn come_up(&mut self) {
        if !self.up && self.peer_ready && self.sending.live().0 > 0 {
            self.up = true;
            self.actions.push_back(Action::Up);
        }
    }

    /// Wants what there is to want, where nothing is under way.
    fn go_on(&mut self) {
        if self.phase == Phase::Running
            && let Err(Breach(fault, text)) = self.sending.go_on(&mut self.actions)
        {
            self.give_up(fault, &text);
        }
    }

    fn give_up(&mut self, fault: FaultCode, text: &str) {
        if self.phase == Phase::Over {
            return;
        }
        let mut end = text.len().min(MAX_TEXT_BYTES);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let text = text[..end].to_owned();
        // What was still to be done is not done any more.
        self.actions.clear();
        self.actions.push_back(Action::Send(Message::End {
            fault,
            text: text.clone(),
        }));
        self.over(Ending {
            by_peer: false,
            fault,
            text,
        });
    }

    fn over(&mut self, ending: Ending) {
        self.phase = Phase::Over;
        self.actions
            .retain(|action| matches!(action, Action::Send(Message::End { .. })));
        self.actions.push_back(Action::Over(ending));
    }
}

/// Whether a session on these terms has an SA for `sender`.
fn fits(terms: &Terms, sender: Sender) -> bool {
    match (sender, terms.mode) {
        (Sender::Fallback, _) | (Sender::Cpu(_), Mode::Cpu) => true,
        (Sender::Connection { from, to }, Mode::Connection) => {
            from > 0 && to > 0 && (terms.ports.contains(from) || terms.ports.contains(to))
        }
        _ => false,
    }
}
