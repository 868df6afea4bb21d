//! Checks of dirty logs.
//!
//! If a log misses a page, that page is stale at the destination, perhaps in only one
//! migration out of many. The test does what a migration does: it copies all memory while
//! the guest writes. After that, it repeatedly copies the pages that the log reports. Whenever
//! the guest is paused, memory must equal the copy.

use std::io;

use dunlin_proto::limits::PAGE_BYTES;

use super::memory::Copy;
use super::{Effort, Violation, failed};
use crate::engine::vmm::{DirtyLog, GuestMemory, SourceVm, VmmError};

/// A writer to guest memory: the guest, or anything else that the log under test must
/// cover. Every [`SourceVm`] is a writer.
///
/// It should write to all parts of memory, to some pages often, and also to pages that were
/// never touched before.
pub trait Writer {
    /// Starts the writer, which then writes until it is paused. The writer may already be running.
    ///
    /// # Errors
    /// The writer cannot run; the test ends.
    fn resume(&self) -> Result<(), VmmError>;

    /// Stops the writer. After this returns, it does not write.
    ///
    /// # Errors
    /// The writer may still write; the test ends.
    fn pause(&self) -> Result<(), VmmError>;
}

impl<V: SourceVm + ?Sized> Writer for V {
    fn resume(&self) -> Result<(), VmmError> {
        SourceVm::resume(self)
    }

    fn pause(&self) -> Result<(), VmmError> {
        SourceVm::pause(self)
    }
}

/// Figures of a log that keeps its contract.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Number of times that the log was fetched.
    pub fetches: u64,
    /// Reported pages; a page counts each time it is reported.
    pub pages: u64,
}

/// Tests the union of a VM's dirty logs, with its guest as the writer. The guest is
/// paused afterwards.
///
/// # Errors
/// See [`Violation`].
pub fn check_dirty_logs(vm: &dyn SourceVm, effort: &Effort) -> Result<Seen, Violation> {
    let memory = vm.memory();
    check_dirty_log(&*memory, &mut Union(vm.dirty_logs()), vm, effort)
}

/// Tests one log that must report everything `writer` writes to `memory`. Needs as much
/// additional memory as `memory` has. The writer is paused and the log stopped afterwards.
///
/// There are three recordings. The first and the last start while the writer is paused. They must
/// start empty, whatever was written before. The second starts while the writer writes.
///
/// # Errors
/// See [`Violation`].
pub fn check_dirty_log<W: Writer + ?Sized>(
    memory: &dyn GuestMemory,
    log: &mut dyn DirtyLog,
    writer: &W,
    effort: &Effort,
) -> Result<Seen, Violation> {
    let mut test = Test {
        memory,
        log,
        writer,
        effort,
        shadow: Copy::default(),
        seen: Seen::default(),
    };
    for running in [false, true, false] {
        if let Err(violation) = test.recording(running) {
            // The violation is more informative than a failure of the clean-up.
            let _ = test.writer.pause();
            let _ = test.log.stop();
            return Err(violation);
        }
    }
    Ok(test.seen)
}

struct Test<'a, W: ?Sized> {
    memory: &'a dyn GuestMemory,
    log: &'a mut dyn DirtyLog,
    writer: &'a W,
    effort: &'a Effort,
    /// The destination's copy.
    shadow: Copy,
    seen: Seen,
}

/// The pages that one fetch reported, by region.
type Bitmaps = Vec<Vec<u64>>;

impl<W: Writer + ?Sized> Test<'_, W> {
    /// Performs one recording, from start to stop.
    fn recording(&mut self, running: bool) -> Result<(), Violation> {
        // Pages that are written before the log starts must not be in it.
        self.writer.resume().map_err(failed("Writer::resume"))?;
        std::thread::sleep(self.effort.between);
        if !running {
            self.writer.pause().map_err(failed("Writer::pause"))?;
        }
        self.log.start().map_err(failed("DirtyLog::start"))?;
        if !running {
            if let Some((region, page)) = first(&self.fetch()?) {
                return Err(Violation::NotEmpty { region, page });
            }
            self.writer.resume().map_err(failed("Writer::resume"))?;
        }
        // Copies all memory, as the first pass of a migration does.
        self.shadow = Copy::of(self.memory)?;
        let before = self.seen.pages;
        for _ in 0..self.effort.pauses {
            self.writer.resume().map_err(failed("Writer::resume"))?;
            for _ in 0..self.effort.fetches {
                std::thread::sleep(self.effort.between);
                let reported = self.fetch()?;
                self.copy(&reported)?;
            }
            std::thread::sleep(self.effort.between);
            self.writer.pause().map_err(failed("Writer::pause"))?;
            let reported = self.fetch()?;
            self.copy(&reported)?;
            if let Some((region, page)) = first(&self.fetch()?) {
                return Err(Violation::NotCleared { region, page });
            }
            self.compare()?;
        }
        if self.seen.pages == before {
            return Err(Violation::NothingWritten);
        }
        self.log.stop().map_err(failed("DirtyLog::stop"))
    }

    /// Fetches the log, and checks that the reported pages exist.
    fn fetch(&mut self) -> Result<Bitmaps, Violation> {
        let regions = self.memory.regions();
        let mut bitmaps: Bitmaps = regions
            .iter()
            .map(|region| vec![0; region.length.div_ceil(PAGE_BYTES).div_ceil(64) as usize])
            .collect();
        let mut outside = None;
        self.log
            .fetch(&mut |region, words| {
                for (word, bits) in words.iter().enumerate().filter(|(_, bits)| **bits != 0) {
                    let last = word as u64 * 64 + u64::from(63 - bits.leading_zeros());
                    match bitmaps.get_mut(region).and_then(|map| map.get_mut(word)) {
                        Some(known) if last * PAGE_BYTES < regions[region].length => *known |= bits,
                        _ => outside = Some((region, last)),
                    }
                }
            })
            .map_err(failed("DirtyLog::fetch"))?;
        if let Some((region, page)) = outside {
            return Err(Violation::Outside { region, page });
        }
        self.seen.fetches += 1;
        self.seen.pages += bitmaps
            .iter()
            .flatten()
            .map(|bits| u64::from(bits.count_ones()))
            .sum::<u64>();
        Ok(bitmaps)
    }

    fn copy(&mut self, reported: &Bitmaps) -> Result<(), Violation> {
        for (index, words) in reported.iter().enumerate() {
            for (word, bits) in (0_u64..).zip(words) {
                for bit in (0..64).filter(|bit| bits >> bit & 1 == 1) {
                    let start = (word * 64 + bit) * PAGE_BYTES;
                    let page = start..start + PAGE_BYTES;
                    self.shadow.renew(self.memory, index, page)?;
                }
            }
        }
        Ok(())
    }

    /// Compares memory with the copy while the writer is paused.
    fn compare(&self) -> Result<(), Violation> {
        let missed = self.shadow.differences(self.memory, usize::MAX)?;
        match missed.first() {
            None => Ok(()),
            Some(&(region, page)) => Err(Violation::Missed {
                region,
                page,
                pages: missed.len() as u64,
            }),
        }
    }
}

/// The first reported page.
fn first(reported: &Bitmaps) -> Option<(usize, u64)> {
    reported.iter().enumerate().find_map(|(region, words)| {
        let (word, bits) = (0_u64..).zip(words).find(|(_, bits)| **bits != 0)?;
        Some((region, word * 64 + u64::from(bits.trailing_zeros())))
    })
}

/// Several logs as one.
pub(super) struct Union(pub(super) Vec<Box<dyn DirtyLog>>);

impl DirtyLog for Union {
    fn start(&mut self) -> io::Result<()> {
        self.0.iter_mut().try_for_each(|log| log.start())
    }

    fn fetch(&mut self, found: &mut dyn FnMut(usize, &[u64])) -> io::Result<()> {
        self.0.iter_mut().try_for_each(|log| log.fetch(found))
    }

    fn stop(&mut self) -> io::Result<()> {
        self.0.iter_mut().try_for_each(|log| log.stop())
    }
}
