//! Many seeds, and the replay of one.

#![allow(clippy::unwrap_used)]

use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use dunlin_proto::mistake::{Mistake, planted};
use dunlin_sim::{Plan, Tally, Violation, run, shrink, trace};

const THREADS: usize = 2;
/// Seeds that a thread takes at a time.
const BATCH: u64 = 64;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().expect("a number"))
}

/// Runs the seeds from 0 to `seeds - 1`; returns the tally, or the lowest
/// failing seed that a thread found.
fn play(seeds: u64) -> Result<Tally, (u64, Violation)> {
    let next = AtomicU64::new(0);
    let sum = Mutex::new(Tally::default());
    let failed: Mutex<Option<(u64, Violation)>> = Mutex::new(None);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                let mut tally = Tally::default();
                while failed.lock().unwrap().is_none() {
                    let first = next.fetch_add(BATCH, Ordering::SeqCst);
                    for seed in first..(first + BATCH).min(seeds) {
                        match run(&Plan::new(seed)) {
                            Ok(one) => tally.add(&one),
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
                sum.lock().unwrap().add(&tally);
            });
        }
    });
    match failed.into_inner().unwrap() {
        Some(failed) => Err(failed),
        None => Ok(sum.into_inner().unwrap()),
    }
}

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
    let tally =
        play(seeds).unwrap_or_else(|(seed, violation)| panic!("{}", explain(seed, &violation)));
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
    assert!(lines.len() > 100, "something happens");
    assert_eq!(lines, once());
}

#[test]
fn no_mistake_is_planted_unless_a_test_does() {
    assert!(!Mistake::ALL.iter().any(|mistake| planted(*mistake)));
}

/// Release builds must not contain the switch.
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
