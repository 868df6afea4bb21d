//! A lane's thread at the destination: reads chunks straight into guest
//! memory, acknowledges them, and keeps iterations apart at the marks.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::time::Duration;

use dunlin_linux::affinity::thread_cpu_time;
use dunlin_proto::control::RegionTable;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::frame::{ChunkHeader, Encoding, FRAME_HEADER_BYTES, Frame, RANGE_BYTES, Range};
use dunlin_proto::lanes::{CourseError, Receiving};
use dunlin_proto::limits::{MAX_RANGES_PER_CHUNK, PAGE_BYTES};

use super::super::fault::Fault;
use super::super::vmm::GuestMemory;
use super::barrier::IterationBarrier;
use super::event::SessionEvent;
use crate::lane::data::{DataReceiver, ReceiveError};

/// How long the source may take from a lane's end to its close.
const CLOSE_LIMIT: Duration = Duration::from_secs(2);

/// Pages cleared between two looks at whether the lane has to end: 16 MiB, some
/// milliseconds. A range may span a whole region, and whoever cancels or fences
/// waits for this thread.
const CLEARED_AT_ONCE: u64 = 4096;

/// The guest memory into which a session's lanes write.
pub(super) struct DestinationMemory {
    memory: Arc<dyn GuestMemory>,
    regions: RegionTable,
    /// For each region of the memory, a bit for each page that a lane has
    /// written: only those have to be cleared when zeros are sent.
    written: Vec<Box<[AtomicU64]>>,
}

impl DestinationMemory {
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
        }
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
    pub(super) memory: Arc<DestinationMemory>,
    pub(super) barrier: Arc<IterationBarrier>,
    pub(super) events: Sender<SessionEvent>,
}

impl Lane {
    /// The thread's body: reports its end to the session, and wakes the other
    /// lanes when it fails.
    pub(super) fn run(mut self) {
        // The VMM's memory is called in here; the session must hear of a
        // panic in it, or it would wait for this lane for ever.
        let received = catch_unwind(AssertUnwindSafe(|| self.receive_all()));
        let wire_bytes = self.receiver.counters().wire_bytes;
        let result = received.unwrap_or_else(|_| {
            let what = format!("the thread of lane {} panicked", self.number);
            Err(Fault::new(FaultCode::Internal, what))
        });
        let Self {
            number,
            receiver,
            events,
            barrier,
            ..
        } = self;
        let failed = result.is_err();
        if failed {
            drop(receiver);
        } else {
            // The source has closed; it needs no answer to go on.
            let _ = receiver.close();
        }
        barrier.forget(number);
        // Before the others are stopped: the session takes the first end that
        // it hears of for the cause. One that is gone needs no report.
        let _ = events.send(SessionEvent::LaneEnded {
            lane: number,
            result,
            wire_bytes,
            cpu: thread_cpu_time(),
        });
    }

    fn receive_all(&mut self) -> Result<(), Fault> {
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
                        .decode_ranges(bytes, &self.memory.regions, &mut ranges)
                        .map_err(malformed)?;
                    self.take_in(&chunk, &ranges)?;
                }
                Frame::Mark { iteration } => self.pass(iteration)?,
                Frame::End { chunks } => {
                    let lane = self.number;
                    self.barrier
                        .report(|lanes| lanes.ended(lane, chunks), || self.tell())
                        .map_err(out_of_course)?;
                    return self.await_close();
                }
            }
        }
    }

    /// Waits at the mark of `iteration` for every other lane.
    fn pass(&self, iteration: u32) -> Result<(), Fault> {
        let lane = self.number;
        let passed = self.barrier.pass(lane, iteration, || self.tell());
        if passed.map_err(out_of_course)? {
            return Ok(());
        }
        Err(self.given_up())
    }

    fn given_up(&self) -> Fault {
        let what = format!("lane {} was given up", self.number);
        Fault::new(FaultCode::LaneLost, what)
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

    /// Writes a chunk's pages where they belong and acknowledges it.
    fn take_in(&mut self, chunk: &ChunkHeader, ranges: &[Range]) -> Result<(), Fault> {
        let (lane, chunk_number) = (self.number, chunk.number());
        self.barrier
            .check_chunk(lane, chunk_number, chunk.iteration())
            .map_err(out_of_course)?;
        let mut pages = 0;
        let place = |range: &Range| {
            (
                self.memory.region_index(range.region),
                range.offset / PAGE_BYTES,
                u64::from(range.page_count),
            )
        };
        for range in ranges {
            let (index, first, count) = place(range);
            pages += count;
            if range.encoding == Encoding::Zero {
                let (mut first, end) = (first, first + count);
                while first < end {
                    if !self.barrier.wants(lane) {
                        return Err(self.given_up());
                    }
                    let here = CLEARED_AT_ONCE.min(end - first);
                    self.memory.clear(index, first, here).map_err(unwritable)?;
                    first += here;
                }
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
            self.memory.mark_written(index, first, count);
        }
        let mut refused = None;
        let targets = raw().map_while(|range| {
            let length = usize::try_from(range.memory_bytes()).unwrap_or(usize::MAX);
            let index = self.memory.region_index(range.region);
            self.memory
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
        let written = |lanes: &mut Receiving| lanes.written(lane, chunk_number, pages);
        self.barrier
            .report(written, || self.tell())
            .map_err(out_of_course)
    }

    /// Something has to be acknowledged.
    fn tell(&self) {
        // A session that is gone acknowledges nothing.
        let _ = self.events.send(SessionEvent::Acks);
    }

    fn failed(&self, error: ReceiveError) -> Fault {
        failed(self.number, error)
    }
}

fn out_of_course(error: CourseError) -> Fault {
    Fault::new(FaultCode::Malformed, "what came on a lane is out of order").because(error)
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
