//! Every state of the switchover against every event, illegal pairs included,
//! and the two roles played against each other over every order of delivery.

#![allow(clippy::unwrap_used)]

use std::fmt::Write;

use dunlin_proto::switchover::{
    Destination, DestinationAction, DestinationEvent, Source, SourceAction, SourceEvent,
};

const SOURCE_STATES: [Source; 7] = [
    Source::Live,
    Source::Paused,
    Source::AwaitingReady,
    Source::Committed,
    Source::Released,
    Source::Kept,
    Source::InDoubt,
];
const SOURCE_EVENTS: [SourceEvent; 8] = [
    SourceEvent::Converged,
    SourceEvent::FinalSent,
    SourceEvent::Ready { same_memory: true },
    SourceEvent::Ready { same_memory: false },
    SourceEvent::Running,
    SourceEvent::PeerCancelled,
    SourceEvent::Failed,
    SourceEvent::ControlLost,
];
const DESTINATION_STATES: [Destination; 6] = [
    Destination::Receiving,
    Destination::Loading,
    Destination::Prepared,
    Destination::Running,
    Destination::Released,
    Destination::Aborted,
];
const DESTINATION_EVENTS: [DestinationEvent; 8] = [
    DestinationEvent::Complete,
    DestinationEvent::Loaded,
    DestinationEvent::Commit { run: true },
    DestinationEvent::Commit { run: false },
    DestinationEvent::Release,
    DestinationEvent::PeerCancelled,
    DestinationEvent::Failed,
    DestinationEvent::ControlLost,
];

#[test]
fn the_whole_table_is_as_recorded() {
    let mut table = String::new();
    for state in SOURCE_STATES {
        for event in SOURCE_EVENTS {
            let result = match state.on(event) {
                Ok((next, action)) => format!("{next:?}, {action:?}"),
                Err(_) => "impossible".into(),
            };
            writeln!(table, "source {state:?} + {event:?} = {result}").unwrap();
        }
    }
    for state in DESTINATION_STATES {
        for event in DESTINATION_EVENTS {
            let result = match state.on(event) {
                Ok((next, action)) => format!("{next:?}, {action:?}"),
                Err(_) => "impossible".into(),
            };
            writeln!(table, "destination {state:?} + {event:?} = {result}").unwrap();
        }
    }
    let recorded = include_str!("switchover_table.txt");
    assert!(
        table == recorded,
        "the table has changed; if that is meant, record this one in tests/switchover_table.txt:\n{table}"
    );
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Pair {
    source: String,
    destination: String,
    to_destination: Vec<&'static str>,
    to_source: Vec<&'static str>,
    cut: bool,
}

/// Plays both roles against each other in every order in which messages can
/// be delivered, the control lane can break and either side can fail, and
/// checks I1 and I2 in every state reached.
#[test]
fn i1_i2_no_order_of_events_runs_the_vm_twice_or_loses_it() {
    let mut seen = std::collections::BTreeSet::new();
    let mut todo = vec![(
        Source::Live,
        Destination::Receiving,
        Vec::<&'static str>::new(),
        Vec::<&'static str>::new(),
        false,
    )];
    let mut ends = std::collections::BTreeSet::new();
    while let Some((source, destination, to_d, to_s, cut)) = todo.pop() {
        let key = Pair {
            source: format!("{source:?}"),
            destination: format!("{destination:?}"),
            to_destination: to_d.clone(),
            to_source: to_s.clone(),
            cut,
        };
        if !seen.insert(key) {
            continue;
        }
        assert!(
            !(source.may_run() && destination.may_run()),
            "I1: runs twice in {source:?}, {destination:?}"
        );
        assert!(
            !(source == Source::Released && destination == Destination::Aborted),
            "I2: both copies are gone"
        );
        let mut source_events = vec![SourceEvent::Failed];
        let mut destination_events = vec![DestinationEvent::Failed];
        match source {
            Source::Live => source_events.push(SourceEvent::Converged),
            Source::Paused => source_events.push(SourceEvent::FinalSent),
            _ => {}
        }
        if destination == Destination::Loading {
            destination_events.push(DestinationEvent::Loaded);
        }
        let mut progressed = false;
        let mut step_source = |event, to_s: &[&'static str]| {
            if let Ok((next, action)) = source.on(event) {
                let mut to_d = to_d.clone();
                match action {
                    SourceAction::AwaitReady => to_d.push("final"),
                    SourceAction::SendCommit => to_d.push("commit"),
                    SourceAction::DestroyAndRelease => to_d.push("release"),
                    SourceAction::CancelPeer | SourceAction::CancelPeerAndResume => {
                        to_d.push("cancel");
                    }
                    _ => {}
                }
                if cut {
                    to_d.clear();
                }
                progressed |= next != source;
                todo.push((next, destination, to_d, to_s.to_vec(), cut));
            }
        };
        for event in source_events {
            step_source(event, &to_s);
        }
        if let Some((&first, rest)) = to_s.split_first() {
            let event = match first {
                "ready" => SourceEvent::Ready { same_memory: true },
                "running" => SourceEvent::Running,
                _ => SourceEvent::PeerCancelled,
            };
            step_source(event, rest);
        }
        if cut && to_s.is_empty() {
            step_source(SourceEvent::ControlLost, &to_s);
        }
        let mut step_destination = |event, to_d: &[&'static str]| {
            if let Ok((next, action)) = destination.on(event) {
                let mut to_s = to_s.clone();
                match action {
                    DestinationAction::SendReady => to_s.push("ready"),
                    DestinationAction::ResumeAndSendRunning
                    | DestinationAction::StayPausedAndSendRunning => to_s.push("running"),
                    DestinationAction::DiscardAndTell => to_s.push("cancel"),
                    _ => {}
                }
                if cut {
                    to_s.clear();
                }
                progressed |= next != destination;
                todo.push((source, next, to_d.to_vec(), to_s, cut));
            }
        };
        for event in destination_events {
            step_destination(event, &to_d);
        }
        if let Some((&first, rest)) = to_d.split_first() {
            let event = match first {
                "final" => DestinationEvent::Complete,
                "commit" => DestinationEvent::Commit { run: true },
                "release" => DestinationEvent::Release,
                _ => DestinationEvent::PeerCancelled,
            };
            step_destination(event, rest);
        }
        if cut && to_d.is_empty() {
            step_destination(DestinationEvent::ControlLost, &to_d);
        }
        if !cut {
            // A cut loses any tail of what is under way in either direction.
            for keep_d in 0..=to_d.len() {
                for keep_s in 0..=to_s.len() {
                    todo.push((
                        source,
                        destination,
                        to_d[..keep_d].to_vec(),
                        to_s[..keep_s].to_vec(),
                        true,
                    ));
                }
            }
        }
        if !progressed {
            ends.insert(format!("{source:?} {destination:?}"));
        }
    }
    assert!(seen.len() > 50, "only {} states were reached", seen.len());
    for wanted in [
        "Released Released",
        "Kept Aborted",
        "InDoubt Running",
        "InDoubt Aborted",
    ] {
        assert!(ends.contains(wanted), "{wanted} is never reached: {ends:?}");
    }
}
