//! Simulates the tunnel with many seeds, and replays one of them.

#![allow(clippy::unwrap_used)]

mod support;

use std::time::Instant;

use dunlin_sim::Violation;
use dunlin_sim::stripe::{Plan, Tally, run, trace};
use support::{check_replay, number, play};

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
    let tally = play(seeds, |seed| run(&Plan::new(seed)), Tally::add)
        .unwrap_or_else(|(seed, violation)| panic!("{}", explain(seed, &violation)));
    println!("{tally:?} in {:.1} s", began.elapsed().as_secs_f64());
    // Check that enough channels end well and that enough faults have an effect.
    assert!(tally.closed > seeds && tally.aborted > seeds / 2);
    assert!(tally.again > seeds / 2 && tally.resumed > seeds / 4);
}

#[test]
fn replay() {
    check_replay(20, Plan::new, |plan, line| trace(plan, line));
}
