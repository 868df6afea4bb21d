//! Runs each role of the switchover with any events, and checks it against the history of its
//! actions. `tests/model` covers both roles together.

use super::Choices;
use crate::control::Verdict;
use crate::journal::{DestinationRecord, SourceRecord};
use crate::switchover::{
    Destination, DestinationAction, DestinationEvent, Resolution, Source, SourceAction, SourceEvent,
};

const VERDICTS: [Verdict; 4] = [
    Verdict::Running,
    Verdict::Aborted,
    Verdict::RanThenDied,
    Verdict::NoRecord,
];

/// History of the source.
#[derive(Default)]
struct SourceHistory {
    /// The journal's record; `None` means *migrating*.
    recorded: Option<SourceRecord>,
    /// The record being written.
    recording: Option<SourceRecord>,
    committed: bool,
    /// Whether the destination has reported that it runs the VM.
    runs_there: bool,
    /// Whether the destination has reported that it runs or ran the VM.
    ran_there: bool,
    aborted: bool,
    /// The operator's decisions.
    run_here: bool,
    destroy: bool,
    destroyed: bool,
}

/// Runs the source with any messages from a destination that decides once. Checks three
/// rules. After *commit* the source runs the VM only if the destination aborted or an
/// operator decided so (I1). It destroys its copy only if the destination runs the VM or an
/// operator decided so (I2). It sends *release* only after its own journal says *released*.
pub fn fuzz_source_switchover(bytes: &[u8]) {
    let mut choices = Choices::new(bytes);
    let mut state = Source::Live;
    let mut history = SourceHistory::default();
    while choices.more() {
        let event = match history.recording.take() {
            // The write succeeds, and the next event reports that.
            Some(record) if !choices.byte().is_multiple_of(4) => {
                history.recorded = Some(record);
                SourceEvent::Recorded
            }
            Some(record) => {
                // After a failed write, the old or the new record may be on disk.
                if choices.byte().is_multiple_of(2) {
                    history.recorded = Some(record);
                }
                SourceEvent::RecordFailed
            }
            None if choices.byte() == 255 => {
                let record = history.recorded.unwrap_or(SourceRecord::Migrating);
                let (restarted, actions) = Source::restarted(record);
                state = restarted;
                history.check(state, actions);
                continue;
            }
            None => source_event(&mut choices),
        };
        let verdict = match event {
            SourceEvent::Running => Some(Verdict::Running),
            SourceEvent::PeerCancelled => Some(Verdict::Aborted),
            SourceEvent::Answer {
                this_attempt: true,
                verdict,
            } => Some(verdict),
            _ => None,
        };
        let runs = verdict == Some(Verdict::Running);
        let ran = runs || verdict == Some(Verdict::RanThenDied);
        let aborted = verdict == Some(Verdict::Aborted);
        if (ran && history.aborted) || (aborted && history.ran_there) {
            continue;
        }
        let Ok((next, actions)) = state.on(event) else {
            continue;
        };
        history.runs_there |= runs;
        history.ran_there |= ran;
        history.aborted |= aborted;
        match event {
            SourceEvent::Resolve(resolution) => {
                assert!(state.may_resolve());
                history.run_here |= resolution == Resolution::RunHere;
                history.destroy |= resolution == Resolution::Destroy;
            }
            SourceEvent::Cancelled => {
                let refused = actions.contains(&SourceAction::RefuseTooLate);
                assert!(!(refused && state.may_cancel()));
            }
            _ => {}
        }
        state = next;
        history.check(state, actions);
    }
}

fn source_event(choices: &mut Choices<'_>) -> SourceEvent {
    match choices.byte() % 11 {
        0 => SourceEvent::Converged,
        1 => SourceEvent::FinalSent,
        2 => SourceEvent::Ready {
            same_memory: !choices.byte().is_multiple_of(8),
        },
        3 => SourceEvent::Running,
        4 => SourceEvent::Answer {
            this_attempt: choices.byte().is_multiple_of(2),
            verdict: VERDICTS[usize::from(choices.byte() % 4)],
        },
        5 => SourceEvent::PeerCancelled,
        6 => SourceEvent::Cancelled,
        7 => SourceEvent::Failed,
        8 => SourceEvent::ControlLost,
        9 => SourceEvent::Resolve(Resolution::RunHere),
        _ => SourceEvent::Resolve(Resolution::Destroy),
    }
}

impl SourceHistory {
    fn check(&mut self, state: Source, actions: &[SourceAction]) {
        for action in actions {
            assert!(
                self.recording.is_none(),
                "another action before the record is written"
            );
            match *action {
                SourceAction::Record(record) => self.recording = Some(record),
                // The model lets this write succeed, because its failure would only be a warning.
                SourceAction::Note(record) => self.recorded = Some(record),
                SourceAction::PauseGuest => {
                    let committing = Some(SourceRecord::Committing);
                    assert_eq!(
                        self.recorded, committing,
                        "the guest is paused before *committing* is recorded"
                    );
                }
                SourceAction::SendCommit => {
                    assert!(!self.committed, "committed twice");
                    self.committed = true;
                }
                SourceAction::ResumeGuest => {
                    // An operator can decide that the VM runs here even after the copy was
                    // destroyed.
                    assert!(!self.destroyed || self.run_here, "the copy is gone");
                    self.may_run_here();
                }
                SourceAction::DestroyCopy => {
                    assert!(
                        self.runs_there || self.destroy,
                        "no other copy of the VM exists"
                    );
                    self.destroyed = true;
                }
                SourceAction::SendRelease => {
                    let released = Some(SourceRecord::Released);
                    assert_eq!(
                        self.recorded, released,
                        "*release* is sent before *released* is recorded"
                    );
                }
                _ => {}
            }
        }
        if state.may_run() {
            self.may_run_here();
        }
    }

    fn may_run_here(&self) {
        let allowed = !self.committed || self.aborted || self.run_here;
        assert!(allowed, "the destination may run the VM");
    }
}

/// History of the destination.
#[derive(Default)]
struct DestinationHistory {
    recorded: Option<DestinationRecord>,
    /// The event that must come next if nothing fails.
    owed: Option<DestinationEvent>,
    recording: Option<DestinationRecord>,
    /// Verdicts reported to the source.
    reported: Vec<Verdict>,
    /// Whether the destination may hold disks and devices of the VM.
    taken: bool,
}

/// Runs the destination with any events. Checks that it decides once, reports no outcome
/// before the outcome is recorded, resumes the guest only if *running* is recorded, and
/// holds no disks or devices when it reports *aborted* (I1, I2).
pub fn fuzz_destination_switchover(bytes: &[u8]) {
    let mut choices = Choices::new(bytes);
    let mut history = DestinationHistory::default();
    let (mut state, actions) = Destination::begin();
    history.check(actions);
    while choices.more() {
        let event = match history.owed.take() {
            Some(event) => history.owed_event(event, &mut choices),
            None if choices.byte() == 255 => {
                let record = history.recorded;
                // Disks and devices are released when the process ends.
                history.taken = false;
                let (restarted, actions) = Destination::restarted(record);
                state = restarted;
                history.check(actions);
                continue;
            }
            None => destination_event(&mut choices),
        };
        let Ok((next, actions)) = state.on(event) else {
            continue;
        };
        state = next;
        if state.may_run() {
            let running = Some(DestinationRecord::Running);
            assert_eq!(
                history.recorded, running,
                "the VM runs before *running* is recorded"
            );
        }
        history.check(actions);
    }
}

fn destination_event(choices: &mut Choices<'_>) -> DestinationEvent {
    match choices.byte() % 9 {
        0 => DestinationEvent::Complete,
        1 => DestinationEvent::Commit {
            run: choices.byte().is_multiple_of(2),
        },
        2 => DestinationEvent::Release,
        3 => DestinationEvent::Inquired,
        4 => DestinationEvent::PeerCancelled,
        5 => DestinationEvent::Cancelled,
        6 => DestinationEvent::Failed,
        7 => DestinationEvent::ControlLost,
        _ => DestinationEvent::Drained,
    }
}

impl DestinationHistory {
    /// Returns the event that reports the result of the last action.
    fn owed_event(
        &mut self,
        event: DestinationEvent,
        choices: &mut Choices<'_>,
    ) -> DestinationEvent {
        let well = !choices.byte().is_multiple_of(4);
        match (event, self.recording.take()) {
            (_, Some(record)) => {
                // After a failure, either the old or the new record may be on disk.
                if well || choices.byte().is_multiple_of(2) {
                    self.recorded = Some(record);
                }
                if well {
                    DestinationEvent::Recorded
                } else {
                    DestinationEvent::RecordFailed
                }
            }
            (DestinationEvent::Drained, None) if !well => {
                // One of the drained messages causes another event before `Drained`.
                self.owed = Some(event);
                destination_event(choices)
            }
            (DestinationEvent::Drained, None) => event,
            (event, None) if well => event,
            _ => DestinationEvent::Failed,
        }
    }

    fn check(&mut self, actions: &[DestinationAction]) {
        for action in actions {
            match *action {
                DestinationAction::Record(record) => {
                    let decided = self
                        .recorded
                        .filter(|one| *one != DestinationRecord::Prepared);
                    let again = decided.is_none_or(|one| one == record);
                    assert!(
                        again || !self.has_reported(),
                        "the destination decides twice"
                    );
                    self.recording = Some(record);
                    self.owed = Some(DestinationEvent::Recorded);
                }
                DestinationAction::LoadState => self.owed = Some(DestinationEvent::Loaded),
                DestinationAction::Acquire => {
                    // Even if the action fails, the destination may hold some of the disks and
                    // devices.
                    self.taken = true;
                    self.owed = Some(DestinationEvent::Acquired);
                }
                DestinationAction::Resume => {
                    let running = Some(DestinationRecord::Running);
                    assert_eq!(
                        self.recorded, running,
                        "the guest resumes before *running* is recorded"
                    );
                    self.owed = Some(DestinationEvent::Resumed);
                }
                DestinationAction::Drain => self.owed = Some(DestinationEvent::Drained),
                DestinationAction::Discard => self.taken = false,
                DestinationAction::Tell(verdict) => self.report(verdict),
                _ => {}
            }
        }
    }

    fn has_reported(&self) -> bool {
        !self.reported.is_empty()
    }

    fn report(&mut self, verdict: Verdict) {
        let record = match verdict {
            Verdict::Running | Verdict::RanThenDied => Some(DestinationRecord::Running),
            Verdict::Aborted => Some(DestinationRecord::Aborted),
            Verdict::NoRecord => None,
        };
        assert_eq!(self.recorded, record, "{verdict:?} is reported");
        let held = verdict == Verdict::Aborted && self.taken;
        assert!(!held, "the destination still holds disks or devices");
        let runs = |reported: &Verdict| matches!(reported, Verdict::Running | Verdict::RanThenDied);
        let aborted = |reported: &Verdict| *reported == Verdict::Aborted;
        self.reported.push(verdict);
        assert!(!(self.reported.iter().any(runs) && self.reported.iter().any(aborted)));
    }
}
