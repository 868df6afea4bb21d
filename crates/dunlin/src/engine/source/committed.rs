//! The phases after *commit*: the destination reports the outcome, or the source asks for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dunlin_proto::control::{Message, Verdict};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::switchover::{Source, SourceAction as Do, SourceEvent as On};
use tracing::info_span;

use super::super::control::{FromPeer, unexpected};
use super::super::fault::{Fault, VmIs};
use super::super::journal::Role;
use super::super::report::Event;
use super::doubt::{Inquiries, NO_RECORD, VERDICT_LIMIT};
use super::event::SessionEvent;
use super::guest::PausedGuest;
use super::lanes::Transfer;
use super::phase::{Done, Phase, Rest, failed, perform, take};
use super::session::Session;
use super::settled::{Figures, Settled};

/// Sends *commit*, and waits for the destination's answer.
pub(super) struct Committed<'a> {
    transfer: Transfer<'a>,
    guest: PausedGuest,
    figures: Figures,
    /// When the guest was paused.
    paused: Instant,
    /// When all conditions of *commit* were met. *commit* follows immediately, and the time limit
    /// for the destination's answer is counted from here.
    agreed: Instant,
    /// Remaining actions of the switchover.
    rest: Rest,
}

impl<'a> Phase<'a> for Committed<'a> {
    fn session(&mut self) -> &mut Session<'a> {
        &mut self.transfer.session
    }

    fn act(&mut self, action: Do) -> Done {
        let session = &mut self.transfer.session;
        match action {
            Do::SendCommit => self.send_commit(),
            Do::ResumeGuest => session.vm_is = self.guest.resume(session),
            Do::DestroyCopy => self.guest.destroy(session),
            other => return session.act(other),
        }
        Done::Yes
    }
}

impl<'a> Committed<'a> {
    pub(super) fn new(
        transfer: Transfer<'a>,
        guest: PausedGuest,
        figures: Figures,
        paused: Instant,
        rest: Rest,
    ) -> Self {
        Self {
            transfer,
            guest,
            figures,
            paused,
            agreed: Instant::now(),
            rest,
        }
    }

    /// Sends *commit*, and waits until it is decided which side has the VM, or until the source
    /// stops asking.
    pub(super) fn settle(mut self) -> Settled {
        let commit = info_span!("commit").entered();
        let rest = self.rest;
        let mut done = perform(&mut self, rest);
        loop {
            let rest = done.unwrap_or_else(|fault| failed(&mut self, fault));
            match self.transfer.session.state {
                Source::Committed => {}
                Source::InDoubt => {
                    drop(commit);
                    return InDoubt::new(self, rest).settle();
                }
                _ => {
                    drop(commit);
                    return self.settled();
                }
            }
            done = self
                .await_running()
                .and_then(|event| take(&mut self, event));
        }
    }

    fn settled(self) -> Settled {
        Settled::committed(self.transfer, self.guest.logged, self.figures)
    }

    fn send_commit(&self) {
        let session = &self.transfer.session;
        session.observer.event(&Event::Committing);
        let commit = Message::Commit {
            run: !session.paused_by_owner,
        };
        if session.control.lane.send(&commit).is_err() {
            // Part of the message may have been sent, so end the lane. Its reader reports the loss.
            session.control.lane.shutdown();
        }
        session.observer.event(&Event::Committed);
    }

    fn await_running(&mut self) -> Result<On, Fault> {
        let until = self.agreed + self.transfer.session.options.answer_limit;
        let message = await_message(&mut self.transfer, "commit", until)?;
        self.verdict(message)
    }

    /// Turns the destination's message after *commit* into an event.
    fn verdict(&mut self, message: Message) -> Result<On, Fault> {
        let session = &mut self.transfer.session;
        let event = match message {
            Message::Running {
                cpu_ns,
                downtime_ns,
            } => {
                self.figures.destination_cpu = Duration::from_nanos(cpu_ns);
                self.figures.downtime.guest =
                    (downtime_ns != 0).then(|| Duration::from_nanos(downtime_ns));
                On::Running
            }
            Message::Answer { attempt, verdict } => {
                if verdict != Verdict::Aborted {
                    // The loss of the control lane is the cause of an aborted migration only. For
                    // any other outcome, drop this fault.
                    session.fault = None;
                }
                On::answer(session.control.terms.offer.attempt, attempt, verdict)
            }
            // The destination sent *ready* before it received the inquiry. *ready* no longer has an
            // effect.
            Message::Ready { .. } if session.state == Source::InDoubt => {
                On::Ready { same_memory: true }
            }
            other => return Err(unexpected(&other, Role::Destination)),
        };
        self.figures.downtime.resume = self.agreed.elapsed();
        self.figures.downtime.total = self.paused.elapsed();
        self.figures.total = session.started.elapsed();
        Ok(event)
    }
}

/// No usable answer arrived after *commit*: the guest stays paused, and the source asks the
/// destination.
struct InDoubt<'a> {
    committed: Committed<'a>,
    inquiries: Inquiries,
    /// Whether to stop asking.
    gave_up: bool,
    /// The remaining actions of the event that caused this phase.
    rest: Rest,
}

impl<'a> Phase<'a> for InDoubt<'a> {
    fn session(&mut self) -> &mut Session<'a> {
        self.committed.session()
    }

    fn act(&mut self, action: Do) -> Done {
        match action {
            Do::HoldInDoubt => self.hold(),
            Do::Inquire => self.inquire(),
            other => return self.committed.act(other),
        }
        Done::Yes
    }
}

impl<'a> InDoubt<'a> {
    fn new(committed: Committed<'a>, rest: Rest) -> Self {
        let limit = committed.transfer.session.options.doubt_limit;
        Self {
            committed,
            inquiries: Inquiries::new(limit),
            gave_up: false,
            rest,
        }
    }

    fn settle(mut self) -> Settled {
        let in_doubt = info_span!("in-doubt").entered();
        let rest = self.rest;
        let mut done = perform(&mut self, rest);
        loop {
            if let Err(fault) = done {
                failed(&mut self, fault);
            }
            if self.session().state != Source::InDoubt || self.gave_up {
                drop(in_doubt);
                return self.committed.settled();
            }
            done = self.await_answer().and_then(|event| {
                let answered = matches!(event, On::Answer { .. });
                let done = take(&mut self, event);
                // Stop asking after an answer that does not resolve the doubt: the destination
                // would give the same answer again.
                self.gave_up |= answered && self.session().state == Source::InDoubt;
                done
            });
        }
    }

    fn hold(&mut self) {
        let session = self.session();
        session.vm_is = VmIs::InDoubt;
        let why = session
            .fault
            .as_ref()
            .map_or_else(|| NO_RECORD.into(), Fault::for_peer);
        session.observer.event(&Event::InDoubt { why });
    }

    fn await_answer(&mut self) -> Result<On, Fault> {
        let until = self.inquiries.until.min(Instant::now() + VERDICT_LIMIT);
        let message = await_message(&mut self.committed.transfer, "the inquiry", until)?;
        self.committed.verdict(message)
    }

    /// Opens a new control lane and asks the destination on it. Tries this until it succeeds or
    /// until the limit.
    fn inquire(&mut self) {
        self.session().control.lane.shutdown();
        let Transfer { session, lanes } = &mut self.committed.transfer;
        let mut last: Option<Fault> = None;
        loop {
            if !self.inquiries.wait() {
                if let Some(fault) = last {
                    session.warn(format!("cannot ask the destination: {}", fault.for_peer()));
                }
                self.gave_up = true;
                return;
            }
            let reopened = session.reopen_control(None, &lanes.terms, self.inquiries.until);
            let adopted = reopened.and_then(|(stream, _)| {
                let terms = &mut session.control.terms;
                terms.sequences = Arc::new(terms.sequences.with_new_peer());
                session.adopt_control(stream)
            });
            let Err(fault) = adopted else {
                let attempt = session.control.terms.offer.attempt;
                session.control.notify(&Message::Inquire { attempt });
                return;
            };
            // Only an answer resolves the doubt, so ask again after any failure.
            last = Some(fault);
        }
    }
}

/// Waits for the destination's next message, which should answer `what`.
fn await_message(
    transfer: &mut Transfer<'_>,
    what: &str,
    until: Instant,
) -> Result<Message, Fault> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        match transfer.next_event(left)? {
            Some(SessionEvent::Control(_, FromPeer::Message(message))) => return Ok(message),
            Some(_) => {}
            None => return Err(not_answered(what)),
        }
    }
}

/// The fault if the destination did not answer `what` in time.
pub(super) fn not_answered(what: &str) -> Fault {
    let what = format!("the destination did not answer {what} in time");
    Fault::new(FaultCode::ControlLost, what)
}
