//! Tests one migration with many features of the public API: three regions with a hole (one region
//! of huge pages, if the host has them), 200 MiB of device state in versioned sections, a
//! description that is refused once, and a hold before *commit*.
//!
//! The test is alone in its process, because it measures all memory of the process (invariant I8).
#![allow(clippy::unwrap_used)]

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use dunlin::engine::VmIs;
use dunlin::engine::vmm::{FaultCode, GuestMemory, RunState};
use dunlin_test_base::huge_pages::HugePages;
use dunlin_test_support::engine::{tls, verified};
use dunlin_test_support::hooks::{
    Calls, HOLE, HUGE_BYTES, MIB, Machines, SECTION_BYTES, Vm, attempt,
};

const SECTIONS: u32 = 200;
/// The memory limit for both sides together. It excludes the guest's memory and state, which
/// belong to the VMM.
const LIMIT_KIB: u64 = 64 << 10;

/// Resident KiB of this process, except the VMs' memory, which is in memfds.
fn resident_kib() -> u64 {
    let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut resident, mut own) = (0, false);
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        match (words.next(), words.next()) {
            (Some("Rss:"), Some(kib)) if !own => resident += kib.parse::<u64>().unwrap(),
            (Some(first), _) if first.contains('-') && !first.ends_with(':') => {
                own = line.contains("memfd:dunlin-guest");
            }
            _ => {}
        }
    }
    resident
}

#[test]
fn i3_i8_a_vm_with_everything_moves_within_its_bounds() {
    let huge = HugePages::reserve(2 * HUGE_BYTES / (2 * MIB));
    let tls = tls();
    let calls = Calls::default();
    let (arrived_at_hold, held) = channel();
    let arrived_at_hold = std::sync::Mutex::new(arrived_at_hold);
    let released = Arc::new(AtomicBool::new(false));
    let release = Arc::clone(&released);
    let vm = Vm::with_hook(
        SECTIONS,
        huge.is_some(),
        &calls,
        &[],
        Some(Box::new(move |step| {
            if step == "source hold" {
                arrived_at_hold.lock().unwrap().send(()).unwrap();
                while !release.load(SeqCst) {
                    thread::sleep(Duration::from_millis(1));
                }
            }
        })),
    );
    vm.start();
    let mut machines = Machines {
        sections: SECTIONS,
        huge: huge.is_some(),
        calls: calls.clone(),
        fail: vec!["destination build"],
        built: None,
    };

    let refused = attempt(&vm, &mut machines, &tls, &verified(2), &|_| ());
    let error = refused.0.unwrap_err();
    assert_eq!(
        (error.code(), error.vm),
        (FaultCode::NoMemory, VmIs::AtSource)
    );
    assert!(
        error.to_string().contains("16 huge pages are missing"),
        "{error}"
    );
    assert!(vm.goes_on());
    assert_eq!(calls.all(), ["source describe", "destination build"]);

    machines.fail.clear();
    let before = resident_kib();
    let (done, peak) = (AtomicBool::new(false), AtomicU64::new(0));
    let held_calls = thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(SeqCst) {
                peak.fetch_max(resident_kib(), SeqCst);
                thread::sleep(Duration::from_millis(5));
            }
        });
        let (calls, released) = (&calls, &released);
        let waiting = scope.spawn(move || {
            held.recv_timeout(Duration::from_secs(60)).unwrap();
            // A destination that does not wait for *commit* would resume during this time.
            thread::sleep(Duration::from_millis(200));
            let calls = calls.all();
            released.store(true, SeqCst);
            calls
        });
        let (report, received) = attempt(&vm, &mut machines, &tls, &verified(4), &|_| ());
        done.store(true, SeqCst);
        let report = report.unwrap();
        assert_eq!(report.digests_equal, Some(true));
        assert!(report.downtime.total > Duration::from_millis(200));
        assert!(received.unwrap().runs);
        // The lanes carried the state, but not the hole.
        let state_pages = u64::from(SECTIONS) * SECTION_BYTES / 4096;
        let last = report.iterations.last().unwrap();
        assert!(last.pages >= state_pages, "{last:?}");
        let first = &report.iterations[0];
        assert_eq!(first.pages, 8 * MIB / 4096 + HUGE_BYTES / 4096, "{first:?}");
        waiting.join().unwrap()
    });
    assert_eq!(held_calls.last(), Some(&"source hold"), "{held_calls:?}");
    let used = peak.load(SeqCst).saturating_sub(before);
    println!("200 MiB of state: both sides used {used} KiB beside the VMs' memory");
    assert!(used < LIMIT_KIB, "{used} KiB");

    let there = machines.built.unwrap();
    assert!(there.goes_on());
    assert_eq!(vm.state(), RunState::Stopped("moved".into()));
    // Pages that the source never touched take no memory at the destination.
    let mut populated = Vec::new();
    there
        .memory
        .ranges_to_send(0, &mut |range| populated.push(range))
        .unwrap();
    assert_eq!(populated, [0..HOLE.start, HOLE.end..32 * MIB]);
    if huge.is_some() {
        assert_eq!(there.memory.regions()[1].backing_page_bytes, 2 << 20);
    }
}
