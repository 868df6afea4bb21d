//! The destination's state machine. The destination decides which side runs the VM.

use super::Impossible;
use crate::control::Verdict;
use crate::journal::DestinationRecord;
use crate::mistake::{Mistake, planted};

/// States of the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Destination {
    /// The VM is built, *accept* is not sent, *prepared* is being recorded.
    Accepting,
    /// Memory and state are arriving.
    Receiving,
    /// *final* matches what has arrived; lanes are joined, state is being loaded.
    Loading,
    /// *ready* is sent. The guest does not run before *commit*.
    Prepared,
    /// The source has inquired over a new control lane, and the destination has recorded neither
    /// *running* nor *aborted*. The messages that the old control lane's reader has read are being
    /// processed.
    Draining {
        /// Whether *ready* had been sent. If so, *commit* may be among the messages that are being
        /// processed.
        prepared: bool,
    },
    /// *commit* is received; disks and devices are being acquired. The guest
    /// has not run, so a failure can still end in *aborted*.
    Acquiring {
        /// Whether the destination resumes the guest; otherwise the guest stays paused.
        run: bool,
    },
    /// *running* is being recorded. This record decides that the VM belongs to the destination.
    Recording {
        /// Whether the destination resumes the guest; otherwise the guest stays paused.
        run: bool,
    },
    /// *running* is recorded and the guest is being resumed.
    Starting,
    /// The VM runs here, or stays paused as *commit* requested.
    Running,
    /// The source has released the VM, and the session is forgotten.
    Released,
    /// *aborted* is being recorded.
    Aborting,
    /// *aborted* is recorded; the destination's copy is dropped.
    Aborted,
    /// The destination's copy is dropped, but *aborted* could not be recorded, so no message
    /// reports it. After the next inquiry, the destination tries to record it again.
    Unrecorded,
    /// *running* is recorded, but the VM does not run here: the VM's process has
    /// ended, or resuming the guest failed. The guest may have run before that.
    Died,
    /// The journal has no record of the session.
    Unknown,
}

/// Events at the destination: what has happened since the last event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DestinationEvent {
    /// The record was written and synced.
    Recorded,
    /// Writing or syncing the record failed. The journal holds the old record or the new one.
    RecordFailed,
    /// *final* arrived, every lane thread was joined, and the counts match.
    Complete,
    /// The state was loaded and checked.
    Loaded,
    /// *commit* arrived.
    Commit {
        /// Whether the destination resumes the guest; otherwise the guest stays paused.
        run: bool,
    },
    /// Disks and devices were acquired.
    Acquired,
    /// The guest was resumed.
    Resumed,
    /// *release* arrived: the source has destroyed its copy.
    Release,
    /// *inquire* arrived on a control lane with a higher epoch than all earlier ones.
    Inquired,
    /// Every message that the old control lane's reader had read was processed.
    Drained,
    /// *cancel* arrived.
    PeerCancelled,
    /// The operator cancelled the migration.
    Cancelled,
    /// An operation failed here, or the peer violated the protocol.
    Failed,
    /// The newest control lane was lost.
    ControlLost,
}

/// What the destination does after an event. [`Destination::on`] returns the actions in the order
/// of their execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DestinationAction {
    /// Writes and syncs this record. Ends with [`DestinationEvent::Recorded`]
    /// or [`DestinationEvent::RecordFailed`].
    Record(DestinationRecord),
    /// Sends *accept*.
    SendAccept,
    /// Sends *refuse*.
    Refuse,
    /// Loads and checks the state. Ends with [`DestinationEvent::Loaded`] or
    /// [`DestinationEvent::Failed`].
    LoadState,
    /// Sends *ready*.
    SendReady,
    /// Acquires disks and devices. Ends with [`DestinationEvent::Acquired`] or
    /// [`DestinationEvent::Failed`].
    Acquire,
    /// Resumes the guest. Ends with [`DestinationEvent::Resumed`] or
    /// [`DestinationEvent::Failed`].
    Resume,
    /// Reports the outcome of the attempt on the newest control lane. If an inquiry
    /// arrived there, the message is *answer*. Otherwise the message is *running*,
    /// *cancel* with the reason (for *aborted*), or an *answer* without an inquiry
    /// (for *ran, then died*).
    Tell(Verdict),
    /// Closes every control lane except the newest, so that nothing more can be
    /// read from them, and joins their readers.
    CloseOld,
    /// Applies, in order and as events, the messages that the readers of the closed control lanes
    /// had read. The actions of each event come before the next event. Ends with
    /// [`DestinationEvent::Drained`].
    Drain,
    /// Closes every control lane without sending a message.
    Close,
    /// Joins the lanes, releases disks and devices, and drops the copy here.
    /// Idempotent.
    Discard,
    /// Removes the record, because the source sends no more inquiries.
    Forget,
    /// Answers the operator that it is too late to cancel.
    RefuseTooLate,
}

use DestinationAction as Do;

const ABORT: &[Do] = &[Do::Record(DestinationRecord::Aborted)];
/// The destination may hold disks and devices. It releases them before the source can receive
/// *aborted* and acquire them again.
const RELEASE_AND_ABORT: &[Do] = &[Do::Discard, Do::Record(DestinationRecord::Aborted)];

impl Destination {
    /// Starts a session: the VM is built, and *accept* is not sent yet.
    #[must_use]
    pub fn begin() -> (Self, &'static [DestinationAction]) {
        (Self::Accepting, &[Do::Record(DestinationRecord::Prepared)])
    }

    /// Continues from the journal after the destination's process, and its VM with it, have ended.
    /// The destination then records *aborted* for an undecided attempt, and answers inquiries.
    /// `None` means that the session has no record.
    ///
    /// The caller holds the record's lock, which proves that the process has ended.
    #[must_use]
    pub fn restarted(record: Option<DestinationRecord>) -> (Self, &'static [DestinationAction]) {
        match record {
            None => (Self::Unknown, &[]),
            Some(DestinationRecord::Prepared) => (Self::Aborting, ABORT),
            Some(DestinationRecord::Running) if planted(Mistake::DeadAnswersRunning) => {
                (Self::Running, &[])
            }
            Some(DestinationRecord::Running) => (Self::Died, &[]),
            // The VM ran here and has moved to another host. The source must not run the VM, so the
            // source gets the answer *running*.
            Some(DestinationRecord::MovedOn) => (Self::Running, &[]),
            Some(DestinationRecord::Aborted) => (Self::Aborted, &[]),
        }
    }

    /// Whether the VM may run at the destination in this state.
    #[must_use]
    pub fn may_run(self) -> bool {
        matches!(self, Self::Starting | Self::Running | Self::Released)
    }

    /// Whether the migration can still be cancelled: *commit* has not been received.
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

    /// Applies an event; returns the next state and the actions, in order.
    ///
    /// # Errors
    /// The event is not possible in this state. If it is a message of the peer,
    /// the peer has violated the protocol, and the caller ends the session with
    /// `Failed` or `ControlLost`.
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
            // These events change nothing while old messages are being processed. If one of them is
            // *commit* after *ready*, it takes effect. If none is, `Drained` aborts.
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
            // The guest has not run, so the source can take it back.
            (Self::Acquiring { .. }, On::Failed) | (Self::Recording { .. }, On::RecordFailed) => {
                (Self::Aborting, RELEASE_AND_ABORT)
            }
            (Self::Recording { run: true }, On::Recorded) => (Self::Starting, &[Do::Resume]),
            (Self::Recording { run: false }, On::Recorded) | (Self::Starting, On::Resumed) => {
                (Self::Running, &[Do::Tell(Verdict::Running)])
            }
            // Some of the guest's vCPUs may have run. The destination's copy must never run again.
            // The source keeps its copy, and an operator decides whether that copy runs.
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
            // Nothing is in progress, so none of these events changes anything.
            (
                Self::Running
                | Self::Released
                | Self::Aborted
                | Self::Unrecorded
                | Self::Died
                | Self::Unknown,
                On::ControlLost | On::Failed | On::Drained,
            )
            // The attempt has ended here. Late messages and a second cancellation change nothing.
            | (
                Self::Aborted | Self::Unrecorded,
                On::Complete | On::Commit { .. } | On::PeerCancelled | On::Cancelled,
            )
            | (Self::Released | Self::Unknown, On::Release) => (self, &[]),
            (state, event) => return Err(Impossible::new("destination", state, event)),
        })
    }

    /// Aborts before *commit*, while this side holds no disks or devices.
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
