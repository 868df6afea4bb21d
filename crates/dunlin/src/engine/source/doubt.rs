//! After *commit*, without an answer: the source asks, and what cannot be
//! answered is left to an operator.

use std::time::Duration;

use dunlin_proto::control::Message;
use dunlin_proto::journal::{Record, State};
use dunlin_proto::switchover::{Resolution, Source, SourceAction as Do, SourceEvent as On};
use thiserror::Error;

use super::super::control::ControlLane;
use super::super::journal::{JournalError, SessionJournal};
use super::super::vmm::{SourceVm, VmmError};

/// Before the second inquiry.
pub(super) const RETRY_FIRST: Duration = Duration::from_millis(100);
/// Between inquiries, at most.
pub(super) const RETRY_LAST: Duration = Duration::from_secs(2);
/// How long the destination may take to answer an inquiry: the answer is known there.
pub(super) const VERDICT_LIMIT: Duration = Duration::from_secs(10);

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
