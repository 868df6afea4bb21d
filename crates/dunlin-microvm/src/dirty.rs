//! What was written since one last asked: by the guest (KVM's log) or by the VMM (vm-memory's
//! bitmap).

use std::io;
use std::sync::{Mutex, PoisonError};

use dunlin_sys::kvm::Machine;
use thiserror::Error;
use vm_memory::GuestMemoryBackend;
use vm_memory::bitmap::Bitmap;

use dunlin_sys::mapping::PAGE_BYTES;

/// Why the dirty log could not be used.
#[derive(Debug, Error)]
pub enum DirtyError {
    /// It was not started.
    #[error("the dirty log is off; start it first")]
    Off,
    /// A page beyond the end of a region.
    #[error("there is no page {page} in region {region}")]
    NoSuchPage {
        /// The region's position.
        region: usize,
        /// The page in it.
        page: u64,
    },
    /// KVM refused to switch its log on or off.
    #[error("KVM's dirty log cannot be switched")]
    Switch(#[source] io::Error),
    /// KVM refused to hand its log over.
    #[error("KVM's dirty log of region {region} cannot be read")]
    Kvm {
        /// The region's position.
        region: usize,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
}

/// The union of both logs.
#[derive(Debug, Default)]
pub(crate) struct DirtyLog(Mutex<bool>);

impl DirtyLog {
    fn lock(&self) -> std::sync::MutexGuard<'_, bool> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts with nothing written. Whoever copies memory must start before the first copy.
    pub(crate) fn start(&self, machine: &Machine) -> Result<(), DirtyError> {
        let mut on = self.lock();
        for region in machine.memory().iter() {
            region.get_mmap().bitmap().reset();
        }
        // KVM clears a log by switching it off and on.
        for enable in [false, true] {
            machine
                .set_dirty_logging(enable)
                .map_err(DirtyError::Switch)?;
        }
        *on = true;
        Ok(())
    }

    /// Reads and clears. If one region's log cannot be read, what was read of the others is kept for
    /// the next time (I5).
    pub(crate) fn fetch(&self, machine: &Machine) -> Result<Vec<Vec<u64>>, DirtyError> {
        let on = self.lock();
        if !*on {
            return Err(DirtyError::Off);
        }
        let memory = machine.memory();
        let mut maps = Vec::with_capacity(memory.num_regions());
        for (index, region) in memory.iter().enumerate() {
            let mut words = match machine.take_dirty_log(index) {
                Ok(words) => words,
                Err(source) => {
                    keep(machine, &maps);
                    return Err(DirtyError::Kvm {
                        region: index,
                        source,
                    });
                }
            };
            let own = region.get_mmap().bitmap().get_and_reset();
            words
                .iter_mut()
                .zip(own)
                .for_each(|(word, own)| *word |= own);
            maps.push(words);
        }
        Ok(maps)
    }

    /// Marks one page as written, as if the VMM had written to it.
    pub(crate) fn mark(
        &self,
        machine: &Machine,
        region: usize,
        page: u64,
    ) -> Result<(), DirtyError> {
        let missing = DirtyError::NoSuchPage { region, page };
        let Some(mapped) = machine.memory().iter().nth(region) else {
            return Err(missing);
        };
        if page >= mapped.size() as u64 / PAGE_BYTES {
            return Err(missing);
        }
        mapped.get_mmap().bitmap().set_bit(page as usize);
        Ok(())
    }

    pub(crate) fn stop(&self, machine: &Machine) -> Result<(), DirtyError> {
        let mut on = self.lock();
        machine
            .set_dirty_logging(false)
            .map_err(DirtyError::Switch)?;
        *on = false;
        Ok(())
    }
}

fn keep(machine: &Machine, maps: &[Vec<u64>]) {
    for (words, region) in maps.iter().zip(machine.memory().iter()) {
        let bitmap = region.get_mmap();
        for (index, word) in words.iter().enumerate() {
            for bit in (0..64).filter(|bit| word >> bit & 1 == 1) {
                let offset = (index * 64 + bit) * PAGE_BYTES as usize;
                bitmap.bitmap().mark_dirty(offset, 1);
            }
        }
    }
}
