//! Guest memory over `vm_memory::GuestMemoryMmap`, the log of the VMM's own
//! writes to it, and its digest.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use dunlin_proto::control::{Region, RegionKind};
use dunlin_proto::limits::{DIGEST_BYTES, PAGE_BYTES};
use dunlin_sys::{memory as sys, pagemap};
use twox_hash::XxHash3_128;
use vm_memory::bitmap::{AtomicBitmap, Bitmap};
use vm_memory::{
    GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, VolatileSlice,
};

use super::vmm::{DirtyLog, GuestMemory};

/// A VM's memory as vm-memory maps it: every mapped region is a RAM region,
/// numbered from 0 in the order of its guest-physical address.
#[derive(Debug)]
pub struct MappedMemory<B = AtomicBitmap> {
    memory: Arc<GuestMemoryMmap<B>>,
    regions: Vec<Region>,
}

impl<B: Bitmap> MappedMemory<B> {
    /// Wraps `memory`, which is backed by pages of `backing_page_bytes` (a
    /// hint for the destination).
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

    fn worth_sending(&self, index: usize, found: &mut dyn FnMut(Range<u64>)) -> io::Result<()> {
        let mapped = self.mapped(index)?;
        if let Some(file) = mapped.file_offset() {
            let start = file.start();
            return pagemap::data(file.file(), start..start + mapped.len(), |range| {
                found(range.start - start..range.end - start);
            });
        }
        let length = usize::try_from(mapped.len()).map_err(io::Error::other)?;
        pagemap::populated(&self.slice(index, 0, length)?, found)
    }
}

/// The VMM's own writes through vm-memory, as a [`DirtyLog`] beside the
/// hypervisor's.
///
/// vm-memory's bitmap always records; there is nothing to start or to stop.
#[derive(Debug)]
pub struct OwnWrites {
    memory: Arc<GuestMemoryMmap<AtomicBitmap>>,
}

impl OwnWrites {
    /// The log of writes to `memory`, whose bitmaps must have one bit for
    /// each 4 KiB.
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
            // The mapping's own bitmap, not the slice view that the trait gives.
            let bitmap: &AtomicBitmap = std::ops::Deref::deref(region).bitmap();
            found(index, &bitmap.get_and_reset());
        }
        Ok(())
    }

    fn stop(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Memory is hashed in pieces of this size, which threads take in turn.
const PIECE_BYTES: u64 = 64 << 20;

/// A digest of all memory, the same on both sides when the memory is the same
/// byte for byte. Pages that are all zero do not count, so that holes need
/// not be read. XXH3 with 128 bits: against accidents, not against attackers,
/// whom the lanes' authentication keeps out.
///
/// # Errors
/// A region cannot be read.
pub fn digest(memory: &dyn GuestMemory, threads: usize) -> io::Result<[u8; DIGEST_BYTES]> {
    let mut pieces = Vec::new();
    for (index, region) in memory.regions().iter().enumerate() {
        let mut populated = Vec::new();
        if memory
            .worth_sending(index, &mut |range| populated.push(range))
            .is_err()
        {
            populated.clear();
            populated.push(0..region.length);
        }
        let mut from = 0;
        while from < region.length {
            let to = (from + PIECE_BYTES).min(region.length);
            let ranges: Vec<Range<u64>> = populated
                .iter()
                .map(|range| range.start.max(from)..range.end.min(to))
                .filter(|range| range.start < range.end)
                .collect();
            if !ranges.is_empty() {
                pieces.push((index, ranges));
            }
            from = to;
        }
    }
    let next = AtomicUsize::new(0);
    let take_turns = || -> io::Result<Vec<(usize, u128)>> {
        let mut hashed = Vec::new();
        loop {
            let turn = next.fetch_add(1, Ordering::Relaxed);
            let Some((index, ranges)) = pieces.get(turn) else {
                return Ok(hashed);
            };
            if let Some(hash) = digest_piece(memory, *index, ranges)? {
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

/// The digest of one piece, or none when all its pages are zero.
fn digest_piece(
    memory: &dyn GuestMemory,
    index: usize,
    ranges: &[Range<u64>],
) -> io::Result<Option<u128>> {
    let mut page = [0_u8; PAGE_BYTES as usize];
    let mut hash = XxHash3_128::new();
    let mut any = false;
    for range in ranges {
        let mut offset = range.start / PAGE_BYTES * PAGE_BYTES;
        while offset < range.end {
            memory.slice(index, offset, page.len())?.copy_to(&mut page);
            if !sys::is_zero(&page) {
                any = true;
                hash.write(&(index as u64).to_le_bytes());
                hash.write(&offset.to_le_bytes());
                hash.write(&page);
            }
            offset += PAGE_BYTES;
        }
    }
    Ok(any.then(|| hash.finish_128()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use vm_memory::Bytes;

    use super::*;

    fn memory(bytes: usize) -> Arc<GuestMemoryMmap<AtomicBitmap>> {
        Arc::new(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), bytes)]).unwrap())
    }

    #[test]
    fn i3_the_digest_sees_one_bit_anywhere_and_not_the_holes() {
        let bytes = 3 * PIECE_BYTES as usize + 12288;
        let (a, b) = (memory(bytes), memory(bytes));
        for address in [0, 4096, PIECE_BYTES - 1, PIECE_BYTES, bytes as u64 - 1] {
            a.write_obj(7_u8, GuestAddress(address)).unwrap();
            b.write_obj(7_u8, GuestAddress(address)).unwrap();
        }
        // A page that was touched and is zero equals one that never was.
        b.write_obj(0_u64, GuestAddress(40960)).unwrap();
        let of = |memory: &Arc<_>, threads| {
            digest(&MappedMemory::new(Arc::clone(memory), 4096), threads).unwrap()
        };
        assert_eq!(of(&a, 1), of(&b, 3));
        b.write_obj(8_u8, GuestAddress(bytes as u64 - 1)).unwrap();
        assert_ne!(of(&a, 1), of(&b, 1));
    }

    #[test]
    fn i3_a_page_at_another_place_is_another_memory() {
        let (a, b) = (memory(1 << 20), memory(1 << 20));
        a.write_obj(7_u8, GuestAddress(0)).unwrap();
        b.write_obj(7_u8, GuestAddress(4096)).unwrap();
        let of = |m: Arc<_>| digest(&MappedMemory::new(m, 4096), 1).unwrap();
        assert_ne!(of(a), of(b));
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
    fn what_the_engine_writes_is_not_the_vmms_own_write() {
        let memory = memory(1 << 20);
        let mapped = MappedMemory::new(Arc::clone(&memory), 4096);
        mapped.slice(0, 4096, 8).unwrap().copy_from(&[1_u8; 8]);
        let mut log = OwnWrites::new(memory);
        log.fetch(&mut |_, words| assert!(words.iter().all(|&w| w == 0)))
            .unwrap();
    }
}
