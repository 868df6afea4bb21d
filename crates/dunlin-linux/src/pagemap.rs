//! Finds the pages of a mapping that hold data or were written, without reading them.
//!
//! Reading an untouched page costs time and, in shared memory, allocates the page. Instead this
//! module uses `SEEK_DATA`/`SEEK_HOLE` on the file of a shared mapping (lseek(2)), and the
//! PAGEMAP_SCAN ioctl for private memory (Linux 6.7, Documentation/admin-guide/mm/pagemap.rst). The
//! same ioctl reports, and resets, which pages were written in memory that [`crate::uffd`] has
//! registered.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, opcode};
use vm_memory::VolatileSlice;

/// `struct pm_scan_arg` of include/uapi/linux/fs.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    regions: u64,
    regions_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region` of include/uapi/linux/fs.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

const PAGE_IS_WRITTEN: u64 = 1 << 1;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
const PAGE_IS_PFNZERO: u64 = 1 << 5;
/// Write-protect the reported pages in the same step.
const PM_SCAN_WP_MATCHING: u64 = 1 << 0;
/// Fail with `EPERM` on memory that is not registered for asynchronous write-protection.
const PM_SCAN_CHECK_WPASYNC: u64 = 1 << 1;
/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: Opcode = opcode::read_write::<ScanArgument>(b'f', 16);

/// The maximum number of results of one call, in total 12 KiB. A gibibyte in which every second
/// page is populated then takes 256 calls.
const BATCH: usize = 512;

/// Calls `found` with each populated range of bytes of `memory`, relative to its start and in
/// order. A page is populated if it is present or swapped out, and not the kernel's shared zero
/// page.
///
/// # Errors
/// `ENOTTY` or `EINVAL` if the kernel lacks PAGEMAP_SCAN (before 6.7); otherwise an error from
/// opening /proc/self/pagemap or from ioctl(2). After any error, the caller must treat all of
/// `memory` as populated.
pub fn populated(memory: &VolatileSlice<'_>, found: impl FnMut(Range<u64>)) -> io::Result<()> {
    let filter = ScanArgument {
        category_inverted: PAGE_IS_PFNZERO,
        category_mask: PAGE_IS_PFNZERO,
        category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
        return_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
        ..ScanArgument::default()
    };
    scan(&open()?, memory, filter, found)
}

/// The size of the parts of `memory` that are huge pages, in KiB. `AnonHugePages` of
/// /proc/self/smaps can differ, because the kernel may have merged the mapping with an adjacent
/// one.
#[cfg(test)]
pub(crate) fn huge_kib(memory: &VolatileSlice<'_>) -> io::Result<u64> {
    const PAGE_IS_HUGE: u64 = 1 << 6;
    let filter = ScanArgument {
        category_mask: PAGE_IS_HUGE,
        return_mask: PAGE_IS_HUGE,
        ..ScanArgument::default()
    };
    let mut bytes = 0;
    scan(&open()?, memory, filter, |range| {
        bytes += range.end - range.start;
    })?;
    Ok(bytes >> 10)
}

/// How [`take_written`] treats a page without an entry in the page table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Absent {
    /// Treats the page as never written.
    Clean,
    /// Treats the page as written, because the kernel may have dropped its entry after a write. Use
    /// this value only if all unwritten pages have been marked as write-protected.
    Written,
}

/// Calls `found` with each range of bytes of `memory` that was written since it was last reported,
/// and write-protects the range again. Ranges are in order, and relative to the start of `memory`.
/// For each page, reporting and write-protecting are one atomic step.
///
/// # Errors
/// `EPERM` if `memory` is not registered for asynchronous write-protection; otherwise an error from
/// ioctl(2). Ranges reported before the error are not reported again.
pub(crate) fn take_written(
    pagemap: &File,
    memory: &VolatileSlice<'_>,
    absent: Absent,
    found: impl FnMut(Range<u64>),
) -> io::Result<()> {
    // If PAGE_IS_WRITTEN is the only condition, the kernel reports every entry without
    // write-protection, empty ones included (pagemap_scan_pmd_entry, fs/proc/task_mmu.c). With the
    // further condition that the page is present or swapped out, the kernel does not report empty
    // entries.
    let category_anyof_mask = match absent {
        Absent::Clean => PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
        Absent::Written => 0,
    };
    let filter = ScanArgument {
        flags: PM_SCAN_WP_MATCHING | PM_SCAN_CHECK_WPASYNC,
        category_mask: PAGE_IS_WRITTEN,
        category_anyof_mask,
        return_mask: PAGE_IS_WRITTEN,
        ..ScanArgument::default()
    };
    scan(pagemap, memory, filter, found)
}

/// Opens /proc/self/pagemap, the interface to the page tables of this process.
pub(crate) fn open() -> io::Result<File> {
    File::open("/proc/self/pagemap")
}

/// Calls `found` with each range of bytes of `memory` that matches the filter, in order, and
/// relative to the start of `memory`.
fn scan(
    pagemap: &File,
    memory: &VolatileSlice<'_>,
    filter: ScanArgument,
    mut found: impl FnMut(Range<u64>),
) -> io::Result<()> {
    let base = memory.ptr_guard().as_ptr() as u64;
    let end = base + memory.len() as u64;
    let mut results = [PageRegion::default(); BATCH];
    let mut start = base;
    while start < end {
        let mut argument = ScanArgument {
            size: size_of::<ScanArgument>() as u64,
            start,
            end,
            regions: results.as_mut_ptr() as u64,
            regions_len: BATCH as u64,
            ..filter
        };
        // SAFETY: the descriptor is open. The argument is the structure of this request and
        // outlives the call. Its `regions` points to `regions_len` writable elements of `results`,
        // which nothing else refers to during the call. The scan reads page tables and at most sets
        // write-protection, which the kernel itself removes at the next write; the content of
        // `memory` does not change, and `memory` stays mapped.
        let count = unsafe {
            libc::ioctl(
                pagemap.as_raw_fd(),
                PAGEMAP_SCAN as _,
                std::ptr::from_mut(&mut argument),
            )
        };
        let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
        for region in &results[..count] {
            found(region.start - base..region.end - base);
        }
        if argument.walk_end <= start {
            return Err(io::Error::other("PAGEMAP_SCAN makes no progress"));
        }
        start = argument.walk_end;
    }
    Ok(())
}

/// Calls `found` with each range of bytes of `file` in `within` that holds data, in order.
/// Changes the file's position, which does not affect mapped memory.
///
/// # Errors
/// An error from lseek(2), or an error of kind `Other` if the file system reports holes out of
/// order.
pub fn data(file: &File, within: Range<u64>, mut found: impl FnMut(Range<u64>)) -> io::Result<()> {
    let mut at = within.start;
    while at < within.end {
        let start = match seek(file, SeekFrom::Data(at)) {
            // The rest of the file is a hole.
            Err(Errno::NXIO) => break,
            start => start?,
        };
        if start >= within.end {
            break;
        }
        let end = match seek(file, SeekFrom::Hole(start)) {
            // The file was truncated between the two calls.
            Err(Errno::NXIO) => within.end,
            end => end?,
        };
        // A device such as devdax returns its current position instead of the position of data or a
        // hole.
        if start < at || end <= start {
            return Err(io::Error::other(
                "the file system reports holes out of order",
            ));
        }
        found(start..end.min(within.end));
        at = end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use rustix::fs::{MemfdFlags, memfd_create};
    use vm_memory::{GuestAddress, GuestMemoryBackend, MmapRegion, VolatileMemory};

    use super::*;
    use crate::mapping::{Backing, advise_huge_pages, allocate};
    use crate::memory::untracked;

    const PAGE: u64 = 4096;

    #[test]
    fn scan_finds_written_pages_but_not_pages_that_were_only_read() {
        let region: MmapRegion = MmapRegion::new(64 * PAGE as usize).unwrap();
        let slice = region.as_volatile_slice();
        for page in [3, 4, 40] {
            slice
                .subslice(page * PAGE as usize, 1)
                .unwrap()
                .copy_from(&[1_u8]);
        }
        let mut byte = [0_u8];
        slice
            .subslice(20 * PAGE as usize, 1)
            .unwrap()
            .copy_to(&mut byte);
        let mut found = Vec::new();
        populated(&slice, |range| found.push(range)).unwrap();
        assert_eq!(found, [3 * PAGE..5 * PAGE, 40 * PAGE..41 * PAGE]);
    }

    #[test]
    fn a_huge_page_is_reported_whole() {
        if dunlin_test_base::huge_pages::transparent().is_none() {
            return;
        }
        let memory = allocate(8 << 20, Backing::Private).unwrap();
        advise_huge_pages(&memory);
        let slice = untracked(&memory.get_slice(GuestAddress(0), 8 << 20).unwrap());
        for page in [700, 1024 + 511] {
            slice
                .subslice(page * PAGE as usize, 1)
                .unwrap()
                .copy_from(&[1_u8]);
        }
        // Release half of a huge page, as a balloon does. This splits the huge page.
        let start = slice.ptr_guard_mut().as_ptr();
        // SAFETY: the range is mapped and private. Its pages read as zeros afterwards, and no
        // reference to their content exists.
        let result = unsafe {
            let half = start.add(1024 * PAGE as usize);
            libc::madvise(half.cast(), 256 * PAGE as usize, libc::MADV_DONTNEED)
        };
        assert_eq!(result, 0);
        let mut found = Vec::new();
        populated(&slice, |range| {
            found.push(range.start / PAGE..range.end / PAGE)
        })
        .unwrap();
        assert_eq!(found, [512..1024, 1280..1536]);
    }

    #[test]
    fn scan_continues_beyond_one_batch() {
        let pages = 4 * BATCH as u64;
        let region: MmapRegion = MmapRegion::new((pages * PAGE) as usize).unwrap();
        let slice = region.as_volatile_slice();
        for page in (0..pages).step_by(2) {
            slice
                .subslice((page * PAGE) as usize, 1)
                .unwrap()
                .copy_from(&[1_u8]);
        }
        let mut count = 0;
        let mut bytes = 0;
        populated(&slice, |range| {
            count += 1;
            bytes += range.end - range.start;
        })
        .unwrap();
        assert_eq!((count, bytes), (pages / 2, pages / 2 * PAGE));
    }

    #[test]
    fn seek_finds_the_data_of_a_memfd() {
        let file = File::from(memfd_create("pagemap-test", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(100 * PAGE).unwrap();
        std::os::unix::fs::FileExt::write_at(&file, b"x", 10 * PAGE).unwrap();
        std::os::unix::fs::FileExt::write_at(&file, b"x", 99 * PAGE).unwrap();
        let mut found = Vec::new();
        data(&file, 0..100 * PAGE, |range| found.push(range)).unwrap();
        assert_eq!(found, [10 * PAGE..11 * PAGE, 99 * PAGE..100 * PAGE]);
        let mut found = Vec::new();
        data(&file, 11 * PAGE..50 * PAGE, |range| found.push(range)).unwrap();
        assert_eq!(found, Vec::<Range<u64>>::new());
    }
}
