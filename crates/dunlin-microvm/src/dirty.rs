//! KVM's log of the pages that the guest wrote, as a dirty log for the engine.

use std::io;
use std::sync::Arc;

use dunlin::engine::vmm::DirtyLog;
use thiserror::Error;
use vm_memory::GuestMemoryBackend;

use crate::kvm::Machine;

/// The log of a KVM guest's writes. It does not contain the writes of the VMM.
#[derive(Debug)]
pub(crate) struct KvmLog(pub(crate) Arc<Machine>);

/// Why KVM's log failed.
#[derive(Debug, Error)]
enum KvmLogError {
    #[error("cannot turn KVM's dirty log on or off")]
    Switch(#[source] io::Error),
    #[error("cannot read KVM's dirty log of region {0} (if the error is ENOENT, the log is off)")]
    Read(usize, #[source] io::Error),
}

impl KvmLog {
    fn switch(&self, enable: bool) -> io::Result<()> {
        let switched = self.0.set_dirty_logging(enable);
        switched.map_err(|error| io::Error::other(KvmLogError::Switch(error)))
    }
}

impl DirtyLog for KvmLog {
    fn start(&mut self) -> io::Result<()> {
        // Switching a log off and on clears it.
        [false, true].into_iter().try_for_each(|on| self.switch(on))
    }

    /// Reading a region's log clears it, so each log is reported before the next region's log is
    /// read. An error then loses no pages of earlier regions (I5).
    fn fetch(&mut self, found: &mut dyn FnMut(usize, &[u64])) -> io::Result<()> {
        for region in 0..self.0.memory().num_regions() {
            let words = self.0.take_dirty_log(region);
            let failed = |error| io::Error::other(KvmLogError::Read(region, error));
            found(region, &words.map_err(failed)?);
        }
        Ok(())
    }

    fn stop(&mut self) -> io::Result<()> {
        self.switch(false)
    }
}
