//! Each role of the switchover under any events, against what must never have
//! happened: a plain list of what was done. Both roles against each other are
//! the model's, in `tests/model`.

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

/// What has happened at the source.
#[derive(Default)]
struct SourceHistory {
    /// What the journal holds; none is *migrating*.
    recorded: Option<SourceRecord>,
    /// What is being recorded.
    recording: Option<SourceRecord>,
    committed: bool,
    /// The destination has said that it runs the VM; that it runs or ran it;
    /// that it aborted.
    runs_there: bool,
    ran_there: bool,
    aborted: bool,
    /// What an operator has vouched for.
    run_here: bool,
    destroy: bool,
    destroyed: bool,
}

/// The source, whatever comes from a destination that decides once: after
/// *commit* it runs the VM only where the destination aborted or an operator
/// vouched for it (I1), and destroys its copy only where the destination runs
/// it or an operator said so (I2); it lets nobody forget before its own
/// journal has let go.
pub fn fuzz_source_switchover(bytes: &[u8]) {
    let mut choices = Choices::new(bytes);
    let mut state = Source::Live;
    let mut history = SourceHistory::default();
    while choices.more() {
        let event = match history.recording.take() {
            // Nothing comes in between.
            Some(record) if !choices.byte().is_multiple_of(4) => {
                history.recorded = Some(record);
                SourceEvent::Recorded
            }
            Some(record) => {
                // Either may be on disk.
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
                "something is done while it records"
            );
            match *action {
                SourceAction::Record(record) => self.recording = Some(record),
                // It may fail, which is a warning.
                SourceAction::Note(record) => self.recorded = Some(record),
                SourceAction::PauseGuest => {
                    let committing = Some(SourceRecord::Committing);
                    assert_eq!(self.recorded, committing, "paused before it was recorded");
                }
                SourceAction::SendCommit => {
                    assert!(!self.committed, "committed twice");
                    self.committed = true;
                }
                SourceAction::ResumeGuest => {
                    // An operator may ask for it all the same.
                    assert!(!self.destroyed || self.run_here, "the copy is gone");
                    self.may_run_here();
                }
                SourceAction::DestroyCopy => {
                    assert!(self.runs_there || self.destroy, "nobody else has the VM");
                    self.destroyed = true;
                }
                SourceAction::SendRelease => {
                    let released = Some(SourceRecord::Released);
                    assert_eq!(self.recorded, released, "the record is still asked about");
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
        assert!(allowed, "the destination may run it");
    }
}

/// What has happened at the destination.
#[derive(Default)]
struct DestinationHistory {
    recorded: Option<DestinationRecord>,
    /// The event that must come next, as it would come if all is well.
    owed: Option<DestinationEvent>,
    recording: Option<DestinationRecord>,
    /// What the source has been told.
    told: Vec<Verdict>,
    /// Whether disks and devices may be held here.
    taken: bool,
}

/// The destination, whatever comes: it decides once, tells nothing before that
/// is recorded, resumes only what is recorded as running, and holds nothing
/// when it says *aborted* (I1, I2).
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
                // What it held has died with it.
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
            assert_eq!(history.recorded, running, "it runs before it was recorded");
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
    /// What comes of an action that ends with an event.
    fn owed_event(
        &mut self,
        event: DestinationEvent,
        choices: &mut Choices<'_>,
    ) -> DestinationEvent {
        let well = !choices.byte().is_multiple_of(4);
        match (event, self.recording.take()) {
            (_, Some(record)) => {
                // Where it failed, either may be on disk.
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
                // Something is drained, and the end of it is still owed.
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
                    assert!(again || !self.was_told(), "it decides twice");
                    self.recording = Some(record);
                    self.owed = Some(DestinationEvent::Recorded);
                }
                DestinationAction::LoadState => self.owed = Some(DestinationEvent::Loaded),
                DestinationAction::Acquire => {
                    // Some of it, even where it fails.
                    self.taken = true;
                    self.owed = Some(DestinationEvent::Acquired);
                }
                DestinationAction::Resume => {
                    let running = Some(DestinationRecord::Running);
                    assert_eq!(self.recorded, running, "resumed before it was recorded");
                    self.owed = Some(DestinationEvent::Resumed);
                }
                DestinationAction::Drain => self.owed = Some(DestinationEvent::Drained),
                DestinationAction::Discard => self.taken = false,
                DestinationAction::Tell(verdict) => self.tell(verdict),
                _ => {}
            }
        }
    }

    fn was_told(&self) -> bool {
        !self.told.is_empty()
    }

    fn tell(&mut self, verdict: Verdict) {
        let record = match verdict {
            Verdict::Running | Verdict::RanThenDied => Some(DestinationRecord::Running),
            Verdict::Aborted => Some(DestinationRecord::Aborted),
            Verdict::NoRecord => None,
        };
        assert_eq!(self.recorded, record, "{verdict:?} is told");
        let held = verdict == Verdict::Aborted && self.taken;
        assert!(!held, "what it holds is the source's again");
        let runs = |told: &Verdict| matches!(told, Verdict::Running | Verdict::RanThenDied);
        let aborted = |told: &Verdict| *told == Verdict::Aborted;
        self.told.push(verdict);
        assert!(!(self.told.iter().any(runs) && self.told.iter().any(aborted)));
    }
}
