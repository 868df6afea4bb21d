//! Tests that the guest runs, checks its memory and keeps its rate, and that commands to it (pause,
//! resume, throttle, power off) work.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used)]

mod support;

use std::time::{Duration, Instant};

use dunlin_microvm::{
    Backing, Config, ControlError, CreateError, Fill, HostOptions, StopCode, Vm, VmState,
    WORKLOAD_START, Workload,
};
use dunlin_test_base::huge_pages::HugePages;
use dunlin_test_base::kvm;
use support::{Logs, fresh, rate_now, rate_of, running, wait_for};
use vm_memory::{Bytes, GuestAddress};

const WORKLOADS: [Workload; 4] = [
    Workload::Idle,
    Workload::Sequential,
    Workload::Random,
    Workload::HOT_SET,
];

fn small() -> Config {
    Config {
        memory_bytes: 16 << 20,
        ..Config::default()
    }
}

#[test]
fn every_workload_on_every_fill_checks_clean() {
    let Some(_turn) = kvm() else { return };
    for workload in WORKLOADS {
        for (fill, vcpus, backing) in [
            (Fill::Zero, 1, Backing::Private),
            (Fill::Random, 2, Backing::Memfd),
            (Fill::Mixed, 4, Backing::Private),
            (Fill::Sparse, 1, Backing::Private),
        ] {
            let vm = running(Config {
                workload,
                fill,
                vcpus,
                backing,
                fill_bytes: Some(5 << 20),
                ..small()
            });
            if workload == Workload::Idle {
                wait_for(&vm, "beats", |vm| vm.stats().beats > 20);
                assert_eq!(vm.stats().pages_checked, 0);
            } else {
                wait_for(&vm, "three passes", |vm| vm.full_passes() >= 3);
            }
            vm.pause().unwrap();
            assert_eq!(vm.state(), VmState::Paused);
        }
    }
}

#[test]
fn memory_on_both_sides_of_the_hole_is_visited() {
    let Some(_turn) = kvm() else { return };
    // The guest's addresses have a hole between 3 and 4 GiB, so the last 16 MiB of memory lie above
    // 4 GiB. The working set is all of the workload's pages, so it includes these 16 MiB.
    let vm = fresh(Config {
        memory_bytes: (3 << 30) + (16 << 20),
        fill: Fill::Zero,
        workload: Workload::Random,
        ..Config::default()
    });
    let page = |address| vm.memory().read_obj::<u64>(GuestAddress(address)).unwrap();
    vm.start().unwrap();
    wait_for(&vm, "a visit above 4 GiB", |_| {
        (0..(16 << 20) / 4096).any(|number| page((4 << 30) + number * 4096) == 1)
    });
    vm.pause().unwrap();
}

#[test]
fn a_guest_runs_on_huge_pages() {
    let Some(_turn) = kvm() else { return };
    let config = Config {
        backing: Backing::Huge,
        ..small()
    };
    let Some(_huge) = HugePages::reserve(config.memory_bytes / (2 << 20)) else {
        return;
    };
    let vm = running(config);
    wait_for(&vm, "a pass", |vm| vm.full_passes() >= 1);
}

#[test]
fn a_missing_huge_page_reservation_is_reported_with_advice() {
    let Some(_turn) = kvm() else { return };
    // No host reserves this many huge pages for tests.
    let config = Config {
        backing: Backing::Huge,
        memory_bytes: 32 << 30,
        ..small()
    };
    let error = Vm::with_options(config, HostOptions::default());
    match error.map(|_| ()) {
        Err(CreateError::Memory(error)) => {
            assert!(error.to_string().contains("vm.nr_hugepages"), "{error}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn one_flipped_bit_stops_the_guest() {
    let Some(_turn) = kvm() else { return };
    let vm = running(small());
    wait_for(&vm, "a pass", |vm| vm.full_passes() >= 1);
    vm.pause().unwrap();
    let address = WORKLOAD_START + 77 * 4096 + 1000;
    let word: u64 = vm.memory().read_obj(GuestAddress(address)).unwrap();
    vm.memory()
        .write_obj(word ^ 0x10, GuestAddress(address))
        .unwrap();
    vm.resume().unwrap();
    let VmState::Stopped(stop) = vm.wait_until_ended(Duration::from_secs(10)) else {
        panic!("{:?}", vm.state());
    };
    assert_eq!(stop.code, StopCode::WrongContent);
    assert_eq!(stop.frame, address / 4096);
    assert_eq!(stop.found ^ stop.expected, 0x10);
    assert!(matches!(
        vm.pause(),
        Err(ControlError::Ended(VmState::Stopped(_)))
    ));
    assert!(matches!(vm.resume(), Err(ControlError::Ended(_))));
}

#[test]
fn a_stale_page_stops_the_guest() {
    let Some(_turn) = kvm() else { return };
    let vm = running(Config {
        vcpus: 2,
        ..small()
    });
    wait_for(&vm, "a pass", |vm| vm.full_passes() >= 1);
    vm.pause().unwrap();
    let address = GuestAddress(WORKLOAD_START + 5 * 4096);
    let mut old = [0; 4096];
    vm.memory().read_slice(&mut old, address).unwrap();
    let pass = |vm: &Vm| vm.memory().read_obj::<u64>(address).unwrap();
    let before = pass(&vm);
    vm.resume().unwrap();
    wait_for(&vm, "two visits", |vm| pass(vm) >= before + 2);
    vm.pause().unwrap();
    vm.memory().write_slice(&old, address).unwrap();
    vm.resume().unwrap();
    let VmState::Stopped(stop) = vm.wait_until_ended(Duration::from_secs(10)) else {
        panic!("{:?}", vm.state());
    };
    assert_eq!((stop.code, stop.vcpu), (StopCode::WrongPass, 0));
    assert!(stop.found < stop.expected);
}

#[test]
fn a_guest_that_was_not_filled_finds_out() {
    let Some(_turn) = kvm() else { return };
    let vm = fresh(small());
    vm.start().unwrap();
    let VmState::Stopped(stop) = vm.wait_until_ended(Duration::from_secs(10)) else {
        panic!("{:?}", vm.state());
    };
    assert_eq!((stop.code, stop.found), (StopCode::WrongContent, 0));
    assert_eq!(vm.fill(), Err(ControlError::Ended(vm.state())));
}

#[test]
fn the_power_goes_off_when_the_work_is_done_or_when_asked() {
    let Some(_turn) = kvm() else { return };
    let vm = running(Config {
        power_off_after: Some(1000),
        ..small()
    });
    assert_eq!(
        vm.wait_until_ended(Duration::from_secs(10)),
        VmState::PoweredOff
    );
    assert!(vm.stats().pages_checked >= 1000);
    assert!(vm.stats().pages_checked < 2000);

    let vm = running(Config {
        workload: Workload::Idle,
        vcpus: 2,
        ..small()
    });
    wait_for(&vm, "beats", |vm| vm.stats().beats > 5);
    vm.ask_power_off();
    assert_eq!(
        vm.wait_until_ended(Duration::from_secs(10)),
        VmState::PoweredOff
    );
    assert_eq!(vm.pause(), Err(ControlError::Ended(VmState::PoweredOff)));
}

#[test]
fn a_pause_is_short_and_nothing_moves_during_it() {
    let Some(_turn) = kvm() else { return };
    for (workload, dirty_rate) in [
        (Workload::Random, 0),
        (Workload::Random, 5000),
        (Workload::Idle, 0),
    ] {
        let vm = running(Config {
            workload,
            dirty_rate,
            vcpus: 2,
            ..small()
        });
        let mut took: Vec<Duration> = (0..50)
            .map(|_| {
                std::thread::sleep(Duration::from_millis(3));
                let start = Instant::now();
                vm.pause().unwrap();
                let took = start.elapsed();
                let before = vm.stats();
                std::thread::sleep(Duration::from_millis(1));
                assert_eq!(vm.stats(), before);
                vm.resume().unwrap();
                took
            })
            .collect();
        took.sort_unstable();
        println!(
            "pause {workload:?} at {dirty_rate}/s: median {:?}, longest {:?}",
            took[25], took[49]
        );
        // Compare only the median, because a busy host delays some pauses.
        assert!(
            took[25] < Duration::from_millis(20),
            "median {:?}",
            took[25]
        );
        let checked = vm.stats().beats;
        wait_for(&vm, "beats after the pauses", |vm| {
            vm.stats().beats > checked
        });
    }
}

#[test]
fn the_guest_keeps_its_pace_throttled_or_not() {
    let Some(_turn) = kvm() else { return };
    let vm = running(Config {
        dirty_rate: 4000,
        vcpus: 2,
        ..small()
    });
    // The rate still changes while the guest visits its first 200 pages, so do not measure there.
    rate_of(&vm, 200);
    let full = rate_of(&vm, 2000);
    vm.throttle(75).unwrap();
    rate_of(&vm, 50);
    let quarter = rate_of(&vm, 500);
    println!("4000/s asked: {full:.0}/s, throttled by 75 %: {quarter:.0}/s");
    // The guest never exceeds its rate by much, but a busy host may slow it down.
    assert!((1000.0..4400.0).contains(&full), "{full}");
    assert!((250.0..1150.0).contains(&quarter), "{quarter}");
    assert_eq!(vm.throttle(100), Err(ControlError::Throttle(100)));

    // Check that the guest does not catch up after a pause.
    vm.throttle(0).unwrap();
    vm.pause().unwrap();
    // If the guest caught up after this wait, it would make 400 additional visits.
    std::thread::sleep(Duration::from_millis(100));
    let before = vm.stats().pages_checked;
    let start = Instant::now();
    vm.resume().unwrap();
    std::thread::sleep(Duration::from_millis(30));
    let burst = (vm.stats().pages_checked - before) as f64;
    let fair = start.elapsed().as_secs_f64() * 4000.0;
    assert!(
        burst <= fair * 1.1 + 50.0,
        "{burst} visits, {fair:.0} expected"
    );
}

#[test]
fn an_unpaced_guest_is_throttled_by_its_duty_cycle() {
    let Some(_turn) = kvm() else { return };
    let vm = running(small());
    let full = rate_now(&vm);
    vm.throttle(80).unwrap();
    let fifth = rate_now(&vm) / full;
    println!("throttled by 80 %: {:.0} % of full speed", fifth * 100.0);
    // Other load on the host affects both rates. The tests of `pace` check the exact ratio.
    assert!((0.02..0.6).contains(&fifth), "{fifth}");
}

#[test]
fn the_hot_set_gets_its_share() {
    let Some(_turn) = kvm() else { return };
    let vm = running(Config {
        workload: Workload::HotSet { share_percent: 90 },
        ..small()
    });
    wait_for(&vm, "two passes", |vm| vm.full_passes() >= 2);
    vm.pause().unwrap();
    let pages = (12 << 20) / 4096;
    let visits = |range: std::ops::Range<u64>| -> u64 {
        range
            .map(|page| {
                let address = GuestAddress(WORKLOAD_START + page * 4096);
                vm.memory().read_obj::<u64>(address).unwrap()
            })
            .sum()
    };
    let (hot, cold) = (visits(0..pages / 8), visits(pages / 8..pages));
    let share = hot as f64 / (hot + cold) as f64;
    assert!((0.899..0.901).contains(&share), "{share}");
    assert_eq!(hot + cold, vm.stats().pages_checked);
}

#[test]
fn commands_from_many_threads_do_not_block_each_other() {
    let Some(_turn) = kvm() else { return };
    let vm = running(Config {
        vcpus: 2,
        dirty_rate: 20_000,
        ..small()
    });
    let mut logs = Logs::start(&vm);
    const ROUNDS: u32 = 100;
    let pauses = || {
        for _ in 0..ROUNDS {
            vm.pause().unwrap();
            vm.resume().unwrap();
        }
    };
    let looks = || {
        for _ in 0..ROUNDS {
            vm.throttle(50).unwrap();
            logs.fetch();
            vm.throttle(0).unwrap();
        }
    };
    std::thread::scope(|scope| {
        let threads = [scope.spawn(pauses), scope.spawn(pauses), scope.spawn(looks)];
        while threads.iter().any(|thread| !thread.is_finished()) {
            assert!(!vm.state().has_ended(), "{:?}", vm.state());
        }
    });
    let checked = vm.stats().pages_checked;
    wait_for(&vm, "visits", |vm| vm.stats().pages_checked > checked + 100);
}

#[test]
fn an_idle_guest_beats_every_millisecond() {
    let Some(_turn) = kvm() else { return };
    let vm = running(Config {
        workload: Workload::Idle,
        ..small()
    });
    let (start, before) = (Instant::now(), vm.stats().beats);
    wait_for(&vm, "beats", |vm| vm.stats().beats >= before + 400);
    let beats = vm.stats().beats - before;
    let fair = start.elapsed().as_millis() as u64;
    println!(
        "{beats} beats in {fair} ms, largest gap {:?}",
        vm.stats().largest_gap
    );
    assert!(beats <= fair + 3, "{beats} beats in {fair} ms");
    assert!(beats >= fair / 4, "{beats} beats in {fair} ms");
}
