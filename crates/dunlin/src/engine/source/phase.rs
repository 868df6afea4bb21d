//! Executes the decisions of the switchover's state machine.
//!
//! [`Source`] returns the actions that follow from an event. A phase executes them in order
//! and feeds resulting events back, until no events remain. It leaves actions that it
//! cannot execute to the next phase.

use dunlin_proto::control::Message;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::journal::{SourceRecord, State};
use dunlin_proto::switchover::{Source, SourceAction as Do, SourceEvent as On};
use tracing::info_span;

use super::super::fault::{Fault, OrFault, VmIs};
use super::super::report::Event;
use super::guest::check_guest;
use super::session::Session;

/// A phase of a migration.
pub(super) trait Phase<'a> {
    fn session(&mut self) -> &mut Session<'a>;

    /// Executes one action. By default, [`Session::act`] executes the actions that all phases
    /// share, and leaves all other actions to the next phase.
    fn act(&mut self, action: Do) -> Done {
        self.session().act(action)
    }
}

/// Result of an action.
pub(super) enum Done {
    /// Done.
    Yes,
    /// Done, with this event as its result.
    With(On),
    /// The action and those after it belong to the next phase.
    Left,
}

/// Actions left to the next phase.
pub(super) type Rest = &'static [Do];

/// Applies an event and executes the actions that follow. Returns those that are left to the next
/// phase.
///
/// # Errors
/// The state does not accept the event: the peer violated the protocol.
pub(super) fn take<'a>(phase: &mut impl Phase<'a>, event: On) -> Result<Rest, Fault> {
    let session = phase.session();
    let (state, actions) = session.state.on(event).or_fault(
        FaultCode::Malformed,
        "the destination violated the order of the switchover",
    )?;
    session.state = state;
    perform(phase, actions)
}

/// Executes `actions`, and those that follow from them. Returns those that are left to the next
/// phase.
pub(super) fn perform<'a>(phase: &mut impl Phase<'a>, actions: Rest) -> Result<Rest, Fault> {
    let mut next = None;
    for (index, action) in actions.iter().enumerate() {
        match phase.act(*action) {
            Done::Yes => {}
            Done::With(event) => next = Some(event),
            Done::Left => return Ok(&actions[index..]),
        }
    }
    match next {
        Some(event) => take(phase, event),
        None => Ok(&[]),
    }
}

/// Applies a failure of this side or the peer, and executes the actions that follow.
pub(super) fn failed<'a>(phase: &mut impl Phase<'a>, fault: Fault) -> Rest {
    let session = phase.session();
    let event = session.event_of(&fault);
    // Keep the fault that caused the doubt: it is more informative than that of a failed inquiry.
    if session.state != Source::InDoubt || session.fault.is_none() {
        session.fault = Some(fault);
    }
    take(phase, event).unwrap_or_else(|impossible| {
        // This is a bug, because every state that waits accepts a failure.
        let text = format!(
            "the state machine has no transition for this failure: {}",
            impossible.for_peer()
        );
        phase.session().warn(text);
        &[]
    })
}

impl Session<'_> {
    pub(super) fn event_of(&self, fault: &Fault) -> On {
        match fault.code {
            _ if fault.from_peer => On::PeerCancelled,
            FaultCode::ControlLost => On::ControlLost,
            FaultCode::Cancelled if self.state.may_cancel() => On::Cancelled,
            _ => On::Failed,
        }
    }

    /// Executes an action that all phases execute alike.
    pub(super) fn act(&mut self, action: Do) -> Done {
        match action {
            Do::Record(record) => return Done::With(self.record(record)),
            Do::Note(record) => {
                if let Err(error) = self.journal.write(State::Source(record)) {
                    self.warn(format!("cannot record {record}: {error}"));
                } else {
                    self.observer.event(&Event::Recorded(record));
                }
            }
            Do::CancelPeer => {
                if check_guest(&**self.vm).is_err() {
                    self.vm_is = VmIs::Gone;
                }
                let (fault, text) = match &self.fault {
                    Some(fault) => (fault.kind(), fault.for_peer()),
                    None => (FaultCode::Internal, String::new()),
                };
                // Best effort: an unreachable peer drops its copy without this message.
                let _ = self.control.lane.send(&Message::Cancel { fault, text });
            }
            Do::AskOperator => self.vm_is = VmIs::RanThenDied,
            // The destination has the VM; the source does not depend on the delivery of this
            // message.
            Do::SendRelease => drop(self.control.lane.send(&Message::Release)),
            Do::RefuseTooLate => {
                self.warn(
                    "too late to cancel: commit may have been sent, so the destination may run \
                     the VM"
                        .into(),
                );
            }
            Do::PauseGuest
            | Do::SendCommit
            | Do::ResumeGuest
            | Do::HoldInDoubt
            | Do::Inquire
            | Do::DestroyCopy => return Done::Left,
        }
        Done::Yes
    }

    fn record(&mut self, record: SourceRecord) -> On {
        let _record = info_span!("record", state = %record).entered();
        match self.journal.write(State::Source(record)) {
            Ok(_) => {
                self.observer.event(&Event::Recorded(record));
                On::Recorded
            }
            Err(error) => {
                let fault = Fault::new(FaultCode::Journal, format!("cannot record {record}"))
                    .because(error);
                if self.state == Source::Releasing {
                    // The migration has succeeded, although the success could not be recorded.
                    self.warn(fault.for_peer());
                } else {
                    self.fault = Some(fault);
                }
                On::RecordFailed
            }
        }
    }
}
