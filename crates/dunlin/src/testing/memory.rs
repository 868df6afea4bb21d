//! Checks of guest memory: its table, its slices, its ranges to send.

use std::io;
use std::ops::Range;
use std::time::{Duration, Instant};

use dunlin_linux::memory::is_zero;
use dunlin_proto::control::RegionTable;
use dunlin_proto::limits::PAGE_BYTES;

use super::{Violation, broken};
use crate::engine::vmm::GuestMemory;

/// Tests memory to which nothing writes during the test. The test reads all of the memory, which
/// may populate holes in shared memory.
///
/// # Errors
/// The first [`Violation`].
pub fn check_memory(memory: &dyn GuestMemory) -> Result<(), Violation> {
    check_table(memory)?;
    for (index, region) in memory.regions().iter().enumerate() {
        check_slices(memory, index, region.length)?;
        check_ranges(memory, index, region.length)?;
    }
    let beyond = memory.regions().len();
    if memory.slice(beyond, 0, 1).is_ok() {
        return Err(no_such_bytes(beyond, 0, 1));
    }
    Ok(())
}

fn check_table(memory: &dyn GuestMemory) -> Result<(), Violation> {
    const METHOD: &str = "GuestMemory::regions";
    let regions = memory.regions();
    RegionTable::new(regions.to_vec()).map_err(|error| {
        let promise = "its table is valid";
        broken(METHOD, promise, error.to_string())
    })?;
    if let Some(pair) = regions.windows(2).find(|pair| pair[0].id >= pair[1].id) {
        return Err(broken(
            METHOD,
            "the identifiers of its regions ascend",
            format!("identifier {} precedes {}", pair[0].id, pair[1].id),
        ));
    }
    if memory.regions() != regions {
        return Err(table_changes("a second call returns another table"));
    }
    Ok(())
}

pub(super) fn table_changes(what: &str) -> Violation {
    broken("GuestMemory::regions", "its table does not change", what)
}

fn no_such_bytes(index: usize, offset: u64, length: usize) -> Violation {
    broken(
        "GuestMemory::slice",
        "bytes outside a region are refused",
        format!("{length} bytes at offset {offset} of region {index} were returned"),
    )
}

fn check_slices(memory: &dyn GuestMemory, index: usize, length: u64) -> Result<(), Violation> {
    const METHOD: &str = "GuestMemory::slice";
    let whole = usize::try_from(length).map_err(io::Error::other)?;
    let page = PAGE_BYTES as usize;
    for (offset, length) in [
        (0, page),
        (0, whole),
        (length - 1, 1),
        (length / 2, whole - whole / 2),
    ] {
        let refused = |what: String| {
            broken(
                METHOD,
                "any bytes within a region are returned",
                format!("{length} bytes at offset {offset} of region {index} {what}"),
            )
        };
        match memory.slice(index, offset, length) {
            Ok(slice) if slice.len() == length => {}
            Ok(slice) => return Err(refused(format!("were returned as {} bytes", slice.len()))),
            Err(error) => return Err(refused(format!("were refused: {error}"))),
        }
    }
    for (offset, length) in [
        (length, 1),
        (length - 1, 2),
        (0, whole + 1),
        (u64::MAX, 1),
        (u64::MAX - PAGE_BYTES + 1, page),
    ] {
        if memory.slice(index, offset, length).is_ok() {
            return Err(no_such_bytes(index, offset, length));
        }
    }
    Ok(())
}

fn check_ranges(memory: &dyn GuestMemory, index: usize, length: u64) -> Result<(), Violation> {
    const METHOD: &str = "GuestMemory::ranges_to_send";
    let mut ranges: Vec<Range<u64>> = Vec::new();
    if memory
        .ranges_to_send(index, &mut |range| ranges.push(range))
        .is_err()
    {
        // If the ranges are unknown, the engine sends the whole region.
        return Ok(());
    }
    let mut end = 0;
    for range in &ranges {
        if range.start < end || range.end < range.start || range.end > length {
            return Err(broken(
                METHOD,
                "its ranges lie within the region, in ascending order",
                format!("region {index} of {length} bytes has range {range:?} after offset {end}"),
            ));
        }
        end = range.end;
    }
    let mut left_out = Vec::new();
    let mut from = 0;
    for range in ranges {
        left_out.push(from..range.start);
        from = range.end;
    }
    left_out.push(from..length);
    for range in left_out {
        if let Some(page) = first_not_zero(memory, index, range)? {
            return Err(broken(
                METHOD,
                "omitted bytes read as zeros",
                format!("page {page} of region {index} is omitted and not zero"),
            ));
        }
    }
    Ok(())
}

/// The first non-zero page in `range` of a region.
fn first_not_zero(
    memory: &dyn GuestMemory,
    index: usize,
    range: Range<u64>,
) -> io::Result<Option<u64>> {
    let mut bytes = [0; PAGE_BYTES as usize];
    let mut at = range.start;
    while at < range.end {
        // Read up to the end of the page, so that the next part is aligned.
        let to = (at / PAGE_BYTES * PAGE_BYTES + PAGE_BYTES).min(range.end);
        let now = &mut bytes[..(to - at) as usize];
        memory.slice(index, at, now.len())?.copy_to(now);
        if !is_zero(now) {
            return Ok(Some(at / PAGE_BYTES));
        }
        at = to;
    }
    Ok(None)
}

/// The first non-zero page of memory: region and page.
pub(super) fn first_written(memory: &dyn GuestMemory) -> io::Result<Option<(usize, u64)>> {
    for (index, region) in memory.regions().iter().enumerate() {
        if let Some(page) = first_not_zero(memory, index, 0..region.length)? {
            return Ok(Some((index, page)));
        }
    }
    Ok(None)
}

/// The ranges of a region that may contain non-zero bytes. The other ranges are not read, because
/// that might populate them.
pub(super) fn ranges_to_read(memory: &dyn GuestMemory, index: usize) -> Vec<Range<u64>> {
    let mut ranges = Vec::new();
    match memory.ranges_to_send(index, &mut |range| ranges.push(range)) {
        Ok(()) => ranges,
        Err(_) => std::iter::once(0..memory.regions()[index].length).collect(),
    }
}

/// A copy of memory at one moment.
#[derive(Default)]
pub(super) struct Copy(Vec<Vec<u8>>);

impl Copy {
    pub(super) fn of(memory: &dyn GuestMemory) -> io::Result<Self> {
        let mut copy = Self::default();
        for (index, region) in memory.regions().iter().enumerate() {
            let length = usize::try_from(region.length).map_err(io::Error::other)?;
            copy.0.push(vec![0; length]);
            for range in ranges_to_read(memory, index) {
                copy.renew(memory, index, range)?;
            }
        }
        Ok(copy)
    }

    /// Copies a range again, up to the end of its region.
    pub(super) fn renew(
        &mut self,
        memory: &dyn GuestMemory,
        index: usize,
        range: Range<u64>,
    ) -> io::Result<()> {
        let bytes = &mut self.0[index];
        let end = bytes.len().min(range.end as usize);
        let part = &mut bytes[range.start as usize..end];
        memory.slice(index, range.start, part.len())?.copy_to(part);
        Ok(())
    }

    /// The first page that has changed: region and page.
    pub(super) fn difference(&self, memory: &dyn GuestMemory) -> io::Result<Option<(usize, u64)>> {
        Ok(self.differences(memory, 1)?.pop())
    }

    /// The first pages that have changed, at most `limit`.
    pub(super) fn differences(
        &self,
        memory: &dyn GuestMemory,
        limit: usize,
    ) -> io::Result<Vec<(usize, u64)>> {
        let mut found = Vec::new();
        let mut page = [0; PAGE_BYTES as usize];
        for (index, bytes) in self.0.iter().enumerate() {
            for range in ranges_to_read(memory, index) {
                let end = bytes.len().min(range.end as usize);
                let before = &bytes[range.start as usize..end];
                for (number, before) in (0_u64..).zip(before.chunks(page.len())) {
                    let offset = range.start + number * PAGE_BYTES;
                    let now = &mut page[..before.len()];
                    memory.slice(index, offset, now.len())?.copy_to(now);
                    if now != before {
                        found.push((index, offset / PAGE_BYTES));
                    }
                    if found.len() == limit {
                        return Ok(found);
                    }
                }
            }
        }
        Ok(found)
    }

    /// Writes the copy into memory that reads as zeros.
    pub(super) fn write_to(&self, memory: &dyn GuestMemory) -> io::Result<()> {
        for (index, bytes) in self.0.iter().enumerate() {
            for (number, page) in (0_u64..).zip(bytes.chunks(PAGE_BYTES as usize)) {
                if !is_zero(page) {
                    let offset = number * PAGE_BYTES;
                    memory.slice(index, offset, page.len())?.copy_from(page);
                }
            }
        }
        Ok(())
    }
}

/// Whether the guest writes within two seconds.
pub(super) fn is_written(memory: &dyn GuestMemory) -> io::Result<bool> {
    let before = Copy::of(memory)?;
    let until = Instant::now() + Duration::from_secs(2);
    loop {
        if before.difference(memory)?.is_some() {
            return Ok(true);
        }
        if Instant::now() > until {
            return Ok(false);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::Arc;

    use vm_memory::bitmap::AtomicBitmap;
    use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap, VolatileSlice};

    use super::*;
    use crate::engine::memory::MappedMemory;
    use crate::engine::vmm::Region;

    /// The defect of a broken memory.
    #[derive(Clone, Copy, Debug)]
    enum Fault {
        None,
        Descends,
        Overlong,
        Short,
        LeavesOut,
        Overlaps,
    }

    struct Broken {
        sound: MappedMemory,
        regions: Vec<Region>,
        fault: Fault,
    }

    impl GuestMemory for Broken {
        fn regions(&self) -> &[Region] {
            &self.regions
        }

        fn slice(&self, index: usize, offset: u64, length: usize) -> io::Result<VolatileSlice<'_>> {
            match self.fault {
                Fault::Overlong if offset + length as u64 > self.regions[index].length => {
                    self.sound.slice(index, 0, 1)
                }
                Fault::Short => self.sound.slice(index, offset, length.min(4096)),
                _ => self.sound.slice(index, offset, length),
            }
        }

        fn ranges_to_send(
            &self,
            index: usize,
            found: &mut dyn FnMut(Range<u64>),
        ) -> io::Result<()> {
            match self.fault {
                Fault::LeavesOut => Ok(()),
                Fault::Overlaps => {
                    found(0..8192);
                    found(4096..12288);
                    Ok(())
                }
                _ => self.sound.ranges_to_send(index, found),
            }
        }
    }

    #[test]
    fn broken_memory_is_found() {
        for (fault, method) in [
            (Fault::None, None),
            (Fault::Descends, Some("GuestMemory::regions promises")),
            (Fault::Overlong, Some("GuestMemory::slice promises")),
            (Fault::Short, Some("GuestMemory::slice promises")),
            (
                Fault::LeavesOut,
                Some("GuestMemory::ranges_to_send promises that omitted"),
            ),
            (
                Fault::Overlaps,
                Some("GuestMemory::ranges_to_send promises"),
            ),
        ] {
            let ranges = [
                (GuestAddress(0), 64 << 10),
                (GuestAddress(1 << 20), 32 << 10),
            ];
            let memory: GuestMemoryMmap<AtomicBitmap> =
                GuestMemoryMmap::from_ranges(&ranges).unwrap();
            memory.write_obj(7_u64, GuestAddress(9 << 12)).unwrap();
            let sound = MappedMemory::new(Arc::new(memory), 4096);
            let mut regions = sound.regions().to_vec();
            if matches!(fault, Fault::Descends) {
                regions[0].id = 9;
            }
            let broken = Broken {
                sound,
                regions,
                fault,
            };
            match (check_memory(&broken), method) {
                (Ok(()), None) => {}
                (Err(violation), Some(method)) => {
                    let text = violation.to_string();
                    assert!(text.starts_with(method), "{fault:?}: {text}");
                }
                (other, _) => panic!("{fault:?}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_copy_finds_a_changed_page_and_can_be_written_to_other_memory() {
        let new = || {
            let ranges = [(GuestAddress(0), 64 << 10)];
            Arc::new(GuestMemoryMmap::<AtomicBitmap>::from_ranges(&ranges).unwrap())
        };
        let (one, other) = (new(), new());
        let [from, to] = [&one, &other].map(|memory| MappedMemory::new(Arc::clone(memory), 4096));
        one.write_obj(7_u64, GuestAddress(3 * 4096 + 8)).unwrap();
        let copy = Copy::of(&from).unwrap();
        assert_eq!(copy.difference(&from).unwrap(), None);
        assert_eq!(first_written(&to).unwrap(), None);
        copy.write_to(&to).unwrap();
        assert_eq!(copy.difference(&to).unwrap(), None);
        assert_eq!(first_written(&to).unwrap(), Some((0, 3)));
        one.write_obj(1_u8, GuestAddress(5 * 4096)).unwrap();
        assert_eq!(copy.difference(&from).unwrap(), Some((0, 5)));
    }
}
