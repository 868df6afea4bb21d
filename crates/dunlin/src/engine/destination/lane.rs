//! A lane's thread at the destination: reads chunks straight into guest
//! memory, acknowledges them, and keeps iterations apart at the marks.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use dunlin_proto::control::RegionTable;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::frame::{ChunkHeader, Encoding, FRAME_HEADER_BYTES, Frame, RANGE_BYTES, Range};
use dunlin_proto::lanes::{CourseError, LaneRefusal, Receiving};
use dunlin_proto::limits::{MAX_RANGES_PER_CHUNK, PAGE_BYTES};
use dunlin_sys::affinity::thread_cpu_time;

use super::super::error::Fault;
use super::super::lock;
use super::super::vmm::GuestMemory;
use super::SessionEvent;
use crate::lane::data::{Canceller, DataReceiver, ReceiveError};

/// How long the source may take from a lane's end to its close.
const CLOSE_LIMIT: Duration = Duration::from_secs(2);

/// Pages cleared between two looks at whether the lane has to end: 16 MiB, some
/// milliseconds. A range may span a whole region, and whoever cancels or fences
/// waits for this thread.
const CLEARED_AT_ONCE: u64 = 4096;

/// What a session's lanes share.
pub(super) struct Shared {
    memory: Arc<dyn GuestMemory>,
    regions: RegionTable,
    /// For each region of the memory, a bit for each page that a lane has
    /// written: only those have to be cleared when zeros are sent.
    written: Vec<Box<[AtomicU64]>>,
    state: Mutex<State>,
    changed: Condvar,
}

/// Guarded by [`Shared::state`].
struct State {
    lanes: Receiving,
    stop: bool,
    cancellers: BTreeMap<u16, Canceller>,
}

impl Shared {
    pub(super) fn new(memory: Arc<dyn GuestMemory>, regions: RegionTable, lanes_max: u16) -> Self {
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
            state: Mutex::new(State {
                lanes: Receiving::new(lanes_max),
                stop: false,
                cancellers: BTreeMap::new(),
            }),
            changed: Condvar::new(),
        }
    }

    /// What is known of the lanes; those that wait at a mark are woken
    /// afterwards.
    pub(super) fn lanes<T>(&self, ask: impl FnOnce(&mut Receiving) -> T) -> T {
        let answer = ask(&mut lock(&self.state).lanes);
        self.changed.notify_all();
        answer
    }

    /// A lane takes part from now on.
    pub(super) fn admit(&self, lane: u16, canceller: Canceller) -> Result<(), LaneRefusal> {
        let mut state = lock(&self.state);
        state.lanes.admit(lane)?;
        state.cancellers.insert(lane, canceller);
        Ok(())
    }

    /// Ends one lane, whatever it waits for. It must be known as closing.
    pub(super) fn cut(&self, lane: u16) {
        if let Some(canceller) = lock(&self.state).cancellers.get(&lane) {
            canceller.shutdown();
        }
        self.changed.notify_all();
    }

    /// Ends every lane: those that wait at a mark and those that wait for
    /// bytes.
    pub(super) fn stop(&self) {
        let mut state = lock(&self.state);
        state.stop = true;
        for canceller in state.cancellers.values() {
            canceller.shutdown();
        }
        drop(state);
        self.changed.notify_all();
    }

    /// The lane's connection goes with its thread: a source that opens and
    /// ends lane after lane uses up no descriptors here (I7).
    fn forget(&self, lane: u16) {
        lock(&self.state).cancellers.remove(&lane);
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
                        .decode_ranges(bytes, &self.shared.regions, &mut ranges)
                        .map_err(malformed)?;
                    self.take_in(&chunk, &ranges)?;
                }
                Frame::Mark { iteration } => self.pass(iteration)?,
                Frame::End { chunks } => {
                    let lane = self.number;
                    self.report(|lanes| lanes.ended(lane, chunks))
                        .map_err(out_of_course)?;
                    return self.await_close();
                }
            }
        }
    }

    /// Waits at the mark of `iteration` for every other lane.
    fn pass(&self, iteration: u32) -> Result<(), Fault> {
        let lane = self.number;
        self.report(|lanes| lanes.mark(lane, iteration))
            .map_err(out_of_course)?;
        let mut state = lock(&self.shared.state);
        while !state.lanes.may_pass(iteration) {
            self.check_wanted_by(&state)?;
            state = self
                .shared
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        Ok(())
    }

    /// Fails once the lane has been given up or the session ends.
    fn check_wanted(&self) -> Result<(), Fault> {
        self.check_wanted_by(&lock(&self.shared.state))
    }

    fn check_wanted_by(&self, state: &State) -> Result<(), Fault> {
        if state.stop || state.lanes.is_closing(self.number) {
            let what = format!("lane {} was given up", self.number);
            return Err(Fault::new(FaultCode::LaneLost, what));
        }
        Ok(())
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
        lock(&self.shared.state)
            .lanes
            .check_chunk(lane, chunk_number, chunk.iteration())
            .map_err(out_of_course)?;
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
                let (mut first, end) = (first, first + count);
                while first < end {
                    self.check_wanted()?;
                    let here = CLEARED_AT_ONCE.min(end - first);
                    self.shared.clear(index, first, here).map_err(unwritable)?;
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
        self.report(|lanes| lanes.written(lane, chunk_number, pages))
            .map_err(out_of_course)
    }

    /// Notes something that has to be told to the source, and lets the session
    /// know if it is the first such thing.
    fn report<T>(&self, note: impl FnOnce(&mut Receiving) -> T) -> T {
        let mut state = lock(&self.shared.state);
        let told = !state.lanes.has_reports();
        let noted = note(&mut state.lanes);
        if told && state.lanes.has_reports() {
            // A session that is gone acknowledges nothing.
            let _ = self.events.send(SessionEvent::Acks);
        }
        drop(state);
        self.shared.changed.notify_all();
        noted
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
