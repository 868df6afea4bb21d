//! Tests the process guest, which needs no KVM.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used)]

mod support;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dunlin_microvm::{
    Backing, Config, ControlError, DecodeError, DecodeReason, Fill, GuestKind, LoadError, Section,
    Stop, StopCode, Vm, VmState, WORKLOAD_START, Workload,
};
use dunlin_test_base::huge_pages::HugePages;
use support::moves::{Tls, movable, relocate, verified};
use support::{
    Logs, built, copy_pages, different_pages, dirty_pages, rate_now, rate_of, running, vmm_write,
    wait_for,
};
use vm_memory::{Bytes, GuestAddress};

/// Lets one test run at a time, because guests that compete for the CPUs do not keep their pace.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn process() -> Config {
    Config {
        guest: GuestKind::Process,
        memory_bytes: 12 << 20,
        vcpus: 2,
        fill: Fill::Mixed,
        ..Config::default()
    }
}

/// Waits until the machine has ended and returns its final state.
fn end_of(vm: &Vm) -> VmState {
    let state = vm.wait_until_ended(Duration::from_secs(10));
    assert!(state.has_ended(), "{state:?}");
    state
}

#[test]
fn i3_it_moves_by_the_engine_whatever_it_does_and_whatever_it_is_made_of() {
    let _turn = turn();
    let tls = Tls::new();
    // Reserve enough huge pages for a machine at the source and a machine at the destination.
    let huge = HugePages::reserve(2 * 6);
    for (workload, backing) in [
        (Workload::Sequential, Backing::Private),
        (Workload::Random, Backing::Memfd),
        (Workload::HOT_SET, Backing::Private),
        (Workload::HOT_SET, Backing::Huge),
        (Workload::Idle, Backing::Private),
    ] {
        if backing == Backing::Huge && huge.is_none() {
            continue;
        }
        let source = movable(Config {
            workload,
            backing,
            dirty_rate: 20_000,
            ..process()
        });
        let busy = workload != Workload::Idle;
        if busy {
            wait_for(source.vm(), "visits", |vm| vm.stats().pages_checked > 1000);
        }
        let (there, report, received) = relocate(&source, &tls, &verified(2));
        assert_eq!(report.digests_equal, Some(true), "{workload:?}");
        assert!(received.guest_downtime.is_some());
        assert_eq!(source.vm().state(), VmState::Moved);
        drop(source);
        let passes = there.vm().full_passes();
        if busy {
            wait_for(there.vm(), "two more passes", |vm| {
                vm.full_passes() >= passes + 2
            });
        }
        let (back, report, _) = relocate(&there, &tls, &verified(1));
        assert_eq!(report.digests_equal, Some(true), "{workload:?}");
        let stats = back.vm().stats();
        wait_for(back.vm(), "beats", |vm| vm.stats().beats > stats.beats + 10);
    }
}

#[test]
fn i3_rounds_of_its_log_end_in_the_same_memory() {
    let _turn = turn();
    let source = running(Config {
        dirty_rate: 50_000,
        ..process()
    });
    let destination = built(source.description());
    let mut logs = Logs::start(&source);
    copy_pages(&source, &destination, None);
    for round in 0..8_u8 {
        std::thread::sleep(Duration::from_millis(5));
        vmm_write(&source, 0, &[round; 100]);
        copy_pages(&source, &destination, Some(&logs.fetch()));
    }
    std::thread::sleep(Duration::from_millis(5));
    source.pause().unwrap();
    let last = copy_pages(&source, &destination, Some(&logs.fetch()));
    assert!(last > 0, "no dirty pages");
    assert_eq!(different_pages(&source, &destination), 0);
    destination.load(&source.save().unwrap()).unwrap();
    let passes = source.full_passes();
    destination.resume().unwrap();
    wait_for(&destination, "two passes", |vm| {
        vm.full_passes() >= passes + 2
    });
}

#[test]
fn i3_it_finds_a_page_that_is_stale_or_damaged() {
    let _turn = turn();
    for (offset, code) in [(0, StopCode::WrongPass), (1000, StopCode::WrongContent)] {
        let vm = running(process());
        wait_for(&vm, "a pass", |vm| vm.full_passes() >= 1);
        vm.pause().unwrap();
        let address = GuestAddress(WORKLOAD_START + 99 * 4096 + offset);
        let byte: u8 = vm.memory().read_obj(address).unwrap();
        vm.memory().write_obj(byte ^ 1, address).unwrap();
        vm.resume().unwrap();
        let VmState::Stopped(stop) = end_of(&vm) else {
            panic!("{:?}", vm.state());
        };
        assert_eq!((stop.code, stop.frame), (code, 1024 + 99));
    }
}

#[test]
fn i3_it_finds_that_its_state_is_of_another_time_than_its_memory() {
    let _turn = turn();
    let source = running(process());
    wait_for(&source, "a pass", |vm| vm.full_passes() >= 1);
    source.pause().unwrap();
    let early = source.save().unwrap();
    let passes = source.full_passes();
    source.resume().unwrap();
    wait_for(&source, "more passes", |vm| vm.full_passes() > passes + 1);
    source.pause().unwrap();
    let destination = built(source.description());
    copy_pages(&source, &destination, None);
    destination.load(&early).unwrap();
    destination.resume().unwrap();
    let VmState::Stopped(stop) = end_of(&destination) else {
        panic!("{:?}", destination.state());
    };
    assert_eq!(stop.code, StopCode::WrongPass);
    assert!(stop.found > stop.expected);
}

/// Asserts that `visits` further visits take at least 6/7 of the time that they need at `rate`
/// visits per second. On a busy host they take longer. The tests of `pace` check the exact rate.
fn is_no_faster(vm: &Vm, visits: u64, rate: f64) {
    let made = rate_of(vm, visits);
    assert!(made <= rate * 7.0 / 6.0, "{made} visits per second");
}

#[test]
fn it_keeps_its_rate_can_be_throttled_and_paused() {
    let _turn = turn();
    let vm = running(Config {
        dirty_rate: 8000,
        ..process()
    });
    // The first pass populates the memory one huge page at a time, so skip it.
    wait_for(&vm, "a pass", |vm| vm.full_passes() >= 1);
    is_no_faster(&vm, 2400, 8000.0);
    vm.throttle(75).unwrap();
    is_no_faster(&vm, 600, 2000.0);
    assert_eq!(vm.throttle(100), Err(ControlError::Throttle(100)));
    vm.pause().unwrap();
    let mut logs = Logs::start(&vm);
    let before = vm.stats();
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(vm.stats(), before);
    assert_eq!(dirty_pages(&logs.fetch()), 0);
    vm.resume().unwrap();
    wait_for(&vm, "visits", |vm| {
        vm.stats().pages_checked > before.pages_checked
    });
}

#[test]
fn without_a_rate_it_is_slowed_down_too() {
    let _turn = turn();
    let vm = running(Config {
        vcpus: 1,
        ..process()
    });
    let full = rate_now(&vm);
    vm.throttle(80).unwrap();
    let slow = rate_now(&vm);
    assert!(slow < full * 0.4, "{slow} of {full}");
}

#[test]
fn it_powers_itself_off() {
    let _turn = turn();
    let vm = running(Config {
        power_off_after: Some(1000),
        ..process()
    });
    assert_eq!(end_of(&vm), VmState::PoweredOff);
    assert!(vm.stats().pages_checked >= 1000);
    let vm = running(Config {
        workload: Workload::Idle,
        ..process()
    });
    vm.ask_power_off();
    assert_eq!(end_of(&vm), VmState::PoweredOff);
}

#[test]
fn it_powers_itself_off_where_it_has_moved_to() {
    let _turn = turn();
    let source = running(process());
    wait_for(&source, "visits", |vm| vm.stats().pages_checked > 0);
    source.pause().unwrap();
    source.ask_power_off();
    let destination = built(source.description());
    copy_pages(&source, &destination, None);
    destination.load(&source.save().unwrap()).unwrap();
    destination.resume().unwrap();
    assert_eq!(end_of(&destination), VmState::PoweredOff);
}

#[test]
fn i3_every_thread_goes_on_where_it_was_in_both_of_its_sets() {
    let _turn = turn();
    let source = running(Config {
        workload: Workload::HOT_SET,
        ..process()
    });
    wait_for(&source, "a pass", |vm| vm.full_passes() >= 1);
    source.pause().unwrap();
    let mut sections = source.save().unwrap();
    let of_threads = |section: &&mut Section| section.name == "visitor";
    for (section, share) in sections.iter_mut().filter(of_threads).zip([37_u64, 38]) {
        section.bytes[16..24].copy_from_slice(&share.to_le_bytes());
    }
    let destination = built(source.description());
    destination.load(&sections).unwrap();
    for (sent, found) in sections.iter().zip(destination.save().unwrap()) {
        if sent.name == "visitor" {
            assert_eq!((sent.instance, &sent.bytes), (found.instance, &found.bytes));
        }
    }
}

#[test]
fn i7_a_state_that_it_could_not_have_come_to_is_refused() {
    let _turn = turn();
    let source = running(process());
    wait_for(&source, "visits", |vm| vm.stats().pages_checked > 0);
    source.pause().unwrap();
    let good = source.save().unwrap();
    let load = |change: &dyn Fn(&mut Vec<Section>)| {
        let mut sections = good.clone();
        change(&mut sections);
        let vm = built(source.description());
        vm.load(&sections)
            .inspect_err(|_| assert!(matches!(vm.state(), VmState::Failed(_))))
    };
    load(&|_| ()).unwrap();
    let visitor = good.iter().position(|s| s.name == "visitor").unwrap();
    let is = |name| {
        move |error: &LoadError| {
            matches!(
                error,
                LoadError::Decode { source: DecodeError { what, why: DecodeReason::BadValue { .. }, .. }, .. }
                    if *what == name
            )
        }
    };
    // In the section, the cursor and the number of remaining visits follow the counters and the
    // share.
    for (word, value, field) in [
        (2, 100, "share"),
        (3, u64::MAX, "cursor"),
        (4, 0, "visits left"),
        (4, 1 << 40, "visits left"),
    ] {
        let error = load(&|sections| {
            let at = word * 8;
            sections[visitor].bytes[at..at + 8].copy_from_slice(&u64::to_le_bytes(value));
        })
        .unwrap_err();
        assert!(is(field)(&error), "{error:?}");
    }
    for cut in 0..good[visitor].bytes.len() {
        let error = load(&|sections| sections[visitor].bytes.truncate(cut)).unwrap_err();
        assert!(matches!(error, LoadError::Decode { .. }), "{error:?}");
    }
    let error = load(&|sections| sections.push(sections[visitor].clone())).unwrap_err();
    assert!(matches!(error, LoadError::Twice { .. }), "{error:?}");
    let error = load(&|sections| drop(sections.remove(visitor))).unwrap_err();
    assert!(matches!(error, LoadError::Missing { .. }), "{error:?}");
    let error = load(&|sections| sections[visitor].name = "vcpu.lapic".into()).unwrap_err();
    assert!(matches!(error, LoadError::Unknown { .. }), "{error:?}");
}

/// Numbers that a guest or a source reports are displayed without a panic, whatever their values.
#[test]
fn i7_counters_and_reports_may_have_any_value() {
    let _turn = turn();
    let source = running(process());
    wait_for(&source, "visits", |vm| vm.stats().pages_checked > 0);
    source.pause().unwrap();
    let mut sections = source.save().unwrap();
    let of_threads = |section: &&mut Section| section.name == "visitor";
    for section in sections.iter_mut().filter(of_threads) {
        // The numbers of visits and beats.
        section.bytes[..16].fill(0xff);
    }
    let destination = built(source.description());
    copy_pages(&source, &destination, None);
    destination.load(&sections).unwrap();
    let threads = u64::from(destination.config().vcpus);
    assert!(threads > 1);
    let stats = destination.stats();
    assert_eq!(
        (stats.pages_checked, stats.beats),
        (threads.wrapping_neg(), threads.wrapping_neg())
    );
    let report = Stop {
        vcpu: 0,
        code: StopCode::WrongContent,
        frame: u64::MAX,
        expected: 0,
        found: 0,
    };
    assert!(
        report.to_string().contains("0xfffffffffffff000"),
        "{report}"
    );
}
