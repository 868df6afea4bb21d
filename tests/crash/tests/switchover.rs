//! Sends SIGKILL or SIGSTOP to the destination, to the source's migrating process or to both, at
//! each step of the switchover. Each test prints a table, which shows which side runs the VM at the
//! end, or with which process the VM died. The VM never runs on both sides.
//!
//! `DUNLIN_SOAK=1` runs every case several times.
#![allow(clippy::unwrap_used)]

mod support;

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use dunlin_crash_tests::step;
use support::{Case, Credentials, Ending, Signal, Victim, run};

/// The number of concurrent runs. It may exceed the number of CPUs, because a run mostly waits for
/// limits to expire.
const AT_A_TIME: usize = 6;
/// The number of times that a run is tried before it counts as failed. On a busy host, a limit of
/// the peer can expire before the run reaches its step.
const TRIES: usize = 3;

const VICTIMS: [Victim; 3] = [Victim::Source, Victim::Destination, Victim::Both];

/// The number of the next run. Each run derives its addresses from its number.
static NUMBERS: AtomicUsize = AtomicUsize::new(0);

fn cases(victims: &[Victim], signal: Signal, at_once: bool) -> Vec<Case> {
    let soak = std::env::var("DUNLIN_SOAK").is_ok_and(|value| value == "1");
    let mut cases = Vec::new();
    for _ in 0..if soak { 10 } else { 1 } {
        for step in step::SOURCE.iter().chain(step::DESTINATION) {
            for victim in victims {
                for elsewhere in [true, false] {
                    cases.push(Case {
                        step,
                        victim: *victim,
                        signal,
                        elsewhere,
                        at_once,
                        number: 0,
                    });
                }
            }
        }
    }
    cases
}

fn play(title: &str, cases: &[Case]) {
    let began = Instant::now();
    let credentials = Credentials::new();
    let next = AtomicUsize::new(0);
    let endings = Mutex::new(BTreeMap::<_, Vec<Ending>>::new());
    let failures = Mutex::new(Vec::new());
    let again = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(|| {
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::SeqCst)) {
                    let mut tries = 0;
                    let result = loop {
                        let number = NUMBERS.fetch_add(1, Ordering::SeqCst);
                        tries += 1;
                        match run(&Case { number, ..*case }, &credentials) {
                            Err(why) if tries < TRIES && why.contains("another path") => {
                                again.fetch_add(1, Ordering::SeqCst);
                            }
                            result => break result,
                        }
                    };
                    match result {
                        Ok(ending) => {
                            let key = (position(case.step), case.victim as usize, !case.elsewhere);
                            endings.lock().unwrap().entry(key).or_default().push(ending);
                        }
                        Err(why) => failures.lock().unwrap().push(format!("{case:?}: {why}")),
                    }
                }
            });
        }
    });
    tally(title, &endings.into_inner().unwrap());
    println!(
        "{} runs in {:.1} s; {} were repeated because a limit expired before their step",
        cases.len(),
        began.elapsed().as_secs_f64(),
        again.into_inner()
    );
    let failures = failures.into_inner().unwrap();
    assert!(
        failures.is_empty(),
        "{} of {} runs:\n{}",
        failures.len(),
        cases.len(),
        failures.join("\n\n")
    );
}

fn position(step: &str) -> usize {
    let mut steps = step::SOURCE.iter().chain(step::DESTINATION);
    steps.position(|one| *one == step).unwrap()
}

fn tally(title: &str, endings: &BTreeMap<(usize, usize, bool), Vec<Ending>>) {
    println!("{title}: where the VM is at the end, by step and victim; the VM of the source");
    println!("lives in another process (left of |) or in the one that migrates it (right)\n");
    println!("{:33}{:16}{:16}both", "", "source", "destination");
    let steps = step::SOURCE.iter().chain(step::DESTINATION);
    for (number, step) in steps.enumerate() {
        let side = if number < step::SOURCE.len() {
            "source"
        } else {
            "destination"
        };
        let mut line = format!("{side:12}{step:21}");
        for victim in 0..VICTIMS.len() {
            let of = |inside| {
                endings
                    .get(&(number, victim, inside))
                    .map_or("-".into(), |found| short(found))
            };
            line.push_str(&format!("{:16}", format!("{} | {}", of(false), of(true))));
        }
        println!("{}", line.trim_end());
    }
    println!(
        "\nS, D: runs at the source, at the destination. †S, †D: died there with its process, and \
         journals\nand answers say so. D†S: ran and died at the destination; the source was informed, \
         and an operator\nresumed its copy. D†: the same, without a copy.\n"
    );
}

fn short(endings: &[Ending]) -> String {
    let mut found: Vec<&str> = endings
        .iter()
        .map(|ending| match ending {
            Ending::Source => "S",
            Ending::Destination => "D",
            Ending::DiedAtSource => "†S",
            Ending::DiedAtDestination => "†D",
            Ending::TakenBack => "D†S",
            Ending::DiedAtBoth => "D†",
        })
        .collect();
    found.sort_unstable();
    found.dedup();
    found.join("/")
}

#[test]
fn i1_i2_any_process_killed_at_any_step_the_vm_runs_once_or_died_with_its_process() {
    play("SIGKILL", &cases(&VICTIMS, Signal::Kill, false));
}

#[test]
fn i1_i2_a_source_that_is_started_again_at_once_is_answered_by_who_waits_for_it() {
    let mut cases = cases(&[Victim::Source], Signal::Kill, true);
    // Leave out the step at which the source has not written *committing* yet. A source that is
    // restarted at this step finds no session in doubt, so it does not contact the destination.
    cases.retain(|case| case.step != "committing-unwritten");
    play("SIGKILL of the source, restarted immediately", &cases);
}

#[test]
fn i1_i2_any_process_stopped_at_any_step_and_continued_later_the_vm_runs_once() {
    play(
        "SIGSTOP, and later SIGCONT",
        &cases(&VICTIMS, Signal::Stop, false),
    );
}
