//! Migrations that lose or damage a single byte. The guest detects it; if both memories are compared,
//! the migration fails before the guest runs.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used)]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dunlin::engine::VmIs;
use dunlin::engine::source::Options;
use dunlin::engine::vmm::{
    Builder, DestinationVm, FaultCode, GuestMemory, Offered, Refusal, Section, VmmError,
};
use dunlin_microvm::{Config, MachineBuilder, Movable, StopCode, Vm, VmState, WORKLOAD_START};
use dunlin_test_base::kvm;
use support::moves::{Tls, attempt, movable, relocate, verified};
use support::wait_for;
use vm_memory::{Bytes, GuestAddress};

/// The page that is damaged. The damaged word in it is part of the content, or the number
/// of the pass.
const PAGE: u64 = WORKLOAD_START + 99 * 4096;
const CONTENT: u64 = 1000;
const PASS: u64 = 0;

/// When the destination damages the byte.
#[derive(Clone, Copy, PartialEq, Eq)]
enum When {
    /// The damage is done after memory has been compared, or would have been.
    Loading,
    /// Before it is hashed.
    Hashing,
}

/// Builds machines that damage one byte of their memory.
struct Damaging {
    machines: MachineBuilder,
    when: When,
    offset: u64,
    built: Option<Arc<Movable>>,
}

impl Damaging {
    fn new(when: When, offset: u64) -> Self {
        Self {
            machines: MachineBuilder::default(),
            when,
            offset,
            built: None,
        }
    }
}

struct Damaged {
    vm: Arc<Movable>,
    when: When,
    offset: u64,
    /// Whether the memory has been requested before. The first request is for the lanes, the second for
    /// the digest.
    asked: AtomicBool,
}

fn flip(vm: &Vm, offset: u64) {
    let address = GuestAddress(PAGE + offset);
    let byte: u8 = vm.memory().read_obj(address).unwrap();
    vm.memory().write_obj(byte ^ 1, address).unwrap();
}

impl Builder for Damaging {
    fn build(&mut self, offered: &Offered) -> Result<Arc<dyn DestinationVm>, Refusal> {
        self.machines.build(offered)?;
        let vm = self.machines.take().unwrap();
        self.built = Some(Arc::clone(&vm));
        Ok(Arc::new(Damaged {
            vm,
            when: self.when,
            offset: self.offset,
            asked: AtomicBool::new(false),
        }))
    }
}

impl DestinationVm for Damaged {
    fn memory(&self) -> Arc<dyn GuestMemory> {
        if self.asked.swap(true, Ordering::SeqCst) && self.when == When::Hashing {
            flip(self.vm.vm(), self.offset);
        }
        DestinationVm::memory(&*self.vm)
    }

    fn load(&self, sections: &[Section]) -> Result<(), VmmError> {
        if self.when == When::Loading {
            flip(self.vm.vm(), self.offset);
        }
        self.vm.load(sections)
    }

    fn acquire(&self) -> Result<(), VmmError> {
        self.vm.acquire()
    }

    fn resume(&self) -> Result<Option<Duration>, VmmError> {
        DestinationVm::resume(&*self.vm)
    }

    fn announce(&self) {
        self.vm.announce();
    }

    fn discard(&self) {
        self.vm.discard();
    }
}

fn guest() -> Arc<Movable> {
    let vm = movable(Config {
        working_set_bytes: Some(8 << 20),
        vcpus: 2,
        ..Config::default()
    });
    wait_for(vm.vm(), "a pass", |vm| vm.full_passes() >= 1);
    vm
}

#[test]
fn i3_one_damaged_byte_stops_the_guest_at_the_destination_with_its_code() {
    let Some(_turn) = kvm() else { return };
    let tls = Tls::new();
    for (offset, code) in [
        (CONTENT, StopCode::WrongContent),
        (PASS, StopCode::WrongPass),
    ] {
        let vm = guest();
        let mut builder = Damaging::new(When::Loading, offset);
        let moved = attempt(&vm, &tls, &verified(2), &mut builder, &|_| ());
        assert_eq!(moved.source.unwrap().digests_equal, Some(true));
        let there = builder.built.unwrap();
        let ended = there.vm().wait_until_ended(Duration::from_secs(10));
        let VmState::Stopped(stop) = ended else {
            panic!("{ended}");
        };
        assert_eq!((stop.code, stop.frame), (code, PAGE / 4096));
        assert_eq!(vm.vm().state(), VmState::Moved);
    }
}

#[test]
fn i3_one_damaged_byte_ends_a_verified_migration_and_the_next_one_works() {
    let Some(_turn) = kvm() else { return };
    let tls = Tls::new();
    let vm = guest();
    let mut builder = Damaging::new(When::Hashing, CONTENT);
    let moved = attempt(&vm, &tls, &verified(2), &mut builder, &|_| ());
    let error = moved.source.unwrap_err();
    assert_eq!(error.code(), FaultCode::VerificationFailed, "{error}");
    assert_eq!(error.vm, VmIs::AtSource);
    // The destination never ran it.
    let there = builder.built.take().unwrap();
    assert_eq!(there.vm().state(), VmState::Paused);
    let error = moved.destination.err().unwrap();
    assert_eq!(error.code(), FaultCode::VerificationFailed, "{error}");
    drop(there);
    // The guest continues where it was, undamaged.
    assert_eq!(vm.vm().state(), VmState::Running);
    let passes = vm.vm().full_passes();
    wait_for(vm.vm(), "two passes", |vm| vm.full_passes() >= passes + 2);
    let (there, report, _) = relocate(&vm, &tls, &verified(2));
    assert_eq!(report.digests_equal, Some(true));
    let passes = there.vm().full_passes();
    wait_for(there.vm(), "two passes", |vm| {
        vm.full_passes() >= passes + 2
    });
}

#[test]
fn i3_without_a_comparison_the_guest_itself_finds_the_damage() {
    let Some(_turn) = kvm() else { return };
    let vm = guest();
    let mut builder = Damaging::new(When::Loading, CONTENT);
    let options = Options::builder().verify(false).build().unwrap();
    let moved = attempt(&vm, &Tls::new(), &options, &mut builder, &|_| ());
    assert_eq!(moved.source.unwrap().digests_equal, None);
    let ended = builder
        .built
        .unwrap()
        .vm()
        .wait_until_ended(Duration::from_secs(10));
    assert!(ended.to_string().contains("code 2"), "{ended}");
}
