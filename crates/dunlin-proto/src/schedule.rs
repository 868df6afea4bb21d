//! Forms chunks of pending pages and assigns them to lanes.
//!
//! Nothing is queued in advance. A chunk is formed when a lane asks for work, so a slow lane delays
//! only one chunk. The ranges of a chunk are kept until the chunk is acknowledged. Its bytes are
//! not kept, because they can be read again from guest memory.
//!
//! Order of calls: Call [`Schedule::new`], and [`Schedule::open_lane`] for each lane. Then call
//! [`Schedule::mark_dirty`] and [`Schedule::begin_iteration`] alternately, while the lanes' threads
//! call [`Schedule::next`] and the control thread calls [`Schedule::acknowledge`]. Finally call
//! [`Schedule::finish`]. After a lost lane is fenced, call [`Schedule::lose_lane`].
//! [`crate::lanes`] decides which lanes exist and when a lane is lost.
//!
//! ```text
//! lane:   Chunk* Mark(1)  Chunk* Mark(2)  …  Chunk* Mark(n)  End
//! ```
//! A lane that is opened later starts with the mark of the iteration before the current one, so it
//! overtakes no other lane. A lane that leaves early ends without the later marks, because after
//! its *end* nothing on it is in flight.
//!
//! A lane may be in iteration 3 while another is still in iteration 2. The marks
//! keep the iterations apart at the destination ([`crate::marks`]).

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};

use thiserror::Error;

use crate::bitmap::{PageBitmap, Run};
use crate::limits::{CHUNK_PAGES, MAX_IN_FLIGHT_RANGES, MAX_RANGES_PER_CHUNK};
use crate::mistake::{Mistake, planted};

/// Contiguous pages of one region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRange {
    /// The region's identifier in the region table.
    pub region: u16,
    /// The pages within the region.
    pub run: Run,
}

/// A chunk to send. The lane's thread owns one plan and reuses it, so that no memory is allocated
/// per chunk.
#[derive(Debug, Default)]
pub struct ChunkPlan {
    /// The chunk's number, unique in a session.
    pub number: u64,
    /// The iteration to which the chunk belongs, counted from 1.
    pub iteration: u32,
    /// The pages. Ranges that [`Schedule::extend`] added come last.
    pub ranges: Vec<PageRange>,
    /// Number of pages in all ranges.
    pub pages: u64,
}

/// What a lane's thread does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Sends the chunk in the plan.
    Chunk,
    /// Sends the mark that ends this iteration.
    Mark(u32),
    /// Sends *end* with the number of chunks that this lane has carried, and
    /// closes the lane.
    End {
        /// Chunks that this lane has carried.
        chunks: u64,
    },
    /// Waits for an event, and asks again.
    Wait,
    /// Ends immediately, because the lane carries nothing more.
    Stop,
}

/// An invalid acknowledgement. The peer is at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "the destination acknowledged chunks {first} to {last}, but chunk {first_unknown} was never sent"
)]
pub struct UnknownChunk {
    /// First chunk of the acknowledged set.
    pub first: u64,
    /// Last chunk of the acknowledged set.
    pub last: u64,
    /// The first chunk of the set that was never sent.
    pub first_unknown: u64,
}

#[derive(Debug)]
struct RegionWork {
    id: u16,
    pending: PageBitmap,
}

#[derive(Debug)]
struct LaneWork {
    /// The iteration of the lane's next chunk.
    iteration: u32,
    leaving: bool,
    course: LaneCourse,
}

/// What a lane has carried, and what the destination has confirmed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneCourse {
    /// Chunks assigned to the lane.
    pub chunks: u64,
    /// Acknowledged chunks.
    pub acknowledged: u64,
    /// The newest mark assigned to the lane; 0 if none.
    pub mark: u32,
    /// Whether *end* was assigned to the lane.
    pub ended: bool,
}

#[derive(Debug)]
struct InFlight {
    number: u64,
    lane: u16,
    acknowledged: bool,
    pages: u64,
    ranges: Vec<PageRange>,
}

/// The pending pages, the lanes, and the chunks in flight.
#[derive(Debug, Default)]
pub struct Schedule {
    regions: Vec<RegionWork>,
    cursor: (usize, u64),
    iteration: u32,
    /// Whether pages of the next iteration have been added.
    adding: bool,
    finishing: bool,
    next_chunk: u64,
    lanes: BTreeMap<u16, LaneWork>,
    in_flight: VecDeque<InFlight>,
    /// The number of ranges that are assigned to a lane and not acknowledged. See
    /// [`MAX_IN_FLIGHT_RANGES`].
    pub(crate) in_flight_ranges: usize,
    in_flight_pages: u64,
    pages: u64,
    lost_chunks: u64,
    lost_pages: u64,
    spare: Vec<Vec<PageRange>>,
}

impl Schedule {
    /// A schedule for regions given as (identifier, pages), in the order in which their pages are
    /// sent. Nothing is pending.
    #[must_use]
    pub fn new(regions: impl IntoIterator<Item = (u16, u64)>) -> Self {
        Self {
            regions: regions
                .into_iter()
                .map(|(id, pages)| RegionWork {
                    id,
                    pending: PageBitmap::new(pages),
                })
                .collect(),
            ..Self::default()
        }
    }

    /// The number of pending pages, which are not assigned to a lane.
    #[must_use]
    pub fn pending_pages(&self) -> u64 {
        self.regions.iter().map(|r| r.pending.count()).sum()
    }

    /// The number of pages that are assigned to a lane and not acknowledged.
    #[must_use]
    pub fn in_flight_pages(&self) -> u64 {
        self.in_flight_pages
    }

    /// The number of pages that are pending or in flight.
    #[must_use]
    pub fn remaining_pages(&self) -> u64 {
        self.pending_pages() + self.in_flight_pages
    }

    /// The current iteration, counted from 1; 0 before the first.
    #[must_use]
    pub fn iteration(&self) -> u32 {
        self.iteration
    }

    /// Number of chunks formed so far, which is the number of the next chunk.
    #[must_use]
    pub fn chunks(&self) -> u64 {
        self.next_chunk
    }

    /// How many chunks and pages have been assigned, without those that were lost with a lane. At
    /// the end, these are the totals that the destination has received.
    #[must_use]
    pub fn kept(&self) -> (u64, u64) {
        (
            self.next_chunk - self.lost_chunks,
            self.pages - self.lost_pages,
        )
    }

    /// Whether the current iteration is the last.
    #[must_use]
    pub fn finishing(&self) -> bool {
        self.finishing
    }

    /// A lane's progress; `None` if the lane is not open.
    #[must_use]
    pub fn course(&self, lane: u16) -> Option<LaneCourse> {
        self.lanes.get(&lane).map(|state| state.course)
    }

    /// Adds `lane`, which the destination has admitted and which carries chunks from now on. At
    /// the destination, lanes that wait at a mark wait only for admitted lanes.
    pub fn open_lane(&mut self, lane: u16) {
        self.lanes.insert(
            lane,
            LaneWork {
                iteration: self.iteration.saturating_sub(1).max(1),
                leaving: false,
                course: LaneCourse::default(),
            },
        );
    }

    /// Makes [`Work::End`] the next task of `lane`, which is no longer needed.
    pub fn leave(&mut self, lane: u16) {
        if let Some(state) = self.lanes.get_mut(&lane) {
            state.leaving = true;
        }
    }

    /// Removes `lane`, which has ended. All of its chunks are confirmed.
    pub fn forget(&mut self, lane: u16) {
        self.lanes.remove(&lane);
    }

    /// Marks a run of pages as pending for the next iteration. `index` is the region's position in
    /// the list given to [`Schedule::new`]. No chunk is formed until [`Schedule::begin_iteration`].
    /// Otherwise a marked page and its older version could be in flight in the same iteration, and
    /// no mark would keep the two versions apart (I4).
    pub fn mark_run(&mut self, index: usize, run: Run) {
        self.adding = true;
        if let Some(region) = self.regions.get_mut(index) {
            region.pending.insert(run);
        }
    }

    /// Marks the pages that are set in the dirty bitmap `log` of region `index`; see
    /// [`Schedule::mark_run`]. Returns the number of pages set in `log`.
    pub fn mark_dirty(&mut self, index: usize, log: &[u64]) -> u64 {
        self.adding = true;
        self.regions
            .get_mut(index)
            .map_or(0, |region| region.pending.union(log))
    }

    /// Starts the next iteration with the pages that are pending now. Lanes
    /// that are still busy with the previous iteration continue with it.
    pub fn begin_iteration(&mut self) {
        self.iteration += 1;
        self.adding = false;
        self.cursor = (0, 0);
    }

    /// Makes the current iteration the last: when no pages are left, each lane
    /// gets its last mark and its *end*.
    pub fn finish(&mut self) {
        self.finishing = true;
    }

    /// Returns the next task of `lane`. A chunk is stored in `plan`.
    pub fn next(&mut self, lane: u16, plan: &mut ChunkPlan) -> Work {
        let Some(state) = self.lanes.get_mut(&lane) else {
            return Work::Stop;
        };
        if state.course.ended {
            return Work::Wait;
        }
        let is_past_last = self.finishing && self.iteration > 0 && state.iteration > self.iteration;
        if state.leaving || is_past_last {
            state.course.ended = true;
            return Work::End {
                chunks: state.course.chunks,
            };
        }
        if self.iteration > state.iteration {
            let passed = state.iteration;
            state.iteration += 1;
            state.course.mark = passed;
            return Work::Mark(passed);
        }
        if self.iteration == 0 || state.iteration > self.iteration {
            return Work::Wait;
        }
        let adding = self.adding && !planted(Mistake::CutBeforeIteration);
        if adding || self.in_flight_ranges >= MAX_IN_FLIGHT_RANGES {
            return Work::Wait;
        }
        if self.cut(plan) {
            self.record(lane, plan);
            return Work::Chunk;
        }
        if self.finishing {
            if let Some(state) = self.lanes.get_mut(&lane) {
                state.iteration += 1;
                state.course.mark = self.iteration;
            }
            return Work::Mark(self.iteration);
        }
        Work::Wait
    }

    /// Adds up to `room` pending pages to the chunk in `plan`, which is the
    /// lane's newest chunk and is not sent yet. A lane calls this if it finds that
    /// pages of the chunk are zero and need no payload. The new ranges are
    /// appended. Returns whether any were added.
    ///
    /// No pages are added while the pending pages belong to another iteration (I4), while
    /// [`MAX_IN_FLIGHT_RANGES`] is reached, or after the lane was lost. In the last case, all pages
    /// of the chunk are pending again.
    pub fn extend(&mut self, plan: &mut ChunkPlan, room: u64) -> bool {
        if self.adding
            || plan.iteration != self.iteration
            || self.in_flight_ranges >= MAX_IN_FLIGHT_RANGES
        {
            return false;
        }
        let at = self
            .in_flight
            .partition_point(|chunk| chunk.number < plan.number);
        let is_under_way = |chunk: &InFlight| chunk.number == plan.number && !chunk.acknowledged;
        if !self.in_flight.get(at).is_some_and(is_under_way) {
            return false;
        }
        let (ranges, pages) = (plan.ranges.len(), plan.pages);
        self.take(plan, room);
        let (added, pages) = (&plan.ranges[ranges..], plan.pages - pages);
        if let Some(chunk) = self.in_flight.get_mut(at) {
            chunk.ranges.extend_from_slice(added);
            chunk.pages += pages;
        }
        self.in_flight_ranges += added.len();
        self.in_flight_pages += pages;
        self.pages += pages;
        pages > 0
    }

    /// Records that the destination wrote chunks `first` to `first + count - 1`. Repetition has no
    /// effect. Returns the number of pages acknowledged for the first time.
    ///
    /// # Errors
    /// One of the chunks does not exist yet.
    pub fn acknowledge(&mut self, first: u64, count: u64) -> Result<u64, UnknownChunk> {
        let end = first.saturating_add(count);
        if end > self.next_chunk {
            return Err(UnknownChunk {
                first,
                last: end.saturating_sub(1),
                first_unknown: first.max(self.next_chunk),
            });
        }
        let from = self.in_flight.partition_point(|chunk| chunk.number < first);
        let mut pages = 0;
        for chunk in self.in_flight.range_mut(from..) {
            if chunk.number >= end {
                break;
            }
            if !chunk.acknowledged {
                chunk.acknowledged = true;
                pages += chunk.pages;
                if let Some(lane) = self.lanes.get_mut(&chunk.lane) {
                    lane.course.acknowledged += 1;
                }
                self.in_flight_ranges -= chunk.ranges.len();
                let mut ranges = std::mem::take(&mut chunk.ranges);
                ranges.clear();
                self.spare.push(ranges);
            }
        }
        self.in_flight_pages -= pages;
        while self.in_flight.front().is_some_and(|c| c.acknowledged) {
            self.in_flight.pop_front();
        }
        Ok(pages)
    }

    /// Removes `lane`, which was lost and fenced. Its unacknowledged pages become pending again.
    /// Returns their number.
    pub fn lose_lane(&mut self, lane: u16) -> u64 {
        self.lanes.remove(&lane);
        let mut pages = 0;
        for chunk in &mut self.in_flight {
            if chunk.lane != lane || chunk.acknowledged {
                continue;
            }
            chunk.acknowledged = true;
            pages += chunk.pages;
            self.lost_chunks += 1;
            self.lost_pages += chunk.pages;
            self.in_flight_ranges -= chunk.ranges.len();
            if planted(Mistake::NoRedirty) {
                chunk.ranges.clear();
            }
            for range in chunk.ranges.drain(..) {
                if let Some(region) = self.regions.iter_mut().find(|r| r.id == range.region) {
                    region.pending.insert(range.run);
                }
            }
        }
        self.in_flight_pages -= pages;
        while self.in_flight.front().is_some_and(|c| c.acknowledged) {
            self.in_flight.pop_front();
        }
        self.cursor = (0, 0);
        pages
    }

    fn cut(&mut self, plan: &mut ChunkPlan) -> bool {
        plan.ranges.clear();
        plan.pages = 0;
        self.take(plan, CHUNK_PAGES);
        plan.iteration = self.iteration;
        plan.number = self.next_chunk;
        !plan.ranges.is_empty()
    }

    /// Moves up to `room` pending pages to the plan.
    fn take(&mut self, plan: &mut ChunkPlan, mut room: u64) {
        while room > 0
            && plan.ranges.len() < MAX_RANGES_PER_CHUNK
            && let Some(region) = self.regions.get_mut(self.cursor.0)
        {
            match region.pending.take_run(self.cursor.1, room) {
                Some(run) => {
                    self.cursor.1 = run.first + run.count;
                    room -= run.count;
                    plan.pages += run.count;
                    plan.ranges.push(PageRange {
                        region: region.id,
                        run,
                    });
                }
                None => self.cursor = (self.cursor.0 + 1, 0),
            }
        }
    }

    fn record(&mut self, lane: u16, plan: &ChunkPlan) {
        let mut ranges = self.spare.pop().unwrap_or_default();
        ranges.extend_from_slice(&plan.ranges);
        self.in_flight_ranges += ranges.len();
        self.in_flight_pages += plan.pages;
        self.pages += plan.pages;
        self.in_flight.push_back(InFlight {
            number: plan.number,
            lane,
            acknowledged: false,
            pages: plan.pages,
            ranges,
        });
        self.next_chunk += 1;
        if let Some(state) = self.lanes.get_mut(&lane) {
            state.course.chunks += 1;
        }
    }
}
