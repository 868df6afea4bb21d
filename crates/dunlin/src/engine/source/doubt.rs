//! A VM in doubt after a *commit* without an answer: when the source asks the destination, and the
//! handle with which an operator decides if no answer arrives.

use std::thread;
use std::time::{Duration, Instant};

use dunlin_lane::fault::fault_behind;
use dunlin_proto::control::Message;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::journal::{Record, State};
use dunlin_proto::switchover::{Resolution, Source, SourceAction as Do, SourceEvent as On};
use thiserror::Error;

use super::super::control::ControlLane;
use super::super::journal::{JournalError, SessionJournal};
use super::super::vmm::{SourceVm, VmmError};

/// Delay before the second inquiry.
const RETRY_FIRST: Duration = Duration::from_millis(100);
/// Longest delay between inquiries.
const RETRY_LAST: Duration = Duration::from_secs(2);
/// How long the destination may take to answer an inquiry. The destination only has to read the
/// outcome from memory or from its journal.
pub(super) const VERDICT_LIMIT: Duration = Duration::from_secs(10);

/// The delays between inquiries, which double up to [`RETRY_LAST`], and the time limit of all
/// inquiries.
pub(super) struct Inquiries {
    pub(super) until: Instant,
    delay: Duration,
}

impl Inquiries {
    pub(super) fn new(limit: Duration) -> Self {
        Self {
            until: Instant::now() + limit,
            delay: Duration::ZERO,
        }
    }

    pub(super) fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    /// Waits before the next inquiry; the first one needs no delay. Returns false at the limit.
    pub(super) fn wait(&mut self) -> bool {
        thread::sleep(self.delay.min(self.left()));
        self.delay = (self.delay * 2).clamp(RETRY_FIRST, RETRY_LAST);
        !self.left().is_zero()
    }
}

pub(super) const NO_RECORD: &str = "the destination has no record of the session";

/// A VM that stays paused at the source until the destination answers or an operator decides. While
/// this value exists, the record is locked, so no other process acts on it.
///
/// [`Doubt::ask`] asks the destination again. If the destination can no longer answer,
/// [`Doubt::resolve`] carries out the decision of an operator who has checked the
/// destination. If the VM died with its process, [`Doubt::give_up`] records that the source
/// has no copy of it left. Do not resume or destroy the VM in any other way: it may run at
/// the destination.
#[derive(Debug)]
pub struct Doubt {
    pub(super) journal: SessionJournal,
    pub(super) state: Source,
    pub(super) paused_by_owner: bool,
}

/// A resolution that could not be carried out.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ResolveError {
    /// The resolution could not be recorded. The VM stays in doubt.
    #[error("cannot record the resolution; the VM stays in doubt")]
    Journal(#[source] JournalError),
    /// The source has the VM, but the VMM could not take back disks and devices or resume the guest.
    #[error("the source has the VM again, but it stays paused: {what}")]
    Resume {
        /// What failed.
        what: &'static str,
        /// The VMM's error.
        source: VmmError,
    },
}

impl ResolveError {
    /// The fault code. If the VMM failed because descriptors or memory ran out, this is the code of
    /// that shortage. After other failures of the VMM it is [`FaultCode::Internal`].
    #[must_use]
    pub fn code(&self) -> FaultCode {
        match self {
            Self::Journal(error) => error.code(),
            Self::Resume { source, .. } => {
                fault_behind(source.as_ref()).unwrap_or(FaultCode::Internal)
            }
        }
    }
}

impl Doubt {
    /// The newest record in the journal.
    #[must_use]
    pub fn record(&self) -> &Record {
        self.journal.record()
    }

    /// Records the operator's decision, and then resumes or destroys `vm`. See [`Resolution`] for
    /// what the operator vouches for. Changes nothing if the session has ended.
    ///
    /// # Errors
    /// [`ResolveError`]. After [`ResolveError::Journal`] the caller may retry.
    pub fn resolve(
        &mut self,
        vm: &dyn SourceVm,
        resolution: Resolution,
    ) -> Result<(), ResolveError> {
        self.take(On::Resolve(resolution), Some(vm), None)
    }

    /// Records that the source no longer has a copy of the VM. Use it for a record that was taken
    /// over ([`Doubt::taken_over`]) after the VM died with its process. The operator vouches that
    /// the VM runs at the destination, or is no longer needed. Changes nothing if the session has
    /// ended.
    ///
    /// # Errors
    /// [`ResolveError::Journal`]; the caller may retry.
    pub fn give_up(&mut self) -> Result<(), ResolveError> {
        self.take(On::Resolve(Resolution::Destroy), None, None)
    }

    /// Removes the record if the session has ended, because no side asks a source about such a
    /// session.
    ///
    /// # Errors
    /// [`JournalError::Undecided`] if the session has not ended; the record then stays.
    /// [`JournalError::Io`].
    pub fn forget(self) -> Result<(), JournalError> {
        self.journal.forget_if_over()
    }

    /// Applies an event and executes the actions that follow, until none remains.
    /// Without `vm` there is nothing to resume or destroy.
    pub(super) fn take(
        &mut self,
        event: On,
        vm: Option<&dyn SourceVm>,
        lane: Option<&ControlLane>,
    ) -> Result<(), ResolveError> {
        let mut next = Some(event);
        let mut unrecorded = None;
        while let Some(event) = next.take() {
            // A session that has ended accepts no resolution.
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
                        // Return to the previous state, in which the same answer can be applied
                        // again.
                        if before.may_resolve() {
                            self.state = before;
                        }
                        return Err(error);
                    }
                }
            }
        }
        match (unrecorded, self.state) {
            // In the state `Released`, the destination has the VM, even if this side could not
            // record that.
            (None, _) | (_, Source::Released) => Ok(()),
            (Some(error), _) => Err(ResolveError::Journal(error)),
        }
    }

    /// Executes one action; returns the resulting event, if any.
    pub(super) fn act(
        &mut self,
        action: Do,
        vm: Option<&dyn SourceVm>,
        lane: Option<&ControlLane>,
    ) -> Result<Option<Result<On, JournalError>>, ResolveError> {
        match (action, vm) {
            (Do::Record(record), _) => {
                let written = self.journal.write(State::Source(record));
                return Ok(Some(written.map(|()| On::Recorded)));
            }
            // Ignore an error, because the older record is just as safe as the new one.
            (Do::Note(record), _) => drop(self.journal.write(State::Source(record))),
            (Do::ResumeGuest, Some(vm)) => self.resume(vm)?,
            (Do::DestroyCopy, Some(vm)) => vm.destroy(),
            (Do::SendRelease, _) => {
                if let Some(lane) = lane {
                    // The destination has the VM in any case. If this message is lost, the
                    // destination keeps its record.
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
            .map_err(failed("cannot take back disks and devices"))?;
        if self.paused_by_owner {
            return Ok(());
        }
        vm.resume().map_err(failed("cannot resume the guest"))
    }
}
