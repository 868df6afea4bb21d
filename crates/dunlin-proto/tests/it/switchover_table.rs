//! Every state of the switchover with every event, illegal pairs included.
//! `tests/model` of the workspace checks the two roles together.

#![allow(clippy::unwrap_used)]

use std::fmt::{Debug, Write};

use dunlin_proto::control::Verdict;
use dunlin_proto::journal::{DestinationRecord, SourceRecord};
use dunlin_proto::switchover::{
    Destination, DestinationAction, DestinationEvent, Resolution, Source, SourceAction, SourceEvent,
};

const SOURCE_STATES: [Source; 12] = [
    Source::Live,
    Source::Recording,
    Source::Paused,
    Source::AwaitingReady,
    Source::Committed,
    Source::InDoubt,
    Source::RanThenDied,
    Source::Releasing,
    Source::TakingBack,
    Source::GivingUp,
    Source::Released,
    Source::Kept,
];
const SOURCE_EVENTS: [SourceEvent; 18] = [
    SourceEvent::Converged,
    SourceEvent::Recorded,
    SourceEvent::RecordFailed,
    SourceEvent::FinalSent,
    SourceEvent::Ready { same_memory: true },
    SourceEvent::Ready { same_memory: false },
    SourceEvent::Running,
    answer(Verdict::Running),
    answer(Verdict::Aborted),
    answer(Verdict::RanThenDied),
    answer(Verdict::NoRecord),
    SourceEvent::Answer {
        this_attempt: false,
        verdict: Verdict::Aborted,
    },
    SourceEvent::PeerCancelled,
    SourceEvent::Cancelled,
    SourceEvent::Failed,
    SourceEvent::ControlLost,
    SourceEvent::Resolve(Resolution::RunHere),
    SourceEvent::Resolve(Resolution::Destroy),
];
const DESTINATION_STATES: [Destination; 18] = [
    Destination::Accepting,
    Destination::Receiving,
    Destination::Loading,
    Destination::Prepared,
    Destination::Draining { prepared: false },
    Destination::Draining { prepared: true },
    Destination::Acquiring { run: true },
    Destination::Acquiring { run: false },
    Destination::Recording { run: true },
    Destination::Recording { run: false },
    Destination::Starting,
    Destination::Running,
    Destination::Released,
    Destination::Aborting,
    Destination::Aborted,
    Destination::Unrecorded,
    Destination::Died,
    Destination::Unknown,
];
const DESTINATION_EVENTS: [DestinationEvent; 15] = [
    DestinationEvent::Recorded,
    DestinationEvent::RecordFailed,
    DestinationEvent::Complete,
    DestinationEvent::Loaded,
    DestinationEvent::Commit { run: true },
    DestinationEvent::Commit { run: false },
    DestinationEvent::Acquired,
    DestinationEvent::Resumed,
    DestinationEvent::Release,
    DestinationEvent::Inquired,
    DestinationEvent::Drained,
    DestinationEvent::PeerCancelled,
    DestinationEvent::Cancelled,
    DestinationEvent::Failed,
    DestinationEvent::ControlLost,
];

const fn answer(verdict: Verdict) -> SourceEvent {
    SourceEvent::Answer {
        this_attempt: true,
        verdict,
    }
}

fn row(state: impl Debug, actions: &[impl Debug]) -> String {
    let actions: Vec<String> = actions.iter().map(|action| format!("{action:?}")).collect();
    format!("{state:?} [{}]", actions.join(", "))
}

#[test]
fn the_whole_table_is_as_recorded() {
    let mut table = String::new();
    for state in SOURCE_STATES {
        for event in SOURCE_EVENTS {
            let result = match state.on(event) {
                Ok((next, actions)) => row(next, actions),
                Err(_) => "impossible".into(),
            };
            writeln!(table, "source {state:?} + {event:?} = {result}").unwrap();
        }
    }
    for record in SourceRecord::ALL {
        let (state, actions) = Source::restarted(*record);
        writeln!(
            table,
            "source restarted, {record} = {}",
            row(state, actions)
        )
        .unwrap();
    }
    for state in DESTINATION_STATES {
        for event in DESTINATION_EVENTS {
            let result = match state.on(event) {
                Ok((next, actions)) => row(next, actions),
                Err(_) => "impossible".into(),
            };
            writeln!(table, "destination {state:?} + {event:?} = {result}").unwrap();
        }
    }
    let (state, actions) = Destination::begin();
    writeln!(table, "destination begins = {}", row(state, actions)).unwrap();
    let records = DestinationRecord::ALL.iter().copied().map(Some);
    for record in records.chain([None]) {
        let (state, actions) = Destination::restarted(record);
        let name = record.map_or("no record", DestinationRecord::name);
        writeln!(
            table,
            "destination restarted, {name} = {}",
            row(state, actions)
        )
        .unwrap();
    }
    let recorded = include_str!("switchover_table.txt");
    assert!(
        table == recorded,
        "the table has changed; if that is intended, replace tests/it/switchover_table.txt by:\n{table}"
    );
}

/// After *commit*, only one report of the destination resumes the guest at the source immediately:
/// *aborted*, in an answer or by *cancel*. After *ran, then died*, no event resumes the guest
/// immediately: the source first records an operator's decision.
#[test]
fn i1_after_commit_only_aborted_or_the_operator_resumes_the_guest() {
    for state in [Source::Committed, Source::InDoubt, Source::RanThenDied] {
        for event in SOURCE_EVENTS {
            let Ok((next, actions)) = state.on(event) else {
                continue;
            };
            let aborted = event == answer(Verdict::Aborted) || event == SourceEvent::PeerCancelled;
            let resumes = actions.contains(&SourceAction::ResumeGuest) || next.may_run();
            assert_eq!(
                resumes,
                aborted && state != Source::RanThenDied,
                "{state:?} {event:?}"
            );
        }
    }
    assert!(!Source::restarted(SourceRecord::Committing).0.may_run());
}

#[test]
fn i1_no_event_reports_before_its_record() {
    for state in DESTINATION_STATES {
        for event in DESTINATION_EVENTS {
            let Ok((_, actions)) = state.on(event) else {
                continue;
            };
            let reported = actions
                .iter()
                .position(|action| matches!(action, DestinationAction::Tell(_)));
            let recorded = actions
                .iter()
                .any(|action| matches!(action, DestinationAction::Record(_)));
            assert!(reported.is_none() || !recorded, "{state:?} {event:?}");
        }
    }
}

#[test]
fn cancelling_is_refused_exactly_where_it_is_too_late() {
    for state in SOURCE_STATES {
        let refused = state
            .on(SourceEvent::Cancelled)
            .is_ok_and(|(next, actions)| {
                assert!(next == state || next == Source::Kept);
                actions == [SourceAction::RefuseTooLate]
            });
        assert!(!(refused && state.may_cancel()), "{state:?}");
    }
    for state in DESTINATION_STATES {
        let refused = state
            .on(DestinationEvent::Cancelled)
            .is_ok_and(|(_, actions)| actions == [DestinationAction::RefuseTooLate]);
        assert!(!(refused && state.may_cancel()), "{state:?}");
    }
}

#[test]
fn an_answer_about_another_attempt_is_ignored() {
    let event = SourceEvent::answer(2, 1, Verdict::Aborted);
    for state in [Source::Committed, Source::InDoubt] {
        let (next, actions) = state.on(event).unwrap();
        assert_eq!((next, actions.len()), (state, 0));
    }
    assert_eq!(
        SourceEvent::answer(2, 2, Verdict::Aborted),
        answer(Verdict::Aborted)
    );
}

/// An inquiry closes the old control lane, but the lane's reader can already have read a *commit*.
/// After *ready*, the destination applies that *commit*. Before *ready*, a *commit* violates the
/// protocol.
#[test]
fn a_drained_commit_counts_only_after_ready() {
    let commit = DestinationEvent::Commit { run: true };
    let (draining, _) = Destination::Prepared
        .on(DestinationEvent::Inquired)
        .unwrap();
    assert_eq!(
        draining.on(commit).unwrap().0,
        Destination::Acquiring { run: true }
    );
    for state in [Destination::Receiving, Destination::Loading] {
        let (draining, _) = state.on(DestinationEvent::Inquired).unwrap();
        assert!(draining.on(commit).is_err());
        assert_eq!(
            draining.on(DestinationEvent::Drained).unwrap().0,
            Destination::Aborting
        );
    }
}
