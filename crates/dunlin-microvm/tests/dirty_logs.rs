//! The conformance test of dirty logs, on those of a machine with each kind of guest.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used)]

mod common;
mod moves_support;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use common::kvm;
use dunlin::engine::dirty::WriteProtectLog;
use dunlin::engine::vmm::SourceVm;
use dunlin::testing::{Effort, Seen, Violation, check_dirty_log, check_dirty_logs};
use dunlin_microvm::{Backing, Config, Fill, GuestKind, Movable, VmState, Workload};
use moves_support::huge_pages::HugePages;
use moves_support::movable;

const BYTES: u64 = 32 << 20;

/// One test at a time: huge pages are reserved for all.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Two vCPUs that write all over memory, to pages that were never touched too.
fn writing(guest: GuestKind, backing: Backing) -> Arc<Movable> {
    movable(Config {
        guest,
        backing,
        memory_bytes: BYTES,
        vcpus: 2,
        fill: Fill::Mixed,
        workload: Workload::Random,
        dirty_rate: 40_000,
        ..Config::default()
    })
}

fn conforms(vm: &Movable, what: &str, result: Result<Seen, Violation>) {
    let config = vm.vm().config();
    let what = format!("{what}, {:?}, {:?}", config.guest, config.backing);
    let seen = result.unwrap_or_else(|violation| panic!("{what}: {violation}"));
    println!("{what}: {seen:?}");
    assert!(seen.pages > 1000, "{what}: {seen:?}");
    // The guest's own check has found nothing wrong either.
    assert_eq!(vm.vm().state(), VmState::Paused);
}

fn all_conform(guest: GuestKind) {
    let huge = HugePages::reserve(BYTES / (2 << 20));
    for backing in [Backing::Private, Backing::Memfd, Backing::Huge] {
        if backing == Backing::Huge && huge.is_none() {
            continue;
        }
        let vm = writing(guest, backing);
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

#[test]
fn i5_write_protection_sees_what_a_kvm_guest_writes() {
    let Some(_kvm) = kvm() else { return };
    let _turn = turn();
    for backing in [Backing::Private, Backing::Memfd] {
        let vm = writing(GuestKind::Kvm, backing);
        let mut log = WriteProtectLog::new(Arc::clone(vm.vm().memory()));
        let memory = SourceVm::memory(&*vm);
        let result = check_dirty_log(&*memory, &mut log, &*vm, &Effort::default());
        conforms(&vm, "write-protection", result);
    }
}
