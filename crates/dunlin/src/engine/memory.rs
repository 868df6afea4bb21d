//! Guest memory over `vm_memory::GuestMemoryMmap`, a log of the VMM's own writes to it,
//! and its digest.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use dunlin_linux::occupancy::Occupancy;
use dunlin_linux::{memory as sys, pagemap};
use dunlin_proto::control::{Region, RegionKind};
use dunlin_proto::limits::{DIGEST_BYTES, PAGE_BYTES};
use twox_hash::XxHash3_128;
use vm_memory::bitmap::{AtomicBitmap, Bitmap};
use vm_memory::{
    GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, VolatileSlice,
};

use super::vmm::{DirtyLog, GuestMemory};

/// A VM's memory as mapped by vm-memory. Every mapped region is a RAM region; they are
/// numbered from 0 in the order of guest-physical addresses.
#[derive(Debug)]
pub struct MappedMemory<B = AtomicBitmap> {
    memory: Arc<GuestMemoryMmap<B>>,
    regions: Vec<Region>,
}

impl<B: Bitmap> MappedMemory<B> {
    /// Wraps `memory`, which is backed by pages of `backing_page_bytes` (a hint for the
    /// destination).
    #[must_use]
    pub fn new(memory: Arc<GuestMemoryMmap<B>>, backing_page_bytes: u32) -> Self {
        let regions = (0_u16..)
            .zip(memory.iter())
            .map(|(id, region)| Region {
                id,
                kind: RegionKind::Ram,
                flags: 0,
                backing_page_bytes,
                length: region.len(),
                guest_physical: region.start_addr().0,
                name: format!("ram{id}"),
            })
            .collect();
        Self { memory, regions }
    }

    fn mapped(&self, index: usize) -> io::Result<&<GuestMemoryMmap<B> as GuestMemoryBackend>::R> {
        self.regions
            .get(index)
            .and_then(|region| self.memory.find_region(GuestAddress(region.guest_physical)))
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "no such region"))
    }
}

impl<B: Bitmap + Send + Sync + 'static> GuestMemory for MappedMemory<B> {
    fn regions(&self) -> &[Region] {
        &self.regions
    }

    fn slice(&self, index: usize, offset: u64, length: usize) -> io::Result<VolatileSlice<'_>> {
        let slice = self
            .mapped(index)?
            .get_slice(vm_memory::MemoryRegionAddress(offset), length)
            .map_err(io::Error::other)?;
        Ok(sys::untracked(&slice))
    }

    fn ranges_to_send(&self, index: usize, found: &mut dyn FnMut(Range<u64>)) -> io::Result<()> {
        let unsupported = |what: &str| io::Error::new(io::ErrorKind::Unsupported, what);
        let mapped = self.mapped(index)?;
        match (sys::is_private(mapped.flags()), mapped.file_offset()) {
            (false, Some(file)) => {
                let start = file.start();
                pagemap::data(file.file(), start..start + mapped.len(), |range| {
                    found(range.start - start..range.end - start);
                })
            }
            (true, None) => {
                let length = usize::try_from(mapped.len()).map_err(io::Error::other)?;
                pagemap::populated(&self.slice(index, 0, length)?, found)
            }
            // The page table does not show the holes: a page without an entry has the file's
            // content, which need not be zero.
            (true, Some(_)) => Err(unsupported("private mapping of a file")),
            // The page table does not show the holes: it has no entry for pages that are swapped
            // out or that another process has written.
            (false, None) => Err(unsupported("shared memory without a known file")),
        }
    }
}

/// The VMM's own writes through vm-memory, as a [`DirtyLog`]. A hypervisor's log does not contain
/// these writes. If all writes go through vm-memory, the VMM needs no other log.
///
/// vm-memory's bitmap always records, so [`OwnWrites::start`] only clears it.
#[derive(Debug)]
pub struct OwnWrites {
    memory: Arc<GuestMemoryMmap<AtomicBitmap>>,
}

impl OwnWrites {
    /// Creates a log of writes to `memory`. The bitmaps of `memory` must have one bit per 4 KiB.
    #[must_use]
    pub fn new(memory: Arc<GuestMemoryMmap<AtomicBitmap>>) -> Self {
        Self { memory }
    }
}

impl DirtyLog for OwnWrites {
    fn start(&mut self) -> io::Result<()> {
        self.fetch(&mut |_, _| ())
    }

    fn fetch(&mut self, found: &mut dyn FnMut(usize, &[u64])) -> io::Result<()> {
        for (index, region) in self.memory.iter().enumerate() {
            // Only the mapping's own bitmap can be reset. `GuestMemoryRegion::bitmap` returns a
            // slice of it, so call the mapping's method instead.
            let bitmap: &AtomicBitmap = std::ops::Deref::deref(region).bitmap();
            found(index, &bitmap.get_and_reset());
        }
        Ok(())
    }

    fn stop(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The position of the region `id` in the table.
pub(super) fn region_index(memory: &dyn GuestMemory, id: u16) -> Option<usize> {
    memory.regions().iter().position(|region| region.id == id)
}

/// The words that hold the bits of `pages` in a bitmap with one bit per page, each with the
/// mask of those bits.
pub(super) fn word_masks(mut pages: Range<u64>) -> impl Iterator<Item = (usize, u64)> {
    std::iter::from_fn(move || {
        let (word, bit) = (pages.start / 64, pages.start % 64);
        let count = (64 - bit).min(pages.end - pages.start);
        pages.start += count;
        (count > 0).then(|| (word as usize, (u64::MAX >> (64 - count)) << bit))
    })
}

/// Memory is hashed in pieces of this size. Each thread takes the next piece when it is
/// free.
const PIECE_BYTES: u64 = 64 << 20;

/// A digest of all memory: equal on both sides if the memory is equal byte for byte. Zero
/// pages are left out, so holes need not be read. It uses XXH3 with 128 bits, which detects
/// accidental corruption; the lanes' authentication protects against attackers.
///
/// [`Occupancy`] finds the holes. [`GuestMemory::ranges_to_send`] is not used, because pages that
/// it fails to report would be missing from both digests, and the digests would still be equal. If
/// the holes of a region are unknown, all of the region is read.
///
/// # Errors
/// A region cannot be read, or a thread panicked.
pub fn digest(memory: &dyn GuestMemory, threads: usize) -> io::Result<[u8; DIGEST_BYTES]> {
    let regions = memory.regions();
    let occupancies: Vec<Option<Occupancy>> = regions
        .iter()
        .enumerate()
        .map(|(index, region)| {
            let length = usize::try_from(region.length).ok()?;
            Occupancy::of(&memory.slice(index, 0, length).ok()?).ok()
        })
        .collect();
    let pieces: Vec<(usize, Range<u64>)> = regions
        .iter()
        .enumerate()
        .flat_map(|(index, region)| {
            let starts = (0..region.length).step_by(PIECE_BYTES as usize);
            starts.map(move |from| (index, from..(from + PIECE_BYTES).min(region.length)))
        })
        .collect();
    let next = AtomicUsize::new(0);
    let take_turns = || -> io::Result<Vec<(usize, u128)>> {
        let mut hashed = Vec::new();
        loop {
            let turn = next.fetch_add(1, Ordering::Relaxed);
            let Some((index, piece)) = pieces.get(turn) else {
                return Ok(hashed);
            };
            let ranges = match &occupancies[*index] {
                Some(occupancy) => occupancy.within(piece.clone()),
                None => std::iter::once(piece.clone()).collect(),
            };
            if let Some(hash) = digest_piece(memory, *index, &ranges)? {
                hashed.push((turn, hash));
            }
        }
    };
    let mut hashed = std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(take_turns)).collect();
        let mut all = take_turns()?;
        for other in others {
            let part = other
                .join()
                .map_err(|_| io::Error::other("a digest thread panicked"))?;
            all.extend(part?);
        }
        io::Result::Ok(all)
    })?;
    hashed.sort_unstable();
    let mut whole = XxHash3_128::new();
    for (_, hash) in hashed {
        whole.write(&hash.to_le_bytes());
    }
    Ok(whole.finish_128().to_le_bytes())
}

/// The digest of the pages in `ranges`, which belong to one piece; `None` if all are
/// zero.
fn digest_piece(
    memory: &dyn GuestMemory,
    index: usize,
    ranges: &[Range<u64>],
) -> io::Result<Option<u128>> {
    let mut page = [0_u8; PAGE_BYTES as usize];
    let mut hash = XxHash3_128::new();
    let mut any = false;
    for range in ranges {
        for offset in range.clone().step_by(page.len()) {
            memory.slice(index, offset, page.len())?.copy_to(&mut page);
            if !sys::is_zero(&page) {
                any = true;
                hash.write(&(index as u64).to_le_bytes());
                hash.write(&offset.to_le_bytes());
                hash.write(&page);
            }
        }
    }
    Ok(any.then(|| hash.finish_128()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::fs::FileExt;

    use dunlin_linux::mapping::{Backing, allocate};
    use vm_memory::{Bytes, FileOffset, GuestRegionMmap, MmapRegion};

    use super::*;

    fn memory(bytes: usize) -> Arc<GuestMemoryMmap<AtomicBitmap>> {
        Arc::new(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), bytes)]).unwrap())
    }

    #[test]
    fn a_range_of_pages_becomes_bits_across_words() {
        let mut words = [0; 4];
        for pages in [3..5, 63..129, 192..256, 7..7] {
            for (word, mask) in word_masks(pages) {
                words[word] |= mask;
            }
        }
        assert_eq!(words, [1 << 63 | 0b11000, u64::MAX, 1, u64::MAX]);
    }

    #[test]
    fn i3_the_digest_sees_one_bit_anywhere_and_not_the_holes() {
        let bytes = 3 * PIECE_BYTES as usize + 12288;
        let (a, b) = (memory(bytes), memory(bytes));
        for address in [0, 4096, PIECE_BYTES - 1, PIECE_BYTES, bytes as u64 - 1] {
            a.write_obj(7_u8, GuestAddress(address)).unwrap();
            b.write_obj(7_u8, GuestAddress(address)).unwrap();
        }
        // A zero page that was touched does not change the digest.
        b.write_obj(0_u64, GuestAddress(40960)).unwrap();
        let of = |memory: &Arc<_>, threads| {
            digest(&MappedMemory::new(Arc::clone(memory), 4096), threads).unwrap()
        };
        assert_eq!(of(&a, 1), of(&b, 3));
        b.write_obj(8_u8, GuestAddress(bytes as u64 - 1)).unwrap();
        assert_ne!(of(&a, 1), of(&b, 1));
    }

    #[test]
    fn i3_a_page_at_another_address_changes_the_digest() {
        let (a, b) = (memory(1 << 20), memory(1 << 20));
        a.write_obj(7_u8, GuestAddress(0)).unwrap();
        b.write_obj(7_u8, GuestAddress(4096)).unwrap();
        let of = |m: Arc<_>| digest(&MappedMemory::new(m, 4096), 1).unwrap();
        assert_ne!(of(a), of(b));
    }

    #[test]
    fn i3_a_page_at_the_same_offset_of_another_region_changes_the_digest() {
        let regions = [(GuestAddress(0), 1 << 20), (GuestAddress(1 << 32), 1 << 20)];
        let with = |address| {
            let memory = GuestMemoryMmap::<AtomicBitmap>::from_ranges(&regions).unwrap();
            memory.write_obj(7_u8, GuestAddress(address)).unwrap();
            digest(&MappedMemory::new(Arc::new(memory), 4096), 1).unwrap()
        };
        assert_eq!(with(4096), with(4096));
        assert_ne!(with(4096), with((1 << 32) + 4096));
    }

    /// Tests two regions at different offsets of one file, because a VMM may keep all of its memory
    /// in one file.
    #[test]
    fn i3_a_region_is_searched_at_its_offset_in_the_file() {
        const SECOND: u64 = 1 << 20;
        let file = {
            let whole = allocate(4 << 20, Backing::Memfd).unwrap();
            let region = whole.iter().next().unwrap();
            Arc::clone(region.file_offset().unwrap().arc())
        };
        let behind = |start| Some(FileOffset::from_arc(Arc::clone(&file), start));
        let regions = [
            (GuestAddress(0), SECOND as usize, behind(0)),
            (GuestAddress(1 << 32), 2 << 20, behind(SECOND)),
        ];
        let memory = Arc::new(GuestMemoryMmap::from_ranges_with_files(&regions).unwrap());
        let mapped = MappedMemory::<AtomicBitmap>::new(Arc::clone(&memory), 4096);
        let ranges_to_send = |index| {
            let mut ranges = Vec::new();
            let found = &mut |range| ranges.push(range);
            mapped.ranges_to_send(index, found).unwrap();
            ranges
        };
        assert_eq!([ranges_to_send(0), ranges_to_send(1)], [[], []]);
        // In the file, the second region directly follows the first.
        for address in [SECOND - 1, 1 << 32, (1 << 32) + (1 << 20)] {
            memory.write_obj(7_u8, GuestAddress(address)).unwrap();
        }
        // The file also has data after both regions.
        file.write_all_at(&[7], 3 << 20).unwrap();
        assert!(matches!(&ranges_to_send(0)[..], [range] if *range == (SECOND - 4096..SECOND)));
        assert_eq!(ranges_to_send(1), [0..4096, 1 << 20..(1 << 20) + 4096]);
        let before = digest(&mapped, 1).unwrap();
        let last = GuestAddress((1 << 32) + (2 << 20) - 1);
        memory.write_obj(7_u8, last).unwrap();
        assert_ne!(digest(&mapped, 1).unwrap(), before);
    }

    /// The holes are unknown in a private mapping of a file (a VM restored from a snapshot) and in
    /// shared memory without a known file (a VMM that shares memory with its children).
    #[test]
    fn i3_memory_whose_holes_cannot_be_found_is_sent_as_a_whole() {
        const BYTES: usize = 2 << 20;
        // Protection and flags of mmap(2).
        const READ_WRITE: i32 = 1 | 2;
        const SHARED: i32 = 1;
        const PRIVATE: i32 = 2;
        const ANONYMOUS: i32 = 0x20;
        let whole = allocate(BYTES as u64, Backing::Memfd).unwrap();
        let file = whole.iter().next().unwrap().file_offset().unwrap().clone();
        for (file, flags) in [(Some(file), PRIVATE), (None, SHARED | ANONYMOUS)] {
            let mapped = MmapRegion::build(file, BYTES, READ_WRITE, flags).unwrap();
            let region = GuestRegionMmap::new(mapped, GuestAddress(0)).unwrap();
            let memory = GuestMemoryMmap::<AtomicBitmap>::from_regions(vec![region]).unwrap();
            memory.write_obj(7_u8, GuestAddress(0)).unwrap();
            let mapped = MappedMemory::new(Arc::new(memory), 4096);
            let error = mapped.ranges_to_send(0, &mut |_| ()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::Unsupported);
        }
    }

    #[test]
    fn own_writes_are_reported_once() {
        let memory = memory(1 << 20);
        let mut log = OwnWrites::new(Arc::clone(&memory));
        memory.write_obj(1_u8, GuestAddress(0)).unwrap();
        log.start().unwrap();
        memory.write_obj(1_u8, GuestAddress(2 * 4096)).unwrap();
        let mut seen = Vec::new();
        log.fetch(&mut |index, words| seen.push((index, words[0])))
            .unwrap();
        log.fetch(&mut |index, words| seen.push((index, words[0])))
            .unwrap();
        assert_eq!(seen, [(0, 4), (0, 0)]);
    }

    #[test]
    fn own_writes_to_every_region_are_reported_with_its_number() {
        let regions = [(GuestAddress(0), 1 << 20), (GuestAddress(1 << 32), 1 << 20)];
        let memory = Arc::new(GuestMemoryMmap::from_ranges(&regions).unwrap());
        let mut log = OwnWrites::new(Arc::clone(&memory));
        let last = GuestAddress((1 << 32) + (1 << 20) - 1);
        memory.write_obj(1_u8, last).unwrap();
        log.start().unwrap();
        let mut fetched = || {
            let mut seen = Vec::new();
            let found = &mut |index, words: &[u64]| seen.push((index, words.to_vec()));
            log.fetch(found).unwrap();
            seen
        };
        assert_eq!(fetched(), [(0, vec![0; 4]), (1, vec![0; 4])]);
        memory.write_obj(1_u8, GuestAddress(4096)).unwrap();
        memory.write_obj(1_u8, last).unwrap();
        let expected = [(0, vec![2, 0, 0, 0]), (1, vec![0, 0, 0, 1 << 63])];
        assert_eq!(fetched(), expected);
    }

    #[test]
    fn writes_of_the_engine_are_not_in_the_log() {
        let memory = memory(1 << 20);
        let mapped = MappedMemory::new(Arc::clone(&memory), 4096);
        mapped.slice(0, 4096, 8).unwrap().copy_from(&[1_u8; 8]);
        let mut log = OwnWrites::new(memory);
        log.fetch(&mut |_, words| assert!(words.iter().all(|&w| w == 0)))
            .unwrap();
    }
}
