//! The tunnel: many seeds, and the replay of one.

#![allow(clippy::unwrap_used)]

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use dunlin_sim::Violation;
use dunlin_sim::stripe::{Plan, Tally, run, trace};

const THREADS: usize = 2;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().expect("a number"))
}

/// Describes a failing seed with everything needed to investigate it.
fn explain(seed: u64, violation: &Violation) -> String {
    let plan = Plan::new(seed);
    let mut lines = Vec::new();
    let _ = trace(&plan, &mut |line| lines.push(line.to_owned()));
    let last = lines.len().saturating_sub(80);
    format!(
        "seed {seed}: {violation}\n\
         replay it: DUNLIN_SEED={seed} cargo test -p dunlin-sim --test stripe replay -- --nocapture\n\
         the end of the run:\n{}",
        lines[last..].join("\n")
    )
}

#[test]
fn i8_every_byte_once_and_in_order_or_the_channel_fails_on_both_sides() {
    let soak = std::env::var_os("DUNLIN_SOAK").is_some_and(|value| value == "1");
    let seeds = number("DUNLIN_SEEDS").unwrap_or(if soak { 100_000 } else { 1_000 });
    let began = Instant::now();
    let next = AtomicU64::new(0);
    let sum = Mutex::new(Tally::default());
    let failed: Mutex<Option<(u64, Violation)>> = Mutex::new(None);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                while failed.lock().unwrap().is_none() {
                    let seed = next.fetch_add(1, Ordering::SeqCst);
                    if seed >= seeds {
                        break;
                    }
                    match run(&Plan::new(seed)) {
                        Ok(tally) => sum.lock().unwrap().add(&tally),
                        Err(violation) => {
                            failed.lock().unwrap().get_or_insert((seed, violation));
                        }
                    }
                }
            });
        }
    });
    if let Some((seed, violation)) = failed.into_inner().unwrap() {
        panic!("{}", explain(seed, &violation));
    }
    let tally = sum.into_inner().unwrap();
    println!("{tally:?} in {:.1} s", began.elapsed().as_secs_f64());
    // Most runs have some faults, and every fault occurs in some runs.
    assert!(tally.closed > seeds && tally.aborted > seeds / 2);
    assert!(tally.again > seeds / 2 && tally.resumed > seeds / 4);
}

/// With DUNLIN_SEED, prints that run; without, checks that a seed determines
/// the whole run.
#[test]
fn replay() {
    let seed = number("DUNLIN_SEED");
    let plan = Plan::new(seed.unwrap_or(4));
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
    assert!(lines.len() > 20, "something happens");
    assert_eq!(lines, once());
}
