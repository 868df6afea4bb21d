//! A lane's thread at the destination: reads chunks directly into guest memory,
//! acknowledges them, and waits at the marks between iterations.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::time::Duration;

use dunlin_lane::data::{DataReceiver, ReceiveError};
use dunlin_proto::control::RegionTable;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::frame::{ChunkHeader, Encoding, FRAME_HEADER_BYTES, Frame, RANGE_BYTES, Range};
use dunlin_proto::lanes::{CourseError, Receiving};
use dunlin_proto::limits::{MAX_RANGES_PER_CHUNK, PAGE_BYTES};
use tracing::{Span, info_span};

use super::super::fault::Fault;
use super::super::memory::{region_index, word_masks};
use super::super::vmm::GuestMemory;
use super::barrier::IterationBarrier;
use super::event::SessionEvent;
use super::pacer::Share;

/// How long the source may take to close a lane after its end frame.
const CLOSE_LIMIT: Duration = Duration::from_secs(2);

/// Maximum number of pages cleared between two checks of whether the lane must end: 16 MiB, which
/// takes a few milliseconds. The checks are necessary because a range may span a whole region, and
/// a cancellation or fence waits for this thread.
const CLEARED_AT_ONCE: u64 = 4096;

/// The guest memory that a session's lanes write.
pub(super) struct DestinationMemory {
    memory: Arc<dyn GuestMemory>,
    regions: RegionTable,
    /// For each region, one bit per page, which is set if a lane has written the page. A zero page
    /// that arrives is cleared only if its bit is set.
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

    /// Marks pages as written.
    fn mark_written(&self, index: usize, first: u64, count: u64) {
        for (word, mask) in word_masks(first..first + count) {
            self.written[index][word].fetch_or(mask, Ordering::Relaxed);
        }
    }

    /// Clears those pages of the range that earlier chunks have written.
    ///
    /// After an error, the remaining pages of the current bitmap word are no longer marked as
    /// written, although they have content. No later chunk relies on the marks, because the error
    /// ends the session.
    fn clear(&self, index: usize, first: u64, count: u64) -> std::io::Result<()> {
        const ZEROS: [u8; PAGE_BYTES as usize] = [0; PAGE_BYTES as usize];
        for (word, mask) in word_masks(first..first + count) {
            let mut set = self.written[index][word].fetch_and(!mask, Ordering::Relaxed) & mask;
            while set != 0 {
                let page = word as u64 * 64 + u64::from(set.trailing_zeros());
                set &= set - 1;
                let slice = self.memory.slice(index, page * PAGE_BYTES, ZEROS.len())?;
                slice.copy_from(&ZEROS);
                #[cfg(feature = "unstable-internals")]
                self.memory
                    .received(index, page * PAGE_BYTES..(page + 1) * PAGE_BYTES);
            }
        }
        Ok(())
    }
}

/// The state of a lane's thread.
pub(super) struct Lane {
    pub(super) number: u16,
    pub(super) receiver: DataReceiver,
    pub(super) memory: Arc<DestinationMemory>,
    pub(super) barrier: Arc<IterationBarrier>,
    pub(super) events: Sender<SessionEvent>,
    /// The session's part of the rate cap, if there is one.
    pub(super) share: Option<Share>,
    /// The session's span.
    pub(super) span: Span,
}

impl Lane {
    /// The thread's body. Reports the end of the lane to the session.
    pub(super) fn run(mut self) {
        let _lane = info_span!(parent: &self.span, "lane", lane = self.number).entered();
        // `receive_all` calls the VMM's code. A panic there must be reported, otherwise the session
        // would wait for this lane forever.
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
            // The source has closed its side and needs no answer.
            let _ = receiver.close();
        }
        barrier.forget(number);
        // Sending fails only after the session has ended.
        let _ = events.send(SessionEvent::LaneEnded {
            lane: number,
            result,
            wire_bytes,
        });
    }

    fn receive_all(&mut self) -> Result<(), Fault> {
        let mut ranges = Vec::with_capacity(MAX_RANGES_PER_CHUNK);
        let mut ranges_bytes = vec![0; MAX_RANGES_PER_CHUNK * RANGE_BYTES];
        loop {
            let mut header = [0; FRAME_HEADER_BYTES];
            let more = self.receiver.next(&mut header, None);
            if !more.map_err(|error| self.failed(error))? {
                return Err(Fault::new(
                    FaultCode::LaneLost,
                    format!("lane {} closed before its end frame", self.number),
                ));
            }
            match Frame::decode(&header).map_err(malformed)? {
                Frame::Chunk(chunk) => {
                    let bytes = &mut ranges_bytes[..chunk.ranges_bytes()];
                    self.receiver
                        .read_exact(bytes)
                        .map_err(|error| self.failed(error))?;
                    chunk
                        .decode_ranges(bytes, &self.memory.regions, &mut ranges)
                        .map_err(malformed)?;
                    self.receive_chunk(&chunk, &ranges)?;
                }
                Frame::Mark { iteration } => self.pass(iteration)?,
                Frame::End { chunks } => {
                    let lane = self.number;
                    self.barrier
                        .report(|lanes| lanes.ended(lane, chunks), || self.notify())
                        .map_err(out_of_order)?;
                    return self.await_close();
                }
            }
        }
    }

    /// Waits at the mark of `iteration` for every other lane.
    fn pass(&self, iteration: u32) -> Result<(), Fault> {
        let lane = self.number;
        let passed = self.barrier.pass(lane, iteration, || self.notify());
        if passed.map_err(out_of_order)? {
            return Ok(());
        }
        Err(self.given_up())
    }

    fn given_up(&self) -> Fault {
        let what = format!("lane {} was given up", self.number);
        Fault::new(FaultCode::LaneLost, what)
    }

    /// Waits until the source closes the lane, which it does right after its end frame. If this
    /// side closed the lane first, the connection would be reset.
    fn await_close(&mut self) -> Result<(), Fault> {
        match self.receiver.next(&mut [0], Some(CLOSE_LIMIT)) {
            Ok(false) => Ok(()),
            Ok(true) => Err(Fault::new(
                FaultCode::Malformed,
                format!("data after the end frame of lane {}", self.number),
            )),
            Err(error) => Err(self.failed(error)),
        }
    }

    /// Writes a chunk's pages to guest memory and acknowledges the chunk.
    fn receive_chunk(&mut self, chunk: &ChunkHeader, ranges: &[Range]) -> Result<(), Fault> {
        let (lane, chunk_number) = (self.number, chunk.number());
        self.barrier
            .check_chunk(lane, chunk_number, chunk.iteration())
            .map_err(out_of_order)?;
        let mut pages = 0;
        // The ranges were decoded against the region table, so every region is found.
        let index_of = |id| region_index(&*self.memory.memory, id).unwrap_or(usize::MAX);
        let pages_of = |range: &Range| {
            (
                index_of(range.region),
                range.offset / PAGE_BYTES,
                u64::from(range.page_count),
            )
        };
        for range in ranges {
            let (index, first, count) = pages_of(range);
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
            let (index, first, count) = pages_of(range);
            // Mark before writing. If the lane fails in between, marked pages may be unwritten,
            // which does no harm. Every page that was written is marked.
            self.memory.mark_written(index, first, count);
        }
        if let Some(share) = &self.share {
            let bytes = raw().map(Range::memory_bytes).sum();
            if !share.take(bytes, || self.barrier.wants(lane)) {
                return Err(self.given_up());
            }
        }
        let mut refused = None;
        let targets = raw().map_while(|range| {
            let length = usize::try_from(range.memory_bytes()).unwrap_or(usize::MAX);
            let index = index_of(range.region);
            self.memory
                .memory
                .slice(index, range.offset, length)
                .map_err(|error| refused = Some(error))
                .ok()
        });
        self.receiver
            .payload_into(targets)
            .map_err(|error| self.failed(error))?;
        if let Some(error) = refused {
            return Err(unwritable(error));
        }
        #[cfg(feature = "unstable-internals")]
        for range in raw() {
            let written = range.offset..range.offset + range.memory_bytes();
            self.memory.memory.received(index_of(range.region), written);
        }
        let written = |lanes: &mut Receiving| lanes.written(lane, chunk_number, pages);
        self.barrier
            .report(written, || self.notify())
            .map_err(out_of_order)
    }

    /// Informs the session that something must be acknowledged.
    fn notify(&self) {
        // Sending fails only after the session has ended.
        let _ = self.events.send(SessionEvent::Acks);
    }

    fn failed(&self, error: ReceiveError) -> Fault {
        let what = format!("lane {} was lost", self.number);
        Fault::new(FaultCode::LaneLost, what).because(error)
    }
}

fn out_of_order(error: CourseError) -> Fault {
    Fault::new(FaultCode::Malformed, "frame out of order on a lane").because(error)
}

fn malformed(error: dunlin_proto::wire::DecodeError) -> Fault {
    Fault::new(error.fault(), "malformed frame on a lane").because(error)
}

fn unwritable(error: std::io::Error) -> Fault {
    Fault::new(FaultCode::LayoutChanged, "cannot write guest memory").because(error)
}
