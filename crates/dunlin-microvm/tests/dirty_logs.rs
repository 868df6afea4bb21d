//! Runs the conformance test of dirty logs on a machine's own logs, with each kind of guest. Also
//! runs it on the log by write-protection, with a KVM guest. Also tests the log of the memory from
//! 4 GiB on, above the hole in the guest's addresses.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used)]

mod support;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dunlin::engine::dirty::WriteProtectLog;
use dunlin::engine::vmm::SourceVm;
use dunlin::testing::{Effort, Seen, Violation, check_dirty_log, check_dirty_logs};
use dunlin_microvm::{
    Backing, Config, Fill, GuestKind, HostOptions, Movable, Vm, VmState, Workload,
};
use dunlin_test_base::huge_pages::{self, HugePages};
use dunlin_test_base::kvm;
use support::{Logs, fresh, wait_for};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

const BYTES: u64 = 32 << 20;

/// Lets one test run at a time, because all tests use the same reserved huge pages.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Private memory with transparent huge pages, and private memory without them.
const PRIVATE: [(Backing, bool); 2] = [(Backing::Private, true), (Backing::Private, false)];
const MEMFD: (Backing, bool) = (Backing::Memfd, false);

/// Creates a machine with two vCPUs that write to all of its memory, including pages that were
/// never touched.
fn writing(guest: GuestKind, (backing, huge_pages): (Backing, bool)) -> Arc<Movable> {
    let config = Config {
        guest,
        backing,
        memory_bytes: BYTES,
        vcpus: 2,
        fill: Fill::Mixed,
        workload: Workload::Random,
        dirty_rate: 40_000,
        ..Config::default()
    };
    let vm = Vm::with_options(config, HostOptions::default().huge_pages(huge_pages)).unwrap();
    vm.fill().unwrap();
    let start = vm.memory().iter().next().unwrap().get_mmap().as_ptr() as u64;
    let on_huge = huge_pages::transparent_bytes(start);
    match huge_pages::transparent() {
        Some(_) if huge_pages => assert!(on_huge > BYTES / 2, "{on_huge} bytes"),
        Some(policy) if policy == "madvise" => assert_eq!(on_huge, 0),
        _ => {}
    }
    vm.start().unwrap();
    Movable::new(Arc::new(vm))
}

fn conforms(vm: &Movable, what: &str, result: Result<Seen, Violation>) {
    let config = vm.vm().config();
    let what = format!("{what}, {:?}, {:?}", config.guest, config.backing);
    let seen = result.unwrap_or_else(|violation| panic!("{what}: {violation}"));
    println!("{what}: {seen:?}");
    assert!(seen.pages > 1000, "{what}: {seen:?}");
    // The checks in the guest have found no error. Otherwise, the state would be `Stopped`.
    assert_eq!(vm.vm().state(), VmState::Paused);
}

fn all_conform(guest: GuestKind) {
    let huge = HugePages::reserve(BYTES / (2 << 20));
    for memory in PRIVATE.into_iter().chain([MEMFD, (Backing::Huge, false)]) {
        if memory.0 == Backing::Huge && huge.is_none() {
            continue;
        }
        let vm = writing(guest, memory);
        conforms(
            &vm,
            "the machine's logs",
            check_dirty_logs(&*vm, &Effort::default()),
        );
    }
}

#[test]
fn i5_kvms_log_with_the_vmms_own_conforms() {
    let Some(_kvm) = kvm() else { return };
    let _turn = turn();
    all_conform(GuestKind::Kvm);
}

#[test]
fn i5_the_log_of_a_process_guest_conforms() {
    let _turn = turn();
    all_conform(GuestKind::Process);
}

/// Tests the log of the second region, which starts at 4 GiB. The guest has touched only a small
/// part of the machine's memory.
fn logs_what_lies_above_the_hole(guest: GuestKind) {
    const ABOVE: u64 = 4 << 30;
    const PAGES: u64 = 4096;
    let vm = fresh(Config {
        guest,
        memory_bytes: (3 << 30) + PAGES * 4096,
        fill: Fill::Zero,
        workload: Workload::Random,
        ..Config::default()
    });
    let visits = |page| {
        let address = GuestAddress(ABOVE + page * 4096);
        vm.memory().read_obj::<u64>(address).unwrap()
    };
    let mut logs = Logs::start(&vm);
    vm.start().unwrap();
    wait_for(&vm, "a visit above 4 GiB", |_| {
        (0..PAGES).any(|page| visits(page) > 0)
    });
    vm.pause().unwrap();
    let is_set = |map: &[u64], page: u64| map[(page / 64) as usize] >> (page % 64) & 1 == 1;
    let maps = logs.fetch();
    let words: Vec<usize> = maps.iter().map(Vec::len).collect();
    assert_eq!(words, [(3 << 30) / 4096 / 64, PAGES as usize / 64]);
    for page in (0..PAGES).filter(|&page| visits(page) > 0) {
        assert!(is_set(&maps[1], page), "{guest:?}: {page}");
    }
    // Write to the second region as the VMM.
    vm.memory()
        .write_obj(7_u64, GuestAddress(ABOVE + 9 * 4096))
        .unwrap();
    let maps = logs.fetch();
    assert!(maps[0].iter().all(|word| *word == 0), "{guest:?}");
    assert!(is_set(&maps[1], 9), "{guest:?}");
    logs.stop();
}

#[test]
fn i5_kvms_log_of_the_memory_above_the_hole_is_its_own() {
    let Some(_kvm) = kvm() else { return };
    let _turn = turn();
    logs_what_lies_above_the_hole(GuestKind::Kvm);
}

#[test]
fn i5_a_process_guests_log_of_the_memory_above_the_hole_is_its_own() {
    let _turn = turn();
    logs_what_lies_above_the_hole(GuestKind::Process);
}

#[test]
fn i5_write_protection_sees_what_a_kvm_guest_writes() {
    let Some(_kvm) = kvm() else { return };
    let _turn = turn();
    for memory in PRIVATE.into_iter().chain([MEMFD]) {
        let vm = writing(GuestKind::Kvm, memory);
        let mut log = WriteProtectLog::new(Arc::clone(vm.vm().memory()));
        let guest = SourceVm::memory(&*vm);
        let result = check_dirty_log(&*guest, &mut log, &*vm, &Effort::default());
        conforms(&vm, "write-protection", result);
    }
}
