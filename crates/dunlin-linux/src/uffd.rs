//! Watching which pages of a mapping are written: userfaultfd's asynchronous
//! write-protection (Linux 6.7, Documentation/admin-guide/mm/userfaultfd.rst).
//!
//! The kernel lifts a page's protection by itself at the first write and lets
//! the writer go on; nobody handles faults. What is no longer protected has
//! been written, and PAGEMAP_SCAN ([`crate::pagemap`]) reports it and protects
//! it again. It sees writes through this process's mapping, by its threads, by
//! the kernel for them (read(2)) and by KVM; not those of another process that
//! maps the same file, nor of a device that writes to pinned pages.
//!
//! Transparent huge pages stay as they are until they are written: the first
//! write splits one, and it is 4 KiB that are reported from then on. Only memory
//! that is touched for the first time while it is watched comes in blocks, once
//! each, whose other pages are zero and go out as ranges. Keeping the kernel from making
//! huge pages meanwhile (MADV_NOHUGEPAGE) would save that, at the price of the
//! guest's huge pages for good: what was there before cannot be restored, since
//! the advice replaces what the VMM's owner had asked for.
//!
//! It takes no privilege: faults are never handed to us, so that the descriptor
//! may be one for faults of user mode only.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};

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

/// `struct uffdio_range` of the same header.
#[repr(C)]
struct Span {
    start: u64,
    length: u64,
}

/// `struct uffdio_register` of the same header.
#[repr(C)]
struct Register {
    range: Span,
    mode: u64,
    ioctls: u64,
}

/// `struct uffdio_writeprotect` of the same header.
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

/// A request of userfaultfd over the structure that it is implemented for. Private:
/// `WriteWatch::control` relies on each number being that of the structure's own request, and on
/// that no request changes what memory holds or whether it is mapped.
trait Request: Sized {
    const NUMBER: libc::c_ulong;
}

impl Request for Api {
    const NUMBER: libc::c_ulong = request::<Self>(3, 0x3f);
}

/// `UFFDIO_REGISTER`: a range registered for asynchronous write-protection alone is read and written
/// as before.
impl Request for Register {
    const NUMBER: libc::c_ulong = request::<Self>(3, 0x00);
}

/// `UFFDIO_UNREGISTER`, which lifts this userfaultfd's own write-protection.
impl Request for Span {
    const NUMBER: libc::c_ulong = request::<Self>(2, 0x01);
}

/// `UFFDIO_WRITEPROTECT`: the kernel lifts the protection itself at each page's next write.
impl Request for WriteProtect {
    const NUMBER: libc::c_ulong = request::<Self>(3, 0x06);
}

/// The number of a request over a structure `T`; `direction` is 2 to read, 3 to read and write.
const fn request<T>(direction: libc::c_ulong, number: libc::c_ulong) -> libc::c_ulong {
    direction << 30 | (size_of::<T>() as libc::c_ulong) << 16 | 0xaa << 8 | number
}

/// What stands behind the memory that is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behind {
    /// Nothing but the process: a private mapping without a file. Costs nothing for pages that
    /// were never touched.
    Anonymous,
    /// A file: a memfd, huge pages, and whatever is mapped shared, which the kernel keeps in a
    /// file of its own. The kernel may drop the mapping of a page and keep the page, so that
    /// every page has to be marked beforehand: page tables for all of it are allocated, 1/512 of
    /// its size.
    File,
}

/// Watches the writes to some mappings of this process. Dropping it ends that.
///
/// First [`WriteWatch::register`] each mapping, then [`WriteWatch::take`] what
/// was written, any number of times.
#[derive(Debug)]
pub struct WriteWatch {
    descriptor: OwnedFd,
    pagemap: File,
}

impl WriteWatch {
    /// Watches nothing yet.
    ///
    /// # Errors
    /// `ENOSYS` or `EINVAL` where the kernel has no asynchronous
    /// write-protection (before 6.7, or built without userfaultfd), `EPERM`
    /// where a filter of system calls forbids it.
    pub fn new() -> io::Result<Self> {
        let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK | USER_MODE_ONLY;
        // SAFETY: a userfaultfd changes nothing until memory is registered, and `control` registers
        // it for asynchronous write-protection alone.
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

    /// Begins to watch `memory`, which must begin and end at a page's border;
    /// nothing of it counts as written at first.
    ///
    /// # Errors
    /// `EBUSY` where another userfaultfd has it, `EINVAL` where it is no memory
    /// that can be watched, `ENOMEM`.
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

    /// Calls `found` with each range of bytes of `memory`, relative to its start
    /// and in order, that was written since it was registered or last taken: in
    /// pages, or in huge pages where it is made of them. It may hold more,
    /// such as a page that was read for the first time.
    ///
    /// # Errors
    /// `EPERM` where `memory` is not registered. The log is lost then.
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

    /// Ends the watch of `memory`.
    ///
    /// # Errors
    /// The error of ioctl(2); dropping the watch ends it all the same.
    pub fn unregister(&self, memory: &VolatileSlice<'_>) -> io::Result<()> {
        self.control(&mut span(memory))
    }

    /// ioctl(2) on the userfaultfd.
    fn control<T: Request>(&self, argument: &mut T) -> io::Result<()> {
        // SAFETY: the descriptor is open; the argument outlives the call and is of the type that
        // the request is defined over, and no request changes memory: see [`Request`].
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
    fn what_was_written_is_taken_once_populated_or_not() {
        for backing in [Backing::Private, Backing::Memfd] {
            let memory = allocate(BYTES, backing).unwrap();
            let (slice, behind) = (slice(&memory), behind(backing));
            for page in [1, 5, 6] {
                write(&slice, page);
            }
            let watch = WriteWatch::new().unwrap();
            watch.register(&slice, behind).unwrap();
            assert_eq!(taken(&watch, &slice, behind), [], "{backing:?}");
            // One that was there, one that was not, one in a page table that was
            // not, and the last.
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
    fn what_the_kernel_writes_for_us_is_taken_too() {
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
    fn a_watch_does_not_make_holes_look_populated() {
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
            // As reclaim does it: the page stays in the file, its entry goes. A
            // protected page's mark stays.
            let start = slice.ptr_guard_mut().as_ptr();
            // SAFETY: the range is mapped and shared: MADV_DONTNEED drops page table
            // entries, and the file keeps the content.
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
        // A block that nobody had touched: whole, once.
        write(&slice, 1700);
        let block = taken(&watch, &slice, Behind::Anonymous);
        write(&slice, 1701);
        assert_eq!(taken(&watch, &slice, Behind::Anonymous), [1701..1702]);
        let pages: u64 = block.iter().map(|range| range.end - range.start).sum();
        assert!(pages <= 512, "{block:?}");
        println!(
            "huge: {before} KiB, {untouched} once watched, {} after 16 writes to two of \
             them ({writing:?}); a first touch reports {pages} pages",
            pagemap::huge_kib(&slice).unwrap()
        );
        // Those that are only read stay.
        assert_eq!(untouched, before);
    }

    #[test]
    fn nothing_of_a_transparent_huge_page_is_lost() {
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
        // A first touch may populate the pages around it as well.
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

    /// What khugepaged does at some time, done at once.
    #[test]
    fn nothing_of_pages_that_are_merged_while_they_are_watched_is_lost() {
        if huge_pages::transparent().is_none() {
            return;
        }
        let memory = allocate(BYTES, Backing::Private).unwrap();
        let slice = slice(&memory);
        // The second block is made of small pages, the third was never touched.
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
        // SAFETY: the range is mapped; MADV_COLLAPSE changes by what pages it is backed, not what
        // it holds. It fails where the kernel merges nothing that is watched.
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
    fn what_is_watched_no_longer_cannot_be_taken_and_can_be_watched_anew() {
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
