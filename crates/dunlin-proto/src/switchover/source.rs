//! The source's part.

use super::Impossible;
use crate::control::Verdict;
use crate::journal::SourceRecord;
use crate::mistake::{Mistake, planted};

/// Where the source stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// Pre-copy; the guest runs here (or was paused by its owner). The journal
    /// says *migrating*.
    Live,
    /// Pre-copy has converged, and *committing* is being recorded.
    Recording,
    /// The guest is paused for the switchover; last pages and state go out.
    Paused,
    /// *final* is sent.
    AwaitingReady,
    /// *commit* is sent. From here the VM must not run at the source unless
    /// the destination is known to have aborted.
    Committed,
    /// *commit* is sent and its lane is lost: the guest stays paused, and the
    /// destination is asked.
    InDoubt,
    /// The VM ran at the destination and does so no more. To run the copy here
    /// would be to go back in time, so that an operator decides.
    RanThenDied,
    /// The destination runs the VM, and that is being recorded.
    Releasing,
    /// The operator takes the VM back, and that is being recorded.
    TakingBack,
    /// The operator gives the copy here up, and that is being recorded.
    GivingUp,
    /// The copy here is destroyed.
    Released,
    /// The migration is over; the VM lives on at the source.
    Kept,
}

/// What the operator decides where no answer can: on `dunlin resolve`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Resolution {
    /// The VM shall go on at the source. The operator vouches that it does not
    /// run at the destination and never will; what it did there is lost.
    RunHere,
    /// The copy here shall be destroyed. The operator vouches that the VM
    /// lives at the destination, or is no longer wanted.
    Destroy,
}

/// What happens at the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SourceEvent {
    /// Pre-copy has converged.
    Converged,
    /// The journal holds the record and is synced.
    Recorded,
    /// The journal could not be written or synced; it holds either record.
    RecordFailed,
    /// Every lane has ended and *final* is on its way.
    FinalSent,
    /// The destination has everything; whether the digests agree, where they
    /// were asked for.
    Ready {
        /// False only when verification was negotiated and failed.
        same_memory: bool,
    },
    /// The destination runs the VM, or keeps it paused as told.
    Running,
    /// An answer; [`SourceEvent::answer`] makes it from the message.
    Answer {
        /// Whether it is about the attempt that was asked about. If not, it is
        /// no answer.
        this_attempt: bool,
        /// What became of the attempt.
        verdict: Verdict,
    },
    /// The destination refuses or cancels. It does so after *commit* only
    /// where it has recorded *aborted*.
    PeerCancelled,
    /// The operator cancels.
    Cancelled,
    /// Something failed here, or the peer broke the protocol.
    Failed,
    /// The newest control lane is lost, or the answer did not come in time.
    ControlLost,
    /// The operator decides.
    Resolve(Resolution),
}

/// What must be done after an event at the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SourceAction {
    /// Write this record and sync it; ends with [`SourceEvent::Recorded`] or
    /// [`SourceEvent::RecordFailed`].
    Record(SourceRecord),
    /// Write this record and sync it. Failing is a warning: the record from
    /// before leads a restarted source to the same end, by way of a question.
    Note(SourceRecord),
    /// Pause the guest, then send last pages and state; ends with
    /// [`SourceEvent::FinalSent`] or [`SourceEvent::Failed`].
    PauseGuest,
    /// Send *commit*: the point of no return.
    SendCommit,
    /// Take disks and devices back and let the guest go on here, unless its
    /// owner had paused it. Doing it twice does no harm.
    ResumeGuest,
    /// Tell the destination to drop its copy.
    CancelPeer,
    /// Tell the operator that the VM is paused here and may run at the
    /// destination.
    HoldInDoubt,
    /// Close the control lane there is. Raise the epoch, in the record too
    /// (failing is a warning), connect anew under it, and *inquire*; wait a
    /// while first if the last inquiry has failed, and give up at a deadline,
    /// leaving the VM in doubt.
    Inquire,
    /// Tell the operator that the VM ran at the destination, does so no more,
    /// and that running it here goes back to the moment of the pause.
    AskOperator,
    /// Destroy the copy here. Doing it twice does no harm.
    DestroyCopy,
    /// Send *release*.
    SendRelease,
    /// Answer that it is too late to cancel.
    RefuseTooLate,
}

use SourceAction as Do;

/// The guest has never stopped. The record comes before the word to the peer,
/// which forgets the session at that word and could answer no question.
const KEEP_LIVE: &[Do] = &[Do::Note(SourceRecord::Kept), Do::CancelPeer];
/// The guest first: every moment counts. A crash before *kept* is on disk
/// leaves *committing*, and the destination, that took no *commit* and was told
/// nothing, will say *aborted*.
const KEEP_PAUSED: &[Do] = &[
    Do::ResumeGuest,
    Do::Note(SourceRecord::Kept),
    Do::CancelPeer,
];
const TAKE_BACK: &[Do] = &[Do::ResumeGuest, Do::Note(SourceRecord::Kept)];

impl Source {
    /// Goes on from the journal after the source's process has died. The VM is
    /// gone if it lived in that process; where it lives elsewhere it is as the
    /// process left it.
    #[must_use]
    pub fn restarted(record: SourceRecord) -> (Self, &'static [SourceAction]) {
        match record {
            SourceRecord::Migrating => (Self::Kept, &[Do::Note(SourceRecord::Kept)]),
            SourceRecord::Committing => (Self::InDoubt, &[Do::HoldInDoubt, Do::Inquire]),
            SourceRecord::RanThenDied => (Self::RanThenDied, &[Do::AskOperator]),
            SourceRecord::RunHere => (Self::Kept, TAKE_BACK),
            SourceRecord::Kept => (Self::Kept, &[]),
            // The destination learns nothing, and keeps its record.
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

    /// Whether an operator may decide: `dunlin resolve`.
    #[must_use]
    pub fn may_resolve(self) -> bool {
        matches!(self, Self::InDoubt | Self::RanThenDied)
    }

    /// Takes an event; returns the state after it and what must be done, in
    /// order.
    ///
    /// # Errors
    /// The state cannot take the event. Coming from the peer it breaks the
    /// protocol; the session must be ended by `Failed` or `ControlLost`.
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

            // *released* is on disk first: were the copy destroyed before, a
            // crash would leave a question about a copy that is gone.
            (Self::Releasing, On::Recorded) => {
                (Self::Released, &[Do::DestroyCopy, Do::SendRelease])
            }
            // The destination runs, so the copy may go; but it must not
            // forget, since this journal still says that it will be asked.
            (Self::Releasing, On::RecordFailed) => (Self::Released, &[Do::DestroyCopy]),

            (
                Self::Committed
                | Self::InDoubt
                | Self::RanThenDied
                | Self::Releasing
                | Self::Released,
                On::Cancelled,
            ) => (self, &[Do::RefuseTooLate]),
            // It crossed our *inquire*: the destination had everything only
            // after this side had crashed.
            (Self::InDoubt, On::Ready { .. }) => (self, &[]),
            // What crossed the end on its way, or was said before it on a lane
            // that came later, changes nothing any more.
            (
                Self::RanThenDied | Self::Released | Self::Kept,
                On::Running | On::Answer { .. } | On::PeerCancelled | On::Failed | On::ControlLost,
            )
            | (Self::Kept, On::Ready { .. } | On::Cancelled) => (self, &[]),
            (state, event) => return Err(Impossible::new("source", state, event)),
        })
    }

    /// What the destination has said of this attempt.
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
    /// The event for an *answer*, where `asked` is the attempt in doubt.
    #[must_use]
    pub fn answer(asked: u32, attempt: u32, verdict: Verdict) -> Self {
        Self::Answer {
            this_attempt: attempt == asked,
            verdict,
        }
    }
}
