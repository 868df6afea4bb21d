//! How two sides agree on SAs, add SAs, renew their keys and remove them.
//!
//! [`Exchange`] is one side. It has no clock and does no I/O: it returns actions, and the caller
//! reports when they are done.
//!
//! * Commands: [`Exchange::want`], [`Exchange::release`], [`Exchange::rekey`],
//!   [`Exchange::end`].
//! * Events: [`Exchange::handle_message`], [`Exchange::begun`],
//!   [`Exchange::inbound_installed`], [`Exchange::outbound_installed`].
//! * Actions: [`Exchange::poll_action`], until it returns `None`. The caller performs each action,
//!   and makes the call that the action names, before it passes the next message to
//!   [`Exchange::handle_message`]. If an action fails, the caller calls [`Exchange::end`].
//!
//! ```text
//!             Terms                 begun()
//!  greeting ─────────▶ beginning ───────────▶ running ──▶ over
//!      └───────────────────┴── End, a breach, end() ───────▲
//! ```
//!
//! The state has at most two epochs in each direction, with at most [`MAX_SAS`] SAs each. The
//! session ends with a fault code if the peer breaks a rule, for example if it sends a message out
//! of order, reuses a number, requests an SA twice, or requests more SAs than allowed.

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

/// The message for which a side waits. The caller restarts its timeout when this value changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Awaited {
    /// The name of the message.
    pub word: &'static str,
    /// If the message is *granted*, the index of the first SA that the peer has yet to grant;
    /// otherwise 0.
    pub index: u32,
}

/// The phase of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The peer's terms have not arrived.
    Greeting,
    /// The terms have arrived, and the initial policies are being installed.
    Beginning(Terms),
    /// The initial policies are installed; SAs are being added and removed.
    Running(Terms),
    /// The session has ended; messages and requests are ignored.
    Over,
}

/// One side of a session.
#[derive(Debug)]
pub struct Exchange {
    phase: Phase,
    own: Own,
    sending: Sending,
    receiving: Receiving,
    peer_ready: bool,
    up: bool,
    actions: VecDeque<Action>,
}

/// The role of this side, with its own terms.
#[derive(Debug)]
enum Own {
    Initiator(Terms),
    Responder { sas_max: u16, udp: Option<Udp> },
}

impl Exchange {
    /// Creates the side that requests the session. Besides the fallback SA, it requests an SA for
    /// each of `senders`.
    #[must_use]
    pub fn initiator(terms: Terms, senders: Vec<Sender>) -> Self {
        let mut exchange = Self::new(Own::Initiator(terms), senders);
        exchange
            .actions
            .push_back(Action::Send(Message::Terms(terms)));
        exchange
    }

    /// Creates the side that accepts the session. It installs up to `sas_max` SAs in an epoch. If
    /// it supports ESP in UDP, `udp` has its ports. It ignores `senders` that the mode of the
    /// session, which the initiator chooses, does not support.
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
            sending: Sending::new(senders),
            receiving: Receiving::default(),
            peer_ready: false,
            up: false,
            actions: VecDeque::new(),
        }
    }

    // State.

    /// Returns the message for which this side waits, so that the caller can time out.
    #[must_use]
    pub fn waits_for(&self) -> Option<Awaited> {
        let (kind, index) = match self.phase {
            Phase::Over => return None,
            Phase::Greeting => (Kind::Terms, 0),
            _ => match self.sending.awaits_grant() {
                Some(index) => (Kind::Granted, index),
                None if !self.peer_ready => (Kind::Ready, 0),
                None => return None,
            },
        };
        let word = kind.name();
        Some(Awaited { word, index })
    }

    /// Returns the outbound SAs and their epoch.
    #[must_use]
    pub fn outbound(&self) -> (u32, &[Grant]) {
        self.sending.live()
    }

    /// Returns the inbound SAs and their epoch.
    #[must_use]
    pub fn inbound(&self) -> (u32, &[Grant]) {
        self.receiving.live()
    }

    // Commands.

    /// Requests an SA for `sender`, unless `sender` has one. If the agreed mode does not support an
    /// SA for `sender`, `sender` uses the fallback SA. While the peer's SA table is full, `sender`
    /// uses the fallback SA too. This side requests the SA when it has released another one.
    pub fn want(&mut self, sender: Sender) {
        let is_wanted = match self.phase {
            Phase::Greeting => true,
            Phase::Beginning(terms) | Phase::Running(terms) => fits(&terms, sender),
            Phase::Over => false,
        };
        if is_wanted {
            self.sending.request(sender);
            self.proceed();
        }
    }

    /// Releases the SA of `sender`. From then on, `sender` must send nothing more.
    pub fn release(&mut self, sender: Sender) {
        if self.phase != Phase::Over {
            self.sending.release(sender);
            self.proceed();
        }
    }

    /// Renews the keys of all outbound SAs.
    pub fn rekey(&mut self) {
        if self.phase != Phase::Over {
            self.sending.rekey();
            self.proceed();
        }
    }

    /// Ends the session and sends the reason to the peer.
    pub fn end(&mut self, fault: FaultCode, text: &str) {
        if self.phase == Phase::Over {
            return;
        }
        let text = text[..text.floor_char_boundary(MAX_TEXT_BYTES)].to_owned();
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

    // Events.

    /// Reports that the caller has installed the initial policies, as [`Action::Begin`] requested.
    pub fn begun(&mut self) {
        let Phase::Beginning(terms) = self.phase else {
            return;
        };
        self.phase = Phase::Running(terms);
        if let Own::Responder { .. } = &self.own {
            self.actions.push_back(Action::Send(Message::Terms(terms)));
        }
        self.proceed();
    }

    /// Reports that the SAs of an [`Action::InstallInbound`] are installed, each with its SPI.
    pub fn inbound_installed(&mut self, spis: &[u32]) {
        let Phase::Running(_) = self.phase else {
            return;
        };
        match self.receiving.installed(spis) {
            Some((epoch, spis)) => {
                let granted = Message::Granted { epoch, spis };
                self.actions.push_back(Action::Send(granted));
            }
            None => self.end(
                FaultCode::Internal,
                "installed SPIs do not match the request, or one is reserved",
            ),
        }
    }

    /// Reports that the SAs and policies of an [`Action::InstallOutbound`] are installed.
    pub fn outbound_installed(&mut self) {
        let Phase::Running(_) = self.phase else {
            return;
        };
        self.sending.installed(&mut self.actions);
        self.come_up();
        self.proceed();
    }

    /// Handles a message that arrived from the peer.
    pub fn handle_message(&mut self, message: Message) {
        let result = match (self.phase, message) {
            (Phase::Over, _) => Ok(None),
            (_, Message::End { fault, text }) => {
                self.over(Ending {
                    by_peer: true,
                    fault,
                    text,
                });
                Ok(None)
            }
            (Phase::Greeting, Message::Terms(terms)) => self.agree(&terms).map(Some),
            (Phase::Running(terms), Message::Want { epoch, slots }) => {
                self.wanted(&terms, epoch, slots).map(Some)
            }
            (Phase::Running(_), Message::Granted { epoch, spis }) => {
                let old = self.sending.live().0;
                if planted(Mistake::RetiredBeforeSwitch) && old > 0 && epoch > old {
                    let retire = Message::Retire { epoch: old };
                    self.actions.push_back(Action::Send(retire));
                }
                self.sending.granted(epoch, &spis).map(Some)
            }
            (Phase::Running(_), Message::Ready) => self.ready().map(|()| None),
            (Phase::Running(_), Message::Retire { epoch }) => {
                self.receiving.retire(epoch).map(Some)
            }
            (Phase::Running(_), Message::Release { indices }) => {
                self.receiving.release(&indices).map(Some)
            }
            (_, message) => Err(Breach(
                FaultCode::Malformed,
                format!("unexpected message *{}*", message.kind()),
            )),
        };
        match result {
            Ok(action) => self.actions.extend(action),
            Err(Breach(fault, text)) => self.end(fault, &text),
        }
    }

    // Actions.

    /// Returns the next action; `None` if there is nothing to do.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    fn agree(&mut self, peers: &Terms) -> Result<Action, Breach> {
        let agreed = match &self.own {
            Own::Initiator(own) => {
                let same = own.mode == peers.mode
                    && own.ports == peers.ports
                    && own.udp.is_some() == peers.udp.is_some();
                if !same {
                    let text = "the answer has terms other than those requested";
                    return Err(Breach(FaultCode::Malformed, text.to_owned()));
                }
                if (own.own, own.other) != (peers.other, peers.own) {
                    let text = format!(
                        "the two sides do not see the same addresses: the connecting side has address {} and the accepting side sees {}; the accepting side has address {} and the connecting side sees {}",
                        own.own, peers.other, peers.own, own.other
                    );
                    return Err(Breach(FaultCode::AddressTranslated, text));
                }
                *own
            }
            Own::Responder { sas_max, udp } => {
                if peers.udp.is_some() && udp.is_none() {
                    let text = "ESP in UDP requested, but the accepting side has no port for it";
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
        self.sending.set_limit(peers.sas_max);
        self.sending.keep(|sender| fits(&agreed, sender));
        self.receiving.set_limit(agreed.sas_max);
        self.phase = Phase::Beginning(agreed);
        Ok(Action::Begin(*peers))
    }

    fn wanted(&mut self, terms: &Terms, epoch: u32, slots: Vec<Slot>) -> Result<Action, Breach> {
        if let Some(other) = slots.iter().find(|slot| !fits(terms, slot.sender)) {
            let text = format!(
                "SA requested for {}, but the session is in mode {} for ports {}",
                other.sender, terms.mode, terms.ports
            );
            return Err(Breach(FaultCode::Malformed, text));
        }
        self.receiving.wanted(epoch, slots)
    }

    fn ready(&mut self) -> Result<(), Breach> {
        if self.peer_ready || self.receiving.live().0 == 0 {
            return Err(malformed("*ready* repeated, or sent before any SA"));
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

    /// Sends the next request, if none is pending.
    fn proceed(&mut self) {
        if let Phase::Running(_) = self.phase
            && let Err(Breach(fault, text)) = self.sending.proceed(&mut self.actions)
        {
            self.end(fault, &text);
        }
    }

    fn over(&mut self, ending: Ending) {
        self.phase = Phase::Over;
        self.actions
            .retain(|action| matches!(action, Action::Send(Message::End { .. })));
        self.actions.push_back(Action::Over(ending));
    }
}

/// Whether a session on these terms supports an SA for `sender`.
fn fits(terms: &Terms, sender: Sender) -> bool {
    match (sender, terms.mode) {
        (Sender::Fallback, _) | (Sender::Cpu(_), Mode::Cpu) => true,
        (Sender::Connection { from, to }, Mode::Connection) => {
            from > 0 && to > 0 && (terms.ports.contains(from) || terms.ports.contains(to))
        }
        _ => false,
    }
}
