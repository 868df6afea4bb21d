//! Tests that instructions and system calls are counted correctly, for work of a known size.

use std::fs;
use std::io::Read;
use std::process::ExitCode;
use std::thread;

use dunlin_kernel_tests::{Needs, run};

/// The numbers of read(2) and clone3(2) on x86-64.
const READ: u32 = 0;
const CLONE: u32 = 435;

fn main() -> ExitCode {
    run(&Needs::NOTHING, |guest| {
        let count = guest.count("300 reads by two threads", || {
            thread::scope(|scope| {
                scope.spawn(|| read(100));
                read(200);
            });
        });
        assert_eq!(count.system_calls.get(&READ), Some(&300));
        assert_eq!(count.system_calls.get(&CLONE), Some(&1));

        // A loop. Its number of instructions does not depend on the data.
        let steps = |number: u64| {
            move || {
                std::hint::black_box((0..number).fold(1_u64, |hash, step| {
                    std::hint::black_box(hash.wrapping_mul(31).wrapping_add(step))
                }));
            }
        };
        let once = guest.count("a loop", steps(10_000_000)).instructions;
        let twice = guest
            .count("a loop twice as long", steps(20_000_000))
            .instructions;
        if let (Some(once), Some(twice)) = (once, twice) {
            let ratio = twice.count / once.count;
            assert!((1.8..2.2).contains(&ratio), "{ratio}");
            assert!(once.error < 0.1 * once.count, "{once:?}");
        }
    })
}

/// Reads one byte `times` times.
fn read(times: usize) {
    let mut zeros = fs::File::open("/dev/zero").expect("the device exists");
    let mut byte = [0];
    for _ in 0..times {
        zeros.read_exact(&mut byte).expect("/dev/zero has no end");
    }
}
