//! Runs many seeds, and runs one of them twice.

use std::fmt::Debug;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use dunlin_sim::Violation;

pub(crate) const THREADS: usize = 2;
/// The number of seeds that a thread takes at a time.
const BATCH: u64 = 64;

/// A number from the environment.
pub(crate) fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().expect("the value is not a number"))
}

/// Runs the seeds from 0 to `seeds - 1`; returns the sum of their tallies, or the lowest failing
/// seed that a thread found.
pub(crate) fn play<T: Default + Send>(
    seeds: u64,
    run: impl Fn(u64) -> Result<T, Violation> + Sync,
    add: impl Fn(&mut T, &T) + Sync,
) -> Result<T, (u64, Violation)> {
    let next = AtomicU64::new(0);
    let sum = Mutex::new(T::default());
    let failed: Mutex<Option<(u64, Violation)>> = Mutex::new(None);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                let mut tally = T::default();
                while failed.lock().unwrap().is_none() {
                    let first = next.fetch_add(BATCH, Ordering::SeqCst);
                    for seed in first..(first + BATCH).min(seeds) {
                        match run(seed) {
                            Ok(one) => add(&mut tally, &one),
                            Err(violation) => {
                                let mut failed = failed.lock().unwrap();
                                if failed.as_ref().is_none_or(|(lowest, _)| seed < *lowest) {
                                    *failed = Some((seed, violation));
                                }
                                return;
                            }
                        }
                    }
                    if first + BATCH >= seeds {
                        break;
                    }
                }
                add(&mut sum.lock().unwrap(), &tally);
            });
        }
    });
    match failed.into_inner().unwrap() {
        Some(failed) => Err(failed),
        None => Ok(sum.into_inner().unwrap()),
    }
}

/// If DUNLIN_SEED is set, prints the run of that seed. In any case checks that the seed determines
/// the whole run, and that the run has more than `least` lines.
pub(crate) fn check_replay<P: Debug, R: Debug>(
    least: usize,
    plan: impl Fn(u64) -> P,
    trace: impl Fn(&P, &mut dyn FnMut(&str)) -> R,
) {
    let seed = number("DUNLIN_SEED");
    let plan = plan(seed.unwrap_or(4));
    let once = || {
        let mut lines = vec![format!("{plan:#?}")];
        let result = trace(&plan, &mut |line| lines.push(line.to_owned()));
        lines.push(format!("{result:?}"));
        lines
    };
    let lines = once();
    if seed.is_some() {
        println!("{}", lines.join("\n"));
    }
    assert!(lines.len() > least, "the run has too few lines");
    assert_eq!(lines, once());
}
