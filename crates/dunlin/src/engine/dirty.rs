//! A dirty log that needs no hypervisor: the kernel's own write-protection.
//!
//! For guests that are threads of the process, and beside KVM where its log
//! cannot be had. [`crate::testing`] tests this and every other log.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use dunlin_linux::memory as sys;
use dunlin_linux::uffd::{Behind, WriteWatch};
use dunlin_proto::limits::PAGE_BYTES;
use thiserror::Error;
use vm_memory::bitmap::{AtomicBitmap, Bitmap};
use vm_memory::{
    GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, MemoryRegionAddress, VolatileSlice,
};

use super::vmm::DirtyLog;

/// Every write to guest memory through this process's mapping of it, whoever
/// writes: threads of the process, the kernel for them, KVM. By userfaultfd's
/// asynchronous write-protection and PAGEMAP_SCAN (Linux 6.7); takes no
/// privilege. Its regions are those of
/// [`MappedMemory`](super::memory::MappedMemory) over the same memory.
///
/// It does not see the writes of another process that maps the same file, such
/// as a vhost-user back end, nor of a device to pinned pages (VFIO, direct I/O
/// under way): those need logs of their own beside this one.
///
/// A region on huge pages is reported by huge pages. A region with a file
/// behind it costs page tables for all of it, 1/512 of its size; a private
/// one nothing where it was never touched. A private page that is read for the
/// first time may be reported as written, and with transparent huge pages one
/// that is written for the first time with those of its 2 MiB.
#[derive(Debug)]
pub struct WriteProtectLog<B = AtomicBitmap> {
    memory: Arc<GuestMemoryMmap<B>>,
    watch: Option<WriteWatch>,
}

impl<B: Bitmap> WriteProtectLog<B> {
    /// The log of writes to `memory`. Nothing else in the process may have it
    /// registered with a userfaultfd while the log is on.
    #[must_use]
    pub fn new(memory: Arc<GuestMemoryMmap<B>>) -> Self {
        Self {
            memory,
            watch: None,
        }
    }

    /// The regions in order, as the watch takes them.
    fn regions(&self) -> impl Iterator<Item = io::Result<(VolatileSlice<'_>, Behind)>> {
        self.memory.iter().map(|region| {
            let length = usize::try_from(region.len()).map_err(io::Error::other)?;
            let whole = region
                .get_slice(MemoryRegionAddress(0), length)
                .map_err(io::Error::other)?;
            // Shared memory has a file also where the VMM knows of none.
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
        // One that was never stopped ends first: only one may have the memory.
        self.watch = None;
        let watch = WriteWatch::new().map_err(|error| {
            said(
                "userfaultfd cannot watch writes here (it needs Linux 6.7)",
                error,
            )
        })?;
        for region in self.regions() {
            let (memory, behind) = region?;
            watch
                .register(&memory, behind)
                .map_err(|error| said("guest memory cannot be watched", error))?;
        }
        self.watch = Some(watch);
        Ok(())
    }

    fn fetch(&mut self, found: &mut dyn FnMut(usize, &[u64])) -> io::Result<()> {
        let watch = self
            .watch
            .as_ref()
            .ok_or_else(|| io::Error::other("the dirty log is off; start it first"))?;
        for (index, region) in self.regions().enumerate() {
            let (memory, behind) = region?;
            let pages = (memory.len() as u64).div_ceil(PAGE_BYTES);
            let mut words = vec![0; pages.div_ceil(64) as usize];
            watch
                .take(&memory, behind, |range| {
                    set(
                        &mut words,
                        range.start / PAGE_BYTES..range.end.div_ceil(PAGE_BYTES),
                    );
                })
                .map_err(|error| said("the log of written pages cannot be read", error))?;
            found(index, &words);
        }
        Ok(())
    }

    fn stop(&mut self) -> io::Result<()> {
        let Some(watch) = self.watch.take() else {
            return Ok(());
        };
        // By hand, since dropping it does nothing while a child of this process
        // still holds a copy of its descriptor.
        self.regions()
            .try_for_each(|region| watch.unregister(&region?.0))
    }
}

/// An error of the kernel, with what was tried.
#[derive(Debug, Error)]
#[error("{what}: {source}")]
struct Failed {
    what: &'static str,
    source: io::Error,
}

fn said(what: &'static str, source: io::Error) -> io::Error {
    io::Error::new(source.kind(), Failed { what, source })
}

/// Sets the bits of `pages`.
fn set(words: &mut [u64], pages: Range<u64>) {
    let mut at = pages.start;
    while at < pages.end {
        let (word, bit) = (at / 64, at % 64);
        let count = (64 - bit).min(pages.end - at);
        words[word as usize] |= (u64::MAX >> (64 - count)) << bit;
        at += count;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use dunlin_proto::fault::FaultCode;

    use crate::engine::fault_behind;

    use dunlin_linux::mapping::{Backing, allocate};
    use vm_memory::{GuestAddress, GuestRegionMmap, MmapRegion};

    use super::*;

    #[test]
    fn a_range_of_pages_becomes_bits_across_words() {
        let mut words = [0; 4];
        set(&mut words, 3..5);
        set(&mut words, 63..129);
        set(&mut words, 192..256);
        set(&mut words, 7..7);
        assert_eq!(words, [1 << 63 | 0b11000, u64::MAX, 1, u64::MAX]);
    }

    /// Of memory that has a file the kernel may drop a page's entry, and with it that the page was
    /// written. What it does then, `uffd` tests.
    #[test]
    fn i5_only_private_memory_without_a_file_is_anonymous() {
        const BYTES: usize = 2 << 20;
        // Of mmap(2), for reading and writing.
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
    fn a_log_that_is_off_says_so() {
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
    fn an_error_keeps_its_cause_so_that_the_fault_is_known() {
        let full = io::Error::from_raw_os_error(24);
        let error = said("userfaultfd cannot watch writes here", full);
        assert_eq!(fault_behind(&error), Some(FaultCode::DescriptorLimit));
    }
}
