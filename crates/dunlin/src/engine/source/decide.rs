//! What the switchover's machine has decided is done here.
//!
//! [`Source`] says what follows from an event; [`Session::take`] does it, in
//! order, until nothing more follows by itself.

use std::time::Instant;

use dunlin_proto::control::Message;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::journal::{SourceRecord, State};
use dunlin_proto::switchover::{Source, SourceAction as Do, SourceEvent as On};

use super::super::fault::{Fault, VmIs};
use super::super::report::Event;
use super::super::vmm::RunState;
use super::session::Session;

impl Session<'_> {
    /// Takes an event and does what follows.
    pub(super) fn take(&mut self, event: On) -> Result<(), Fault> {
        let mut next = Some(event);
        while let Some(event) = next.take() {
            let (state, actions) = self.state.on(event).map_err(|error| {
                Fault::new(
                    FaultCode::Malformed,
                    "the peer broke the order of the switchover",
                )
                .because(error)
            })?;
            self.state = state;
            for action in actions {
                next = self.act(*action);
            }
        }
        Ok(())
    }

    /// Something failed, here or at the peer: whatever follows from that.
    pub(super) fn failed(&mut self, fault: Fault) {
        let event = self.event_of(&fault);
        // What brought the doubt about says more than how an inquiry failed.
        if self.state != Source::InDoubt || self.fault.is_none() {
            self.fault = Some(fault);
        }
        if let Err(impossible) = self.take(event) {
            // Every state that waits for something takes a failure.
            let text = format!("a failure could not be taken: {}", impossible.for_peer());
            self.observer.event(&Event::Warning(text));
        }
    }

    fn event_of(&self, fault: &Fault) -> On {
        match fault.code {
            _ if fault.told => On::PeerCancelled,
            FaultCode::ControlLost => On::ControlLost,
            FaultCode::Cancelled if self.state.may_cancel() => On::Cancelled,
            _ => On::Failed,
        }
    }

    /// Does one thing; returns the event that it ends with, if it is one that
    /// does.
    fn act(&mut self, action: Do) -> Option<On> {
        match action {
            Do::Record(record) => return Some(self.record(record)),
            Do::Note(record) => {
                if let Err(error) = self.journal.write(State::Source(record)) {
                    self.warn(format!("{record} could not be recorded: {error}"));
                } else {
                    self.observer.event(&Event::Recorded(record));
                }
            }
            Do::PauseGuest => {
                return Some(match self.pause_and_finish() {
                    Ok(()) => On::FinalSent,
                    Err(fault) => {
                        let event = self.event_of(&fault);
                        self.fault = Some(fault);
                        event
                    }
                });
            }
            Do::SendCommit => self.send_commit(),
            Do::ResumeGuest => {
                // The guest itself is asked, and not the fault: a peer may
                // name any.
                self.vm_is = if self.has_ended() {
                    self.take_back();
                    VmIs::Gone
                } else {
                    self.resume_here()
                };
            }
            Do::CancelPeer => {
                if self.has_ended() {
                    self.vm_is = VmIs::Gone;
                }
                let (fault, text) = match &self.fault {
                    Some(fault) => (fault.kind(), fault.for_peer()),
                    None => (FaultCode::Internal, String::new()),
                };
                // The peer may be gone; it drops its copy in either case.
                let _ = self.control.send(&Message::Cancel { fault, text });
            }
            Do::HoldInDoubt => self.hold_in_doubt(),
            Do::Inquire => self.inquire(),
            Do::AskOperator => self.vm_is = VmIs::RanThenDied,
            Do::DestroyCopy => {
                self.let_go_of_guest();
                self.vm.destroy();
                self.observer.event(&Event::Running);
            }
            // The destination runs; whether it hears of our end changes
            // nothing here.
            Do::SendRelease => drop(self.control.send(&Message::Release)),
            Do::RefuseTooLate => {
                self.warn("too late to cancel: the VM is the destination's".into());
            }
        }
        None
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

    fn send_commit(&mut self) {
        self.observer.event(&Event::Committing);
        self.committed = Some(Instant::now());
        let commit = Message::Commit {
            run: !self.paused_by_owner,
        };
        if self.control.send(&commit).is_err() {
            // A part of it may have left. The reader tells of the loss.
            self.control.shutdown();
        }
        self.observer.event(&Event::Committed);
    }

    fn has_ended(&self) -> bool {
        matches!(
            self.vm.run_state(),
            RunState::PoweredOff | RunState::Stopped(_)
        )
    }

    /// After the pause: the guest goes on at the source.
    fn resume_here(&mut self) -> VmIs {
        if !self.take_back() {
            return VmIs::StuckAtSource;
        }
        if self.paused_by_owner {
            return VmIs::AtSource;
        }
        match self.vm.resume() {
            Ok(()) => VmIs::AtSource,
            Err(error) => {
                self.warn(format!("the guest cannot be resumed: {error}"));
                VmIs::StuckAtSource
            }
        }
    }

    /// Takes disks and devices back, if they were let go. Returns whether the
    /// VM has them.
    fn take_back(&self) -> bool {
        if !self.relinquished {
            return true;
        }
        let result = self.vm.reactivate();
        if let Err(error) = &result {
            self.warn(format!("disks and devices cannot be taken back: {error}"));
        }
        result.is_ok()
    }

    pub(super) fn warn(&self, text: String) {
        self.observer.event(&Event::Warning(text));
    }
}
