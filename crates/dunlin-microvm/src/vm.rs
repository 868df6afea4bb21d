//! The machine itself.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use dunlin_sys::kvm::{Machine, Vcpu};
use dunlin_sys::mapping::{MappingError, TrackedMemory, allocate};
use kvm_bindings::MsrList;
use kvm_ioctls::Kvm;
use thiserror::Error;
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use crate::config::{Config, ConfigError, Workload};
use crate::control::{Control, ControlError, VmState};
use crate::describe::{DescribeError, Host, VmDescription, same_rate};
use crate::dirty::{DirtyError, DirtyLog};
use crate::heart::Heart;
use crate::layout::{DEVICE_BYTES, DEVICE_START, block};
use crate::pace::Pace;
use crate::state::{LoadError, Own, Parts, SaveError, Section};
use crate::vcpu::{Shared, Slot};
use crate::{boot, fill, vcpu};

/// A virtual machine. Every method may be called from any thread.
///
/// Dropping it ends the guest and joins its threads.
#[derive(Debug)]
pub struct Vm {
    description: VmDescription,
    machine: Arc<Machine>,
    shared: Arc<Shared>,
    dirty: DirtyLog,
    msrs: MsrList,
    threads: Vec<JoinHandle<()>>,
    /// Whether memory and registers are those of a guest before its first instruction.
    bootable: bool,
}

/// What a machine has done so far. Counters go on across a migration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Pages that the guest has read, found right and written to.
    pub pages_checked: u64,
    /// Beats of all vCPUs.
    pub beats: u64,
    /// CLOCK_MONOTONIC at the last beat here, in nanoseconds.
    pub last_beat_ns: Option<u64>,
    /// The longest time between two beats of one vCPU, pauses and moves included.
    pub largest_gap: Duration,
    /// After a move: from the last beat at the source to the first one here.
    pub downtime: Option<Duration>,
}

/// Why a machine could not be built.
#[derive(Debug, Error)]
pub enum CreateError {
    /// No machine can be like that.
    #[error("the machine's configuration is impossible")]
    Config(#[from] ConfigError),
    /// This host cannot run it.
    #[error("this host cannot run the machine")]
    Describe(#[from] DescribeError),
    /// There is no memory for it.
    #[error("the machine's memory cannot be had")]
    Memory(#[from] MappingError),
    /// KVM, or the kernel, refused.
    #[error("cannot {step}")]
    Kernel {
        /// What was tried.
        step: &'static str,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
}

/// Why guest memory could not be read or written on behalf of the VMM.
#[derive(Debug, Error)]
pub enum AccessError {
    /// The bytes lie outside the pages that belong to the VMM's device.
    #[error("{bytes} bytes at {offset} lie outside the device's {DEVICE_BYTES}")]
    Device {
        /// From the start of the device's pages.
        offset: u64,
        /// How many.
        bytes: usize,
    },
    /// Guest memory has no such address.
    #[error("guest memory cannot be accessed")]
    Memory(#[from] GuestMemoryError),
}

impl Vm {
    /// Builds a machine, paused before its first instruction, with the first content of its memory
    /// but for what [`Vm::fill`] adds.
    ///
    /// # Errors
    /// See [`CreateError`].
    pub fn new(config: Config) -> Result<Self, CreateError> {
        config.validate()?;
        let kvm = open_kvm()?;
        let host = Host::get(&kvm).map_err(kernel("ask KVM what this host offers"))?;
        let description = VmDescription {
            config,
            tsc_khz: host.tsc_khz,
            cpuid: host.cpuid.clone(),
        };
        let mut vm = Self::build(&kvm, host, description)?;
        let has_avx = vm.description.cpuid.has_avx();
        boot::write_memory(vm.memory(), &vm.description.config, has_avx)
            .map_err(|error| kernel("write the guest's program")(io::Error::other(error)))?;
        for (index, slot) in (0..).zip(&vm.shared.slots) {
            boot::set_registers(&slot.lock(), index, vm.description.config.seed, has_avx)
                .map_err(kernel("set the registers of a vCPU"))?;
        }
        vm.bootable = true;
        Ok(vm)
    }

    /// Builds the machine that a source has described, with zero memory, ready for [`Vm::load`].
    ///
    /// # Errors
    /// See [`CreateError`].
    pub fn from_description(description: &VmDescription) -> Result<Self, CreateError> {
        let kvm = open_kvm()?;
        let host = Host::get(&kvm).map_err(kernel("ask KVM what this host offers"))?;
        host.check(description)?;
        Self::build(&kvm, host, description.clone())
    }

    fn build(kvm: &Kvm, host: &Host, description: VmDescription) -> Result<Self, CreateError> {
        let config = &description.config;
        let memory = Arc::new(allocate(config.memory_bytes, config.backing)?);
        let machine = Machine::new(kvm, Arc::clone(&memory))
            .map(Arc::new)
            .map_err(kernel("create a virtual machine"))?;
        let slots = (0..config.vcpus)
            .map(|index| {
                let vcpu = machine.create_vcpu(index.into())?;
                description.cpuid.show(&vcpu, index)?;
                if !same_rate(description.tsc_khz, host.tsc_khz) {
                    vcpu.set_tsc_khz(description.tsc_khz)?;
                }
                Ok(Slot::new(vcpu))
            })
            .collect::<io::Result<Vec<_>>>()
            .map_err(kernel("create a vCPU"))?;
        let msrs = kvm
            .get_msr_index_list()
            .map_err(|error| kernel("list the MSRs")(error.into()))?;
        let shared = Arc::new(Shared {
            memory,
            control: Control::new(config.vcpus),
            heart: Heart::new(config.vcpus, description.tsc_khz),
            slots,
            power_off_at: AtomicU64::new(config.power_off_after.unwrap_or(u64::MAX)),
            pace: pace(config),
        });
        let mut vm = Self {
            machine,
            shared,
            dirty: DirtyLog::default(),
            msrs,
            threads: Vec::new(),
            bootable: false,
            description,
        };
        for index in 0..vm.description.config.vcpus {
            let shared = Arc::clone(&vm.shared);
            let thread = thread::Builder::new()
                .name(format!("vcpu-{index}"))
                .spawn(move || vcpu::thread(&shared, index))
                .map_err(kernel("start a vCPU's thread"))?;
            vm.threads.push(thread);
        }
        Ok(vm)
    }

    /// What a destination needs to build the same machine.
    pub fn description(&self) -> &VmDescription {
        &self.description
    }

    /// What the machine is like.
    pub fn config(&self) -> &Config {
        &self.description.config
    }

    /// The guest's memory. What is written through it is in the dirty log.
    pub fn memory(&self) -> &Arc<TrackedMemory> {
        &self.shared.memory
    }

    /// Gives the workload's pages their first content, on all CPUs. Call it before [`Vm::start`]; a
    /// guest that starts without finds its pages wrong.
    ///
    /// # Errors
    /// Started, if the machine is not a new one.
    pub fn fill(&self) -> Result<(), ControlError> {
        match self.state() {
            VmState::Created => {}
            state if state.has_ended() => return Err(ControlError::Ended(state)),
            _ => return Err(ControlError::Started),
        }
        fill::fill(self.memory(), self.config())
            .expect("the pages to fill lie within the configured memory");
        Ok(())
    }

    /// Starts a machine that was built by [`Vm::new`].
    ///
    /// # Errors
    /// Started or Ended; Empty, if the machine was built from a description.
    pub fn start(&self) -> Result<(), ControlError> {
        if !self.bootable {
            return Err(ControlError::Empty);
        }
        self.shared.control.run(VmState::Created)
    }

    /// Stops every vCPU. On return none is in the guest, nothing writes guest memory, and registers
    /// are consistent; until somebody resumes it. Does nothing on a machine that is not running.
    ///
    /// # Errors
    /// Ended, if the machine has ended, perhaps just now; it stands still all the same.
    pub fn pause(&self) -> Result<(), ControlError> {
        self.shared.control.pause(|| self.shared.kick_all())
    }

    /// Lets a paused machine go on, be it paused here or loaded. Does nothing on a running one.
    ///
    /// # Errors
    /// NotStarted or Ended.
    pub fn resume(&self) -> Result<(), ControlError> {
        self.shared.control.run(VmState::Paused)
    }

    /// The guest lives on another host now: this copy stays where it stands and can never run again
    /// (I1). Does nothing on a machine that has ended.
    pub fn give_away(&self) {
        self.shared
            .control
            .end(VmState::Moved, || self.shared.kick_all());
    }

    /// Slows the guest down to (100 - `percent`) % of its page visits.
    ///
    /// # Errors
    /// Throttle, above 99.
    pub fn throttle(&self, percent: u8) -> Result<(), ControlError> {
        if percent > 99 {
            return Err(ControlError::Throttle(percent));
        }
        self.shared.control.set_throttle(percent);
        Ok(())
    }

    /// Tells the guest to power itself off at its next beat.
    pub fn ask_power_off(&self) {
        self.shared.power_off_at.store(0, Ordering::Relaxed);
    }

    /// What the machine is doing.
    pub fn state(&self) -> VmState {
        self.shared.control.state()
    }

    /// Waits until the machine does not run any more, at most `limit`, and returns what it is doing.
    pub fn wait_while_running(&self, limit: Duration) -> VmState {
        self.shared
            .control
            .wait_while_running(Instant::now() + limit)
    }

    /// Waits until the machine has ended for good, at most `limit`, and returns what it is doing.
    pub fn wait_until_ended(&self, limit: Duration) -> VmState {
        self.shared.control.wait_until_ended(Instant::now() + limit)
    }

    /// After a move: waits for the guest's first beat here, at most `limit`, and says how long the
    /// guest was silent.
    pub fn wait_for_downtime(&self, limit: Duration) -> Option<Duration> {
        self.shared.heart.wait_for_downtime(limit)
    }

    /// What the machine has done so far.
    pub fn stats(&self) -> Stats {
        let pulse = self.shared.heart.pulse();
        Stats {
            pages_checked: self.shared.total(block::VISITS),
            beats: self.shared.total(block::BEATS),
            last_beat_ns: pulse.last_beat_ns,
            largest_gap: pulse.largest_gap,
            downtime: pulse.downtime,
        }
    }

    /// Passes that every page has seen: over each vCPU's slowest set.
    pub fn full_passes(&self) -> u64 {
        const PASS: u64 = 0x20;
        const COUNT: u64 = 0x08;
        let hot_set = matches!(self.config().workload, Workload::HotSet { .. });
        (0..self.config().vcpus)
            .flat_map(|vcpu| [(vcpu, block::SET_0), (vcpu, block::SET_1)])
            .filter(|&(_, set)| set == block::SET_0 || hot_set)
            .filter(|&(vcpu, set)| self.shared.counter(vcpu, set + COUNT) > 0)
            .map(|(vcpu, set)| self.shared.counter(vcpu, set + PASS))
            .min()
            .unwrap_or(0)
    }

    /// The last TSC that each vCPU has read.
    pub fn guest_tscs(&self) -> Vec<u64> {
        (0..self.config().vcpus)
            .map(|vcpu| self.shared.counter(vcpu, block::LAST_TSC))
            .collect()
    }

    /// Forgets the largest gap between beats, so that a new one can be measured.
    pub fn forget_largest_gap(&self) {
        self.shared.heart.forget_gap();
    }

    /// Writes to the pages that belong to the VMM's device, as a device does by itself: the guest
    /// does not take part, and the dirty log has it all the same. `offset` counts from
    /// [`DEVICE_START`].
    ///
    /// # Errors
    /// Device, if the bytes reach beyond [`DEVICE_BYTES`].
    pub fn vmm_write(&self, offset: u64, bytes: &[u8]) -> Result<(), AccessError> {
        let address = device_address(offset, bytes.len())?;
        Ok(self.memory().write_slice(bytes, address)?)
    }

    /// Reads from the pages that belong to the VMM's device.
    ///
    /// # Errors
    /// Device, if the bytes reach beyond [`DEVICE_BYTES`].
    pub fn vmm_read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), AccessError> {
        let address = device_address(offset, bytes.len())?;
        Ok(self.memory().read_slice(bytes, address)?)
    }

    /// Starts to log what is written from now on, by the guest and by the VMM.
    ///
    /// # Errors
    /// What KVM answered.
    pub fn start_dirty_log(&self) -> Result<(), DirtyError> {
        self.dirty.start(&self.machine)
    }

    /// What was written since the log was started or last fetched, which is cleared: for each
    /// region of [`Vm::memory`] one bit for each page of 4 KiB, least significant first.
    ///
    /// # Errors
    /// Off, or what KVM answered; nothing is lost from the log then but the region that KVM failed.
    pub fn fetch_dirty_log(&self) -> Result<Vec<Vec<u64>>, DirtyError> {
        self.dirty.fetch(&self.machine)
    }

    /// Puts a page back into the log, such as one that was fetched and then not sent.
    ///
    /// # Errors
    /// NoSuchPage.
    pub fn mark_dirty(&self, region: usize, page: u64) -> Result<(), DirtyError> {
        self.dirty.mark(&self.machine, region, page)
    }

    /// Stops logging.
    ///
    /// # Errors
    /// What KVM answered.
    pub fn stop_dirty_log(&self) -> Result<(), DirtyError> {
        self.dirty.stop(&self.machine)
    }

    /// Everything but the memory of a paused machine.
    ///
    /// # Errors
    /// NotPaused, or what KVM does not give.
    pub fn save(&self) -> Result<Vec<Section>, SaveError> {
        match self.state() {
            VmState::Created | VmState::Paused => {}
            state => return Err(SaveError::NotPaused(state)),
        }
        let own = Own {
            throttle_percent: self.shared.control.throttle_percent(),
            power_off_at: self.shared.power_off_at.load(Ordering::Relaxed),
        };
        self.with_parts(|parts| parts.save(own))
    }

    /// Takes over a source's state. The machine is paused afterwards, and [`Vm::resume`] lets it go
    /// on where the source was; its memory must be there by then.
    ///
    /// # Errors
    /// See [`LoadError`]. The machine has failed then and can only be dropped.
    pub fn load(&self, sections: &[Section]) -> Result<(), LoadError> {
        self.shared
            .control
            .load(|| {
                let own = self.with_parts(|parts| parts.load(sections))?;
                self.shared
                    .power_off_at
                    .store(own.power_off_at, Ordering::Relaxed);
                Ok::<_, LoadError>(own)
            })?
            .map(|own| self.shared.control.set_throttle(own.throttle_percent))
    }

    fn with_parts<T>(&self, work: impl FnOnce(&Parts<'_>) -> T) -> T {
        let guards: Vec<_> = self.shared.slots.iter().map(Slot::lock).collect();
        let vcpus: Vec<&Vcpu> = guards.iter().map(|guard| &**guard).collect();
        work(&Parts {
            vcpus: &vcpus,
            msrs: &self.msrs,
            heart: &self.shared.heart,
            tsc_khz: self.description.tsc_khz,
        })
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        self.shared.control.exit(|| self.shared.kick_all());
        for thread in self.threads.drain(..) {
            // A panic of that thread has been reported already.
            let _ = thread.join();
        }
    }
}

fn pace(config: &Config) -> Pace {
    match (config.workload, config.dirty_rate) {
        (Workload::Idle, _) => Pace::Idle,
        (_, 0) => Pace::Unpaced,
        (_, rate) => Pace::Rate(rate as f64 / f64::from(config.vcpus)),
    }
}

fn device_address(offset: u64, bytes: usize) -> Result<GuestAddress, AccessError> {
    match offset.checked_add(bytes as u64) {
        Some(end) if end <= DEVICE_BYTES => Ok(GuestAddress(DEVICE_START + offset)),
        _ => Err(AccessError::Device { offset, bytes }),
    }
}

fn open_kvm() -> Result<Kvm, CreateError> {
    Kvm::new().map_err(|error| kernel("open /dev/kvm")(error.into()))
}

fn kernel(step: &'static str) -> impl Fn(io::Error) -> CreateError {
    move |source| CreateError::Kernel { step, source }
}
