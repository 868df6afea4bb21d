//! What the switchover's state machine decides is done here.
//!
//! [`Source`] says what follows from an event. A phase does what it can of that, in order, until
//! nothing more follows by itself; what it leaves is for the next phase.

use dunlin_proto::control::Message;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::journal::{SourceRecord, State};
use dunlin_proto::switchover::{Source, SourceAction as Do, SourceEvent as On};

use super::super::fault::{Fault, OrFault, VmIs};
use super::super::report::Event;
use super::session::Session;

/// A phase of a migration.
pub(super) trait Phase<'a> {
    fn session(&mut self) -> &mut Session<'a>;

    /// Does one action. What the phase does not know, [`Session::act`] does or leaves.
    fn act(&mut self, action: Do) -> Done;
}

/// What became of an action.
pub(super) enum Done {
    /// It is done.
    Yes,
    /// It is done, and ended with this event.
    With(On),
    /// It belongs to the next phase, with those that follow it.
    Left,
}

/// Actions that a phase has left to the next one.
pub(super) type Rest = &'static [Do];

/// Takes an event and does what follows.
///
/// # Errors
/// The state cannot take the event: the peer broke the protocol.
pub(super) fn take<'a>(phase: &mut impl Phase<'a>, event: On) -> Result<Rest, Fault> {
    let session = phase.session();
    let (state, actions) = session.state.on(event).or_fault(
        FaultCode::Malformed,
        "the peer broke the order of the switchover",
    )?;
    session.state = state;
    perform(phase, actions)
}

/// Does `actions`, and what follows from them.
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

/// Something failed, here or at the peer: does what follows from that.
pub(super) fn failed<'a>(phase: &mut impl Phase<'a>, fault: Fault) -> Rest {
    let session = phase.session();
    let event = session.event_of(&fault);
    // The cause of the doubt says more than the failure of an inquiry.
    if session.state != Source::InDoubt || session.fault.is_none() {
        session.fault = Some(fault);
    }
    take(phase, event).unwrap_or_else(|impossible| {
        // Every state that waits for something takes a failure.
        let text = format!("a failure could not be taken: {}", impossible.for_peer());
        phase.session().warn(text);
        &[]
    })
}

impl Session<'_> {
    pub(super) fn event_of(&self, fault: &Fault) -> On {
        match fault.code {
            _ if fault.told => On::PeerCancelled,
            FaultCode::ControlLost => On::ControlLost,
            FaultCode::Cancelled if self.state.may_cancel() => On::Cancelled,
            _ => On::Failed,
        }
    }

    /// Does an action that is the same in every phase.
    pub(super) fn act(&mut self, action: Do) -> Done {
        match action {
            Do::Record(record) => return Done::With(self.record(record)),
            Do::Note(record) => {
                if let Err(error) = self.journal.write(State::Source(record)) {
                    self.warn(format!("{record} could not be recorded: {error}"));
                } else {
                    self.observer.event(&Event::Recorded(record));
                }
            }
            Do::CancelPeer => {
                if self.guest_has_ended() {
                    self.vm_is = VmIs::Gone;
                }
                let (fault, text) = match &self.fault {
                    Some(fault) => (fault.kind(), fault.for_peer()),
                    None => (FaultCode::Internal, String::new()),
                };
                // A peer that is gone drops its copy too.
                let _ = self.control.lane.send(&Message::Cancel { fault, text });
            }
            Do::AskOperator => self.vm_is = VmIs::RanThenDied,
            // The destination runs; nothing here depends on whether this arrives.
            Do::SendRelease => drop(self.control.lane.send(&Message::Release)),
            Do::RefuseTooLate => {
                self.warn("too late to cancel: the VM is the destination's".into());
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
        match self.journal.write(State::Source(record)) {
            Ok(_) => {
                self.observer.event(&Event::Recorded(record));
                On::Recorded
            }
            Err(error) => {
                let fault = Fault::new(
                    FaultCode::Journal,
                    format!("{record} could not be recorded"),
                )
                .because(error);
                if self.state == Source::Releasing {
                    // The migration has succeeded all the same.
                    self.warn(fault.for_peer());
                } else {
                    self.fault = Some(fault);
                }
                On::RecordFailed
            }
        }
    }
}
