//! Digests of a machine's memory by page, which `dunlin demo` compares after the guest has moved.
//! docs/decisions/0017-the-demos-check.md states which differences the digests show.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use dunlin::engine::memory::MappedMemory;
use dunlin::engine::vmm::{GuestMemory, Region};
use dunlin_linux::mapping::{HUGE_PAGE_BYTES, PAGE_BYTES};
use dunlin_linux::memory::is_zero;
use dunlin_linux::occupancy::Occupancy;
use twox_hash::XxHash3_128;
use vm_memory::VolatileSlice;
use vm_memory::bitmap::AtomicBitmap;

/// Number of pages that each digest of [`PageDigests::blocks`] covers.
const BLOCK_PAGES: usize = (HUGE_PAGE_BYTES / PAGE_BYTES) as usize;

/// One digest per page, by region: 64 bits of XXH3, or 0 for a page of zeros.
#[derive(Debug, Default)]
pub(crate) struct PageDigests(Vec<Box<[AtomicU64]>>);

impl PageDigests {
    /// The digests of memory that is all zero.
    pub(crate) fn of_zeros(regions: &[Region]) -> Self {
        let zeros = |region: &Region| (0..region.pages()).map(|_| AtomicU64::new(0)).collect();
        Self(regions.iter().map(zeros).collect())
    }

    /// Computes the digests of the memory's current content. Skips holes without reading them, if
    /// the kernel reports the holes.
    ///
    /// # Errors
    /// A region cannot be read.
    pub(crate) fn of(memory: &dyn GuestMemory) -> io::Result<Self> {
        let digests = Self::of_zeros(memory.regions());
        for (index, region) in memory.regions().iter().enumerate() {
            let length = usize::try_from(region.length).map_err(io::Error::other)?;
            let ranges = match Occupancy::of(&memory.slice(index, 0, length)?) {
                Ok(occupancy) => occupancy.within(0..region.length),
                Err(_) => std::iter::once(0..region.length).collect(),
            };
            for range in ranges {
                digests.read(memory, index, range)?;
            }
        }
        Ok(digests)
    }

    /// Whether any digests are kept.
    pub(crate) fn are_kept(&self) -> bool {
        !self.0.is_empty()
    }

    /// Reads the pages of `range` in a region and computes their digests.
    fn read(&self, memory: &dyn GuestMemory, index: usize, range: Range<u64>) -> io::Result<()> {
        let mut page = [0_u8; PAGE_BYTES as usize];
        for offset in range.step_by(page.len()) {
            memory.slice(index, offset, page.len())?.copy_to(&mut page);
            let digest = match is_zero(&page) {
                true => 0,
                false => XxHash3_128::oneshot(&page) as u64,
            };
            self.0[index][(offset / PAGE_BYTES) as usize].store(digest, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Replaces the digests by the digests of `later`, except those of the pages that are marked in
    /// `written`. `written` has one bitmap for each region.
    pub(crate) fn replace(&self, later: &Self, written: &[Vec<u64>]) {
        for ((ours, later), written) in self.0.iter().zip(&later.0).zip(written) {
            for (page, (ours, later)) in ours.iter().zip(later.iter()).enumerate() {
                if written[page / 64] >> (page % 64) & 1 == 0 {
                    ours.store(later.load(Ordering::Relaxed), Ordering::Relaxed);
                }
            }
        }
    }

    /// Returns one digest for each 2 MiB of memory, computed from the digests of its pages, in the
    /// order of regions.
    pub(crate) fn blocks(&self) -> Vec<u64> {
        let blocks = self.0.iter().flat_map(|region| region.chunks(BLOCK_PAGES));
        let digest = |block: &[AtomicU64]| {
            let mut whole = XxHash3_128::new();
            for page in block {
                whole.write(&page.load(Ordering::Relaxed).to_le_bytes());
            }
            whole.finish_128() as u64
        };
        blocks.map(digest).collect()
    }
}

/// Guest memory. If digests are kept, a lane that writes pages updates the digests of these pages.
#[derive(Debug)]
pub(crate) struct DigestedMemory {
    pub(crate) mapped: MappedMemory<AtomicBitmap>,
    pub(crate) digests: PageDigests,
}

impl GuestMemory for DigestedMemory {
    fn regions(&self) -> &[Region] {
        self.mapped.regions()
    }

    fn slice(&self, index: usize, offset: u64, length: usize) -> io::Result<VolatileSlice<'_>> {
        self.mapped.slice(index, offset, length)
    }

    fn ranges_to_send(&self, index: usize, found: &mut dyn FnMut(Range<u64>)) -> io::Result<()> {
        self.mapped.ranges_to_send(index, found)
    }

    fn received(&self, index: usize, range: Range<u64>) {
        if self.digests.are_kept() {
            self.digests
                .read(&self.mapped, index, range)
                .expect("a lane has just written this range");
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Arc;

    use dunlin_linux::mapping::{Backing, TrackedMemory, allocate};
    use vm_memory::{Bytes, GuestAddress};

    use super::*;

    const BYTES: u64 = 3 * HUGE_PAGE_BYTES;

    fn memory() -> (Arc<TrackedMemory>, MappedMemory<AtomicBitmap>) {
        let memory = Arc::new(allocate(BYTES, Backing::Private).unwrap());
        (Arc::clone(&memory), MappedMemory::new(memory, 4096))
    }

    #[test]
    fn i3_digests_by_page_see_one_bit_anywhere_and_not_the_holes() {
        let ((a, mapped_a), (b, mapped_b)) = (memory(), memory());
        for address in [0, 4096, HUGE_PAGE_BYTES, BYTES - 1] {
            a.write_obj(7_u8, GuestAddress(address)).unwrap();
            b.write_obj(7_u8, GuestAddress(address)).unwrap();
        }
        // A page that was written but contains only zeros must have the digest of an untouched
        // page.
        b.write_obj(0_u64, GuestAddress(40960)).unwrap();
        let blocks = |mapped| PageDigests::of(mapped).unwrap().blocks();
        let before = blocks(&mapped_a);
        assert_eq!(before.len(), 3);
        assert_eq!(before, blocks(&mapped_b));
        for (block, address) in [(0, 4095), (0, 40960), (1, HUGE_PAGE_BYTES), (2, BYTES - 1)] {
            let byte: u8 = b.read_obj(GuestAddress(address)).unwrap();
            b.write_obj(byte ^ 0x10, GuestAddress(address)).unwrap();
            let after = blocks(&mapped_b);
            let differ: Vec<usize> = (0..3).filter(|one| before[*one] != after[*one]).collect();
            assert_eq!(differ, [block], "{address:#x}");
            b.write_obj(byte, GuestAddress(address)).unwrap();
        }
        // Exchanges the contents of two pages.
        b.write_obj(0_u8, GuestAddress(4096)).unwrap();
        b.write_obj(7_u8, GuestAddress(2 * 4096)).unwrap();
        assert_ne!(before[0], blocks(&mapped_b)[0]);
    }

    #[test]
    fn i3_a_page_that_was_written_since_keeps_its_first_digest() {
        let (memory, mapped) = memory();
        let first = PageDigests::of(&mapped).unwrap();
        let zeros = first.blocks();
        for page in [0, 65, 1535] {
            let address = GuestAddress(page * PAGE_BYTES);
            memory.write_obj(7_u8, address).unwrap();
        }
        let later = PageDigests::of(&mapped).unwrap();
        let mut written = vec![vec![0; 24]];
        for page in [0, 65, 1535] {
            written[0][page / 64] |= 1 << (page % 64);
        }
        first.replace(&later, &written);
        assert_eq!(first.blocks(), zeros);
        written[0][1] = 0;
        first.replace(&later, &written);
        let after = first.blocks();
        assert_eq!(after[1..], zeros[1..]);
        assert_ne!(after[0], zeros[0]);
        first.replace(&later, &[vec![0; 24]]);
        assert_eq!(first.blocks(), later.blocks());
    }

    #[test]
    fn digests_follow_the_lanes_only_if_they_are_kept() {
        for kept in [true, false] {
            let (memory, mapped) = memory();
            let digests = match kept {
                true => PageDigests::of_zeros(mapped.regions()),
                false => PageDigests::default(),
            };
            let digested = DigestedMemory { mapped, digests };
            memory.write_obj(7_u8, GuestAddress(5 * 4096)).unwrap();
            memory.write_obj(7_u8, GuestAddress(9 * 4096)).unwrap();
            digested.received(0, 5 * 4096..6 * 4096);
            assert_eq!(digested.digests.are_kept(), kept);
            let all = PageDigests::of(&digested.mapped).unwrap().blocks();
            assert_ne!(digested.digests.blocks(), all);
            digested.received(0, 8 * 4096..10 * 4096);
            assert_eq!(digested.digests.blocks() == all, kept);
        }
    }
}
