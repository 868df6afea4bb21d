//! A dirty log that needs no hypervisor: it uses the kernel's write-protection.
//!
//! It serves guests that are threads of the process, and KVM guests if KVM's own log is not
//! available. [`crate::testing`] has tests for any dirty log.

use std::io;
use std::mem;
use std::sync::Arc;

use dunlin_linux::memory as sys;
use dunlin_linux::uffd::{Behind, WriteWatch};
use dunlin_proto::limits::PAGE_BYTES;
use thiserror::Error;
use vm_memory::bitmap::{AtomicBitmap, Bitmap};
use vm_memory::{
    GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, MemoryRegionAddress, VolatileSlice,
};

use super::memory::word_masks;
use super::vmm::DirtyLog;

/// Logs every write to guest memory through this process's mapping: by threads of the
/// process, by the kernel on their behalf, and by KVM. It uses userfaultfd's
/// asynchronous write-protection and PAGEMAP_SCAN (Linux 6.7) and needs no privilege.
/// Its regions are those of [`MappedMemory`](super::memory::MappedMemory) over the same
/// memory.
///
/// It does not see writes by another process that maps the same file, such as a vhost-user back
/// end. It does not see DMA into pinned pages either (VFIO, direct I/O in flight). These writes
/// need their own logs in addition.
///
/// A region on huge pages is reported in huge pages. A region backed by a file costs page tables
/// for the whole region, which are 1/512 of its size; a private region without a file costs nothing
/// for pages that were never touched. The first read of a private page may be reported as a write.
/// With transparent huge pages, a write that populates a huge page is reported for all of its 2
/// MiB; later writes are reported for 4 KiB.
#[derive(Debug)]
pub struct WriteProtectLog<B = AtomicBitmap> {
    memory: Arc<GuestMemoryMmap<B>>,
    recording: Recording,
}

#[derive(Debug)]
enum Recording {
    Off,
    On(WriteWatch),
}

impl<B: Bitmap> WriteProtectLog<B> {
    /// A log of writes to `memory`. Nothing else in the process may register that
    /// memory with a userfaultfd while the log is on.
    #[must_use]
    pub fn new(memory: Arc<GuestMemoryMmap<B>>) -> Self {
        Self {
            memory,
            recording: Recording::Off,
        }
    }

    /// The regions in order, in the form that [`WriteWatch`] accepts.
    fn regions(&self) -> impl Iterator<Item = io::Result<(VolatileSlice<'_>, Behind)>> {
        self.memory.iter().map(|region| {
            let length = usize::try_from(region.len()).map_err(io::Error::other)?;
            let whole = region
                .get_slice(MemoryRegionAddress(0), length)
                .map_err(io::Error::other)?;
            // Shared memory has a file in the kernel, even if the VMM has no descriptor of that
            // file.
            let behind = match (region.file_offset(), sys::is_private(region.flags())) {
                (None, true) => Behind::Anonymous,
                _ => Behind::File,
            };
            Ok((sys::untracked(&whole), behind))
        })
    }
}

impl<B: Bitmap + Send + Sync + 'static> DirtyLog for WriteProtectLog<B> {
    fn start(&mut self) -> io::Result<()> {
        // Drop an earlier [`WriteWatch`] first, because the memory can be registered with only one.
        self.recording = Recording::Off;
        let watch = WriteWatch::new()
            .map_err(|error| failed("userfaultfd cannot watch writes (needs Linux 6.7)", error))?;
        for region in self.regions() {
            let (memory, behind) = region?;
            watch
                .register(&memory, behind)
                .map_err(|error| failed("cannot watch writes to guest memory", error))?;
        }
        self.recording = Recording::On(watch);
        Ok(())
    }

    fn fetch(&mut self, found: &mut dyn FnMut(usize, &[u64])) -> io::Result<()> {
        let Recording::On(watch) = &self.recording else {
            return Err(io::Error::other("dirty log is off; start it first"));
        };
        for (index, region) in self.regions().enumerate() {
            let (memory, behind) = region?;
            let pages = (memory.len() as u64).div_ceil(PAGE_BYTES);
            let mut words = vec![0; pages.div_ceil(64) as usize];
            watch
                .take(&memory, behind, |range| {
                    let pages = range.start / PAGE_BYTES..range.end.div_ceil(PAGE_BYTES);
                    for (word, mask) in word_masks(pages) {
                        words[word] |= mask;
                    }
                })
                .map_err(|error| failed("cannot read the log of written pages", error))?;
            found(index, &words);
        }
        Ok(())
    }

    fn stop(&mut self) -> io::Result<()> {
        let Recording::On(watch) = mem::replace(&mut self.recording, Recording::Off) else {
            return Ok(());
        };
        // Unregister explicitly: closing the descriptor has no effect while a child
        // process still holds a copy of it.
        self.regions()
            .try_for_each(|region| watch.unregister(&region?.0))
    }
}

/// An error from the kernel, with the failed operation.
#[derive(Debug, Error)]
#[error("{what}: {source}")]
struct Failed {
    what: &'static str,
    source: io::Error,
}

fn failed(what: &'static str, source: io::Error) -> io::Error {
    io::Error::new(source.kind(), Failed { what, source })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use dunlin_proto::fault::FaultCode;

    use crate::engine::fault_behind;

    use dunlin_linux::mapping::{Backing, allocate};
    use vm_memory::{GuestAddress, GuestRegionMmap, MmapRegion};

    use super::*;

    /// Only private memory without a file keeps its page-table entries. If memory has a file, the
    /// kernel may drop a page's entry, and with it the information that the page was written. The
    /// tests of `uffd` cover the consequences.
    #[test]
    fn i5_only_private_memory_without_a_file_is_anonymous() {
        const BYTES: usize = 2 << 20;
        // Protection and flags of mmap(2).
        const READ_WRITE: i32 = 1 | 2;
        const SHARED: i32 = 1;
        const PRIVATE: i32 = 2;
        const ANONYMOUS: i32 = 0x20;
        let whole = allocate(BYTES as u64, Backing::Memfd).unwrap();
        let file = whole.iter().next().unwrap().file_offset().cloned();
        for (file, flags, expected) in [
            (None, PRIVATE | ANONYMOUS, Behind::Anonymous),
            (None, SHARED | ANONYMOUS, Behind::File),
            (file.clone(), SHARED, Behind::File),
            (file, PRIVATE, Behind::File),
        ] {
            let mapped = MmapRegion::build(file, BYTES, READ_WRITE, flags).unwrap();
            let region = GuestRegionMmap::new(mapped, GuestAddress(0)).unwrap();
            let memory = GuestMemoryMmap::<AtomicBitmap>::from_regions(vec![region]).unwrap();
            let mut log = WriteProtectLog::new(Arc::new(memory));
            let behind: Vec<_> = log.regions().map(|region| region.unwrap().1).collect();
            assert_eq!(behind, [expected], "{flags:#x}");
            log.start().unwrap();
            log.stop().unwrap();
        }
    }

    #[test]
    fn a_log_that_is_off_cannot_be_read() {
        let memory = [(GuestAddress(0), 1 << 20)];
        let memory: GuestMemoryMmap<AtomicBitmap> = GuestMemoryMmap::from_ranges(&memory).unwrap();
        let mut log = WriteProtectLog::new(Arc::new(memory));
        let off = log.fetch(&mut |_, _| ()).unwrap_err();
        assert!(off.to_string().contains("off"), "{off}");
        log.stop().unwrap();
        log.start().unwrap();
        log.start().unwrap();
        log.fetch(&mut |_, words| assert_eq!(words, [0; 4]))
            .unwrap();
        log.stop().unwrap();
        log.fetch(&mut |_, _| ()).unwrap_err();
    }

    #[test]
    fn an_error_keeps_its_cause_for_the_fault_code() {
        let full = io::Error::from_raw_os_error(24);
        let error = failed("userfaultfd cannot watch writes", full);
        assert_eq!(fault_behind(&error), Some(FaultCode::DescriptorLimit));
    }
}
