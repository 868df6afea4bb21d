//! Pages written since the last fetch: by the guest (KVM's log, or write-protection for
//! a process guest) or by the VMM (vm-memory's bitmap).

use std::io;
use std::sync::{Arc, Mutex};

use crate::kvm::Machine;
use dunlin::engine::dirty::WriteProtectLog;
use dunlin::engine::vmm::DirtyLog as _;
use dunlin::lane::sync::lock;
use dunlin_linux::mapping::TrackedMemory;
use thiserror::Error;
use vm_memory::GuestMemoryBackend;
use vm_memory::bitmap::Bitmap;

use dunlin_linux::mapping::PAGE_BYTES;

/// Why the dirty log failed.
#[derive(Debug, Error)]
pub enum DirtyError {
    /// It was not started.
    #[error("dirty log is off; start it first")]
    Off,
    /// KVM refused to turn its log on or off.
    #[error("cannot turn KVM's dirty log on or off")]
    Switch(#[source] io::Error),
    /// KVM refused to return its log.
    #[error("cannot read KVM's dirty log of region {region}")]
    Kvm {
        /// The region's position.
        region: usize,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The log of a process guest failed.
    #[error("the write-protection log failed")]
    WriteProtect(#[source] io::Error),
}

/// The source of the log of the guest's writes.
#[derive(Debug)]
pub(crate) enum Guest {
    Kvm(Arc<Machine>),
    Process(WriteProtectLog),
}

/// The union of both logs.
#[derive(Debug)]
pub(crate) struct DirtyLog {
    memory: Arc<TrackedMemory>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    on: bool,
    guest: Guest,
}

impl DirtyLog {
    /// A log that is off.
    pub(crate) fn new(memory: Arc<TrackedMemory>, guest: Guest) -> Self {
        let state = Mutex::new(State { on: false, guest });
        Self { memory, state }
    }

    /// Starts an empty log. Start it before the first copy of memory.
    pub(crate) fn start(&self) -> Result<(), DirtyError> {
        let mut state = lock(&self.state);
        for region in self.memory.iter() {
            region.get_mmap().bitmap().reset();
        }
        match &mut state.guest {
            Guest::Kvm(machine) => {
                // KVM clears a log by switching it off and on.
                for enable in [false, true] {
                    machine
                        .set_dirty_logging(enable)
                        .map_err(DirtyError::Switch)?;
                }
            }
            Guest::Process(log) => log.start().map_err(DirtyError::WriteProtect)?,
        }
        state.on = true;
        Ok(())
    }

    /// Reads and clears the log. If one region's log cannot be read, KVM's log of the
    /// other regions is kept for the next fetch (I5).
    pub(crate) fn fetch(&self) -> Result<Vec<Vec<u64>>, DirtyError> {
        let mut state = lock(&self.state);
        if !state.on {
            return Err(DirtyError::Off);
        }
        let mut maps = match &mut state.guest {
            Guest::Kvm(machine) => {
                take_from(machine.memory(), |region| machine.take_dirty_log(region))?
            }
            Guest::Process(log) => {
                let mut maps = Vec::new();
                log.fetch(&mut |_, words| maps.push(words.to_vec()))
                    .map_err(DirtyError::WriteProtect)?;
                maps
            }
        };
        for (words, region) in maps.iter_mut().zip(self.memory.iter()) {
            let own = region.get_mmap().bitmap().get_and_reset();
            words
                .iter_mut()
                .zip(own)
                .for_each(|(word, own)| *word |= own);
        }
        Ok(maps)
    }

    pub(crate) fn stop(&self) -> Result<(), DirtyError> {
        let mut state = lock(&self.state);
        match &mut state.guest {
            Guest::Kvm(machine) => machine
                .set_dirty_logging(false)
                .map_err(DirtyError::Switch)?,
            Guest::Process(log) => log.stop().map_err(DirtyError::WriteProtect)?,
        }
        state.on = false;
        Ok(())
    }
}

/// Reads and clears KVM's log of every region with `take`.
fn take_from(
    memory: &TrackedMemory,
    take: impl Fn(usize) -> io::Result<Vec<u64>>,
) -> Result<Vec<Vec<u64>>, DirtyError> {
    let regions = memory.num_regions();
    let mut maps = Vec::with_capacity(regions);
    for region in 0..regions {
        match take(region) {
            Ok(words) => maps.push(words),
            Err(source) => {
                keep(memory, &maps);
                return Err(DirtyError::Kvm { region, source });
            }
        }
    }
    Ok(maps)
}

/// Adds pages that were already read to the VMM's own log.
fn keep(memory: &TrackedMemory, maps: &[Vec<u64>]) {
    for (words, region) in maps.iter().zip(memory.iter()) {
        let bitmap = region.get_mmap();
        for (index, word) in words.iter().enumerate() {
            for bit in (0..64).filter(|bit| word >> bit & 1 == 1) {
                let offset = (index * 64 + bit) * PAGE_BYTES as usize;
                bitmap.bitmap().mark_dirty(offset, 1);
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use dunlin_linux::mapping::{Backing, HOLE_START, allocate};

    use super::*;

    #[test]
    fn i5_pages_read_before_a_region_failed_are_reported_next_time() {
        let memory = Arc::new(allocate(HOLE_START + (2 << 20), Backing::Private).unwrap());
        let mut low = vec![0; (HOLE_START / PAGE_BYTES / 64) as usize];
        (low[0], low[3]) = (1 << 7, 1 << 63 | 1);
        let taken = take_from(&memory, |region| match region {
            0 => Ok(low.clone()),
            _ => Err(io::ErrorKind::Other.into()),
        });
        assert!(matches!(taken, Err(DirtyError::Kvm { region: 1, .. })));
        let regions = memory.iter();
        let own = |mapped: &vm_memory::GuestRegionMmap<vm_memory::bitmap::AtomicBitmap>| {
            mapped.get_mmap().bitmap().get_and_reset()
        };
        let kept: Vec<Vec<u64>> = regions.map(own).collect();
        assert_eq!(kept[0][..low.len()], low);
        assert!(kept[1].iter().all(|word| *word == 0));
    }
}
