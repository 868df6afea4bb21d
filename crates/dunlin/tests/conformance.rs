//! The conformance kit: the VMMs of two examples pass it, and it names the contract that a faulty
//! VMM breaks.
#![allow(clippy::unwrap_used)]
#![allow(clippy::duplicate_mod, reason = "each example is complete by itself")]

#[allow(dead_code)]
#[path = "../examples/smallest.rs"]
mod smallest;
#[allow(dead_code)]
#[path = "../examples/two_logs.rs"]
mod two_logs;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::SeqCst};
use std::time::Duration;

use dunlin::engine::vmm::{
    Builder, Built, DestinationVm, DirtyLog, GuestMemory, Offered, Refusal, RunState, Section,
    SourceVm, VmDescription, VmmError,
};
use dunlin::testing::{
    Conformance, Effort, Violation, Vmm, check_arrival, check_control, check_state, check_vmm,
};

/// An example's VMM under test.
struct Example<B, V> {
    builder: B,
    start: fn() -> Result<Arc<V>, VmmError>,
    last: fn(&B) -> Option<Arc<V>>,
}

impl<B: Builder, V: SourceVm + 'static> Vmm for Example<B, V> {
    fn start(&mut self) -> Result<Arc<dyn SourceVm>, VmmError> {
        let vm = (self.start)()?;
        vm.resume()?;
        Ok(vm)
    }

    fn builder(&mut self) -> &mut dyn Builder {
        &mut self.builder
    }

    fn built(&mut self) -> Option<Arc<dyn SourceVm>> {
        (self.last)(&self.builder).map(|vm| vm as _)
    }
}

/// Builds VMs of the smallest example; keeps the last one.
#[derive(Default)]
struct Smallest(Option<Arc<smallest::Vm>>);

impl Builder for Smallest {
    fn build(&mut self, _: &Offered) -> Built {
        let vm = smallest::Vm::new().unwrap();
        self.0 = Some(vm.clone());
        Ok(vm)
    }
}

fn smallest() -> Example<Smallest, smallest::Vm> {
    Example {
        builder: Smallest::default(),
        start: smallest::Vm::new,
        last: |machines| machines.0.clone(),
    }
}

fn two_logs() -> Example<two_logs::Machines, two_logs::Vm> {
    Example {
        builder: two_logs::Machines::default(),
        start: two_logs::Vm::new,
        last: |machines| machines.0.clone(),
    }
}

#[test]
fn the_examples_keep_what_the_traits_promise() {
    let seen = check_vmm(&mut smallest(), &Effort::default()).unwrap();
    assert!(!seen.throttles);
    assert_eq!(seen.unsteady, [""; 0]);
    let seen = check_vmm(&mut two_logs(), &Effort::default()).unwrap();
    assert!(seen.throttles);
    assert!(seen.dirty.pages > 100, "{seen:?}");
}

/// The kit can test the source alone, for a VMM that cannot receive a VM yet. It can also test the
/// state or the arrival alone.
#[test]
fn each_part_of_a_vmm_is_tested_by_itself() {
    let effort = Effort::default();
    for (fault, expected) in [
        (None, ""),
        (Some(Fault::RunStateLies), "SourceVm::run_state"),
    ] {
        let vm = two_logs::Vm::new().unwrap();
        let source: Arc<dyn SourceVm> = match fault {
            Some(fault) => Faulty::new(vm, fault),
            None => vm,
        };
        match check_control(&*source, &effort) {
            Ok(throttles) => assert!(throttles && fault.is_none()),
            Err(Violation::Broken { method, .. }) => assert_eq!(method, expected),
            Err(other) => panic!("{other}"),
        }
    }
    assert_eq!(check_state(&mut two_logs(), &effort).unwrap(), [""; 0]);
    check_arrival(&mut two_logs(), &effort).unwrap();
}

/// How a faulty VMM deviates from the VMM that it wraps.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// One of the VM's two logs is left out.
    LogForgets,
    /// A log reports each page again and again.
    LogKeeps,
    /// A pause has no effect, but the VM reports that it is paused.
    PauseDoesNot,
    /// The device's section of the state is not loaded.
    StateIsLost,
    /// The reported run state is always running.
    RunStateLies,
    /// Each description differs.
    DescribeVaries,
    /// Throttling is reported and has no effect.
    ThrottleIdles,
    /// Every version of a section is accepted.
    VersionIgnored,
    /// Memory is written while the state is saved.
    SaveWrites,
    /// The built VM runs before it is resumed.
    BuildRuns,
    /// A call of `resume` leaves the VM paused.
    ResumeIdles,
    /// The source's VM is resumed instead of destroyed.
    DestroyIdles,
}

/// A VM with a fault, on either side.
struct Faulty {
    vm: Arc<two_logs::Vm>,
    fault: Fault,
    /// How many times the VM has been described.
    described: AtomicU8,
    /// Whether the VM claims to be paused.
    paused: AtomicBool,
}

impl Faulty {
    fn new(vm: Arc<two_logs::Vm>, fault: Fault) -> Arc<Self> {
        Arc::new(Self {
            vm,
            fault,
            described: AtomicU8::new(0),
            paused: AtomicBool::new(false),
        })
    }
}

/// A log that repeats every page that it has reported.
struct Keeps(Box<dyn DirtyLog>, Vec<Vec<u64>>);

impl DirtyLog for Keeps {
    fn start(&mut self) -> io::Result<()> {
        self.1.clear();
        self.0.start()
    }

    fn fetch(&mut self, found: &mut dyn FnMut(usize, &[u64])) -> io::Result<()> {
        let kept = &mut self.1;
        self.0.fetch(&mut |index, words| {
            kept.resize_with(kept.len().max(index + 1), Vec::new);
            kept[index].resize(words.len(), 0);
            for (kept, word) in kept[index].iter_mut().zip(words) {
                *kept |= word;
            }
            found(index, &kept[index]);
        })
    }

    fn stop(&mut self) -> io::Result<()> {
        self.0.stop()
    }
}

impl SourceVm for Faulty {
    fn describe(&self) -> Result<VmDescription, VmmError> {
        let mut described = self.vm.describe()?;
        if self.fault == Fault::DescribeVaries {
            let before = self.described.fetch_add(1, SeqCst);
            described.description.push(before);
        }
        Ok(described)
    }

    fn memory(&self) -> Arc<dyn GuestMemory> {
        SourceVm::memory(&*self.vm)
    }

    fn dirty_logs(&self) -> Vec<Box<dyn DirtyLog>> {
        let mut logs = self.vm.dirty_logs();
        match self.fault {
            Fault::LogForgets => logs.truncate(1),
            Fault::LogKeeps => {
                let log = logs.pop().unwrap();
                logs.push(Box::new(Keeps(log, Vec::new())));
            }
            _ => {}
        }
        logs
    }

    fn run_state(&self) -> RunState {
        match self.fault {
            Fault::RunStateLies => RunState::Running,
            // Claim to be paused, because the kit must find the fault without the help of the
            // reported state.
            Fault::PauseDoesNot if self.paused.load(SeqCst) => RunState::Paused,
            _ => self.vm.run_state(),
        }
    }

    fn pause(&self) -> Result<(), VmmError> {
        if self.fault == Fault::PauseDoesNot {
            self.paused.store(true, SeqCst);
            return Ok(());
        }
        self.vm.pause()
    }

    fn resume(&self) -> Result<(), VmmError> {
        self.paused.store(false, SeqCst);
        SourceVm::resume(&*self.vm)
    }

    fn throttle(&self, percent: u8) -> Result<bool, VmmError> {
        match self.fault {
            Fault::ThrottleIdles => Ok(true),
            _ => self.vm.throttle(percent),
        }
    }

    fn save(&self) -> Result<Vec<Section>, VmmError> {
        if self.fault == Fault::SaveWrites {
            let memory = SourceVm::memory(&*self.vm);
            memory.slice(1, 4096 * 7, 1)?.copy_from(&[0x55_u8]);
        }
        self.vm.save()
    }

    fn deactivate(&self) -> Result<(), VmmError> {
        self.vm.deactivate()
    }

    fn reactivate(&self) -> Result<(), VmmError> {
        self.vm.reactivate()
    }

    fn hold(&self) -> Result<(), VmmError> {
        self.vm.hold()
    }

    fn destroy(&self) {
        if self.fault != Fault::DestroyIdles {
            self.vm.destroy();
        } else {
            SourceVm::resume(&*self.vm).unwrap();
        }
    }
}

impl DestinationVm for Faulty {
    fn memory(&self) -> Arc<dyn GuestMemory> {
        SourceVm::memory(self)
    }

    fn load(&self, sections: &[Section]) -> Result<(), VmmError> {
        let mut sections = sections.to_vec();
        match self.fault {
            Fault::StateIsLost => sections.retain(|section| section.name != "device"),
            Fault::VersionIgnored => {
                for section in &mut sections {
                    section.version = 1;
                }
            }
            _ => {}
        }
        self.vm.load(&sections)
    }

    fn acquire(&self) -> Result<(), VmmError> {
        self.vm.acquire()
    }

    fn resume(&self) -> Result<Option<Duration>, VmmError> {
        match self.fault {
            Fault::ResumeIdles => Ok(None),
            _ => DestinationVm::resume(&*self.vm),
        }
    }

    fn announce(&self) {
        self.vm.announce();
    }

    fn discard(&self) {
        self.vm.discard();
    }
}

struct FaultyVmm {
    fault: Fault,
    machines: two_logs::Machines,
    built: Option<Arc<Faulty>>,
}

impl Vmm for FaultyVmm {
    fn start(&mut self) -> Result<Arc<dyn SourceVm>, VmmError> {
        let vm = two_logs::Vm::new()?;
        SourceVm::resume(&*vm)?;
        Ok(Faulty::new(vm, self.fault))
    }

    fn builder(&mut self) -> &mut dyn Builder {
        self
    }

    fn built(&mut self) -> Option<Arc<dyn SourceVm>> {
        self.built.clone().map(|vm| vm as _)
    }
}

impl Builder for FaultyVmm {
    fn build(&mut self, offered: &Offered) -> Result<Arc<dyn DestinationVm>, Refusal> {
        self.machines.build(offered)?;
        let vm = self.machines.0.take().unwrap();
        if self.fault == Fault::BuildRuns {
            SourceVm::resume(&*vm).unwrap();
        }
        let vm = Faulty::new(vm, self.fault);
        self.built = Some(Arc::clone(&vm));
        Ok(vm)
    }
}

fn check(fault: Fault) -> Result<Conformance, Violation> {
    let mut vmm = FaultyVmm {
        fault,
        machines: two_logs::Machines::default(),
        built: None,
    };
    let effort = Effort::default();
    check_vmm(&mut vmm, &effort)
}

#[test]
fn every_broken_contract_is_reported_with_its_method() {
    for (fault, sentence) in [
        (
            Fault::LogForgets,
            "DirtyLog::fetch promises to report every earlier write; ",
        ),
        (
            Fault::LogKeeps,
            "DirtyLog::fetch promises that it clears the log; page ",
        ),
        (
            Fault::PauseDoesNot,
            "SourceVm::pause promises that nothing writes guest memory once it has returned; page ",
        ),
        (
            Fault::StateIsLost,
            "DestinationVm::load promises that a VM that has loaded a state saves the same state again; \
             required section `device` (instance 0, version 1) differs, first at byte 0 of 8",
        ),
        (
            Fault::RunStateLies,
            "SourceVm::run_state promises that it returns the guest's run state; after pause",
        ),
        (
            Fault::DescribeVaries,
            "SourceVm::describe promises that a VM has the same description in every attempt",
        ),
        (
            Fault::ThrottleIdles,
            "SourceVm::throttle promises that a throttled guest writes less",
        ),
        (
            Fault::VersionIgnored,
            "DestinationVm::load promises that a required section with an unsupported name",
        ),
        (
            Fault::SaveWrites,
            "SourceVm::save promises that it does not write guest \
             memory; page 7 of region 1 changed",
        ),
        (Fault::BuildRuns, "Builder::build promises that the VM"),
        (
            Fault::ResumeIdles,
            "DestinationVm::resume promises that the guest runs at the destination",
        ),
        (
            Fault::DestroyIdles,
            "SourceVm::destroy promises that the copy at the source never runs again",
        ),
    ] {
        let violation = match check(fault) {
            Err(violation) => violation,
            Ok(seen) => panic!("{fault:?} was not found: {seen:?}"),
        };
        let text = violation.to_string();
        assert!(text.starts_with(sentence), "{fault:?}: {text}");
    }
}
