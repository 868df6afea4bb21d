//! After *commit*, without an answer: the source asks, and what cannot be
//! answered is left to an operator.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use dunlin_proto::control::Message;
use dunlin_proto::fault::{AtFault, FaultCode};
use dunlin_proto::journal::{Record, State};
use dunlin_proto::switchover::{Resolution, Source, SourceAction as Do, SourceEvent as On};
use thiserror::Error;

use super::super::control::ControlLane;
use super::super::error::{Fault, MigrateError, VmIs};
use super::super::journal::{JournalError, SessionJournal};
use super::super::report::Event;
use super::super::vmm::{SourceVm, VmmError};
use super::resume::another_peer;
use super::session::Session;
use super::set_up::open_control;
use crate::lane::control::ControlStream;

/// Before the second inquiry.
pub(super) const RETRY_FIRST: Duration = Duration::from_millis(100);
/// Between inquiries, at most.
pub(super) const RETRY_LAST: Duration = Duration::from_secs(2);

pub(super) const NO_RECORD: &str = "the destination has no record of the session";

/// A VM that the source holds paused until an operator decides. It keeps the
/// record locked, so that others see that the VM's process lives.
#[derive(Debug)]
pub struct Doubt {
    pub(super) journal: SessionJournal,
    pub(super) state: Source,
    pub(super) paused_by_owner: bool,
}

/// A resolution that could not be carried out.
#[derive(Debug, Error)]
pub enum ResolveError {
    /// It could not be recorded; nothing has been changed.
    #[error("the resolution cannot be recorded, and the VM stays in doubt")]
    Journal(#[source] JournalError),
    /// It is recorded that the VM goes on here, and it could not be let go on.
    #[error("the VM is the source's again, and stays paused: {what}")]
    Resume {
        /// What failed.
        what: &'static str,
        /// What the VMM said.
        source: VmmError,
    },
}

impl Doubt {
    /// What the journal says.
    #[must_use]
    pub fn record(&self) -> &Record {
        self.journal.record()
    }

    /// The operator has decided; see [`Resolution`] for what that vouches for.
    /// Records it, and lets `vm` go on or destroys it.
    ///
    /// # Errors
    /// [`ResolveError`]; with `Journal` it may be tried again.
    pub fn resolve(
        &mut self,
        vm: &dyn SourceVm,
        resolution: Resolution,
    ) -> Result<(), ResolveError> {
        self.take(On::Resolve(resolution), Some(vm), None)
    }

    /// Removes the record, if nothing is in doubt any more: nobody asks a
    /// source about a session that is over.
    ///
    /// # Errors
    /// [`JournalError::Undecided`], and the record stays; [`JournalError::Io`].
    pub fn forget(self) -> Result<(), JournalError> {
        self.journal.forget_if_over()
    }

    /// Takes an event and does what follows, until nothing more follows by
    /// itself. Without `vm` there is nothing left to resume or to destroy.
    pub(super) fn take(
        &mut self,
        event: On,
        vm: Option<&dyn SourceVm>,
        lane: Option<&ControlLane>,
    ) -> Result<(), ResolveError> {
        let mut next = Some(event);
        let mut unrecorded = None;
        while let Some(event) = next.take() {
            // What is over takes no answer and no resolution: no action
            // follows.
            let Ok((state, actions)) = self.state.on(event) else {
                return Ok(());
            };
            let before = std::mem::replace(&mut self.state, state);
            for action in actions {
                match self.act(*action, vm, lane) {
                    Ok(Some(Ok(event))) => next = Some(event),
                    Ok(Some(Err(error))) => {
                        next = Some(On::RecordFailed);
                        unrecorded = Some(error);
                    }
                    Ok(None) => {}
                    Err(error) => {
                        // The same answer may be had again.
                        if before.may_resolve() {
                            self.state = before;
                        }
                        return Err(error);
                    }
                }
            }
        }
        match (unrecorded, self.state) {
            // The destination has it, whatever could be recorded here.
            (None, _) | (_, Source::Released) => Ok(()),
            (Some(error), _) => Err(ResolveError::Journal(error)),
        }
    }

    /// Does one thing; returns the event that it ends with, if it is one that
    /// does.
    pub(super) fn act(
        &mut self,
        action: Do,
        vm: Option<&dyn SourceVm>,
        lane: Option<&ControlLane>,
    ) -> Result<Option<Result<On, JournalError>>, ResolveError> {
        match (action, vm) {
            (Do::Record(record), _) => {
                let written = self.journal.write(State::Source(record));
                return Ok(Some(written.map(|_| On::Recorded)));
            }
            // A record that says less is as safe.
            (Do::Note(record), _) => drop(self.journal.write(State::Source(record))),
            (Do::ResumeGuest, Some(vm)) => self.resume(vm)?,
            (Do::DestroyCopy, Some(vm)) => vm.destroy(),
            (Do::SendRelease, _) => {
                if let Some(lane) = lane {
                    // The destination runs; if it does not hear of our end, it
                    // keeps its record.
                    let _ = lane.send(&Message::Release);
                }
            }
            _ => {}
        }
        Ok(None)
    }

    fn resume(&self, vm: &dyn SourceVm) -> Result<(), ResolveError> {
        let failed = |what| move |source| ResolveError::Resume { what, source };
        vm.reactivate()
            .map_err(failed("disks and devices cannot be taken back"))?;
        if self.paused_by_owner {
            return Ok(());
        }
        vm.resume().map_err(failed("the guest cannot be resumed"))
    }
}

impl Session<'_> {
    pub(super) fn hold_in_doubt(&mut self) {
        self.vm_is = VmIs::InDoubt;
        self.doubt_until
            .get_or_insert(Instant::now() + self.options.doubt_limit);
        let why = self
            .fault
            .as_ref()
            .map_or_else(|| NO_RECORD.into(), Fault::for_peer);
        self.observer.event(&Event::InDoubt { why });
    }

    /// Makes a new control lane and asks over it, until the limit is up.
    pub(super) fn inquire(&mut self) {
        let until = self.doubt_until.unwrap_or_else(Instant::now);
        self.end_control();
        let Some(terms) = &self.terms else {
            self.gave_up = true;
            return;
        };
        let (to, tls, peer) = (terms.to.clone(), terms.tls.clone(), terms.peer.clone());
        let mut last: Option<Fault> = None;
        loop {
            if self.inquiries > 0 {
                let pause = RETRY_FIRST * 2_u32.pow(self.inquiries.min(5) - 1);
                let left = until.saturating_duration_since(Instant::now());
                thread::sleep(pause.min(RETRY_LAST).min(left));
            }
            if Instant::now() >= until {
                if let Some(fault) = last {
                    self.warn(format!(
                        "the destination could not be asked: {}",
                        fault.for_peer()
                    ));
                }
                self.gave_up = true;
                return;
            }
            self.inquiries += 1;
            // One that was tried may stand at the destination already.
            self.raise_epoch();
            let deadline = until.min(Instant::now() + self.options.connect_limit);
            let fault = match open_control(self.host, None, &to, &tls, &self.offer, deadline) {
                Ok((stream, _)) if !stream.peer().is(&peer) => {
                    another_peer(stream.peer(), self.journal.peer())
                }
                Ok((stream, _)) => {
                    self.sequences = Arc::new(self.sequences.with_new_peer());
                    match self.adopt_control(stream) {
                        Ok(()) => {
                            let attempt = self.offer.attempt;
                            if self.control.send(&Message::Inquire { attempt }).is_err() {
                                // Its reader reports the loss.
                                self.control.shutdown();
                            }
                            return;
                        }
                        Err(fault) => fault,
                    }
                }
                Err(fault) => fault,
            };
            // Whatever this one said, only an answer ends the doubt.
            last = Some(fault);
        }
    }

    /// The next control lane has a higher epoch than any before, in the
    /// journal too.
    pub(super) fn raise_epoch(&mut self) {
        self.offer.epoch += 1;
        if let Err(error) = self.journal.write_epoch(self.offer.epoch) {
            self.warn(format!(
                "the control lane's epoch could not be recorded: {error}"
            ));
        }
    }

    /// Ends the control lane there is, and joins its reader.
    pub(super) fn end_control(&mut self) {
        self.control.shutdown();
        if let Some(reader) = self.reader.take() {
            // A panic there has been reported as the loss of the lane.
            let _ = reader.join();
        }
    }

    /// A control lane that was made under the offer's epoch is the session's.
    pub(super) fn adopt_control(&mut self, stream: ControlStream) -> Result<(), Fault> {
        let Some(terms) = &self.terms else {
            return Err(Fault::new(FaultCode::Internal, "no lanes are accepted yet"));
        };
        let events = terms.events.clone();
        let sequences = Arc::clone(&self.sequences);
        let session = self.control.session();
        self.control = Arc::new(ControlLane::new(
            stream,
            session,
            self.offer.epoch,
            sequences,
            self.options.silence_limit,
        ));
        self.control_ended.set(false);
        self.spawn_reader(&events)
    }

    /// How the session has ended, other than well.
    pub(super) fn error(
        state: Source,
        fault: Option<Fault>,
        vm_is: VmIs,
        journal: SessionJournal,
        paused_by_owner: bool,
    ) -> MigrateError {
        let fault = fault.unwrap_or_else(|| match state {
            Source::RanThenDied => Fault {
                at_fault: AtFault::Peer,
                ..Fault::new(FaultCode::Internal, "the VM has died at the destination")
            },
            Source::InDoubt => Fault::new(FaultCode::ControlLost, NO_RECORD),
            _ => Fault::new(
                FaultCode::Internal,
                "the migration has ended without a reason",
            ),
        });
        let mut error = fault.into_error(vm_is);
        if state.may_resolve() {
            error.doubt = Some(Box::new(Doubt {
                journal,
                state,
                paused_by_owner,
            }));
        } else if state == Source::Kept {
            // Left behind it says *kept*, or leads a restarted process there.
            let _ = journal.forget();
        }
        error
    }
}
