//! Implements the engine's traits for the machine, for the source and for the destination.

use std::io;
use std::mem;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::cgroup;
use dunlin::engine::fault_behind;
use dunlin::engine::memory::MappedMemory;
use dunlin::engine::vmm::{
    Builder, DestinationVm, DirtyLog, FaultCode, GuestMemory, Offered, Refusal, RunState, Section,
    SourceVm, VmDescription as Described, VmmError,
};
use dunlin::lane::sync::lock;
use dunlin_linux::mapping::{Backing, HUGE_PAGE_BYTES, PAGE_BYTES, layout};
use dunlin_proto::text::chain;

use crate::config::HostOptions;
use crate::control::VmState;
use crate::describe::VmDescription;
use crate::digests::{DigestedMemory, PageDigests};
use crate::vm::{CreateError, Vm};

/// How long to wait for the guest's first beat at the destination. The downtime ends with this
/// beat. The guest sends a beat about every millisecond.
const FIRST_BEAT_LIMIT: Duration = Duration::from_millis(100);

/// A machine that can be migrated or is being received.
pub struct Movable {
    vm: Arc<Vm>,
    memory: Arc<DigestedMemory>,
    /// The logs of the guest's writes since it resumed here. [`Movable::digests_at_resume`] takes
    /// them. Empty if no digests are kept, or if the logs could not be started.
    since_resume: Mutex<Vec<Box<dyn DirtyLog>>>,
}

impl Movable {
    /// Makes `vm` migratable.
    #[must_use]
    pub fn new(vm: Arc<Vm>) -> Arc<Self> {
        Self::with_digests(vm, false)
    }

    fn with_digests(vm: Arc<Vm>, kept: bool) -> Arc<Self> {
        let backing_page_bytes = match vm.config().backing {
            Backing::Private | Backing::Memfd => PAGE_BYTES,
            Backing::Huge => HUGE_PAGE_BYTES,
        };
        let backing_page_bytes = u32::try_from(backing_page_bytes).unwrap_or(u32::MAX);
        let mapped = MappedMemory::new(Arc::clone(vm.memory()), backing_page_bytes);
        let digests = if kept {
            PageDigests::of_zeros(mapped.regions())
        } else {
            PageDigests::default()
        };
        Arc::new(Self {
            vm,
            memory: Arc::new(DigestedMemory { mapped, digests }),
            since_resume: Mutex::default(),
        })
    }

    /// Computes one digest for each 2 MiB of memory. Nothing may write to the memory during this
    /// call.
    ///
    /// # Errors
    /// The memory cannot be read.
    pub fn digests(&self) -> io::Result<Vec<u64>> {
        Ok(PageDigests::of(&*self.memory)?.blocks())
    }

    /// Returns one digest for each 2 MiB of an arrived machine's memory, as the memory was when the
    /// guest resumed. The guest may run during this call. For a page that was written after the
    /// resume, the call uses the digest that a lane computed when the page arrived.
    ///
    /// Call this method once, before the next migration. The machine must have been built with
    /// [`HostOptions::digests`].
    ///
    /// # Errors
    /// The memory or the log of the guest's writes cannot be read, or no log was started at the
    /// resume.
    pub fn digests_at_resume(&self) -> Result<Vec<u64>, VmmError> {
        let mut logs = mem::take(&mut *lock(&self.since_resume));
        if logs.is_empty() {
            return Err("no log of the writes since the guest resumed".into());
        }
        let now = PageDigests::of(&*self.memory)?;
        let regions = self.memory.regions().iter();
        let words = regions.map(|region| vec![0; region.pages().div_ceil(64) as usize]);
        let mut written: Vec<Vec<u64>> = words.collect();
        for log in &mut logs {
            log.fetch(&mut |region, words| {
                let all = written[region].iter_mut().zip(words);
                all.for_each(|(all, words)| *all |= words);
            })?;
            log.stop()?;
        }
        self.memory.digests.replace(&now, &written);
        Ok(self.memory.digests.blocks())
    }

    /// The machine.
    #[must_use]
    pub fn vm(&self) -> &Arc<Vm> {
        &self.vm
    }
}

impl SourceVm for Movable {
    fn describe(&self) -> Result<Described, VmmError> {
        let description = self.vm.description();
        Ok(Described {
            uuid: description.config.uuid,
            name: description.config.name.clone(),
            description: description.encode(),
        })
    }

    fn memory(&self) -> Arc<dyn GuestMemory> {
        Arc::clone(&self.memory) as _
    }

    fn dirty_logs(&self) -> Vec<Box<dyn DirtyLog>> {
        self.vm.dirty_logs()
    }

    fn run_state(&self) -> RunState {
        match self.vm.state() {
            VmState::Running => RunState::Running,
            VmState::Created | VmState::Paused => RunState::Paused,
            VmState::PoweredOff => RunState::PoweredOff,
            ended @ (VmState::Stopped(_) | VmState::Failed(_) | VmState::Moved) => {
                RunState::Stopped(ended.to_string())
            }
        }
    }

    fn pause(&self) -> Result<(), VmmError> {
        match self.vm.pause() {
            Ok(()) => Ok(()),
            // This is not an error: the guest has ended, and the engine calls `run_state` to get
            // the reason.
            Err(_) if self.vm.state().has_ended() => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn resume(&self) -> Result<(), VmmError> {
        Ok(self.vm.resume()?)
    }

    fn throttle(&self, percent: u8) -> Result<bool, VmmError> {
        self.vm.throttle(percent)?;
        Ok(true)
    }

    fn save(&self) -> Result<Vec<Section>, VmmError> {
        Ok(self.vm.save()?)
    }

    /// Marks this copy as moved, so that it never runs again. Its memory is freed with the last
    /// reference.
    fn destroy(&self) {
        self.vm.give_away();
    }
}

impl DestinationVm for Movable {
    fn memory(&self) -> Arc<dyn GuestMemory> {
        Arc::clone(&self.memory) as _
    }

    fn load(&self, sections: &[Section]) -> Result<(), VmmError> {
        self.vm.load(sections)?;
        // The source throttled the guest only for the migration, so end the throttling.
        Ok(self.vm.throttle(0)?)
    }

    fn acquire(&self) -> Result<(), VmmError> {
        Ok(())
    }

    fn resume(&self) -> Result<Option<Duration>, VmmError> {
        if self.memory.digests.are_kept() {
            let mut logs = self.vm.dirty_logs();
            // If the logs cannot be started, the guest still resumes, but `digests_at_resume` fails
            // later.
            if logs.iter_mut().try_for_each(|log| log.start()).is_ok() {
                *lock(&self.since_resume) = logs;
            }
        }
        self.vm.resume()?;
        Ok(self.vm.wait_for_downtime(FIRST_BEAT_LIMIT))
    }

    fn announce(&self) {}

    fn discard(&self) {}
}

/// Builds the machines that sources describe.
#[derive(Default)]
pub struct MachineBuilder {
    options: HostOptions,
    built: Option<Arc<Movable>>,
}

impl MachineBuilder {
    /// Creates a builder that uses this host's options.
    #[must_use]
    pub fn new(options: HostOptions) -> Self {
        Self {
            options,
            built: None,
        }
    }

    /// Returns the machine that was built last; `None` if there is none or it was already taken.
    pub fn take(&mut self) -> Option<Arc<Movable>> {
        self.built.take()
    }
}

impl Builder for MachineBuilder {
    fn build(&mut self, offered: &Offered) -> Result<Arc<dyn DestinationVm>, Refusal> {
        // First drop a machine that was built for a failed migration, because the host can lack the
        // memory for two machines.
        self.built = None;
        let refuse = |fault, error: &dyn std::error::Error| Refusal {
            fault,
            text: chain(error),
        };
        let description = VmDescription::decode(&offered.vm.description)
            .map_err(|error| refuse(FaultCode::Malformed, &error))?;
        check_layout(&description, offered)?;
        check_room(description.config.memory_bytes)?;
        let vm = Vm::from_description(&description, self.options).map_err(|error| {
            let fault = match &error {
                CreateError::Memory(_) => FaultCode::NoMemory,
                CreateError::Kernel { .. } => FaultCode::Kernel,
                CreateError::Config(_) | CreateError::Describe(_) | CreateError::NoKvm(_) => {
                    FaultCode::DescriptionRefused
                }
            };
            refuse(fault_behind(&error).unwrap_or(fault), &error)
        })?;
        let movable = Movable::with_digests(Arc::new(vm), self.options.digests);
        self.built = Some(Arc::clone(&movable));
        Ok(movable)
    }
}

/// Checks that the source's memory regions equal those of a machine with this description, because
/// the layout of memory cannot change after the memory is allocated.
fn check_layout(description: &VmDescription, offered: &Offered) -> Result<(), Refusal> {
    let theirs: Vec<u64> = offered.regions.iter().map(|region| region.length).collect();
    let ours: Vec<u64> = layout(description.config.memory_bytes)
        .iter()
        .map(|(_, bytes)| *bytes)
        .collect();
    if theirs == ours {
        return Ok(());
    }
    Err(Refusal {
        fault: FaultCode::DescriptionRefused,
        text: format!(
            "the source's memory has regions of {theirs:?} bytes, but a machine with the same \
             description has regions of {ours:?} bytes at the destination: run the same release of \
             the VMM on both hosts"
        ),
    })
}

/// Refuses a machine that is larger than the memory limit of this process's control group plus the
/// host's swap. Otherwise the kernel could kill this process after the VM has arrived.
fn check_room(memory_bytes: u64) -> Result<(), Refusal> {
    // If there is no limit, or /proc cannot be read, accept the machine.
    let Ok(Some(limit)) = cgroup::memory_limit() else {
        return Ok(());
    };
    let swap_bytes = cgroup::swap_bytes().unwrap_or(0);
    if limit.bytes.saturating_add(swap_bytes) >= memory_bytes {
        return Ok(());
    }
    Err(Refusal {
        fault: FaultCode::NoMemory,
        text: format!(
            "the VM has {memory_bytes} bytes of memory, but the destination's process is limited \
             to {} bytes by {}, with {swap_bytes} bytes of swap: raise that limit, because the \
             kernel would kill the process",
            limit.bytes,
            limit.file.display()
        ),
    })
}
