//! Simulates migrations with many seeds, and replays one of them.

#![allow(clippy::unwrap_used)]

mod support;

use std::process::Command;
use std::time::Instant;

use dunlin_proto::mistake::{Mistake, planted};
use dunlin_sim::{Plan, Tally, Violation, run, shrink, trace};
use support::{THREADS, check_replay, number, play};

/// Describes a failing seed with everything needed to investigate it.
fn explain(seed: u64, violation: &Violation) -> String {
    let (plan, smallest) = shrink(&Plan::new(seed), violation);
    let mut lines = Vec::new();
    let _ = trace(&plan, &mut |line| lines.push(line.to_owned()));
    let last = lines.len().saturating_sub(60);
    format!(
        "seed {seed}: {violation}\n\
         replay it: DUNLIN_SEED={seed} cargo test -p dunlin-sim replay -- --nocapture\n\
         shrunk: {smallest}\n{plan:#?}\nthe end of the shrunk run:\n{}",
        lines[last..].join("\n")
    )
}

#[test]
fn i1_i2_i3_i4_i5_hold_for_every_seed() {
    let soak = std::env::var_os("DUNLIN_SOAK").is_some_and(|value| value == "1");
    let seeds = number("DUNLIN_SEEDS").unwrap_or(if soak { 1_000_000 } else { 10_000 });
    let began = Instant::now();
    let tally = play(seeds, |seed| run(&Plan::new(seed)), Tally::add)
        .unwrap_or_else(|(seed, violation)| panic!("{}", explain(seed, &violation)));
    println!("{tally}");
    let seconds = began.elapsed().as_secs_f64();
    println!(
        "{} runs, {} steps, {:.0} hours of virtual time in {seconds:.1} s on {THREADS} threads: \
         {:.0} seeds a second",
        tally.runs,
        tally.steps,
        tally.virtual_ns as f64 / 3.6e12,
        tally.runs as f64 / seconds
    );
    let rare = tally.rarer_than(5);
    assert!(
        seeds < 10_000 || rare.is_empty(),
        "in fewer than 5 % of the runs: {rare:?}"
    );
}

#[test]
fn replay() {
    check_replay(100, Plan::new, |plan, line| trace(plan, line));
}

#[test]
fn no_mistake_is_planted_unless_a_test_does() {
    assert!(!Mistake::ALL.iter().any(|mistake| planted(*mistake)));
}

/// The command `dunlin` must be built without the planted mistakes, which only tests may contain.
#[test]
fn the_command_is_built_without_mistakes() {
    let tree = Command::new(env!("CARGO"))
        .args(["tree", "--offline", "--locked", "--package", "dunlin-cli"])
        .args([
            "--edges",
            "features,normal,build",
            "--invert",
            "dunlin-proto",
        ])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    let text = String::from_utf8(tree.stdout).unwrap();
    assert!(
        tree.status.success() && text.contains("dunlin-cli"),
        "{text}"
    );
    assert!(!text.contains("mistakes"), "{text}");
}
