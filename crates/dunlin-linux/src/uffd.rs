//! Records which pages of a mapping are written, with userfaultfd's asynchronous write-protection
//! (Linux 6.7, Documentation/admin-guide/mm/userfaultfd.rst).
//!
//! At the first write to a page the kernel removes the page's write-protection and lets the writer
//! continue; no fault reaches user space. A page without protection has been written; PAGEMAP_SCAN
//! ([`crate::pagemap`]) reports the page and protects it again. The watch covers writes through
//! this process's mapping: by its threads, by the kernel on their behalf (read(2)) and by KVM. The
//! watch does not cover writes by another process that maps the same file, or by a device to pinned
//! pages.
//!
//! Transparent huge pages stay huge until they are written: the first write splits the huge page,
//! and from then on single pages of 4 KiB are reported. If memory is touched for the first time
//! while it is watched, its whole block of 2 MiB may be reported, once. The other pages of the
//! block are zero, so the source sends them without content. Disabling huge pages during the watch
//! (MADV_NOHUGEPAGE) would avoid this, but the guest would lose its huge pages permanently: the
//! advice replaces the VMM's own advice, which cannot be restored.
//!
//! No privilege is needed: user space handles no faults, so a descriptor that handles only faults
//! in user mode (`UFFD_USER_MODE_ONLY`) is sufficient.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::ioctl::Opcode;
use rustix::ioctl::opcode::{read, read_write};
use rustix::mm::{UserfaultfdFlags, userfaultfd};
use vm_memory::VolatileSlice;

use crate::pagemap::{self, Absent};

/// `struct uffdio_api` of include/uapi/linux/userfaultfd.h.
#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_range` of include/uapi/linux/userfaultfd.h.
#[repr(C)]
struct Span {
    start: u64,
    length: u64,
}

/// `struct uffdio_register` of include/uapi/linux/userfaultfd.h.
#[repr(C)]
struct Register {
    range: Span,
    mode: u64,
    ioctls: u64,
}

/// `struct uffdio_writeprotect` of include/uapi/linux/userfaultfd.h.
#[repr(C)]
struct WriteProtect {
    range: Span,
    mode: u64,
}

const UFFD_API: u64 = 0xaa;
/// `UFFD_USER_MODE_ONLY`, which `rustix` does not name.
const USER_MODE_ONLY: UserfaultfdFlags = UserfaultfdFlags::from_bits_retain(1);
const UFFD_FEATURE_PAGEFAULT_FLAG_WP: u64 = 1 << 0;
const UFFD_FEATURE_WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
const UFFD_FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
const UFFD_FEATURE_WP_ASYNC: u64 = 1 << 15;
const UFFDIO_REGISTER_MODE_WP: u64 = 1 << 1;
const UFFDIO_WRITEPROTECT_MODE_WP: u64 = 1 << 0;

/// A userfaultfd request, implemented for its argument structure. The trait is private because
/// `WriteWatch::control` relies on two facts: `NUMBER` is the number of a request that takes the
/// implementing structure, and no request changes the content of memory or whether it is mapped.
trait Request: Sized {
    const NUMBER: Opcode;
}

impl Request for Api {
    const NUMBER: Opcode = read_write::<Self>(0xaa, 0x3f);
}

/// `UFFDIO_REGISTER`. A range that is registered only for asynchronous write-protection can be read
/// and written as before.
impl Request for Register {
    const NUMBER: Opcode = read_write::<Self>(0xaa, 0x00);
}

/// `UFFDIO_UNREGISTER`: removes this userfaultfd's write-protection.
impl Request for Span {
    const NUMBER: Opcode = read::<Self>(0xaa, 0x01);
}

/// `UFFDIO_WRITEPROTECT`: the kernel itself removes the protection at the next write to each page.
impl Request for WriteProtect {
    const NUMBER: Opcode = read_write::<Self>(0xaa, 0x06);
}

/// The backing of the watched memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behind {
    /// No file: a private, anonymous mapping. Untouched pages cost nothing.
    Anonymous,
    /// A file: a memfd, huge pages, or any other shared mapping, which the kernel backs with a file
    /// that it creates. The kernel may unmap a written page and keep it in the file, so a page
    /// without an entry in the page table counts as written. Therefore every page must be marked as
    /// write-protected at registration. That allocates page tables for all of the memory, at most
    /// about 1/512 of its size.
    File,
}

/// Watches writes to mappings of this process, until it is dropped.
///
/// First [`WriteWatch::register`] each mapping, then [`WriteWatch::take`] the written pages any
/// number of times.
#[derive(Debug)]
pub struct WriteWatch {
    descriptor: OwnedFd,
    pagemap: File,
}

impl WriteWatch {
    /// Creates a watch without mappings.
    ///
    /// # Errors
    /// `ENOSYS` or `EINVAL` if the kernel lacks asynchronous write-protection (before 6.7, or built
    /// without userfaultfd), `EPERM` if a seccomp filter forbids userfaultfd(2); otherwise an error
    /// from userfaultfd(2), open(2) or ioctl(2), such as `EMFILE`.
    pub fn new() -> io::Result<Self> {
        let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK | USER_MODE_ONLY;
        // SAFETY: a userfaultfd has no effect until memory is registered. `control` registers
        // memory only for asynchronous write-protection. Programs can read and write such memory as
        // before.
        let descriptor = unsafe { userfaultfd(flags)? };
        let watch = Self {
            descriptor,
            pagemap: pagemap::open()?,
        };
        let mut api = Api {
            api: UFFD_API,
            features: UFFD_FEATURE_PAGEFAULT_FLAG_WP
                | UFFD_FEATURE_WP_HUGETLBFS_SHMEM
                | UFFD_FEATURE_WP_UNPOPULATED
                | UFFD_FEATURE_WP_ASYNC,
            ioctls: 0,
        };
        watch.control(&mut api)?;
        Ok(watch)
    }

    /// Starts to watch `memory`, which must begin and end at a page boundary. At first no page
    /// counts as written.
    ///
    /// # Errors
    /// An error from ioctl(2), such as `EBUSY` if another userfaultfd watches the memory, `EINVAL`
    /// if this kind of memory cannot be watched, or `ENOMEM`.
    pub fn register(&self, memory: &VolatileSlice<'_>, behind: Behind) -> io::Result<()> {
        let mut register = Register {
            range: span(memory),
            mode: UFFDIO_REGISTER_MODE_WP,
            ioctls: 0,
        };
        self.control(&mut register)?;
        match behind {
            Behind::Anonymous => self.take(memory, behind, |_| ()),
            Behind::File => {
                let mut protect = WriteProtect {
                    range: span(memory),
                    mode: UFFDIO_WRITEPROTECT_MODE_WP,
                };
                self.control(&mut protect)
            }
        }
    }

    /// Calls `found` with each range of bytes of `memory` that was written after the previous call,
    /// or after the registration if there was none. Ranges are in order, relative to the start of
    /// `memory`, and in whole pages (huge pages if the memory consists of them). The ranges may
    /// include other pages, such as a page that was read for the first time.
    ///
    /// # Errors
    /// `EPERM` if `memory` is not registered; otherwise an error from ioctl(2).
    pub fn take(
        &self,
        memory: &VolatileSlice<'_>,
        behind: Behind,
        found: impl FnMut(Range<u64>),
    ) -> io::Result<()> {
        let absent = match behind {
            Behind::Anonymous => Absent::Clean,
            Behind::File => Absent::Written,
        };
        pagemap::take_written(&self.pagemap, memory, absent, found)
    }

    /// Stops watching `memory`.
    ///
    /// # Errors
    /// An error from ioctl(2). Dropping the [`WriteWatch`] stops watching all memory.
    pub fn unregister(&self, memory: &VolatileSlice<'_>) -> io::Result<()> {
        self.control(&mut span(memory))
    }

    /// ioctl(2) on the userfaultfd.
    fn control<T: Request>(&self, argument: &mut T) -> io::Result<()> {
        // SAFETY: the descriptor is open. The argument outlives the call and has the type of the
        // request, and no request changes the content of memory or whether it is mapped: see
        // [`Request`].
        let result = unsafe {
            libc::ioctl(
                self.descriptor.as_raw_fd(),
                T::NUMBER as _,
                std::ptr::from_mut(argument),
            )
        };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

fn span(memory: &VolatileSlice<'_>) -> Span {
    Span {
        start: memory.ptr_guard().as_ptr() as u64,
        length: memory.len() as u64,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::single_range_in_vec_init, clippy::unwrap_used)]

    use std::io::Read;

    use vm_memory::{
        GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress, MmapRegion, VolatileMemory,
    };

    use super::*;
    use crate::mapping::{Backing, HUGE_PAGE_BYTES, TrackedMemory, advise_huge_pages, allocate};
    use crate::memory::untracked;
    use dunlin_test_base::huge_pages::{self, HugePages};

    const PAGE: u64 = 4096;
    const BYTES: u64 = 8 << 20;

    fn behind(backing: Backing) -> Behind {
        match backing {
            Backing::Private => Behind::Anonymous,
            Backing::Memfd | Backing::Huge => Behind::File,
        }
    }

    fn slice(memory: &TrackedMemory) -> VolatileSlice<'_> {
        let region = memory.iter().next().unwrap();
        let whole = region.get_slice(MemoryRegionAddress(0), BYTES as usize);
        untracked(&whole.unwrap())
    }

    fn write(slice: &VolatileSlice<'_>, page: u64) {
        let byte = slice.subslice((page * PAGE) as usize + 7, 1).unwrap();
        byte.copy_from(&[1_u8]);
    }

    fn taken(watch: &WriteWatch, slice: &VolatileSlice<'_>, behind: Behind) -> Vec<Range<u64>> {
        let mut pages = Vec::new();
        watch
            .take(slice, behind, |range| {
                pages.push(range.start / PAGE..range.end / PAGE);
            })
            .unwrap();
        pages
    }

    #[test]
    fn written_pages_are_taken_once_populated_or_not() {
        for backing in [Backing::Private, Backing::Memfd] {
            let memory = allocate(BYTES, backing).unwrap();
            let (slice, behind) = (slice(&memory), behind(backing));
            for page in [1, 5, 6] {
                write(&slice, page);
            }
            let watch = WriteWatch::new().unwrap();
            watch.register(&slice, behind).unwrap();
            assert_eq!(taken(&watch, &slice, behind), [], "{backing:?}");
            // A populated page, an unpopulated page, a page without a page table, and the last
            // page.
            for page in [5, 9, 1000, 2047] {
                write(&slice, page);
            }
            assert_eq!(
                taken(&watch, &slice, behind),
                [5..6, 9..10, 1000..1001, 2047..2048],
                "{backing:?}"
            );
            assert_eq!(taken(&watch, &slice, behind), [], "{backing:?}");
            write(&slice, 9);
            assert_eq!(taken(&watch, &slice, behind), [9..10], "{backing:?}");
        }
    }

    #[test]
    fn pages_written_by_the_kernel_for_the_process_are_taken_too() {
        let memory = allocate(BYTES, Backing::Private).unwrap();
        let slice = slice(&memory);
        write(&slice, 3);
        let watch = WriteWatch::new().unwrap();
        watch.register(&slice, Behind::Anonymous).unwrap();
        let mut zeros = File::open("/dev/zero").unwrap().take(2 * PAGE);
        let mut target = slice
            .subslice(3 * PAGE as usize, 2 * PAGE as usize)
            .unwrap();
        vm_memory::ReadVolatile::read_exact_volatile(zeros.get_mut(), &mut target).unwrap();
        assert_eq!(taken(&watch, &slice, Behind::Anonymous), [3..5]);
    }

    #[test]
    fn a_watch_does_not_make_holes_appear_populated() {
        let memory = allocate(BYTES, Backing::Private).unwrap();
        let slice = slice(&memory);
        write(&slice, 3);
        let watch = WriteWatch::new().unwrap();
        watch.register(&slice, Behind::Anonymous).unwrap();
        write(&slice, 600);
        taken(&watch, &slice, Behind::Anonymous);
        let mut populated = Vec::new();
        pagemap::populated(&slice, |range| populated.push(range.start / PAGE)).unwrap();
        assert_eq!(populated, [3, 600]);
    }

    #[test]
    fn a_page_that_the_kernel_unmapped_in_between_is_taken() {
        let memfd = allocate(BYTES, Backing::Memfd).unwrap();
        let (read_write, shared) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        let anonymous = shared | libc::MAP_ANONYMOUS;
        let anonymous: MmapRegion =
            MmapRegion::build(None, BYTES as usize, read_write, anonymous).unwrap();
        for slice in [slice(&memfd), anonymous.as_volatile_slice()] {
            let watch = WriteWatch::new().unwrap();
            watch.register(&slice, Behind::File).unwrap();
            for page in [4, 7] {
                write(&slice, page);
            }
            assert_eq!(taken(&watch, &slice, Behind::File), [4..5, 7..8]);
            write(&slice, 4);
            // MADV_DONTNEED has the same effect as reclaim: the page stays in the file, but its
            // page table entry is dropped. The mark of a protected page remains.
            let start = slice.ptr_guard_mut().as_ptr();
            // SAFETY: the range is mapped and shared. MADV_DONTNEED drops page table entries, and
            // the file keeps the content.
            let result =
                unsafe { libc::madvise(start.cast(), 16 * PAGE as usize, libc::MADV_DONTNEED) };
            assert_eq!(result, 0);
            let taken = taken(&watch, &slice, Behind::File);
            assert!(taken.contains(&(4..5)), "{taken:?}");
        }
    }

    #[test]
    fn a_written_huge_page_is_taken_whole() {
        let Some(_huge) = HugePages::reserve(BYTES / (2 << 20)) else {
            return;
        };
        let memory = allocate(BYTES, Backing::Huge).unwrap();
        let slice = slice(&memory);
        write(&slice, 0);
        let watch = WriteWatch::new().unwrap();
        watch.register(&slice, Behind::File).unwrap();
        assert_eq!(taken(&watch, &slice, Behind::File), []);
        write(&slice, 700);
        write(&slice, 2000);
        assert_eq!(taken(&watch, &slice, Behind::File), [512..1024, 1536..2048]);
        assert_eq!(taken(&watch, &slice, Behind::File), []);
        write(&slice, 3);
        assert_eq!(taken(&watch, &slice, Behind::File), [0..512]);
    }

    #[test]
    fn a_transparent_huge_page_is_reported_by_the_pages_that_are_written() {
        if huge_pages::transparent().is_none() {
            return;
        }
        let memory = allocate(BYTES, Backing::Private).unwrap();
        let slice = slice(&memory);
        advise_huge_pages(&memory);
        for block in 0..3 {
            write(&slice, 512 * block);
        }
        let before = pagemap::huge_kib(&slice).unwrap();
        assert_eq!(before, 3 * HUGE_PAGE_BYTES / 1024);
        let watch = WriteWatch::new().unwrap();
        watch.register(&slice, Behind::Anonymous).unwrap();
        let untouched = pagemap::huge_kib(&slice).unwrap();
        let began = std::time::Instant::now();
        for page in (0..1024).step_by(64) {
            write(&slice, page);
        }
        let writing = began.elapsed();
        let reported = taken(&watch, &slice, Behind::Anonymous);
        let expected: Vec<_> = (0..1024).step_by(64).map(|page| page..page + 1).collect();
        assert_eq!(reported, expected);
        // If a block is touched for the first time, the whole block may be reported, once.
        write(&slice, 1700);
        let block = taken(&watch, &slice, Behind::Anonymous);
        write(&slice, 1701);
        assert_eq!(taken(&watch, &slice, Behind::Anonymous), [1701..1702]);
        let pages: u64 = block.iter().map(|range| range.end - range.start).sum();
        assert!(pages <= 512, "{block:?}");
        println!(
            "memory on huge pages: {before} KiB, {untouched} KiB once watched, {} KiB after 16 writes to \
             two of them ({writing:?}); a first touch reports {pages} pages",
            pagemap::huge_kib(&slice).unwrap()
        );
        // Registering the memory split no huge page.
        assert_eq!(untouched, before);
    }

    #[test]
    fn no_write_to_a_transparent_huge_page_is_lost() {
        let memory = allocate(BYTES, Backing::Private).unwrap();
        let slice = slice(&memory);
        advise_huge_pages(&memory);
        write(&slice, 1000);
        let watch = WriteWatch::new().unwrap();
        watch.register(&slice, Behind::Anonymous).unwrap();
        assert_eq!(taken(&watch, &slice, Behind::Anonymous), []);
        write(&slice, 1000);
        write(&slice, 1003);
        assert_eq!(
            taken(&watch, &slice, Behind::Anonymous),
            [1000..1001, 1003..1004]
        );
        // A first touch may also populate the pages around the touched page.
        write(&slice, 1600);
        let around = taken(&watch, &slice, Behind::Anonymous);
        assert!(
            around.iter().any(|pages| pages.contains(&1600)),
            "{around:?}"
        );
        assert_eq!(taken(&watch, &slice, Behind::Anonymous), []);
        write(&slice, 1601);
        assert_eq!(taken(&watch, &slice, Behind::Anonymous), [1601..1602]);
    }

    /// The test merges pages with MADV_COLLAPSE, which does at once what khugepaged would do later.
    #[test]
    fn no_write_is_lost_when_watched_pages_are_merged() {
        if huge_pages::transparent().is_none() {
            return;
        }
        let memory = allocate(BYTES, Backing::Private).unwrap();
        let slice = slice(&memory);
        // The second block consists of small pages; the third one was never touched.
        for page in 512..1024 {
            write(&slice, page);
        }
        advise_huge_pages(&memory);
        let watch = WriteWatch::new().unwrap();
        watch.register(&slice, Behind::Anonymous).unwrap();
        write(&slice, 600);
        assert_eq!(taken(&watch, &slice, Behind::Anonymous), [600..601]);
        for page in (512..1024).chain([1100]) {
            write(&slice, page);
        }
        let start = slice.ptr_guard_mut().as_ptr();
        // SAFETY: the range is mapped. MADV_COLLAPSE changes the size of the pages that back it,
        // not their content. It fails if the kernel does not merge watched pages.
        unsafe { libc::madvise(start.cast(), slice.len(), libc::MADV_COLLAPSE) };
        let taken = taken(&watch, &slice, Behind::Anonymous);
        for page in (512..1024).chain([1100]) {
            assert!(
                taken.iter().any(|pages| pages.contains(&page)),
                "{page} in {taken:?}"
            );
        }
    }

    #[test]
    fn unregistered_memory_cannot_be_taken_and_can_be_registered_again() {
        let memory = allocate(BYTES, Backing::Private).unwrap();
        let slice = slice(&memory);
        write(&slice, 0);
        let watch = WriteWatch::new().unwrap();
        watch.register(&slice, Behind::Anonymous).unwrap();
        let second = WriteWatch::new().unwrap();
        let busy = second.register(&slice, Behind::Anonymous).unwrap_err();
        assert_eq!(busy.raw_os_error(), Some(libc::EBUSY));
        watch.unregister(&slice).unwrap();
        let ended = watch.take(&slice, Behind::Anonymous, |_| ()).unwrap_err();
        assert_eq!(ended.raw_os_error(), Some(libc::EPERM));
        second.register(&slice, Behind::Anonymous).unwrap();
        write(&slice, 0);
        assert_eq!(taken(&second, &slice, Behind::Anonymous), [0..1]);
        drop(second);
        watch.register(&slice, Behind::Anonymous).unwrap();
        assert_eq!(taken(&watch, &slice, Behind::Anonymous), []);
    }
}
