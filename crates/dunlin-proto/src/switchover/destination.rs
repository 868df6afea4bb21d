//! The destination's part: it decides.

use super::Impossible;
use crate::control::Verdict;
use crate::journal::DestinationRecord;
use crate::mistake::{Mistake, planted};

/// Where the destination stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Destination {
    /// The VM is built, *accept* is not sent, *prepared* is being recorded.
    Accepting,
    /// Memory and state come in.
    Receiving,
    /// *final* has come and adds up; lanes are joined, state is being loaded.
    Loading,
    /// *ready* is sent; nothing runs before *commit*.
    Prepared,
    /// The source has asked over a new control lane before anything was
    /// decided: what the old one's reader had read is being taken.
    Draining {
        /// Whether *ready* had been sent, so that a *commit* may be among it.
        prepared: bool,
    },
    /// *commit* is taken; disks and devices are being taken. Nothing has run,
    /// so that failing here can still be *aborted*.
    Acquiring {
        /// Whether the guest shall run, or stay paused.
        run: bool,
    },
    /// *running* is being recorded: the decision.
    Recording {
        /// Whether the guest shall run, or stay paused.
        run: bool,
    },
    /// *running* is recorded and the guest is being resumed.
    Starting,
    /// The VM lives here.
    Running,
    /// The source has let go, and the session is forgotten.
    Released,
    /// *aborted* is being recorded.
    Aborting,
    /// *aborted* is recorded; the copy here is dropped.
    Aborted,
    /// The copy here is dropped, but *aborted* could not be recorded: nobody
    /// is told. The next inquiry tries again.
    Unrecorded,
    /// The VM may have run here and does so no more, while the journal says
    /// *running*: its process died, or it could not be resumed.
    Died,
    /// The journal knows nothing of the session.
    Unknown,
}

/// What happens at the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DestinationEvent {
    /// The journal holds the record and is synced.
    Recorded,
    /// The journal could not be written or synced; it holds either record.
    RecordFailed,
    /// *final* has come, every lane thread is joined and the counts agree.
    Complete,
    /// State is loaded and checked.
    Loaded,
    /// The source commits.
    Commit {
        /// Whether the guest shall run, or stay paused as it was.
        run: bool,
    },
    /// Disks and devices are here.
    Acquired,
    /// The guest runs.
    Resumed,
    /// The source has destroyed its copy.
    Release,
    /// The source asks, on a control lane with a higher epoch than any before.
    Inquired,
    /// Everything that the old control lane's reader had read has been taken.
    Drained,
    /// The source cancels.
    PeerCancelled,
    /// The operator cancels.
    Cancelled,
    /// Something failed here, or the peer broke the protocol.
    Failed,
    /// The newest control lane is lost.
    ControlLost,
}

/// What must be done after an event at the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DestinationAction {
    /// Write this record and sync it; ends with [`DestinationEvent::Recorded`]
    /// or [`DestinationEvent::RecordFailed`].
    Record(DestinationRecord),
    /// Send *accept*.
    SendAccept,
    /// Refuse the session.
    Refuse,
    /// Load and check the state; ends with [`DestinationEvent::Loaded`] or
    /// [`DestinationEvent::Failed`].
    LoadState,
    /// Send *ready*.
    SendReady,
    /// Take disks and devices; ends with [`DestinationEvent::Acquired`] or
    /// [`DestinationEvent::Failed`].
    Acquire,
    /// Resume the guest; ends with [`DestinationEvent::Resumed`] or
    /// [`DestinationEvent::Failed`].
    Resume,
    /// Say what became of the attempt, on the newest control lane: as *answer*
    /// if an inquiry came there, else *running* as itself, *aborted* as
    /// *cancel* with the reason, *ran, then died* as an *answer* unasked.
    Tell(Verdict),
    /// Close every control lane but the newest, so that nothing more can be
    /// read from them, and join their readers.
    CloseOld,
    /// Take as events, in order, what those readers had read, each with all
    /// that it brings; ends with [`DestinationEvent::Drained`].
    Drain,
    /// Close every control lane without a word.
    Close,
    /// Join the lanes, let disks and devices go and drop the copy here. Doing
    /// it twice does no harm.
    Discard,
    /// Remove the record: the source will never ask again.
    Forget,
    /// Answer that it is too late to cancel.
    RefuseTooLate,
}

use DestinationAction as Do;

const ABORT: &[Do] = &[Do::Record(DestinationRecord::Aborted)];
/// Disks and devices may be held here: they are let go before the source can
/// hear of it and take them back.
const LET_GO_AND_ABORT: &[Do] = &[Do::Discard, Do::Record(DestinationRecord::Aborted)];

impl Destination {
    /// Begins a session: the VM is built and *accept* not yet sent.
    #[must_use]
    pub fn begin() -> (Self, &'static [DestinationAction]) {
        (Self::Accepting, &[Do::Record(DestinationRecord::Prepared)])
    }

    /// Goes on from the journal after the destination's process has died, and
    /// its VM with it: only to answer. `None` is a session without a record.
    ///
    /// The caller holds the record's lock, which proves that the process died.
    #[must_use]
    pub fn restarted(record: Option<DestinationRecord>) -> (Self, &'static [DestinationAction]) {
        match record {
            None => (Self::Unknown, &[]),
            Some(DestinationRecord::Prepared) => (Self::Aborting, ABORT),
            Some(DestinationRecord::Running) if planted(Mistake::DeadAnswersRunning) => {
                (Self::Running, &[])
            }
            Some(DestinationRecord::Running) => (Self::Died, &[]),
            // Not here, but not the source's either.
            Some(DestinationRecord::MovedOn) => (Self::Running, &[]),
            Some(DestinationRecord::Aborted) => (Self::Aborted, &[]),
        }
    }

    /// Whether the VM may run at the destination in this state.
    #[must_use]
    pub fn may_run(self) -> bool {
        matches!(self, Self::Starting | Self::Running | Self::Released)
    }

    /// Whether the migration can still be cancelled: no *commit* is taken.
    #[must_use]
    pub fn may_cancel(self) -> bool {
        matches!(
            self,
            Self::Accepting
                | Self::Receiving
                | Self::Loading
                | Self::Prepared
                | Self::Draining { .. }
        )
    }

    /// Takes an event; returns the state after it and what must be done, in
    /// order.
    ///
    /// # Errors
    /// The state cannot take the event. Coming from the peer it breaks the
    /// protocol; the session must be ended by `Failed` or `ControlLost`.
    pub fn on(
        self,
        event: DestinationEvent,
    ) -> Result<(Self, &'static [DestinationAction]), Impossible> {
        use DestinationEvent as On;
        Ok(match (self, event) {
            (Self::Accepting, On::Recorded) => (Self::Receiving, &[Do::SendAccept]),
            (Self::Accepting, On::RecordFailed) => (Self::Unrecorded, &[Do::Refuse, Do::Discard]),
            (Self::Receiving, On::Complete) => (Self::Loading, &[Do::LoadState]),
            (Self::Loading, On::Loaded) => (Self::Prepared, &[Do::SendReady]),
            (
                Self::Receiving | Self::Loading | Self::Prepared,
                On::PeerCancelled | On::Cancelled | On::Failed | On::ControlLost,
            ) => self.abort(),

            (Self::Prepared, On::Inquired) if planted(Mistake::AnswerBeforeClose) => {
                (Self::Prepared, &[Do::Tell(Verdict::Aborted)])
            }
            (Self::Prepared, On::Inquired) if planted(Mistake::AnswerBeforeDrain) => (
                Self::Draining { prepared: true },
                &[Do::CloseOld, Do::Tell(Verdict::Aborted), Do::Drain],
            ),
            (Self::Receiving | Self::Loading | Self::Prepared, On::Inquired) => {
                let prepared = self == Self::Prepared;
                (Self::Draining { prepared }, &[Do::CloseOld, Do::Drain])
            }
            (Self::Draining { .. }, On::Drained) => self.abort(),
            // Each leads to the end of draining, which is to come.
            (Self::Draining { prepared: false }, On::Complete)
            | (
                Self::Draining { .. },
                On::PeerCancelled | On::Cancelled | On::Failed | On::ControlLost,
            ) => (self, &[]),

            (Self::Prepared | Self::Draining { prepared: true }, On::Commit { run }) => {
                (Self::Acquiring { run }, &[Do::Acquire])
            }
            (Self::Acquiring { .. }, On::Failed) if planted(Mistake::TellBeforeLettingGo) => {
                (Self::Aborting, ABORT)
            }
            (Self::Acquiring { run: true }, On::Acquired) if planted(Mistake::RunBeforeRecord) => {
                (Self::Starting, &[Do::Resume])
            }
            (Self::Starting, On::Resumed) if planted(Mistake::RunBeforeRecord) => (
                Self::Recording { run: false },
                &[Do::Record(DestinationRecord::Running)],
            ),
            (Self::Acquiring { run }, On::Acquired) if planted(Mistake::TellBeforeRecord) => (
                Self::Recording { run },
                &[
                    Do::Tell(Verdict::Running),
                    Do::Record(DestinationRecord::Running),
                ],
            ),
            (Self::Acquiring { run }, On::Acquired) => (
                Self::Recording { run },
                &[Do::Record(DestinationRecord::Running)],
            ),
            // Nothing has run, so that the source can have it back.
            (Self::Acquiring { .. }, On::Failed) | (Self::Recording { .. }, On::RecordFailed) => {
                (Self::Aborting, LET_GO_AND_ABORT)
            }
            (Self::Recording { run: true }, On::Recorded) => (Self::Starting, &[Do::Resume]),
            (Self::Recording { run: false }, On::Recorded) | (Self::Starting, On::Resumed) => {
                (Self::Running, &[Do::Tell(Verdict::Running)])
            }
            // Some of it may have run. The source keeps its copy, and an
            // operator decides; so this one must never run again.
            (Self::Starting, On::Failed) => (
                Self::Died,
                &[Do::Discard, Do::Tell(Verdict::RanThenDied)],
            ),

            (Self::Running, On::Release) => (Self::Released, &[Do::Forget]),
            // *running* had reached the source before the VM died.
            (Self::Died, On::Release) => (Self::Died, &[Do::Forget]),
            (Self::Aborting, On::Recorded) => {
                (Self::Aborted, &[Do::Tell(Verdict::Aborted), Do::Discard])
            }
            (Self::Aborting, On::RecordFailed) => (Self::Unrecorded, &[Do::Discard, Do::Close]),

            (Self::Unrecorded, On::Inquired) => (
                Self::Aborting,
                &[Do::CloseOld, Do::Record(DestinationRecord::Aborted)],
            ),
            (Self::Running | Self::Released, On::Inquired) => {
                (self, &[Do::CloseOld, Do::Tell(Verdict::Running)])
            }
            (Self::Aborted, On::Inquired) => (self, &[Do::CloseOld, Do::Tell(Verdict::Aborted)]),
            (Self::Died, On::Inquired) => (self, &[Do::CloseOld, Do::Tell(Verdict::RanThenDied)]),
            (Self::Unknown, On::Inquired) => (self, &[Do::CloseOld, Do::Tell(Verdict::NoRecord)]),

            (Self::Running | Self::Released | Self::Died, On::Cancelled) => {
                (self, &[Do::RefuseTooLate])
            }
            // The end of a lane on which all was said, or that was drained.
            (
                Self::Running
                | Self::Released
                | Self::Aborted
                | Self::Unrecorded
                | Self::Died
                | Self::Unknown,
                On::ControlLost | On::Failed | On::Drained,
            )
            // They crossed our *cancel*.
            | (
                Self::Aborted | Self::Unrecorded,
                On::Complete | On::Commit { .. } | On::PeerCancelled | On::Cancelled,
            )
            | (Self::Released | Self::Unknown, On::Release) => (self, &[]),
            (state, event) => return Err(Impossible::new("destination", state, event)),
        })
    }

    /// Before *commit*: nothing is held here that the source would miss.
    fn abort(self) -> (Self, &'static [DestinationAction]) {
        if planted(Mistake::TellAbortedBeforeRecord) {
            return (
                Self::Aborting,
                &[
                    Do::Tell(Verdict::Aborted),
                    Do::Record(DestinationRecord::Aborted),
                ],
            );
        }
        (Self::Aborting, ABORT)
    }
}
