//! Guest memory: its backing, its guest-physical layout, and the log of the VMM's own writes.
//!
//! Every region has an [`AtomicBitmap`] with one bit for each 4 KiB page. vm-memory sets a bit
//! whenever the VMM writes through it; the guest's own writes are in KVM's dirty log
//! (`dunlin-microvm`).
//!
//! Every region begins at a multiple of 2 MiB in the guest and, if possible, in this process, so
//! that huge pages fit; [`advise_huge_pages`] requests them.

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;

use rustix::fs::{MemfdFlags, memfd_create};
use thiserror::Error;
use vm_memory::bitmap::AtomicBitmap;
use vm_memory::mmap::{MmapRegionBuilder, MmapRegionError};
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestRegionMmap, MmapRegion,
};

/// Guest memory with the log of the VMM's own writes.
pub type TrackedMemory = GuestMemoryMmap<AtomicBitmap>;

/// Bytes of a guest page, the unit of every dirty log in this project.
pub const PAGE_BYTES: u64 = 4096;

/// Bytes of a huge page.
pub const HUGE_PAGE_BYTES: u64 = 2 << 20;

/// The upper limit of the low region. The devices of a PC are above it.
pub const HOLE_START: u64 = 3 << 30;

/// The start of the high region, above the devices.
pub const HOLE_END: u64 = 4 << 30;

/// The backing of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// Memory that is anonymous and private to the process.
    Private,
    /// A memfd per region, mapped shared. The region's `file_offset` holds the file, so that
    /// SEEK_DATA can find the holes.
    Memfd,
    /// A memfd per region with 2 MiB huge pages, which the host must have reserved.
    Huge,
}

/// Why guest memory could not be allocated.
#[derive(Debug, Error)]
pub enum MappingError {
    /// The size is zero or not a multiple of 2 MiB.
    #[error("guest memory size of {0} bytes is not a positive multiple of 2 MiB")]
    Size(u64),
    /// The kernel refused the memfd.
    #[error("cannot create a memfd of {bytes} bytes for guest memory")]
    Memfd {
        /// Length of the region.
        bytes: u64,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The kernel refused the mapping of huge pages, usually because too few are free.
    #[error(
        "too few free huge pages for {bytes} bytes of guest memory: reserve {} pages \
         of 2 MiB (`sysctl vm.nr_hugepages=N`), or use another backing",
        bytes / HUGE_PAGE_BYTES
    )]
    HugePages {
        /// Length of the region.
        bytes: u64,
        /// The kernel's error.
        #[source]
        source: MmapRegionError,
    },
    /// The kernel refused the mapping.
    #[error("cannot map {bytes} bytes of guest memory")]
    Map {
        /// Length of the region.
        bytes: u64,
        /// The kernel's error.
        #[source]
        source: MmapRegionError,
    },
}

/// The regions of a guest with `memory_bytes` of memory, as (guest-physical address, bytes): the
/// first one below [`HOLE_START`], and a second one from [`HOLE_END`] if the guest has more memory.
pub fn layout(memory_bytes: u64) -> Vec<(u64, u64)> {
    let low = memory_bytes.min(HOLE_START);
    let mut regions = vec![(0, low)];
    if memory_bytes > low {
        regions.push((HOLE_END, memory_bytes - low));
    }
    regions
}

/// Maps `memory_bytes` (a multiple of 2 MiB) of zero pages for a guest, as [`layout`] places them.
///
/// Populates no pages. Private and memfd mappings reserve no swap. Huge pages are reserved by the
/// mapping, because a later page fault without a free huge page would kill the process (SIGBUS).
///
/// # Errors
/// See [`MappingError`].
pub fn allocate(memory_bytes: u64, backing: Backing) -> Result<TrackedMemory, MappingError> {
    allocate_at(memory_bytes, &layout(memory_bytes), backing)
}

/// Like [`allocate`] with [`Backing::Private`], but in one region at address 0. A measurement can
/// thus use the same offsets for memory of every size.
///
/// # Errors
/// See [`MappingError`].
pub fn allocate_flat(memory_bytes: u64) -> Result<TrackedMemory, MappingError> {
    allocate_at(memory_bytes, &[(0, memory_bytes)], Backing::Private)
}

fn allocate_at(
    memory_bytes: u64,
    places: &[(u64, u64)],
    backing: Backing,
) -> Result<TrackedMemory, MappingError> {
    if memory_bytes == 0 || !memory_bytes.is_multiple_of(HUGE_PAGE_BYTES) {
        return Err(MappingError::Size(memory_bytes));
    }
    let regions = places
        .iter()
        .map(|&(start, bytes)| region(start, bytes, backing))
        .collect::<Result<Vec<_>, _>>()?;
    Ok(TrackedMemory::from_regions(regions).expect("the layout is sorted and disjoint"))
}

fn region(
    start: u64,
    bytes: u64,
    backing: Backing,
) -> Result<GuestRegionMmap<AtomicBitmap>, MappingError> {
    const PAGE: NonZeroUsize = NonZeroUsize::new(PAGE_BYTES as usize).expect("4096 is not zero");
    let length = bytes as usize;
    let memfd = |flags| {
        memfd(bytes, flags)
            .map(|file| FileOffset::new(file, 0))
            .map_err(|source| MappingError::Memfd { bytes, source })
    };
    let (flags, file) = match backing {
        Backing::Private => (
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            None,
        ),
        Backing::Memfd => (
            libc::MAP_SHARED | libc::MAP_NORESERVE,
            Some(memfd(MemfdFlags::empty())?),
        ),
        Backing::Huge => (
            libc::MAP_SHARED,
            Some(memfd(MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB)?),
        ),
    };
    let mapped = aligned(|| {
        let bitmap = AtomicBitmap::new(length, PAGE);
        let builder = MmapRegionBuilder::new_with_bitmap(length, bitmap)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(flags)
            .with_hugetlbfs(backing == Backing::Huge);
        match &file {
            Some(file) => builder.with_file_offset(file.clone()).build(),
            None => builder.build(),
        }
    });
    let mapped = mapped.map_err(|source| match backing {
        Backing::Huge => MappingError::HugePages { bytes, source },
        Backing::Private | Backing::Memfd => MappingError::Map { bytes, source },
    })?;
    Ok(GuestRegionMmap::new(mapped, GuestAddress(start)).expect("no region reaches 2^64"))
}

/// Requests transparent huge pages (`MADV_HUGEPAGE`, madvise(2)). For the memory of a memfd, the
/// kernel follows the advice only if `/sys/kernel/mm/transparent_hugepage/shmem_enabled` is
/// `advise`; the kernel's default is `never`.
///
/// Call it before the first page is touched: populated pages stay small until khugepaged merges
/// them.
///
/// Errors are ignored, because a guest also works without huge pages. A kernel without transparent
/// huge pages returns `EINVAL` and leaves the memory unchanged, and so does every kernel for
/// [`Backing::Huge`]. Under the policy `never` the advice has no effect.
///
/// Drawback: the first touch of a page may populate the 2 MiB around it.
pub fn advise_huge_pages(memory: &TrackedMemory) {
    for region in memory.iter() {
        let mapped = region.get_mmap();
        // SAFETY: the range is one whole mapping, which `memory` owns and keeps mapped.
        // MADV_HUGEPAGE only affects the size of the pages that back it, not its content or its
        // access rights.
        unsafe { libc::madvise(mapped.as_ptr().cast(), mapped.size(), libc::MADV_HUGEPAGE) };
    }
}

/// The maximum number of times that [`aligned`] repeats the mapping. Once is enough unless other
/// threads map memory concurrently.
const ALIGN_ATTEMPTS: usize = 4;

/// Calls `map` until its mapping begins at a multiple of 2 MiB, but repeats the call at most
/// [`ALIGN_ATTEMPTS`] times. A huge page needs an aligned 2 MiB block in this process, and KVM's
/// second-level tables need the same alignment in this process and in the guest.
///
/// Since 6.7 Linux aligns private memory automatically. In other cases the kernel usually takes the
/// end of the highest gap that fits, without alignment. This function then puts a placeholder at
/// the end of that gap. The placeholder begins at a multiple of 2 MiB, so the next mapping ends at
/// that multiple. (vm-memory neither accepts an address nor adopts an existing mapping.)
fn aligned(
    map: impl Fn() -> Result<MmapRegion<AtomicBitmap>, MmapRegionError>,
) -> Result<MmapRegion<AtomicBitmap>, MmapRegionError> {
    let mut mapped = map()?;
    for _ in 0..ALIGN_ATTEMPTS {
        let start = mapped.as_ptr() as usize;
        let excess = start % HUGE_PAGE_BYTES as usize;
        if excess == 0 {
            break;
        }
        let end = start + mapped.size();
        drop(mapped);
        let taken = Placeholder::new(end - excess, excess);
        mapped = match map() {
            Ok(mapped) => mapped,
            // If a limit on the address space is too low for the placeholder and the mapping
            // together, use a mapping without alignment.
            Err(_) => {
                drop(taken);
                return map();
            }
        };
    }
    Ok(mapped)
}

/// An address range that no other mapping can use; dropping it unmaps it.
struct Placeholder {
    start: *mut libc::c_void,
    bytes: usize,
}

impl Placeholder {
    /// Returns `None` if the kernel refuses the mapping, for example because the range is in use.
    fn new(start: usize, bytes: usize) -> Option<Self> {
        let flags = libc::MAP_PRIVATE
            | libc::MAP_ANONYMOUS
            | libc::MAP_NORESERVE
            | libc::MAP_FIXED_NOREPLACE;
        // SAFETY: MAP_FIXED_NOREPLACE replaces no mapping; kernels before 4.17 use `start` as a
        // hint, which replaces none either. The new mapping cannot be accessed (PROT_NONE).
        let start = unsafe { libc::mmap(start as *mut _, bytes, libc::PROT_NONE, flags, -1, 0) };
        (start != libc::MAP_FAILED).then_some(Self { start, bytes })
    }
}

impl Drop for Placeholder {
    fn drop(&mut self) {
        // SAFETY: `new` created this mapping, only this call unmaps it, and nothing refers to it.
        unsafe { libc::munmap(self.start, self.bytes) };
    }
}

fn memfd(bytes: u64, flags: MemfdFlags) -> io::Result<File> {
    let file = File::from(memfd_create("dunlin-guest", MemfdFlags::CLOEXEC | flags)?);
    file.set_len(bytes)?;
    Ok(file)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use dunlin_test_base::huge_pages;
    use vm_memory::{Bytes, GuestMemoryRegion};

    #[test]
    fn memory_above_three_gibibytes_continues_at_four() {
        assert_eq!(layout(1 << 30), [(0, 1 << 30)]);
        assert_eq!(layout(HOLE_START), [(0, HOLE_START)]);
        assert_eq!(layout(5 << 30), [(0, 3 << 30), (4 << 30, 2 << 30)]);
    }

    #[test]
    fn flat_memory_has_one_region_even_above_three_gibibytes() {
        let memory = allocate_flat(5 << 30).unwrap();
        let regions: Vec<_> = memory
            .iter()
            .map(|region| (region.start_addr(), region.len()))
            .collect();
        assert_eq!(regions, [(GuestAddress(0), 5 << 30)]);
    }

    #[test]
    fn a_write_by_the_vmm_marks_exactly_its_pages() {
        let memory = allocate(4 << 20, Backing::Memfd).unwrap();
        memory
            .write_slice(&[7; 2], GuestAddress(3 * PAGE_BYTES - 1))
            .unwrap();
        let region = memory.iter().next().unwrap();
        assert!(region.file_offset().is_some());
        assert_eq!(region.get_mmap().bitmap().get_and_reset()[0], 0b1100);
        assert_eq!(region.get_mmap().bitmap().get_and_reset()[0], 0);
    }

    #[test]
    fn a_size_that_is_not_a_multiple_of_2_mib_is_rejected() {
        assert!(matches!(
            allocate(4096, Backing::Private),
            Err(MappingError::Size(4096))
        ));
    }

    #[test]
    fn too_few_huge_pages_are_an_error_of_their_own() {
        let error = allocate(1 << 40, Backing::Huge).unwrap_err();
        assert!(matches!(error, MappingError::HugePages { .. }), "{error}");
    }

    /// Includes memfds, because some kernels align private memory themselves. On such a kernel,
    /// private memory alone would not test [`aligned`].
    #[test]
    fn every_region_begins_at_a_huge_page_boundary() {
        for backing in [Backing::Private, Backing::Memfd] {
            // All mappings are kept, so that each one is placed in a different gap.
            let all: Vec<_> = (1..40)
                .map(|blocks| allocate(blocks * HUGE_PAGE_BYTES, backing).unwrap())
                .chain([allocate(HOLE_START + HUGE_PAGE_BYTES, backing).unwrap()])
                .collect();
            for region in all.iter().flat_map(|memory| memory.iter()) {
                let start = region.get_mmap().as_ptr() as u64;
                assert_eq!(start % HUGE_PAGE_BYTES, 0, "{backing:?}: {start:#x}");
            }
        }
    }

    /// Returns the number of bytes on huge pages after one write into the second of three blocks of
    /// 2 MiB.
    fn huge_after_a_write(backing: Backing, advise: bool) -> u64 {
        let memory = allocate(3 * HUGE_PAGE_BYTES, backing).unwrap();
        if advise {
            advise_huge_pages(&memory);
        }
        let page = GuestAddress(HUGE_PAGE_BYTES + 5 * PAGE_BYTES);
        memory.write_slice(&[1], page).unwrap();
        let start = memory.iter().next().unwrap().get_mmap().as_ptr() as u64;
        huge_pages::transparent_bytes(start)
    }

    #[test]
    fn the_high_region_gets_huge_pages_too() {
        if huge_pages::transparent().is_none() {
            return;
        }
        let memory = allocate(HOLE_START + 2 * HUGE_PAGE_BYTES, Backing::Private).unwrap();
        advise_huge_pages(&memory);
        for (region, start) in memory.iter().zip([0, HOLE_END]) {
            let page = GuestAddress(start + HUGE_PAGE_BYTES + 5 * PAGE_BYTES);
            memory.write_slice(&[1], page).unwrap();
            // Read the page table instead of /proc/self/smaps, because the kernel may have merged
            // the regions into one mapping.
            let first = vm_memory::MemoryRegionAddress(0);
            let slice = region.get_slice(first, region.len() as usize).unwrap();
            let huge_kib = crate::pagemap::huge_kib(&crate::memory::untracked(&slice)).unwrap();
            assert_eq!(huge_kib, HUGE_PAGE_BYTES / 1024, "{start:#x}");
        }
    }

    #[test]
    fn only_private_memory_is_advised() {
        let Some(policy) = huge_pages::transparent() else {
            return;
        };
        assert_eq!(huge_after_a_write(Backing::Private, true), HUGE_PAGE_BYTES);
        if policy == "madvise" {
            assert_eq!(huge_after_a_write(Backing::Private, false), 0);
        }
        assert_eq!(huge_after_a_write(Backing::Memfd, true), 0);
    }
}
