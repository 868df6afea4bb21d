//! The source's state machine.

use super::Impossible;
use crate::control::Verdict;
use crate::journal::SourceRecord;
use crate::mistake::{Mistake, planted};

/// States of the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// Pre-copy. The guest runs here, unless its owner has paused it. The journal
    /// says *migrating*.
    Live,
    /// Pre-copy has converged, and *committing* is being recorded.
    Recording,
    /// The guest is paused for the switchover; the last pages and the state are being sent.
    Paused,
    /// *final* is sent.
    AwaitingReady,
    /// *commit* is sent. From here on the VM must not run at the source, unless the destination has
    /// reported *aborted* or an operator decides so.
    Committed,
    /// *commit* is sent, and no usable answer has arrived. The guest stays paused, and the source
    /// inquires at the destination.
    InDoubt,
    /// The VM ran at the destination and no longer does. The copy here is older,
    /// so an operator decides.
    RanThenDied,
    /// The destination runs the VM; *released* is being recorded.
    Releasing,
    /// The operator has decided that the VM continues here; *run here* is being
    /// recorded.
    TakingBack,
    /// The operator has decided to destroy the copy here; *given up* is being
    /// recorded.
    GivingUp,
    /// The copy here is destroyed.
    Released,
    /// The migration has ended; the VM stays at the source.
    Kept,
}

/// The operator's decision about a VM in doubt, or about one that ran and died at the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Resolution {
    /// The VM continues at the source. The operator vouches that it does not
    /// run at the destination and never will; what it did there is lost.
    RunHere,
    /// The copy here is destroyed. The operator vouches that the VM runs at the
    /// destination or may be discarded.
    Destroy,
}

/// Events at the source: what has happened since the last event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SourceEvent {
    /// Pre-copy converged.
    Converged,
    /// The record was written and synced.
    Recorded,
    /// Writing or syncing the record failed. The journal holds the old record or the new one.
    RecordFailed,
    /// Every lane ended and *final* was sent.
    FinalSent,
    /// *ready* arrived: the destination has received everything.
    Ready {
        /// False only if verification was negotiated and the memories differ.
        same_memory: bool,
    },
    /// *running* arrived: the destination runs the VM, or keeps it paused as
    /// *commit* requested.
    Running,
    /// *answer* arrived; built by [`SourceEvent::answer`].
    Answer {
        /// Whether the answer concerns the attempt in doubt. Otherwise the source ignores the
        /// answer.
        this_attempt: bool,
        /// The outcome of the attempt.
        verdict: Verdict,
    },
    /// *refuse* or *cancel* arrived. After *commit* the destination sends *cancel*
    /// only if it has recorded *aborted*.
    PeerCancelled,
    /// The operator cancelled the migration.
    Cancelled,
    /// An operation failed here, or the peer violated the protocol.
    Failed,
    /// The newest control lane was lost, or no answer arrived in time.
    ControlLost,
    /// The operator decided.
    Resolve(Resolution),
}

/// What the source does after an event. [`Source::on`] returns the actions in the order of
/// their execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SourceAction {
    /// Writes and syncs this record. Ends with [`SourceEvent::Recorded`] or
    /// [`SourceEvent::RecordFailed`].
    Record(SourceRecord),
    /// Writes and syncs this record. A failure is only a warning, because a source that restarts
    /// from the previous record reaches the same end.
    Note(SourceRecord),
    /// Pauses the guest, then sends the last pages and the state. Ends with
    /// [`SourceEvent::FinalSent`] or [`SourceEvent::Failed`].
    PauseGuest,
    /// Sends *commit*: the point of no return.
    SendCommit,
    /// Acquires disks and devices again and resumes the guest here, unless its
    /// owner had paused it. Idempotent.
    ResumeGuest,
    /// Sends *cancel*: the destination drops its copy.
    CancelPeer,
    /// Reports to the operator that the VM is paused here and possibly runs at the
    /// destination.
    HoldInDoubt,
    /// Closes the current control lane, if any. Raises the epoch and records it; a
    /// failure to record it is only a warning. Connects again with the new epoch and
    /// sends *inquire*. After a failed inquiry, the source waits before it connects
    /// again. At the deadline it stops inquiring and leaves the VM in doubt.
    Inquire,
    /// Reports to the operator that the VM ran at the destination and no longer
    /// does, and that the copy here would continue from the moment of the pause.
    AskOperator,
    /// Destroys the copy here. Idempotent.
    DestroyCopy,
    /// Sends *release*.
    SendRelease,
    /// Answers the operator that it is too late to cancel.
    RefuseTooLate,
}

use SourceAction as Do;

/// The actions that end a migration before the pause. *kept* is recorded before *cancel* is sent,
/// because after *cancel* the destination forgets the session and can no longer answer.
const KEEP_LIVE: &[Do] = &[Do::Note(SourceRecord::Kept), Do::CancelPeer];
/// The actions that end a migration after the pause. The guest is resumed first, to keep the
/// downtime short. If the source crashes before *kept* is on disk, the journal says *committing*,
/// and the restarted source inquires. The destination then answers *aborted*, because it has
/// received neither *commit* nor *cancel*.
const KEEP_PAUSED: &[Do] = &[
    Do::ResumeGuest,
    Do::Note(SourceRecord::Kept),
    Do::CancelPeer,
];
const TAKE_BACK: &[Do] = &[Do::ResumeGuest, Do::Note(SourceRecord::Kept)];

impl Source {
    /// Continues from the journal after the source's process has ended. A VM that ran
    /// in that process is lost. A VM in another process is in the state in which
    /// the source's process left it.
    #[must_use]
    pub fn restarted(record: SourceRecord) -> (Self, &'static [SourceAction]) {
        match record {
            SourceRecord::Migrating => (Self::Kept, &[Do::Note(SourceRecord::Kept)]),
            SourceRecord::Committing => (Self::InDoubt, &[Do::HoldInDoubt, Do::Inquire]),
            SourceRecord::RanThenDied => (Self::RanThenDied, &[Do::AskOperator]),
            SourceRecord::RunHere => (Self::Kept, TAKE_BACK),
            SourceRecord::Kept => (Self::Kept, &[]),
            // A source that has restarted sends no *release*. A destination that has not received
            // *release* keeps its record.
            SourceRecord::Released | SourceRecord::GivenUp => (Self::Released, &[Do::DestroyCopy]),
        }
    }

    /// Whether the VM may run, or be resumed, at the source in this state.
    #[must_use]
    pub fn may_run(self) -> bool {
        matches!(self, Self::Live | Self::Recording | Self::Kept)
    }

    /// Whether the migration can still be cancelled: *commit* is not sent.
    #[must_use]
    pub fn may_cancel(self) -> bool {
        matches!(
            self,
            Self::Live | Self::Recording | Self::Paused | Self::AwaitingReady
        )
    }

    /// Whether an operator may decide, see [`Resolution`].
    #[must_use]
    pub fn may_resolve(self) -> bool {
        matches!(self, Self::InDoubt | Self::RanThenDied)
    }

    /// Applies an event; returns the next state and the actions, in order.
    ///
    /// # Errors
    /// The event is not possible in this state. If it is a message of the peer,
    /// the peer has violated the protocol, and the caller ends the session with
    /// `Failed` or `ControlLost`.
    pub fn on(self, event: SourceEvent) -> Result<(Self, &'static [SourceAction]), Impossible> {
        use SourceEvent as On;
        Ok(match (self, event) {
            (Self::Live, On::Converged) if planted(Mistake::PauseBeforeRecord) => {
                (Self::Paused, &[Do::PauseGuest])
            }
            (Self::Live, On::Converged) => {
                (Self::Recording, &[Do::Record(SourceRecord::Committing)])
            }
            (Self::Recording, On::Recorded) => (Self::Paused, &[Do::PauseGuest]),
            (Self::Live, On::PeerCancelled | On::Cancelled | On::Failed | On::ControlLost)
            | (Self::Recording, On::RecordFailed) => (Self::Kept, KEEP_LIVE),

            (Self::Paused, On::FinalSent) => (Self::AwaitingReady, &[]),
            (Self::AwaitingReady, On::Ready { same_memory: true }) => {
                (Self::Committed, &[Do::SendCommit])
            }
            (Self::AwaitingReady, On::Ready { same_memory: false })
            | (
                Self::Paused | Self::AwaitingReady,
                On::PeerCancelled | On::Cancelled | On::Failed | On::ControlLost,
            ) => (Self::Kept, KEEP_PAUSED),

            (Self::Committed, On::ControlLost) if planted(Mistake::ResumeWithoutAsking) => {
                (Self::Kept, TAKE_BACK)
            }
            (Self::Committed, On::ControlLost | On::Failed) => {
                (Self::InDoubt, &[Do::HoldInDoubt, Do::Inquire])
            }
            (Self::InDoubt, On::ControlLost | On::Failed) => (Self::InDoubt, &[Do::Inquire]),

            (Self::Committed | Self::InDoubt, On::Running) => self.learn(Verdict::Running),
            (Self::Committed | Self::InDoubt, On::PeerCancelled) => self.learn(Verdict::Aborted),
            (
                Self::Committed | Self::InDoubt,
                On::Answer {
                    this_attempt,
                    verdict,
                },
            ) => {
                if this_attempt || planted(Mistake::BelieveAnyAttempt) {
                    self.learn(verdict)
                } else {
                    (self, &[])
                }
            }

            (Self::InDoubt | Self::RanThenDied, On::Resolve(Resolution::RunHere)) => {
                (Self::TakingBack, &[Do::Record(SourceRecord::RunHere)])
            }
            (Self::InDoubt | Self::RanThenDied, On::Resolve(Resolution::Destroy)) => {
                (Self::GivingUp, &[Do::Record(SourceRecord::GivenUp)])
            }
            (Self::TakingBack, On::Recorded) => (Self::Kept, TAKE_BACK),
            (Self::GivingUp, On::Recorded) => (Self::Released, &[Do::DestroyCopy]),
            (Self::TakingBack | Self::GivingUp, On::RecordFailed) => {
                (Self::InDoubt, &[Do::HoldInDoubt])
            }

            // *released* must be on disk first. Otherwise, after a crash between
            // the two steps, the journal would lead to an inquiry about a copy that
            // no longer exists.
            (Self::Releasing, On::Recorded) => {
                (Self::Released, &[Do::DestroyCopy, Do::SendRelease])
            }
            // The destination runs the VM, so the copy can be destroyed.
            // *release* is not sent: the destination must keep its record,
            // because this journal still leads to an inquiry.
            (Self::Releasing, On::RecordFailed) => (Self::Released, &[Do::DestroyCopy]),

            (
                Self::Committed
                | Self::InDoubt
                | Self::RanThenDied
                | Self::Releasing
                | Self::Released,
                On::Cancelled,
            ) => (self, &[Do::RefuseTooLate]),
            // This process has restarted after a crash and has sent *inquire*. Before *inquire*
            // reached the destination, the destination had received everything and sent *ready*.
            (Self::InDoubt, On::Ready { .. }) => (self, &[]),
            // Messages that were in flight at the end, or that an older and slower control lane
            // delivers late, change nothing.
            (
                Self::RanThenDied | Self::Released | Self::Kept,
                On::Running | On::Answer { .. } | On::PeerCancelled | On::Failed | On::ControlLost,
            )
            | (Self::Kept, On::Ready { .. } | On::Cancelled) => (self, &[]),
            (state, event) => return Err(Impossible::new("source", state, event)),
        })
    }

    /// Applies the destination's verdict on this attempt.
    fn learn(self, verdict: Verdict) -> (Self, &'static [SourceAction]) {
        match verdict {
            Verdict::Running if planted(Mistake::ReleaseBeforeRecord) => (
                Self::Releasing,
                &[
                    Do::DestroyCopy,
                    Do::SendRelease,
                    Do::Record(SourceRecord::Released),
                ],
            ),
            Verdict::Running => (Self::Releasing, &[Do::Record(SourceRecord::Released)]),
            Verdict::Aborted => (Self::Kept, TAKE_BACK),
            Verdict::RanThenDied => (
                Self::RanThenDied,
                &[Do::Note(SourceRecord::RanThenDied), Do::AskOperator],
            ),
            Verdict::NoRecord => (Self::InDoubt, &[Do::HoldInDoubt]),
        }
    }
}

impl SourceEvent {
    /// The event for an *answer* about `attempt`; `asked` is the attempt in doubt.
    #[must_use]
    pub fn answer(asked: u32, attempt: u32, verdict: Verdict) -> Self {
        Self::Answer {
            this_attempt: attempt == asked,
            verdict,
        }
    }
}
