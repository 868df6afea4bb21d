//! Tests that the engine migrates a running machine over real TLS lanes and the guest continues.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used)]

mod support;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dunlin::engine::vmm::FaultCode;
use dunlin::engine::{Event, VmIs};
use dunlin_microvm::{Backing, Config, ControlError, Fill, MachineBuilder, Vm, VmState, Workload};
use dunlin_test_base::huge_pages::HugePages;
use dunlin_test_base::kvm;
use support::moves::{Tls, attempt, movable, relocate, relocate_while, verified};
use support::{guest_tscs, vmm_read, vmm_write, wait_for};

const MIB: u64 = 1 << 20;

/// The number of migrations of one guest, which is larger in `make soak` than in `make test`.
fn rounds() -> u16 {
    if std::env::var_os("DUNLIN_SOAK").is_some_and(|soak| soak == "1") {
        200
    } else {
        25
    }
}

/// Waits until the guest has completed a pass that began after this call, over all its pages. If
/// the guest visits no pages, waits for beats instead.
fn goes_on(vm: &Vm) {
    if vm.config().workload == Workload::Idle {
        let beats = vm.stats().beats;
        wait_for(vm, "beats", |vm| vm.stats().beats > beats + 5);
    } else {
        let passes = vm.full_passes();
        wait_for(vm, "two passes", |vm| vm.full_passes() >= passes + 2);
    }
}

/// Moves a guest `rounds` times, each time from the previous destination to a new one. The number
/// of lanes takes the values 1 to 8 in turn.
fn moves_again_and_again(tls: &Tls, config: Config, rounds: u16, first_lanes: u16) {
    let what = format!(
        "{} MiB {:?}, {} vCPUs, {:?}, filled {:?}",
        config.memory_bytes / MIB,
        config.backing,
        config.vcpus,
        config.workload,
        config.fill
    );
    let start = Instant::now();
    let mut vm = movable(config);
    goes_on(vm.vm());
    let mut downtimes = Vec::new();
    for round in 0..rounds {
        let lanes = (first_lanes + round) % 8 + 1;
        let checked = vm.vm().stats().pages_checked;
        let tscs = guest_tscs(vm.vm());
        let (there, report, received) = relocate(&vm, tls, &verified(lanes));
        assert_eq!(report.digests_equal, Some(true), "round {round}, {what}");
        assert_eq!(report.lanes.len(), usize::from(lanes));
        assert!(report.runs && received.runs);
        assert!(there.vm().stats().pages_checked >= checked);
        assert_eq!(vm.vm().state(), VmState::Moved);
        goes_on(there.vm());
        let later = guest_tscs(there.vm());
        assert!(
            tscs.iter()
                .zip(later)
                .all(|(before, later)| *before < later)
        );
        downtimes.push(report.downtime.guest.unwrap_or_default());
        vm = there;
    }
    downtimes.sort_unstable();
    println!(
        "{rounds} moves in {:.1} s, downtime median {:?}, longest {:?}: {what}",
        start.elapsed().as_secs_f64(),
        downtimes[downtimes.len() / 2],
        downtimes[downtimes.len() - 1],
    );
}

#[test]
fn i3_one_guest_moves_back_and_forth() {
    let Some(_turn) = kvm() else { return };
    let config = Config {
        memory_bytes: 128 * MIB,
        working_set_bytes: Some(24 * MIB),
        vcpus: 2,
        fill: Fill::Mixed,
        workload: Workload::HOT_SET,
        ..Config::default()
    };
    moves_again_and_again(&Tls::new(), config, rounds(), 0);
}

#[test]
fn i3_every_workload_backing_and_fill_moves() {
    let Some(_turn) = kvm() else { return };
    // Source and destination exist at the same time, so reserve pages for two machines.
    let huge = HugePages::reserve(2 * 64 / 2);
    let tls = Tls::new();
    let workloads = [
        Workload::Idle,
        Workload::Sequential,
        Workload::Random,
        Workload::HOT_SET,
    ];
    let backings = [Backing::Private, Backing::Memfd, Backing::Huge];
    let fills = [Fill::Random, Fill::Zero, Fill::Mixed, Fill::Sparse];
    let mut number = 0_u8;
    for (first, workload) in workloads.into_iter().enumerate() {
        for (second, backing) in backings.into_iter().enumerate() {
            if backing == Backing::Huge && huge.is_none() {
                continue;
            }
            let config = Config {
                memory_bytes: 64 * MIB,
                working_set_bytes: Some(8 * MIB),
                fill: fills[(first + second) % fills.len()],
                vcpus: number % 4 + 1,
                seed: number.into(),
                workload,
                backing,
                ..Config::default()
            };
            // In `make test`, migrate eight times: once with each number of lanes. In `make soak`,
            // migrate 25 times.
            let rounds = if rounds() > 25 { 25 } else { 8 };
            moves_again_and_again(&tls, config, rounds, number.into());
            number += 1;
        }
    }
}

#[test]
fn i3_what_the_vmm_writes_during_pre_copy_arrives() {
    let Some(_turn) = kvm() else { return };
    let tls = Tls::new();
    let vm = movable(Config {
        working_set_bytes: Some(8 * MIB),
        ..Config::default()
    });
    vmm_write(vm.vm(), 0, b"before");
    let written = AtomicU64::new(0);
    let write = |event: &Event| {
        if matches!(event, Event::Iterated(_)) {
            // In each iteration, write to two pages that no vCPU writes to. The first page is a
            // different one in each of the first 14 iterations. The second page is the same in all
            // iterations.
            let number = written.fetch_add(1, Ordering::SeqCst) + 1;
            let bytes = number.to_le_bytes();
            vmm_write(vm.vm(), 4096 * number.min(14), &bytes);
            vmm_write(vm.vm(), 15 * 4096, &bytes);
        }
    };
    let (there, report, _) = relocate_while(&vm, &tls, &verified(2), &write);
    let written = written.into_inner();
    assert_eq!(written as usize, report.iterations.len() - 1);
    let read = |offset: u64| {
        let mut bytes = [0; 8];
        vmm_read(there.vm(), offset, &mut bytes);
        u64::from_le_bytes(bytes)
    };
    assert_eq!(&read(0).to_le_bytes()[..6], b"before");
    for number in 1..=written.min(13) {
        assert_eq!(read(4096 * number), number);
    }
    assert_eq!(read(15 * 4096), written);
}

#[test]
fn a_guest_that_was_paused_arrives_paused_and_goes_on_when_resumed() {
    let Some(_turn) = kvm() else { return };
    let tls = Tls::new();
    let vm = movable(Config {
        working_set_bytes: Some(8 * MIB),
        vcpus: 2,
        ..Config::default()
    });
    goes_on(vm.vm());
    vm.vm().pause().unwrap();
    let checked = vm.vm().stats().pages_checked;
    let (there, report, received) = relocate(&vm, &tls, &verified(3));
    assert!(!report.runs && !received.runs);
    assert_eq!(there.vm().state(), VmState::Paused);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(there.vm().stats().pages_checked, checked);
    // Move the paused guest to a third machine.
    let (third, ..) = relocate(&there, &tls, &verified(1));
    assert_eq!(third.vm().stats().pages_checked, checked);
    third.vm().resume().unwrap();
    goes_on(third.vm());
}

#[test]
fn i1_a_guest_that_has_moved_cannot_be_resumed_at_the_source() {
    let Some(_turn) = kvm() else { return };
    let tls = Tls::new();
    let vm = movable(Config {
        working_set_bytes: Some(8 * MIB),
        ..Config::default()
    });
    let (there, ..) = relocate(&vm, &tls, &verified(1));
    assert_eq!(vm.vm().resume(), Err(ControlError::Ended(VmState::Moved)));
    let checked = vm.vm().stats().pages_checked;
    goes_on(there.vm());
    assert_eq!(vm.vm().stats().pages_checked, checked);
    // The machine cannot be migrated again.
    let again = attempt(
        &vm,
        &tls,
        &verified(1),
        &mut MachineBuilder::default(),
        &|_| (),
    );
    assert_eq!(again.source.unwrap_err().code(), FaultCode::GuestStopped);
}

#[test]
fn a_guest_that_powers_off_in_the_middle_ends_the_migration() {
    let Some(_turn) = kvm() else { return };
    let tls = Tls::new();
    let vm = movable(Config {
        memory_bytes: 128 * MIB,
        workload: Workload::Random,
        ..Config::default()
    });
    goes_on(vm.vm());
    // At this rate the memory takes a second to migrate, so that the guest ends during the
    // migration.
    let options = verified(2).to_builder().rate(128 * MIB).build().unwrap();
    let asked = AtomicU64::new(0);
    let moved = attempt(
        &vm,
        &tls,
        &options,
        &mut MachineBuilder::default(),
        &|event| {
            if matches!(event, Event::Progress(_)) && asked.fetch_add(1, Ordering::SeqCst) == 0 {
                vm.vm().ask_power_off();
            }
        },
    );
    let error = moved.source.unwrap_err();
    assert_eq!(error.code(), FaultCode::GuestPoweredOff);
    assert_eq!(error.vm, VmIs::Gone);
    assert_eq!(vm.vm().state(), VmState::PoweredOff);
    // The destination gets the reason.
    let error = moved.destination.err().unwrap();
    assert_eq!(error.code(), FaultCode::GuestPoweredOff, "{error}");
    assert!(asked.into_inner() > 0);
}

#[test]
fn downtime_as_the_guest_saw_it_agrees_with_the_sources() {
    let Some(_turn) = kvm() else { return };
    let tls = Tls::new();
    let mut vm = movable(Config {
        working_set_bytes: Some(8 * MIB),
        dirty_rate: 5_000,
        vcpus: 2,
        ..Config::default()
    });
    // Before its first beat, a vCPU has not read its TSC.
    wait_for(vm.vm(), "a beat of each vCPU", |vm| {
        guest_tscs(vm).iter().all(|tsc| *tsc > 0)
    });
    let wall = Instant::now();
    let before = guest_tscs(vm.vm());
    for _ in 0..5 {
        let (there, report, received) = relocate(&vm, &tls, &verified(2));
        let (guest, source) = (report.downtime.guest.unwrap(), report.downtime.total);
        println!("downtime as the guest saw it {guest:?}, from pause to running {source:?}");
        assert_eq!(received.guest_downtime, Some(guest));
        // The guest sends a beat every millisecond. It is silent from its last beat before the
        // pause to its first beat after the resume.
        let slack = Duration::from_millis(20);
        assert!(guest <= source + slack, "{guest:?} {source:?}");
        assert!(guest + slack >= source, "{guest:?} {source:?}");
        let parts = report.downtime;
        assert!(parts.pause + parts.last_pages + parts.ready + parts.resume <= source + slack);
        goes_on(there.vm());
        assert!(there.vm().stats().largest_gap >= guest);
        vm = there;
    }
    // If the TSC had gone back, the guest would have stopped. Check that the TSC has not run ahead
    // of the wall clock either.
    let khz = f64::from(vm.vm().description().tsc_khz);
    let guest_ms = (guest_tscs(vm.vm())[0] - before[0]) as f64 / khz;
    let wall_ms = wall.elapsed().as_secs_f64() * 1000.0;
    assert!(guest_ms <= wall_ms + 5.0, "{guest_ms} {wall_ms}");
    assert!(guest_ms >= wall_ms - 50.0, "{guest_ms} {wall_ms}");
}
