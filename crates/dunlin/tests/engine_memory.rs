//! Tests the engine's memory, excluding the guest's memory (invariant I8). The test is alone in its
//! process, because it measures the whole process. Both sides run in that process, and together
//! they stay within the limit for one side.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use dunlin::engine::Cancel;
use dunlin::engine::{destination, source};
use dunlin_test_support::engine::{TestBuilder, TestVm, run, tls};

/// Each side's limit, in KiB.
const LIMIT_KIB: u64 = 64 << 10;

/// Resident KiB of this process outside the guest's mappings, which are recognised by
/// their size.
fn resident_kib(guest_bytes: u64) -> u64 {
    let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
    let mut outside = 0;
    let mut guests = false;
    for line in smaps.lines() {
        let first = line.split_whitespace().next().unwrap_or_default();
        if let Some((from, to)) = first.split_once('-')
            && let (Ok(from), Ok(to)) = (u64::from_str_radix(from, 16), u64::from_str_radix(to, 16))
        {
            guests = to - from >= guest_bytes;
        } else if first == "Rss:" && !guests {
            outside += line
                .split_whitespace()
                .nth(1)
                .unwrap()
                .parse::<u64>()
                .unwrap();
        }
    }
    outside
}

#[test]
fn i8_both_sides_together_stay_under_the_bound_of_one_with_eight_lanes() {
    const REGION: usize = 96 << 20;
    let (client, server) = tls();
    let vm = TestVm::new(2 * REGION);
    vm.fill(REGION);
    vm.start(20_000, Duration::from_micros(10));
    let before = resident_kib(REGION as u64);
    let (done, peak) = (AtomicBool::new(false), AtomicU64::new(0));
    let report = thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::SeqCst) {
                peak.fetch_max(resident_kib(REGION as u64), Ordering::SeqCst);
                thread::sleep(Duration::from_millis(1));
            }
        });
        let options = source::Options::builder().lanes(8).build().unwrap();
        let accepting = destination::Options::default();
        let builder = TestBuilder::default();
        let tls = (&client, &server);
        let moved = run(&vm, tls, &options, &accepting, builder, &Cancel::new());
        done.store(true, Ordering::SeqCst);
        moved.source
    });
    assert!(report.unwrap().traffic.raw_pages >= 2 * (REGION as u64) / 4096);
    let grown = peak.load(Ordering::SeqCst) - before;
    println!("{grown} KiB at most, both sides together");
    assert!(
        grown > 1000,
        "{grown} KiB: the measurement misses the lanes' buffers"
    );
    assert!(grown < LIMIT_KIB, "{grown} KiB beside the guests' memory");
}
