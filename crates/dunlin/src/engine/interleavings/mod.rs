//! The shared state of the engine's threads, under a checker that chooses at every step
//! the thread that runs next.
//!
//! The code under test is the engine's own: [`super::source::work_queue`],
//! [`super::destination::barrier`], the backlog of a control lane, `Cancel` and `Tune`. Sockets and
//! guest memory are replaced ([`migration`]). Half of the schedules are random. The other half give
//! each thread a priority and change the priorities a few times. That finds errors that occur only
//! if a thread pauses for a long time. A deadlock ends a run with a panic. A lost wake-up is a
//! deadlock too.
//!
//! Each run prints the number of schedules. A failure prints its seed: `DUNLIN_SEED=…` repeats the
//! run. `DUNLIN_SOAK=1` tries fifty times as many schedules.
//!
//! Planted mistakes show that the checks find errors. For each of the engine's notifications, a
//! mistake in the locks ([`sync::Mistake`]) omits that notification. The mistakes in the decisions
//! are those of [`dunlin_proto::mistake`].
#![allow(clippy::unwrap_used)]

mod barrier;
mod cancel;
mod connection;
mod migration;
pub(super) mod sync;
mod work_queue;

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{SystemTime, UNIX_EPOCH};

use dunlin_proto::mistake::plant;
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, FailurePersistence, MaxSteps, Runner};

use sync::{Mistake, Site, Timeouts, take_sites};

/// A scenario that runs on the checker's threads; panics on an error.
type Scenario = fn();

/// All scenarios: the name, whether timed waits expire, and the number of schedules.
const SCENARIOS: &[(&str, Timeouts, usize, Scenario)] = &[
    (
        "lanes share the work",
        Timeouts::Never,
        2000,
        work_queue::share,
    ),
    (
        "lanes wait for acknowledgements",
        Timeouts::Never,
        40,
        work_queue::acknowledged,
    ),
    ("lanes are cut", Timeouts::Never, 2000, work_queue::cut),
    ("lanes are stopped", Timeouts::Never, 2000, work_queue::stop),
    (
        "lanes that are not admitted",
        Timeouts::Sometimes,
        1000,
        work_queue::not_admitted,
    ),
    (
        "the rate changes",
        Timeouts::Never,
        2000,
        work_queue::rate_changes,
    ),
    (
        "the rate holds",
        Timeouts::Sometimes,
        1000,
        work_queue::rate_holds,
    ),
    (
        "the rate is tuned",
        Timeouts::Never,
        2000,
        work_queue::tuned,
    ),
    ("lanes wait at marks", Timeouts::Never, 2000, barrier::marks),
    ("lanes end at marks", Timeouts::Never, 2000, barrier::ends),
    (
        "lanes at marks are fenced",
        Timeouts::Never,
        2000,
        barrier::fences,
    ),
    (
        "lanes at marks are stopped",
        Timeouts::Never,
        2000,
        barrier::stop,
    ),
    (
        "acknowledgements",
        Timeouts::Never,
        2000,
        barrier::acknowledgements,
    ),
    (
        "messages wait for room",
        Timeouts::Never,
        2000,
        cancel::backlog,
    ),
    (
        "messages wait for the end",
        Timeouts::Never,
        2000,
        cancel::backlog_closes,
    ),
    ("cancellation", Timeouts::Never, 4000, cancel::cancellation),
    ("whole migrations", Timeouts::Never, 1500, migration::moves),
    (
        "migrations that lose a lane",
        Timeouts::Never,
        1500,
        migration::loses,
    ),
    (
        "migrations that are cancelled",
        Timeouts::Never,
        1500,
        migration::cancelled,
    ),
];

fn soaks() -> bool {
    std::env::var_os("DUNLIN_SOAK").is_some()
}

/// Tries `count` schedules from `seed`; returns whether the scenario succeeded in all of them.
fn holds(timeouts: Timeouts, seed: u64, count: usize, scenario: Scenario) -> bool {
    let mut config = Config::new();
    config.failure_persistence = FailurePersistence::None;
    config.max_steps = MaxSteps::FailAfter(100_000);
    let run = move || {
        sync::begin(timeouts);
        scenario();
    };
    catch_unwind(AssertUnwindSafe(|| {
        let random = RandomScheduler::new_from_seed(seed, count.div_ceil(2));
        Runner::new(random, config.clone()).run(run);
        let priorities = PctScheduler::new_from_seed(seed, 3, count / 2);
        Runner::new(priorities, config).run(run);
    }))
    .is_ok()
}

/// The number of schedules out of `count` that must suffice to find a mistake.
fn few(count: usize) -> usize {
    (count / 20).max(20)
}

/// The scenario that fails with `mistake` in the locks, if any.
fn found(mistake: Mistake) -> Option<&'static str> {
    sync::plant(Some(mistake));
    let failed = SCENARIOS
        .iter()
        .find(|(_, timeouts, count, scenario)| !holds(*timeouts, 1, few(*count), *scenario));
    sync::plant(None);
    failed.map(|(name, ..)| *name)
}

#[test]
fn i4_no_order_of_threads_loses_a_wake_up_or_passes_a_mark() {
    let _none = plant(None);
    let replay = std::env::var("DUNLIN_SEED").ok();
    let replay = replay.map(|seed| seed.parse::<u64>().expect("DUNLIN_SEED is not a number"));
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let seed = replay.unwrap_or(since_epoch.as_nanos() as u64);
    let mut failed = Vec::new();
    let mut sum = 0;
    for &(name, timeouts, count, scenario) in SCENARIOS {
        let count = if soaks() { count * 50 } else { count };
        let held = holds(timeouts, seed, count, scenario);
        println!("{name}: {count} schedules");
        sum += count;
        if !held {
            failed.push(name);
        }
    }
    println!(
        "{sum} schedules of {} scenarios, DUNLIN_SEED={seed}",
        SCENARIOS.len()
    );
    assert!(
        failed.is_empty(),
        "{failed:?} failed with DUNLIN_SEED={seed}"
    );
}

#[test]
fn every_omitted_notification_is_found() {
    let _none = plant(None);
    take_sites();
    for &(_, timeouts, count, scenario) in SCENARIOS {
        assert!(holds(timeouts, 1, few(count), scenario));
    }
    let mut sites: BTreeSet<Site> = take_sites();
    // Leave out the notifications of the scenarios themselves.
    sites.retain(|(file, _)| !file.contains("interleavings"));
    let missed: Vec<Site> = sites
        .iter()
        .copied()
        .filter(|&site| {
            let scenario = found(Mistake::Silent(site));
            println!(
                "without the notification at {}:{}: {scenario:?}",
                site.0, site.1
            );
            scenario.is_none()
        })
        .collect();
    assert!(sites.len() >= 10, "only {sites:?} were reached");
    assert!(missed.is_empty(), "nothing fails without {missed:?}");
}

#[test]
fn mistakes_in_how_locks_are_used_are_found() {
    let _none = plant(None);
    for mistake in [Mistake::NotifyOne, Mistake::LateWait] {
        let scenario = found(mistake);
        println!("{mistake:?}: {scenario:?}");
        assert!(scenario.is_some(), "{mistake:?}");
    }
}

#[test]
fn i4_mistakes_in_marks_and_fences_are_found() {
    use dunlin_proto::mistake::Mistake;
    for mistake in [
        Mistake::NoFence,
        Mistake::NoRedirty,
        Mistake::MarkPassedEarly,
        Mistake::WrongChunkAcknowledged,
    ] {
        let _planted = plant(Some(mistake));
        let failed = SCENARIOS
            .iter()
            .rev()
            .find(|(_, timeouts, count, scenario)| !holds(*timeouts, 1, *count, *scenario));
        let name = failed.map(|(name, ..)| *name);
        println!("{mistake:?}: {name:?}");
        assert!(name.is_some(), "{mistake:?}");
    }
}
