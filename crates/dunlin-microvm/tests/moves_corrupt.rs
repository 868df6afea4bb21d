//! Migrations that lose or damage a single byte. The guest detects damage in a page that it visits.
//! If the migration compares the memory of source and destination, damage before the comparison
//! makes the migration fail before the guest runs. The digests that `dunlin demo` compares after the
//! resume show damage in any page, except in a page that is damaged after its arrival and written
//! after the resume.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used)]

mod support;

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use dunlin::engine::source::Options;
use dunlin::engine::vmm::{
    Builder, DestinationVm, DirtyLog, FaultCode, GuestMemory, Offered, Refusal, RunState, Section,
    SourceVm, VmDescription, VmmError,
};
use dunlin::engine::{Event, VmIs};
use dunlin_microvm::{
    Config, DEVICE_START, GuestKind, HostOptions, MachineBuilder, Movable, StopCode, Vm, VmState,
    WORKLOAD_START,
};
use dunlin_test_base::kvm;
use support::moves::{Tls, attempt, movable, relocate, unverified, verified};
use support::{vmm_read, vmm_write, wait_for};
use vm_memory::{Bytes, GuestAddress};

/// Address of the damaged page, and the possible offsets of the damaged word in the page: a word of
/// the content, or the pass count.
const PAGE: u64 = WORKLOAD_START + 99 * 4096;
const CONTENT: u64 = 1000;
const PASS: u64 = 0;

/// Offset from [`PAGE`] of a filled page that the guest does not visit.
const COLD: u64 = 20 << 20;
/// Number of the 2 MiB block that contains the page at [`COLD`], and number of the block that
/// contains the pages at [`DEVICE_START`].
const COLD_BLOCK: usize = ((PAGE + COLD) >> 21) as usize;
const DEVICE_BLOCK: usize = (DEVICE_START >> 21) as usize;

/// When the destination damages a byte of the memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum When {
    Never,
    /// When the state is loaded, which is after any comparison of the memories.
    Loading,
    /// Before the memory is hashed for the comparison.
    Hashing,
    /// Immediately before the guest resumes.
    Resuming,
}

/// Builds machines that damage one byte of their own memory.
struct Damaging {
    machines: MachineBuilder,
    when: When,
    offset: u64,
    built: Option<Arc<Movable>>,
}

impl Damaging {
    fn new(when: When, offset: u64) -> Self {
        Self {
            machines: MachineBuilder::new(HostOptions::default().digests(true)),
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
    /// Whether the memory has been requested before. The first request is for the lanes, and the
    /// second is for the digest.
    asked: AtomicBool,
}

fn flip(vm: &Vm, offset: u64) {
    let address = GuestAddress(PAGE.wrapping_add(offset));
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
        if self.when == When::Resuming {
            flip(self.vm.vm(), self.offset);
        }
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
    guest_of(GuestKind::Kvm)
}

fn guest_of(kind: GuestKind) -> Arc<Movable> {
    let vm = movable(Config {
        guest: kind,
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
    // The destination has loaded the guest, but has never run it.
    let there = builder.built.take().unwrap();
    assert_eq!(there.vm().state(), VmState::Paused);
    let error = moved.destination.err().unwrap();
    assert_eq!(error.code(), FaultCode::VerificationFailed, "{error}");
    drop(there);
    // The guest continues at the source, undamaged.
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

/// The kinds of guest that this host can run, and the guard that lets one test use KVM at a time.
fn kinds() -> (Option<MutexGuard<'static, ()>>, Vec<GuestKind>) {
    let turn = kvm();
    let on_kvm = turn.as_ref().map(|_| GuestKind::Kvm);
    let kinds = on_kvm.into_iter().chain([GuestKind::Process]).collect();
    (turn, kinds)
}

/// Returns the numbers of the 2 MiB blocks in which two memories differ.
fn differences(source: &[u64], destination: &[u64]) -> Vec<usize> {
    assert_eq!(source.len(), destination.len());
    let blocks = 0..source.len();
    blocks
        .filter(|block| source[*block] != destination[*block])
        .collect()
}

#[test]
fn i3_a_byte_damaged_between_the_last_write_and_the_resume_is_in_the_digests() {
    let (_turn, kinds) = kinds();
    let tls = Tls::new();
    for kind in kinds {
        for (when, found) in [
            (When::Never, &[][..]),
            (When::Loading, &[COLD_BLOCK]),
            (When::Resuming, &[COLD_BLOCK]),
        ] {
            let vm = guest_of(kind);
            let mut builder = Damaging::new(when, COLD + CONTENT);
            let moved = attempt(&vm, &tls, &unverified(), &mut builder, &|_| ());
            assert_eq!(moved.source.unwrap().digests_equal, None);
            moved.destination.unwrap();
            let there = builder.built.unwrap();
            let theirs = there.digests_at_resume().unwrap();
            assert_eq!(
                differences(&vm.digests().unwrap(), &theirs),
                found,
                "{kind:?}"
            );
            let passes = there.vm().full_passes();
            wait_for(there.vm(), "two passes", |vm| {
                vm.full_passes() >= passes + 2
            });
        }
    }
}

/// Tests a limit of the digests. If a page is written after the resume and before the digests are
/// computed, the digest from its arrival is used. The damage happens after that digest was
/// computed, so the digests do not show it.
#[test]
fn i3_a_byte_damaged_in_a_page_that_is_written_after_the_resume_is_not_in_the_digests() {
    let (_turn, kinds) = kinds();
    let tls = Tls::new();
    for kind in kinds {
        let vm = guest_of(kind);
        let mut builder = Damaging::new(When::Loading, DEVICE_START.wrapping_sub(PAGE));
        let moved = attempt(&vm, &tls, &unverified(), &mut builder, &|_| ());
        moved.source.unwrap();
        moved.destination.unwrap();
        let there = builder.built.unwrap();
        vmm_write(there.vm(), 100, &[7]);
        let theirs = there.digests_at_resume().unwrap();
        let found = differences(&vm.digests().unwrap(), &theirs);
        assert!(found.is_empty(), "{kind:?}");
        let mut byte = [0];
        vmm_read(there.vm(), 0, &mut byte);
        assert_eq!(byte, [1], "the damaged byte was overwritten");
    }
}

/// A machine with a dirty log that never reports the page at [`DEVICE_START`].
struct Forgetful(Arc<Movable>);

struct ForgetfulLog(Box<dyn DirtyLog>);

impl DirtyLog for ForgetfulLog {
    fn start(&mut self) -> io::Result<()> {
        self.0.start()
    }

    fn fetch(&mut self, found: &mut dyn FnMut(usize, &[u64])) -> io::Result<()> {
        const PAGE: usize = (DEVICE_START / 4096) as usize;
        self.0.fetch(&mut |index, words| {
            let mut words = words.to_vec();
            words[PAGE / 64] &= !(1 << (PAGE % 64));
            found(index, &words);
        })
    }

    fn stop(&mut self) -> io::Result<()> {
        self.0.stop()
    }
}

impl SourceVm for Forgetful {
    fn describe(&self) -> Result<VmDescription, VmmError> {
        self.0.describe()
    }

    fn memory(&self) -> Arc<dyn GuestMemory> {
        SourceVm::memory(&*self.0)
    }

    fn dirty_logs(&self) -> Vec<Box<dyn DirtyLog>> {
        let logs = self.0.dirty_logs().into_iter();
        logs.map(|log| Box::new(ForgetfulLog(log)) as Box<dyn DirtyLog>)
            .collect()
    }

    fn run_state(&self) -> RunState {
        self.0.run_state()
    }

    fn pause(&self) -> Result<(), VmmError> {
        self.0.pause()
    }

    fn resume(&self) -> Result<(), VmmError> {
        SourceVm::resume(&*self.0)
    }

    fn save(&self) -> Result<Vec<Section>, VmmError> {
        self.0.save()
    }

    fn destroy(&self) {
        self.0.destroy();
    }
}

#[test]
fn i3_a_page_that_the_dirty_log_misses_is_in_the_digests() {
    let (_turn, kinds) = kinds();
    let tls = Tls::new();
    for kind in kinds {
        for forgets in [false, true] {
            let vm = guest_of(kind);
            vmm_write(vm.vm(), 0, &[1]);
            // By the end of the first iteration, the page has been sent. A write at this time must
            // be in the dirty log.
            let written = AtomicBool::new(false);
            let on_event = |event: &Event| {
                if matches!(event, Event::Iterated(_)) && !written.swap(true, Ordering::SeqCst) {
                    vmm_write(vm.vm(), 0, &[2]);
                }
            };
            let mut builder = Damaging::new(When::Never, 0);
            let moved = if forgets {
                let forgetful = Arc::new(Forgetful(Arc::clone(&vm)));
                attempt(&forgetful, &tls, &unverified(), &mut builder, &on_event)
            } else {
                attempt(&vm, &tls, &unverified(), &mut builder, &on_event)
            };
            moved.source.unwrap();
            moved.destination.unwrap();
            assert!(written.into_inner());
            let there = builder.built.unwrap();
            // Now the page has the same content on both hosts. For a page that is written after the
            // resume, the destination uses the digest of the content that arrived. So the digests
            // differ if the dirty log missed the write at the source.
            vmm_write(there.vm(), 0, &[2]);
            let theirs = there.digests_at_resume().unwrap();
            let found = differences(&vm.digests().unwrap(), &theirs);
            let expected = if forgets { &[DEVICE_BLOCK][..] } else { &[] };
            assert_eq!(found, expected, "{kind:?}");
        }
    }
}

/// The lanes do not carry the content of zero pages, so the digest of a page that becomes zero is
/// tested separately.
#[test]
fn i3_a_page_that_becomes_zero_on_the_way_is_equal_in_the_digests() {
    let (_turn, kinds) = kinds();
    let tls = Tls::new();
    for kind in kinds {
        let vm = guest_of(kind);
        vmm_write(vm.vm(), 0, &[1]);
        let on_event = |event: &Event| {
            if matches!(event, Event::Iterated(_)) {
                vmm_write(vm.vm(), 0, &[0]);
            }
        };
        let mut builder = Damaging::new(When::Never, 0);
        let moved = attempt(&vm, &tls, &unverified(), &mut builder, &on_event);
        moved.source.unwrap();
        moved.destination.unwrap();
        let there = builder.built.unwrap();
        // After this write, the destination uses the digest from the page's arrival.
        vmm_write(there.vm(), 0, &[0]);
        let theirs = there.digests_at_resume().unwrap();
        assert!(differences(&vm.digests().unwrap(), &theirs).is_empty());
    }
}
