//! Plants each mistake of the switchover, and checks that the model then violates the property in
//! the table. Prints the shortest path to the violation.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;

use dunlin_model::{Budget, Switchover};
use dunlin_proto::mistake::{Mistake, plant};
use stateright::{Checker, HasDiscoveries, Model};

const BUDGET: Budget = Budget {
    source_crashes: 1,
    destination_crashes: 1,
    faults: 1,
    cancellations: 1,
    strays: 1,
    epochs: 2,
};

const TWICE: &str = "I1: never on both sides";
const BACK: &str = "I1: never back in time without the operator";
const DEVICES: &str = "I1: disks and devices never on both sides";
const LOST: &str = "I2: never lost";
const STRANDED: &str = "I2: paused only if a next step is certain";
const FORGOTTEN: &str = "I2: not forgotten while it may be asked";
const UNRESOLVED: &str = "I2: a doubt is resolved once nothing more fails";
const UNRECORDED: &str = "reports only what the journal holds";
const UNTRUE: &str = "reports only the truth";

/// The switchover's mistakes, each with a property that it breaks.
const MISTAKES: [(Mistake, &str); 12] = [
    (Mistake::PauseBeforeRecord, STRANDED),
    (Mistake::ResumeWithoutAsking, TWICE),
    (Mistake::BelieveAnyAttempt, TWICE),
    (Mistake::ReleaseBeforeRecord, FORGOTTEN),
    (Mistake::ReleaseBeforeRecord, UNRESOLVED),
    (Mistake::AnswerBeforeClose, TWICE),
    (Mistake::AnswerBeforeDrain, TWICE),
    (Mistake::RunBeforeRecord, BACK),
    (Mistake::TellBeforeRecord, LOST),
    (Mistake::TellAbortedBeforeRecord, UNRECORDED),
    (Mistake::TellBeforeLettingGo, DEVICES),
    (Mistake::DeadAnswersRunning, UNTRUE),
];

fn model() -> Switchover {
    Switchover {
        budget: BUDGET,
        run: true,
    }
}

#[test]
fn i1_i2_each_planted_mistake_is_found() {
    let mut missed = Vec::new();
    for (mistake, property) in MISTAKES {
        let _planted = plant(Some(mistake));
        // Use one thread, because with more threads the path found might not be the shortest.
        let checker = model()
            .checker()
            .threads(1)
            .finish_when(HasDiscoveries::AnyOf(BTreeSet::from([property])))
            .spawn_bfs()
            .join();
        let Some(path) = checker.discovery(property) else {
            missed.push(mistake);
            continue;
        };
        let steps = path.into_actions();
        println!(
            "{mistake:?} breaks \"{property}\" in {} steps ({} states): {steps:?}",
            steps.len(),
            checker.unique_state_count()
        );
    }
    assert!(
        missed.is_empty(),
        "mistakes that were not found: {missed:?}"
    );
}
