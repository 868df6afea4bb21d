//! Checks the switchover under every order of events within a budget of failures. Prints the number
//! of states; `DUNLIN_SOAK=1` allows more failures.

use std::time::Instant;

use dunlin_model::{Budget, Switchover};
use stateright::{Checker, Model};

const BUDGET: Budget = Budget {
    source_crashes: 1,
    destination_crashes: 1,
    faults: 1,
    cancellations: 1,
    strays: 1,
    epochs: 3,
};

const SOAK: Budget = Budget {
    source_crashes: 2,
    destination_crashes: 2,
    faults: 2,
    cancellations: 1,
    strays: 1,
    epochs: 4,
};

fn check(model: Switchover) {
    #[cfg(feature = "mistakes")]
    let _none = dunlin_proto::mistake::plant(None);
    let began = Instant::now();
    let checker = model.checker().threads(2).spawn_bfs().join();
    println!(
        "{} states, {} of them different, {} steps deep, in {:.1} s: {model:?}",
        checker.state_count(),
        checker.unique_state_count(),
        checker.max_depth(),
        began.elapsed().as_secs_f64()
    );
    checker.assert_properties();
}

fn budget() -> Budget {
    if std::env::var_os("DUNLIN_SOAK").is_some_and(|value| value == "1") {
        SOAK
    } else {
        BUDGET
    }
}

#[test]
fn i1_i2_no_order_of_events_runs_the_vm_twice_or_loses_it() {
    check(Switchover {
        budget: budget(),
        run: true,
    });
}

#[test]
fn i1_i2_no_order_of_events_does_so_for_a_vm_that_arrives_paused() {
    // Always use a small budget. For a VM that arrives paused, only one state of the destination
    // differs from those for a VM that runs.
    check(Switchover {
        budget: Budget {
            source_crashes: 1,
            destination_crashes: 1,
            faults: 1,
            cancellations: 0,
            strays: 0,
            epochs: 2,
        },
        run: false,
    });
}
