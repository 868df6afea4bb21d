//! The machine: creates, runs, observes and migrates a guest of either kind.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::kvm::{Machine, Vcpu};
use dunlin::engine::dirty::WriteProtectLog;
use dunlin::engine::memory::OwnWrites;
use dunlin::engine::vmm::DirtyLog;
use dunlin_linux::mapping::{MappingError, TrackedMemory, advise_huge_pages, allocate};
use kvm_bindings::MsrList;
use kvm_ioctls::Kvm;
use thiserror::Error;

use crate::common::Common;
use crate::config::{Config, ConfigError, GuestKind, HostOptions, Workload};
use crate::control::{ControlError, VmState};
use crate::describe::{DescribeError, Host, VmDescription, same_rate};
use crate::dirty::KvmLog;
use crate::layout::block;
use crate::state::{LoadError, Own, Parts, SaveError, Section};
use crate::vcpu::{Shared, Slot};
use crate::{boot, fill, process, vcpu};

/// A virtual machine. Every method may be called from any thread.
///
/// Dropping it ends the guest and joins its threads.
#[derive(Debug)]
pub struct Vm {
    description: VmDescription,
    guest: Guest,
    threads: Vec<JoinHandle<()>>,
    /// Whether [`Vm::start`] may start the machine. False for a machine that was built from a
    /// source's description: it waits for [`Vm::load`].
    bootable: bool,
}

/// The guest of a machine.
#[derive(Debug)]
enum Guest {
    Kvm {
        machine: Arc<Machine>,
        shared: Arc<Shared>,
        msrs: MsrList,
    },
    Process(Arc<process::Shared>),
}

/// Counters of a machine. A migration resets only `downtime`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Number of page visits. In each visit, the guest reads, verifies and writes the page.
    pub pages_checked: u64,
    /// Number of beats of all vCPUs. A *beat* is a message that a vCPU sends to the VMM about every
    /// millisecond.
    pub beats: u64,
    /// The longest time between two beats of one vCPU, or between the guest's last beat before a
    /// migration and its first beat afterwards.
    pub largest_gap: Duration,
    /// After a migration, the time from the last beat at the source to the first beat on this host.
    pub downtime: Option<Duration>,
}

/// Why a machine could not be built.
#[derive(Debug, Error)]
pub enum CreateError {
    /// The configuration is invalid.
    #[error("invalid machine configuration")]
    Config(#[from] ConfigError),
    /// This host, the destination, cannot run the machine of the description.
    #[error("the destination cannot run the machine")]
    Describe(#[from] DescribeError),
    /// The machine's memory could not be allocated.
    #[error("cannot allocate the machine's memory")]
    Memory(#[from] MappingError),
    /// This process cannot use KVM.
    #[error(
        "cannot open /dev/kvm, which a KVM guest needs: load the kvm module, \
         and run as root or in the group kvm"
    )]
    NoKvm(#[source] io::Error),
    /// KVM or another part of the kernel returned an error.
    #[error("cannot {step}")]
    Kernel {
        /// The failed step.
        step: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

impl Vm {
    /// Builds a machine that has not started, so the guest is before its first instruction. All
    /// memory has its initial content, except for the pages that [`Vm::fill`] writes.
    ///
    /// # Errors
    /// See [`CreateError`].
    pub fn with_options(config: Config, options: HostOptions) -> Result<Self, CreateError> {
        config.validate()?;
        if config.guest == GuestKind::Process {
            let mut vm = Self::build_process(VmDescription::of_process(config), options)?;
            vm.bootable = true;
            return Ok(vm);
        }
        let kvm = open_kvm()?;
        let host = Host::get(&kvm).map_err(kernel("query what KVM supports on this host"))?;
        let description = VmDescription {
            config,
            tsc_khz: host.tsc_khz,
            cpuid: host.cpuid.clone(),
        };
        let (mut vm, shared) = Self::build_kvm(&kvm, host, description, options)?;
        let has_avx = vm.description.cpuid.has_avx();
        boot::write_memory(vm.memory(), &vm.description.config, has_avx)
            .map_err(|error| kernel("write the guest's program")(io::Error::other(error)))?;
        for (index, slot) in (0..).zip(&shared.slots) {
            boot::set_registers(&slot.lock(), index, vm.description.config.seed, has_avx)
                .map_err(kernel("set the registers of a vCPU"))?;
        }
        vm.bootable = true;
        Ok(vm)
    }

    /// Builds the machine that a source has described, with zeroed memory, ready for
    /// [`Vm::load`].
    ///
    /// # Errors
    /// See [`CreateError`].
    pub fn from_description(
        description: &VmDescription,
        options: HostOptions,
    ) -> Result<Self, CreateError> {
        if description.config.guest == GuestKind::Process {
            description.config.validate()?;
            return Self::build_process(description.clone(), options);
        }
        let kvm = open_kvm()?;
        let host = Host::get(&kvm).map_err(kernel("query what KVM supports on this host"))?;
        host.check(description)?;
        Ok(Self::build_kvm(&kvm, host, description.clone(), options)?.0)
    }

    fn build_kvm(
        kvm: &Kvm,
        host: &Host,
        description: VmDescription,
        options: HostOptions,
    ) -> Result<(Self, Arc<Shared>), CreateError> {
        let config = &description.config;
        let memory = guest_memory(config, options)?;
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
            common: Common::new(memory, config, description.tsc_khz),
            slots,
        });
        let guest = Guest::Kvm {
            machine,
            shared: Arc::clone(&shared),
            msrs,
        };
        let mut vm = Self::assemble(description, guest);
        vm.spawn("vcpu", &shared, vcpu::thread)?;
        Ok((vm, shared))
    }

    fn build_process(
        description: VmDescription,
        options: HostOptions,
    ) -> Result<Self, CreateError> {
        let config = &description.config;
        let memory = guest_memory(config, options)?;
        let common = Common::new(memory, config, description.tsc_khz);
        let shared = Arc::new(process::Shared::new(common, config));
        let guest = Guest::Process(Arc::clone(&shared));
        let mut vm = Self::assemble(description, guest);
        vm.spawn("visitor", &shared, process::thread)?;
        Ok(vm)
    }

    fn assemble(description: VmDescription, guest: Guest) -> Self {
        Self {
            description,
            guest,
            threads: Vec::new(),
            bootable: false,
        }
    }

    /// Starts a thread for each vCPU. Each thread waits until the machine runs.
    fn spawn<S: Send + Sync + 'static>(
        &mut self,
        name: &str,
        shared: &Arc<S>,
        body: fn(&S, u8),
    ) -> Result<(), CreateError> {
        for index in 0..self.config().vcpus {
            let shared = Arc::clone(shared);
            let thread = thread::Builder::new()
                .name(format!("{name}-{index}"))
                .spawn(move || body(&shared, index))
                .map_err(kernel("start a vCPU's thread"))?;
            self.threads.push(thread);
        }
        Ok(())
    }

    fn common(&self) -> &Common {
        match &self.guest {
            Guest::Kvm { shared, .. } => &shared.common,
            Guest::Process(shared) => &shared.common,
        }
    }

    /// Makes every vCPU leave the guest. The threads of a process guest need no kick, because they
    /// poll the machine's state.
    fn kick_all(&self) {
        if let Guest::Kvm { shared, .. } = &self.guest {
            shared.kick_all();
        }
    }

    /// The description from which a destination builds the same machine.
    pub fn description(&self) -> &VmDescription {
        &self.description
    }

    /// The machine's configuration.
    pub fn config(&self) -> &Config {
        &self.description.config
    }

    /// The guest's memory. The logs of [`Vm::dirty_logs`] also record what the VMM writes through
    /// the returned object.
    pub fn memory(&self) -> &Arc<TrackedMemory> {
        &self.common().memory
    }

    /// Writes the initial content of the workload's pages, with one thread for each CPU of the
    /// process. Call it before [`Vm::start`], because the guest checks this content.
    ///
    /// # Errors
    /// `Started` or `Ended` if the machine is not new.
    pub fn fill(&self) -> Result<(), ControlError> {
        self.state().must_be_created()?;
        fill::fill(self.memory(), self.config())
            .expect("the pages to fill lie within the configured memory");
        Ok(())
    }

    /// Starts a machine built by [`Vm::with_options`].
    ///
    /// # Errors
    /// `Started` or `Ended`; `Empty` if the machine was built from a description.
    pub fn start(&self) -> Result<(), ControlError> {
        if !self.bootable {
            return Err(ControlError::Empty);
        }
        self.common().control.run(VmState::Created)
    }

    /// Stops every vCPU. From the return of this method until the machine is resumed, no vCPU runs
    /// the guest, and the registers are consistent. It has no effect on a machine that is not
    /// running.
    ///
    /// # Errors
    /// `Ended` if the machine has ended, possibly during the call. In this case, too, no vCPU runs.
    pub fn pause(&self) -> Result<(), ControlError> {
        self.common().control.pause(|| self.kick_all())
    }

    /// Resumes a machine that was paused on this host or has been loaded. It has no effect on a
    /// running machine.
    ///
    /// # Errors
    /// `NotStarted` or `Ended`.
    pub fn resume(&self) -> Result<(), ControlError> {
        self.common().control.run(VmState::Paused)
    }

    /// Marks this copy of the machine as moved, so that it can never run again (I1). It has no effect
    /// on a machine that has ended.
    pub fn give_away(&self) {
        self.common()
            .control
            .end(VmState::Moved, || self.kick_all());
    }

    /// Throttles the guest to (100 - `percent`) % of its rate of page visits.
    ///
    /// # Errors
    /// `Throttle` if `percent` is above 99.
    pub fn throttle(&self, percent: u8) -> Result<(), ControlError> {
        if percent > 99 {
            return Err(ControlError::Throttle(percent));
        }
        self.common().control.set_throttle(percent);
        Ok(())
    }

    /// Makes the guest power itself off at its next beat.
    pub fn ask_power_off(&self) {
        self.common().power_off_at.store(0, Ordering::Relaxed);
    }

    /// The state of the machine.
    pub fn state(&self) -> VmState {
        self.common().control.state()
    }

    /// Waits until the machine has ended, for at most `limit`, and returns its state.
    pub fn wait_until_ended(&self, limit: Duration) -> VmState {
        self.common()
            .control
            .wait_until_ended(Instant::now() + limit)
    }

    /// After a migration, waits for the guest's first beat on this host, for at most `limit`.
    /// Returns the downtime; `None` if there was no such beat.
    pub fn wait_for_downtime(&self, limit: Duration) -> Option<Duration> {
        self.common().heart.wait_for_downtime(limit)
    }

    /// The machine's counters.
    pub fn stats(&self) -> Stats {
        let pulse = self.common().heart.pulse();
        let (pages_checked, beats) = match &self.guest {
            Guest::Kvm { shared, .. } => (shared.total(block::VISITS), shared.total(block::BEATS)),
            Guest::Process(shared) => (shared.visits(), shared.beats()),
        };
        Stats {
            pages_checked,
            beats,
            largest_gap: pulse.largest_gap,
            downtime: pulse.downtime,
        }
    }

    /// The number of times that the guest has visited all pages. Each vCPU counts its passes over
    /// each of its page sets; the result is the lowest of these counts.
    pub fn full_passes(&self) -> u64 {
        const PASS: u64 = 0x20;
        const COUNT: u64 = 0x08;
        let shared = match &self.guest {
            Guest::Kvm { shared, .. } => shared,
            Guest::Process(shared) => return shared.full_passes(),
        };
        let hot_set = matches!(self.config().workload, Workload::HotSet { .. });
        (0..self.config().vcpus)
            .flat_map(|vcpu| [(vcpu, block::SET_0), (vcpu, block::SET_1)])
            .filter(|&(_, set)| set == block::SET_0 || hot_set)
            .filter(|&(vcpu, set)| shared.counter(vcpu, set + COUNT) > 0)
            .map(|(vcpu, set)| shared.counter(vcpu, set + PASS))
            .min()
            .unwrap_or(0)
    }

    /// Returns dirty logs, which are off. Together they record the writes of the guest and of the
    /// VMM to [`Vm::memory`]. If this method is called more than once, only the logs of one call
    /// may be on at the same time.
    pub fn dirty_logs(&self) -> Vec<Box<dyn DirtyLog>> {
        let memory = Arc::clone(self.memory());
        match &self.guest {
            Guest::Kvm { machine, .. } => vec![
                Box::new(KvmLog(Arc::clone(machine))),
                Box::new(OwnWrites::new(memory)),
            ],
            // This log records every write of this process, so the VMM's writes need no separate
            // log.
            Guest::Process(_) => vec![Box::new(WriteProtectLog::new(memory))],
        }
    }

    /// Saves the state of a paused or new machine, without its memory.
    ///
    /// # Errors
    /// `NotPaused`, or an error from KVM.
    pub fn save(&self) -> Result<Vec<Section>, SaveError> {
        match self.state() {
            VmState::Created | VmState::Paused => {}
            state => return Err(SaveError::NotPaused(state)),
        }
        let own = Own {
            throttle_percent: self.common().control.throttle_percent(),
            power_off_at: self.common().power_off_at.load(Ordering::Relaxed),
        };
        match &self.guest {
            Guest::Kvm { shared, msrs, .. } => {
                self.with_parts(shared, msrs, |parts| parts.save(own))
            }
            Guest::Process(shared) => Ok(shared.save(own)),
        }
    }

    /// Loads a source's state. Afterwards the machine is paused, and [`Vm::resume`] continues where
    /// the source stopped. All of the machine's memory must have arrived before the machine is
    /// resumed.
    ///
    /// # Errors
    /// See [`LoadError`]. After an error other than [`LoadError::Control`], the machine has failed
    /// and can only be dropped.
    pub fn load(&self, sections: &[Section]) -> Result<(), LoadError> {
        let common = self.common();
        let own = common.control.load(|| {
            let own = match &self.guest {
                Guest::Kvm { shared, msrs, .. } => {
                    self.with_parts(shared, msrs, |parts| parts.load(sections))?
                }
                Guest::Process(shared) => shared.load(sections)?,
            };
            // Store the value before another thread can resume the machine.
            common
                .power_off_at
                .store(own.power_off_at, Ordering::Relaxed);
            Ok::<_, LoadError>(own)
        })?;
        common.control.set_throttle(own.throttle_percent);
        Ok(())
    }

    fn with_parts<T>(
        &self,
        shared: &Shared,
        msrs: &MsrList,
        work: impl FnOnce(&Parts<'_>) -> T,
    ) -> T {
        let guards: Vec<_> = shared.slots.iter().map(Slot::lock).collect();
        let vcpus: Vec<&Vcpu> = guards.iter().map(|guard| &**guard).collect();
        work(&Parts {
            vcpus: &vcpus,
            msrs,
            heart: &shared.common.heart,
            tsc_khz: self.description.tsc_khz,
        })
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        self.common().control.exit(|| self.kick_all());
        for thread in self.threads.drain(..) {
            // The panic handler has already reported a panic of the thread.
            let _ = thread.join();
        }
    }
}

/// Allocates zeroed, unpopulated memory for the configuration.
fn guest_memory(config: &Config, options: HostOptions) -> Result<Arc<TrackedMemory>, MappingError> {
    let memory = allocate(config.memory_bytes, config.backing)?;
    if options.huge_pages {
        advise_huge_pages(&memory);
    }
    Ok(Arc::new(memory))
}

fn open_kvm() -> Result<Kvm, CreateError> {
    Kvm::new().map_err(|error| CreateError::NoKvm(error.into()))
}

fn kernel(step: &'static str) -> impl Fn(io::Error) -> CreateError {
    move |source| CreateError::Kernel { step, source }
}
