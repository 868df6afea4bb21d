//! Migrates a machine to another machine in the same process, and checks the machine's dirty log.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used)]

mod support;

use std::error::Error;
use std::io;
use std::time::{Duration, Instant};

use dunlin::engine::vmm::DirtyLog;
use dunlin_microvm::{Backing, Config, DEVICE_START, Fill, Vm, VmState, Workload};
use dunlin_test_base::kvm;
use support::{
    Logs, built, copy_pages, different_pages, dirty_pages, fresh, guest_tscs, last_beat_ns,
    rate_of, running, vmm_read, vmm_write, wait_for,
};

fn is_dirty(maps: &[Vec<u64>], page: u64) -> bool {
    maps[0][(page / 64) as usize] >> (page % 64) & 1 == 1
}

fn move_paused(source: &Vm) -> Vm {
    source.pause().unwrap();
    let destination = built(source.description());
    copy_pages(source, &destination, None);
    destination.load(&source.save().unwrap()).unwrap();
    destination
}

#[test]
fn a_moved_machine_goes_on_where_it_was() {
    let Some(_turn) = kvm() else { return };
    for (workload, vcpus, backing) in [
        (Workload::Sequential, 1, Backing::Private),
        (Workload::Random, 2, Backing::Memfd),
        (Workload::HOT_SET, 4, Backing::Private),
    ] {
        let source = running(Config {
            workload,
            vcpus,
            backing,
            fill: Fill::Mixed,
            memory_bytes: 12 << 20,
            ..Config::default()
        });
        wait_for(&source, "a pass", |vm| vm.full_passes() >= 1);
        source.throttle(10).unwrap();
        let destination = move_paused(&source);
        assert_eq!(destination.state(), VmState::Paused);
        let (stats, passes, tscs) = (source.stats(), source.full_passes(), guest_tscs(&source));
        assert_eq!(destination.stats().pages_checked, stats.pages_checked);
        assert_eq!(destination.stats().downtime, None);
        std::thread::sleep(Duration::from_millis(30));
        destination.resume().unwrap();
        wait_for(&destination, "two more passes", |vm| {
            vm.full_passes() >= passes + 2
        });
        // If a vCPU's TSC goes back, the guest stops the machine.
        wait_for(&destination, "beats of every vCPU", |vm| {
            let now = guest_tscs(vm);
            tscs.iter().zip(now).all(|(before, now)| *before < now)
        });
        let downtime = destination.stats().downtime.unwrap();
        assert!(downtime >= Duration::from_millis(30), "{downtime:?}");
        assert!(downtime < Duration::from_secs(5), "{downtime:?}");
        assert!(destination.stats().largest_gap >= downtime);
        // The source is still paused, so its guest has visited no further pages.
        assert_eq!(source.stats().pages_checked, stats.pages_checked);
        // Move the machine to a third machine.
        let third = move_paused(&destination);
        let passes = destination.full_passes();
        drop(destination);
        third.resume().unwrap();
        wait_for(&third, "passes on the third", |vm| {
            vm.full_passes() > passes
        });
    }
}

#[test]
fn wall_time_at_the_destination_includes_the_downtime() {
    let Some(_turn) = kvm() else { return };
    let source = running(Config {
        workload: Workload::Idle,
        ..Config::default()
    });
    wait_for(&source, "beats", |vm| vm.stats().beats > 10);
    source.pause().unwrap();
    let (before, start) = (guest_tscs(&source)[0], last_beat_ns(&source));
    let destination = move_paused(&source);
    std::thread::sleep(Duration::from_millis(100));
    destination.resume().unwrap();
    wait_for(&destination, "a beat", |vm| vm.stats().downtime.is_some());
    destination.pause().unwrap();
    let ticks = guest_tscs(&destination)[0] - before;
    let guest_ms = ticks as f64 / f64::from(destination.description().tsc_khz);
    let wall_ms = (last_beat_ns(&destination) - start) as f64 / 1e6;
    println!("downtime by the guest's TSC {guest_ms:.3} ms, by the wall clock {wall_ms:.3} ms");
    assert!((guest_ms - wall_ms).abs() < 5.0);
    assert!(guest_ms > 100.0);
}

#[test]
fn i3_rounds_of_the_dirty_log_end_in_the_same_memory() {
    let Some(_turn) = kvm() else { return };
    for (workload, backing) in [
        (Workload::Random, Backing::Private),
        (Workload::Sequential, Backing::Memfd),
        (Workload::HOT_SET, Backing::Private),
    ] {
        let source = running(Config {
            workload,
            backing,
            vcpus: 2,
            memory_bytes: 32 << 20,
            ..Config::default()
        });
        let destination = built(source.description());
        let mut logs = Logs::start(&source);
        copy_pages(&source, &destination, None);
        let let_it_write = || {
            let visits = source.stats().pages_checked;
            wait_for(&source, "visits", |vm| {
                vm.stats().pages_checked > visits + 100
            });
        };
        for round in 0..8u8 {
            let_it_write();
            vmm_write(&source, 4096 * u64::from(round), &[round; 100]);
            copy_pages(&source, &destination, Some(&logs.fetch()));
        }
        let_it_write();
        source.pause().unwrap();
        let last = copy_pages(&source, &destination, Some(&logs.fetch()));
        assert!(last >= 100, "only {last} dirty pages");
        assert_eq!(different_pages(&source, &destination), 0);
        assert_eq!(dirty_pages(&logs.fetch()), 0);
        destination.load(&source.save().unwrap()).unwrap();
        let passes = source.full_passes();
        destination.resume().unwrap();
        wait_for(&destination, "two passes", |vm| {
            vm.full_passes() >= passes + 2
        });
    }
}

/// Asserts that the log of the guest's writes is off. For a log that is off, KVM returns ENOENT.
fn is_off(logs: &mut [Box<dyn DirtyLog>]) {
    let error = logs[0].fetch(&mut |_, _| ()).unwrap_err();
    let kernels = error.source().unwrap().downcast_ref::<io::Error>();
    assert_eq!(kernels.unwrap().kind(), io::ErrorKind::NotFound, "{error}");
}

#[test]
fn the_log_holds_exactly_what_was_written() {
    let Some(_turn) = kvm() else { return };
    let vm = fresh(Config::default());
    is_off(&mut vm.dirty_logs());
    vm.fill().unwrap();
    let mut logs = Logs::start(&vm);
    assert_eq!(dirty_pages(&logs.fetch()), 0);

    // Write as the VMM: the last byte of one page and the first byte of the next.
    vmm_write(&vm, 4095, &[1, 2]);
    let maps = logs.fetch();
    let page = DEVICE_START / 4096;
    assert_eq!(maps[0][(page / 64) as usize], 0b11 << (page % 64));
    assert_eq!(dirty_pages(&maps), 2);
    assert_eq!(dirty_pages(&logs.fetch()), 0);
    let mut bytes = [0; 2];
    vmm_read(&vm, 4095, &mut bytes);
    assert_eq!(bytes, [1, 2]);

    // Let the guest write: some pages of the workload, and its parameter block.
    vm.start().unwrap();
    wait_for(&vm, "visits", |vm| vm.stats().pages_checked > 0);
    vm.pause().unwrap();
    let written = vm.stats().pages_checked.min((60 << 20) / 4096);
    let maps = logs.fetch();
    let first = 1024;
    assert!((first..first + written).all(|page| is_dirty(&maps, page)));
    // KVM may also log a page that it has only mapped for writing, such as the program's page or
    // the page after it.
    let pages = dirty_pages(&maps);
    assert!(
        (written + 1..written + 16).contains(&pages),
        "{pages} for {written}"
    );
    is_off(&mut logs.stop());
}

#[test]
fn measures() {
    let Some(_turn) = kvm() else { return };
    let vm = fresh(Config {
        memory_bytes: 1 << 30,
        workload: Workload::Random,
        working_set_bytes: Some(256 << 20),
        fill_bytes: Some(256 << 20),
        ..Config::default()
    });
    let start = Instant::now();
    vm.fill().unwrap();
    println!("256 MiB filled in {:?}", start.elapsed());
    vm.start().unwrap();
    wait_for(&vm, "a pass", |vm| vm.full_passes() >= 1);
    let visits = rate_of(&vm, 60_000);
    let start = Instant::now();
    let mut logs = Logs::start(&vm);
    let started = start.elapsed();
    rate_of(&vm, 20_000);
    let start = Instant::now();
    let maps = logs.fetch();
    let busy = start.elapsed();
    vm.pause().unwrap();
    logs.fetch();
    let start = Instant::now();
    logs.fetch();
    let quiet = start.elapsed();
    let start = Instant::now();
    let sections = vm.save().unwrap();
    let saved = start.elapsed();
    let start = Instant::now();
    let other = built(vm.description());
    let built = start.elapsed();
    let start = Instant::now();
    other.load(&sections).unwrap();
    println!(
        "1 GiB: {visits:.0} visits/s on one vCPU; log started in {started:?}, fetched with {} pages \
         in {busy:?}, empty in {quiet:?}; saved {} sections, {} bytes, in {saved:?}; built in \
         {built:?}, loaded in {:?}",
        dirty_pages(&maps),
        sections.len(),
        sections
            .iter()
            .map(|section| section.bytes.len())
            .sum::<usize>(),
        start.elapsed()
    );
}
