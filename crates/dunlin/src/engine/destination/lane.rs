//! A lane's thread at the destination: reads chunks straight into guest
//! memory, acknowledges them, and keeps iterations apart at the marks.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use dunlin_proto::control::RegionTable;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::frame::{ChunkHeader, Encoding, FRAME_HEADER_BYTES, Frame, RANGE_BYTES, Range};
use dunlin_proto::limits::{MAX_RANGES_PER_CHUNK, PAGE_BYTES};
use dunlin_proto::marks::Marks;
use dunlin_sys::affinity::thread_cpu_time;

use super::super::error::Fault;
use super::super::lock;
use super::super::vmm::GuestMemory;
use super::SessionEvent;
use crate::lane::data::{Canceller, DataReceiver, ReceiveError};

/// How long the source may take from a lane's end to its close.
const CLOSE_LIMIT: Duration = Duration::from_secs(10);

/// What a session's lanes share.
pub(super) struct Shared {
    memory: Arc<dyn GuestMemory>,
    regions: RegionTable,
    /// For each region of the memory, a bit for each page that a lane has
    /// written: only those have to be cleared when zeros are sent.
    written: Vec<Box<[AtomicU64]>>,
    barrier: Mutex<Barrier>,
    changed: Condvar,
    acks: Mutex<Vec<u64>>,
}

#[derive(Default)]
struct Barrier {
    marks: Marks,
    stop: bool,
    cancellers: Vec<(u16, Canceller)>,
}

/// What one lane has brought.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Totals {
    pub(super) chunks: u64,
    pub(super) pages: u64,
    pub(super) wire_bytes: u64,
}

impl Shared {
    pub(super) fn new(memory: Arc<dyn GuestMemory>, regions: RegionTable) -> Self {
        let written = memory
            .regions()
            .iter()
            .map(|region| {
                let words = usize::try_from(region.pages().div_ceil(64)).unwrap_or(usize::MAX);
                std::iter::repeat_with(AtomicU64::default)
                    .take(words)
                    .collect()
            })
            .collect();
        Self {
            memory,
            regions,
            written,
            barrier: Mutex::default(),
            changed: Condvar::new(),
            acks: Mutex::default(),
        }
    }

    /// A lane takes part from now on.
    pub(super) fn open(&self, lane: u16, canceller: Canceller) {
        let mut barrier = lock(&self.barrier);
        barrier.marks.open(lane);
        barrier.cancellers.push((lane, canceller));
    }

    /// Ends every lane: those that wait at a mark and those that wait for
    /// bytes.
    pub(super) fn stop(&self) {
        let mut barrier = lock(&self.barrier);
        barrier.stop = true;
        for (_, canceller) in &barrier.cancellers {
            canceller.shutdown();
        }
        drop(barrier);
        self.changed.notify_all();
    }

    /// Puts the numbers of the chunks written since the last call into
    /// `numbers`, whose room is used for the next ones: no lane allocates.
    pub(super) fn take_acks(&self, numbers: &mut Vec<u64>) {
        numbers.clear();
        std::mem::swap(numbers, &mut lock(&self.acks));
    }

    fn pass(&self, lane: u16, iteration: u32) -> Result<(), Fault> {
        let mut barrier = lock(&self.barrier);
        barrier.marks.reach(lane, iteration).map_err(|error| {
            Fault::new(FaultCode::Malformed, "the marks are out of order").because(error)
        })?;
        self.changed.notify_all();
        while !barrier.marks.may_pass(iteration) {
            if barrier.stop {
                return Err(Fault::new(FaultCode::LaneLost, "another lane has failed"));
            }
            barrier = self
                .changed
                .wait(barrier)
                .unwrap_or_else(PoisonError::into_inner);
        }
        Ok(())
    }

    fn end(&self, lane: u16) {
        lock(&self.barrier).marks.end(lane);
        self.changed.notify_all();
    }

    /// The lane's connection goes with its thread: a source that opens and
    /// ends lane after lane uses up no descriptors here (I7).
    fn forget(&self, lane: u16) {
        lock(&self.barrier)
            .cancellers
            .retain(|(number, _)| *number != lane);
    }

    fn region_index(&self, id: u16) -> usize {
        self.memory
            .regions()
            .iter()
            .position(|region| region.id == id)
            .unwrap_or(usize::MAX)
    }

    /// Notes that pages hold something.
    fn mark_written(&self, index: usize, first: u64, count: u64) {
        self.for_words(index, first, count, |word, mask| {
            word.fetch_or(mask, Ordering::Relaxed);
        });
    }

    /// Clears those of the pages that an earlier chunk has written.
    fn clear(&self, index: usize, first: u64, count: u64) -> std::io::Result<()> {
        const ZEROS: [u8; PAGE_BYTES as usize] = [0; PAGE_BYTES as usize];
        let mut result = Ok(());
        let mut page = first;
        self.for_words(index, first, count, |word, mask| {
            let mut set = word.fetch_and(!mask, Ordering::Relaxed) & mask;
            while set != 0 {
                let at = page / 64 * 64 + u64::from(set.trailing_zeros());
                set &= set - 1;
                match self.memory.slice(index, at * PAGE_BYTES, ZEROS.len()) {
                    Ok(slice) => slice.copy_from(&ZEROS),
                    Err(error) => result = Err(error),
                }
            }
            page = (page / 64 + 1) * 64;
        });
        result
    }

    fn for_words(
        &self,
        index: usize,
        first: u64,
        count: u64,
        mut each: impl FnMut(&AtomicU64, u64),
    ) {
        let mut page = first;
        let end = first + count;
        while page < end {
            let bit = page % 64;
            let here = (64 - bit).min(end - page);
            let mask = (u64::MAX >> (64 - here)) << bit;
            let word = usize::try_from(page / 64).unwrap_or(usize::MAX);
            each(&self.written[index][word], mask);
            page += here;
        }
    }
}

/// Everything that a lane's thread needs.
pub(super) struct Lane {
    pub(super) number: u16,
    pub(super) receiver: DataReceiver,
    pub(super) shared: Arc<Shared>,
    pub(super) events: Sender<SessionEvent>,
}

impl Lane {
    /// The thread's body: reports its end to the session, and wakes the other
    /// lanes when it fails.
    pub(super) fn run(mut self) {
        // The VMM's memory is called in here; the session must hear of a
        // panic in it, or it would wait for this lane for ever.
        let result = catch_unwind(AssertUnwindSafe(|| self.receive_all())).unwrap_or_else(|_| {
            let what = format!("the thread of lane {} panicked", self.number);
            Err(Fault::new(FaultCode::Internal, what))
        });
        let Self {
            number,
            receiver,
            events,
            shared,
        } = self;
        let failed = result.is_err();
        if failed {
            drop(receiver);
        } else {
            // The source has closed; it needs no answer to go on.
            let _ = receiver.close();
        }
        shared.forget(number);
        // Before the others are stopped: the session takes the first end that
        // it hears of for the cause. One that is gone needs no report.
        let _ = events.send(SessionEvent::LaneEnded {
            lane: number,
            result,
            cpu: thread_cpu_time(),
        });
        if failed {
            shared.stop();
        }
    }

    fn receive_all(&mut self) -> Result<Totals, Fault> {
        let mut totals = Totals::default();
        let mut ranges = Vec::with_capacity(MAX_RANGES_PER_CHUNK);
        let mut ranges_bytes = vec![0; MAX_RANGES_PER_CHUNK * RANGE_BYTES];
        loop {
            let mut header = [0; FRAME_HEADER_BYTES];
            if !self
                .receiver
                .next(&mut header, None)
                .map_err(|error| self.failed(error))?
            {
                return Err(Fault::new(
                    FaultCode::LaneLost,
                    format!("lane {} was closed before its end", self.number),
                ));
            }
            match Frame::decode(&header).map_err(malformed)? {
                Frame::Chunk(chunk) => {
                    let bytes = &mut ranges_bytes[..chunk.ranges_bytes()];
                    self.receiver
                        .read_exact(bytes)
                        .map_err(|error| failed(self.number, error))?;
                    chunk
                        .decode_ranges(bytes, &self.shared.regions, &mut ranges)
                        .map_err(malformed)?;
                    totals.pages += self.take_in(&chunk, &ranges)?;
                    totals.chunks += 1;
                }
                Frame::Mark { iteration } => self.shared.pass(self.number, iteration)?,
                Frame::End { chunks } if chunks == totals.chunks => {
                    self.shared.end(self.number);
                    self.await_close()?;
                    totals.wire_bytes = self.receiver.counters().wire_bytes;
                    return Ok(totals);
                }
                Frame::End { chunks } => {
                    return Err(Fault::new(
                        FaultCode::Malformed,
                        format!(
                            "lane {} ends with {chunks} chunks and has brought {}",
                            self.number, totals.chunks
                        ),
                    ));
                }
            }
        }
    }

    /// The source closes right behind its end. Closing here before that has
    /// come would reset the connection under its hands.
    fn await_close(&mut self) -> Result<(), Fault> {
        match self.receiver.next(&mut [0], Some(CLOSE_LIMIT)) {
            Ok(false) => Ok(()),
            Ok(true) => Err(Fault::new(
                FaultCode::Malformed,
                format!("something follows the end of lane {}", self.number),
            )),
            Err(error) => Err(self.failed(error)),
        }
    }

    /// Writes a chunk's pages where they belong and acknowledges it. Returns
    /// how many pages it held.
    fn take_in(&mut self, chunk: &ChunkHeader, ranges: &[Range]) -> Result<u64, Fault> {
        let mut pages = 0;
        let place = |range: &Range| {
            (
                self.shared.region_index(range.region),
                range.offset / PAGE_BYTES,
                u64::from(range.page_count),
            )
        };
        for range in ranges {
            let (index, first, count) = place(range);
            pages += count;
            if range.encoding == Encoding::Zero {
                self.shared.clear(index, first, count).map_err(unwritable)?;
            }
        }
        let raw = || {
            ranges
                .iter()
                .filter(|range| range.encoding == Encoding::Raw)
        };
        for range in raw() {
            let (index, first, count) = place(range);
            // Before the bytes: a lane that dies in between leaves pages that
            // are noted as written, never the reverse.
            self.shared.mark_written(index, first, count);
        }
        let mut refused = None;
        let targets = raw().map_while(|range| {
            let length = usize::try_from(range.memory_bytes()).unwrap_or(usize::MAX);
            let index = self.shared.region_index(range.region);
            self.shared
                .memory
                .slice(index, range.offset, length)
                .map_err(|error| refused = Some(error))
                .ok()
        });
        self.receiver
            .payload_into(targets)
            .map_err(|error| failed(self.number, error))?;
        if let Some(error) = refused {
            return Err(unwritable(error));
        }
        let mut acks = lock(&self.shared.acks);
        acks.push(chunk.number());
        if acks.len() == 1 {
            // A session that is gone acknowledges nothing.
            let _ = self.events.send(SessionEvent::Acks);
        }
        Ok(pages)
    }

    fn failed(&self, error: ReceiveError) -> Fault {
        failed(self.number, error)
    }
}

fn failed(lane: u16, error: ReceiveError) -> Fault {
    Fault::new(FaultCode::LaneLost, format!("lane {lane} was lost")).because(error)
}

fn malformed(error: dunlin_proto::wire::DecodeError) -> Fault {
    Fault::new(error.fault(), "what came on a lane makes no sense").because(error)
}

fn unwritable(error: std::io::Error) -> Fault {
    Fault::new(FaultCode::LayoutChanged, "guest memory cannot be written").because(error)
}
