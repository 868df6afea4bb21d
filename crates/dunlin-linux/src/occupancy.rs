//! Finds the bytes of this process's memory that may hold data, from the kernel's tables.
//!
//! [`crate::pagemap`] finds the pages that a source sends. `--verify` needs an independent method,
//! because digests based on the same scan would repeat its mistakes. The two modules share no code
//! and, where possible, no kernel interface:
//!
//! | memory | a hole is |
//! | --- | --- |
//! | private, not of a file | an entry of /proc/self/pagemap without bits 62 and 63 |
//! | shared, its file open in this process | a hole of that file, at the offset in /proc/self/maps |
//! | any other | unknown: everything may hold data |
//!
//! Reading the entries of 1 GiB takes 2 MiB of reads and populates nothing
//! (Documentation/admin-guide/mm/pagemap.rst). The page table of a shared mapping lacks pages that
//! only another process wrote, and mincore(2) reports swapped-out pages as absent. lseek(2) on the
//! file reports both kinds of pages as data, so this module finds the file among this process's
//! descriptors by device and inode. It does not use the caller's file and offset, which could be
//! wrong. lseek(2) reports no holes in files of huge pages, so all of that memory may hold data.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use vm_memory::VolatileSlice;

/// Size of an entry of /proc/self/pagemap, in bytes.
const ENTRY_BYTES: usize = 8;
/// The page is in memory.
const PRESENT: u64 = 1 << 63;
/// The page is swapped out, or the kernel is moving it (page migration).
const SWAPPED: u64 = 1 << 62;
/// Number of entries in each read. They occupy 64 KiB and describe 32 MiB of memory.
const ENTRIES_AT_ONCE: usize = 8192;
/// Ranges are rounded outwards to multiples of this length.
const PAGE_BYTES: u64 = 4096;
/// The name of a private mapping of huge pages that was made without a file. Such a mapping has an
/// inode nevertheless.
const ANONYMOUS_HUGE: &str = "/anon_hugepage (deleted)";

/// The methods that find the holes in a range of memory.
#[derive(Debug)]
pub struct Occupancy {
    /// The first address of the memory.
    base: u64,
    areas: Vec<Area>,
}

/// A range of addresses in which one method finds the holes.
#[derive(Debug)]
struct Area {
    addresses: Range<u64>,
    method: Method,
}

#[derive(Debug)]
enum Method {
    /// The entries of the page table.
    Entries { pagemap: File, page_bytes: u64 },
    /// The file of a shared mapping; `offset` is the file offset of the first address.
    File { file: File, offset: u64 },
    /// No method: everything may hold data.
    None,
}

impl Occupancy {
    /// Reads how `memory` is mapped. The mapping must not change until the last call of
    /// [`Occupancy::within`].
    ///
    /// # Errors
    /// /proc/self/maps cannot be read or parsed.
    pub fn of(memory: &VolatileSlice<'_>) -> io::Result<Self> {
        let base = memory.ptr_guard().as_ptr() as u64;
        let end = base + memory.len() as u64;
        // The paths in the file need not be UTF-8.
        let maps = fs::read("/proc/self/maps")?;
        let maps = String::from_utf8_lossy(&maps);
        let mut areas = Vec::new();
        for line in maps.lines() {
            let mapping = Mapping::parse(line).ok_or_else(|| {
                let what = format!("malformed line in /proc/self/maps: {line:?}");
                io::Error::new(io::ErrorKind::InvalidData, what)
            })?;
            let addresses = mapping.addresses.start.max(base)..mapping.addresses.end.min(end);
            if addresses.is_empty() {
                continue;
            }
            let method = mapping.method(addresses.start).unwrap_or(Method::None);
            areas.push(Area { addresses, method });
        }
        Ok(Self { base, areas })
    }

    /// The bytes in `within`, relative to the memory's start, that may be non-zero: ascending,
    /// disjoint, non-adjacent ranges of whole 4 KiB pages. `within` must begin and end at a page
    /// boundary.
    #[must_use]
    pub fn within(&self, within: Range<u64>) -> Vec<Range<u64>> {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        let mut found = |addresses: Range<u64>| {
            let from = (addresses.start - self.base) / PAGE_BYTES * PAGE_BYTES;
            let to = (addresses.end - self.base).next_multiple_of(PAGE_BYTES);
            let (from, to) = (from.max(within.start), to.min(within.end));
            match ranges.last_mut() {
                Some(last) if from <= last.end => last.end = last.end.max(to),
                _ => ranges.push(from..to),
            }
        };
        let mut at = self.base + within.start;
        let end = self.base + within.end;
        for area in &self.areas {
            let here = area.addresses.start.max(at)..area.addresses.end.min(end);
            if here.is_empty() {
                continue;
            }
            if at < here.start {
                // No line of /proc/self/maps describes these bytes, so treat them as data.
                found(at..here.start);
            }
            at = here.end;
            if area.find(here.clone(), &mut found).is_err() {
                found(here);
            }
        }
        if at < end {
            found(at..end);
        }
        ranges
    }
}

impl Area {
    /// Calls `found` with the addresses in `within` that may hold data, in order.
    ///
    /// # Errors
    /// A read or seek fails; any address not reported yet may hold data.
    fn find(&self, within: Range<u64>, found: &mut dyn FnMut(Range<u64>)) -> io::Result<()> {
        match &self.method {
            Method::Entries {
                pagemap,
                page_bytes,
            } => by_entries(pagemap, *page_bytes, within, found),
            Method::File { file, offset } => {
                let shift = self.addresses.start;
                let bytes = within.start - shift + offset..within.end - shift + offset;
                by_file(file, bytes, &mut |data| {
                    found(data.start - offset + shift..data.end - offset + shift);
                })
            }
            Method::None => {
                found(within);
                Ok(())
            }
        }
    }
}

fn by_entries(
    pagemap: &File,
    page_bytes: u64,
    within: Range<u64>,
    found: &mut dyn FnMut(Range<u64>),
) -> io::Result<()> {
    let mut bytes = vec![0; ENTRIES_AT_ONCE * ENTRY_BYTES];
    let (mut page, end) = (within.start / page_bytes, within.end.div_ceil(page_bytes));
    while page < end {
        let count = (end - page).min(ENTRIES_AT_ONCE as u64);
        let bytes = &mut bytes[..count as usize * ENTRY_BYTES];
        pagemap.read_exact_at(bytes, page * ENTRY_BYTES as u64)?;
        let (entries, _) = bytes.as_chunks::<ENTRY_BYTES>();
        for (page, entry) in (page..).zip(entries) {
            if holds_data(u64::from_ne_bytes(*entry)) {
                found(page * page_bytes..(page + 1) * page_bytes);
            }
        }
        page += count;
    }
    Ok(())
}

/// Whether private memory with this entry may hold data. Other bits are ignored, because holes may
/// have them too: soft-dirty (55) and write-protected by userfaultfd (57).
const fn holds_data(entry: u64) -> bool {
    entry & (PRESENT | SWAPPED) != 0
}

fn by_file(file: &File, within: Range<u64>, found: &mut dyn FnMut(Range<u64>)) -> io::Result<()> {
    let mut hole = within.start;
    loop {
        let data = match seek(file, SeekFrom::Data(hole)) {
            // The rest of the file is a hole.
            Err(Errno::NXIO) => return Ok(()),
            data => data?,
        };
        if data >= within.end {
            return Ok(());
        }
        // The end of the file counts as a hole.
        let next = seek(file, SeekFrom::Hole(data))?;
        if data < hole || next <= data {
            return Err(io::Error::other(
                "the file system reports holes out of order",
            ));
        }
        hole = next;
        found(data..hole.min(within.end));
        if hole >= within.end {
            return Ok(());
        }
    }
}

/// A line of /proc/self/maps (proc_pid_maps(5)).
#[derive(Debug, PartialEq, Eq)]
struct Mapping<'a> {
    addresses: Range<u64>,
    shared: bool,
    /// The file offset of the first address.
    offset: u64,
    /// Major and minor number.
    device: (u32, u32),
    inode: u64,
    name: &'a str,
}

impl<'a> Mapping<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let hexadecimal = |text: &str| u64::from_str_radix(text, 16).ok();
        let mut fields = line.splitn(6, ' ');
        let (start, end) = fields.next()?.split_once('-')?;
        let shared = match fields.next()?.as_bytes() {
            [_, _, _, b's'] => true,
            [_, _, _, b'p'] => false,
            _ => return None,
        };
        let offset = hexadecimal(fields.next()?)?;
        let (major, minor) = fields.next()?.split_once(':')?;
        Some(Self {
            addresses: hexadecimal(start)?..hexadecimal(end)?,
            shared,
            offset,
            device: (
                u32::from_str_radix(major, 16).ok()?,
                u32::from_str_radix(minor, 16).ok()?,
            ),
            inode: fields.next()?.parse().ok()?,
            name: fields.next().unwrap_or_default().trim_start(),
        })
    }

    /// Returns the method for finding the holes from `first`, an address in this mapping.
    fn method(&self, first: u64) -> io::Result<Method> {
        if self.shared {
            let offset = first - self.addresses.start + self.offset;
            let file = self.open()?;
            return Ok(Method::File { file, offset });
        }
        // In a private mapping of a file, a page without an entry has the content of the file, so
        // it is not a hole.
        if self.inode != 0 && self.name != ANONYMOUS_HUGE {
            return Ok(Method::None);
        }
        Ok(Method::Entries {
            pagemap: File::open("/proc/self/pagemap")?,
            page_bytes: rustix::param::page_size() as u64,
        })
    }

    /// Opens the file of the mapping again. Seeking on the existing descriptor would move its file
    /// position, and the owner of the descriptor may use that position.
    fn open(&self) -> io::Result<File> {
        let is_mapped = |metadata: &fs::Metadata| {
            let device = (libc::major(metadata.dev()), libc::minor(metadata.dev()));
            (device, metadata.ino()) == (self.device, self.inode)
        };
        for descriptor in fs::read_dir("/proc/self/fd")? {
            let path = descriptor?.path();
            // Another thread may have closed the descriptor or reused its number.
            if !fs::metadata(&path).is_ok_and(|metadata| is_mapped(&metadata)) {
                continue;
            }
            let file = OpenOptions::new()
                .read(true)
                .custom_flags(libc::O_NONBLOCK)
                .open(&path)?;
            if is_mapped(&file.metadata()?) {
                return Ok(file);
            }
        }
        Err(io::ErrorKind::NotFound.into())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use vm_memory::{FileOffset, MmapRegion, VolatileMemory};

    use super::*;
    use crate::mapping::{Backing, TrackedMemory, allocate};

    const MIB: u64 = 1 << 20;

    fn slice(memory: &TrackedMemory) -> VolatileSlice<'_> {
        use vm_memory::{GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress};
        let region = memory.iter().next().unwrap();
        let all = region.get_slice(MemoryRegionAddress(0), region.len() as usize);
        crate::memory::untracked(&all.unwrap())
    }

    fn advise(slice: &VolatileSlice<'_>, advice: libc::c_int) {
        let start = slice.ptr_guard_mut().as_ptr();
        // SAFETY: `slice` is mapped, and the advice that the tests pass (MADV_NOHUGEPAGE,
        // MADV_DONTDUMP) does not change its content.
        let result = unsafe { libc::madvise(start.cast(), slice.len(), advice) };
        assert_eq!(result, 0);
    }

    fn write(slice: &VolatileSlice<'_>, offset: u64) {
        slice
            .subslice(offset as usize, 1)
            .unwrap()
            .copy_from(&[7_u8]);
    }

    fn occupied(slice: &VolatileSlice<'_>) -> Vec<Range<u64>> {
        Occupancy::of(slice).unwrap().within(0..slice.len() as u64)
    }

    fn resident_pages(slice: &VolatileSlice<'_>) -> usize {
        let mut pages = vec![0_u8; slice.len() / 4096];
        let start = slice.ptr_guard_mut().as_ptr();
        // SAFETY: `slice` is mapped, and `pages` has one byte for each of its pages. The call
        // writes to nothing else.
        let result = unsafe { libc::mincore(start.cast(), slice.len(), pages.as_mut_ptr()) };
        assert_eq!(result, 0);
        pages.iter().filter(|&&page| page & 1 == 1).count()
    }

    #[test]
    fn written_pages_are_found_and_holes_stay_holes() {
        for backing in [Backing::Private, Backing::Memfd] {
            let memory = allocate(64 * MIB, backing).unwrap();
            let slice = slice(&memory);
            advise(&slice, libc::MADV_NOHUGEPAGE);
            assert_eq!(occupied(&slice), []);
            for offset in [0, 3 * 4096, 4 * 4096 + 4095, 40 * MIB, 64 * MIB - 1] {
                write(&slice, offset);
            }
            let expected = [
                0..4096,
                3 * 4096..5 * 4096,
                40 * MIB..40 * MIB + 4096,
                64 * MIB - 4096..64 * MIB,
            ];
            assert_eq!(occupied(&slice), expected, "{backing:?}");
            assert_eq!(resident_pages(&slice), 5, "{backing:?}");
            let known = Occupancy::of(&slice).unwrap();
            let part = known.within(4 * 4096..40 * MIB + 4096);
            let expected = [4 * 4096..5 * 4096, 40 * MIB..40 * MIB + 4096];
            assert_eq!(part, expected, "{backing:?}");
        }
    }

    #[test]
    fn a_mapping_that_begins_within_its_file_uses_the_files_offset() {
        let whole = allocate(16 * MIB, Backing::Memfd).unwrap();
        let region = vm_memory::GuestMemoryBackend::iter(&whole).next().unwrap();
        let file = region.file_offset().unwrap().file();
        for offset in [MIB, 9 * MIB] {
            write(&slice(&whole), offset);
        }
        for (start, expected) in [
            (0, MIB..MIB + 4096),
            (MIB, 0..4096),
            (7 * MIB, 2 * MIB..2 * MIB + 4096),
        ] {
            let offset = FileOffset::new(file.try_clone().unwrap(), start);
            let part: MmapRegion = MmapRegion::from_file(offset, 4 * MIB as usize).unwrap();
            let found = occupied(&part.as_volatile_slice());
            assert!(found.iter().eq([&expected]), "{start}: {found:?}");
        }
    }

    /// A slice can begin within a mapping, because the kernel can merge two adjacent regions of one
    /// file into one mapping.
    #[test]
    fn a_slice_that_begins_within_a_mapping_uses_the_files_offset() {
        let whole = allocate(16 * MIB, Backing::Memfd).unwrap();
        let slice = slice(&whole);
        for offset in [0, 5 * MIB, 11 * MIB, 15 * MIB] {
            write(&slice, offset);
        }
        let part = slice.subslice(4 * MIB as usize, 8 * MIB as usize).unwrap();
        let expected = [MIB..MIB + 4096, 7 * MIB..7 * MIB + 4096];
        assert_eq!(occupied(&part), expected);
        let known = Occupancy::of(&part).unwrap();
        assert_eq!(known.within(2 * MIB..8 * MIB), expected[1..]);
    }

    #[test]
    fn a_file_of_the_same_inode_on_another_device_is_another_file() {
        let whole = allocate(2 * MIB, Backing::Memfd).unwrap();
        let region = vm_memory::GuestMemoryBackend::iter(&whole).next().unwrap();
        let file = region.file_offset().unwrap().file();
        let metadata = file.metadata().unwrap();
        let (major, minor) = (libc::major(metadata.dev()), libc::minor(metadata.dev()));
        let opened = |device| {
            let mapping = Mapping {
                addresses: 0..2 * MIB,
                shared: true,
                offset: 0,
                device,
                inode: metadata.ino(),
                name: "",
            };
            mapping.open()
        };
        let found = opened((major, minor)).unwrap().metadata().unwrap();
        assert_eq!((found.dev(), found.ino()), (metadata.dev(), metadata.ino()));
        for device in [(major + 1, minor), (major, minor + 1)] {
            let error = opened(device).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::NotFound, "{device:?}");
        }
    }

    #[test]
    fn writes_through_the_file_are_found() {
        let whole = allocate(4 * MIB, Backing::Memfd).unwrap();
        let region = vm_memory::GuestMemoryBackend::iter(&whole).next().unwrap();
        let file = region.file_offset().unwrap().file();
        file.write_all_at(&[1], 2 * MIB).unwrap();
        let slice = slice(&whole);
        let page = 2 * MIB..2 * MIB + 4096;
        assert_eq!(occupied(&slice), std::slice::from_ref(&page));
    }

    #[test]
    fn memory_without_a_method_may_hold_data_everywhere() {
        let whole = allocate(2 * MIB, Backing::Memfd).unwrap();
        let region = vm_memory::GuestMemoryBackend::iter(&whole).next().unwrap();
        let file = region.file_offset().unwrap().file().try_clone().unwrap();
        file.write_all_at(&[1], 0).unwrap();
        // A private mapping of a file: its unwritten pages are those of the file, which may hold
        // data.
        let private: MmapRegion = MmapRegion::build(
            Some(FileOffset::new(file, 0)),
            MIB as usize,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE,
        )
        .unwrap();
        let everything = 0..MIB;
        let all = std::slice::from_ref(&everything);
        assert_eq!(occupied(&private.as_volatile_slice()), all);
        // A shared mapping without a descriptor of its file in this process.
        let shared: MmapRegion = MmapRegion::build(
            None,
            MIB as usize,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_ANONYMOUS,
        )
        .unwrap();
        assert_eq!(occupied(&shared.as_volatile_slice()), all);
    }

    /// The test splits the mapping with madvise(2) on a part of the memory, which has the same
    /// effect as mapping the memory in several steps.
    #[test]
    fn data_is_found_in_memory_of_several_mappings() {
        let memory = allocate(16 * MIB, Backing::Private).unwrap();
        let slice = slice(&memory);
        let middle = slice.subslice(4 * MIB as usize, 4 * MIB as usize).unwrap();
        advise(&slice, libc::MADV_NOHUGEPAGE);
        advise(&middle, libc::MADV_DONTDUMP);
        for offset in [4 * MIB - 4096, 4 * MIB, 8 * MIB, 12 * MIB] {
            write(&slice, offset);
        }
        assert!(Occupancy::of(&slice).unwrap().areas.len() >= 3);
        let expected = [
            4 * MIB - 4096..4 * MIB + 4096,
            8 * MIB..8 * MIB + 4096,
            12 * MIB..12 * MIB + 4096,
        ];
        assert_eq!(occupied(&slice), expected);
    }

    #[test]
    fn a_swapped_page_holds_data_and_a_hole_that_is_only_watched_does_not() {
        for (bits, holds) in [
            (vec![], false),
            (vec![55], false),
            (vec![57], false),
            (vec![62], true),
            (vec![62, 55, 57], true),
            (vec![63], true),
            (vec![63, 61, 56], true),
        ] {
            let entry = bits.iter().fold(0, |entry, bit| entry | 1_u64 << bit);
            assert_eq!(holds_data(entry), holds, "{bits:?}");
        }
    }

    #[test]
    fn lines_of_proc_self_maps_are_parsed() {
        let line = "7f2e5c000000-7f2e5c100000 rw-s 00300000 00:01 1042                       \
                    /memfd:dunlin guest (deleted)";
        let mapping = Mapping {
            addresses: 0x7f2e_5c00_0000..0x7f2e_5c10_0000,
            shared: true,
            offset: 0x30_0000,
            device: (0, 1),
            inode: 1042,
            name: "/memfd:dunlin guest (deleted)",
        };
        assert_eq!(Mapping::parse(line), Some(mapping));
        let line = "ffff0000-ffffe000 rw-p 00000000 fd:1a 0 ";
        let mapping = Mapping {
            addresses: 0xffff_0000..0xffff_e000,
            shared: false,
            offset: 0,
            device: (0xfd, 0x1a),
            inode: 0,
            name: "",
        };
        assert_eq!(Mapping::parse(line), Some(mapping));
        for line in ["", "Rss: 12 kB", "7f00-7f01 rw-x 0 00:00 0", "7f00 rw-p 0"] {
            assert_eq!(Mapping::parse(line), None, "{line}");
        }
    }
}
