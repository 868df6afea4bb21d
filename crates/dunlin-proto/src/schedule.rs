//! Cutting chunks from the pages that are waiting, and giving them to lanes.
//!
//! Nothing is queued for a whole pass: a chunk is cut from the bitmap at the
//! moment a lane asks, so a slow lane holds one chunk and a fast one takes
//! the rest. What a lane has been given and the destination has not
//! acknowledged is kept as ranges, not as bytes: guest memory itself is the
//! retransmit buffer.
//!
//! Order of calls: [`Schedule::new`], [`Schedule::open_lane`] for each lane;
//! then, in turn, [`Schedule::mark_dirty`] and [`Schedule::begin_iteration`],
//! while the lanes' threads call [`Schedule::next`] and the control thread
//! [`Schedule::acknowledge`]; at last [`Schedule::finish`]. A lane that is
//! lost goes through [`Schedule::lose_lane`] once it is fenced; which lanes
//! there are, and when one is lost, is [`crate::lanes`]' to say.
//!
//! ```text
//! lane:   Chunk* Mark(1)  Chunk* Mark(2)  …  Chunk* Mark(n)  End
//! ```
//! A lane that comes later begins with the mark of the iteration before the
//! current one, so that it overtakes nobody either. One that leaves early
//! ends without the marks to come: nothing of it is under way then.
//!
//! A lane may be in iteration 3 while another is still in 2: the marks keep
//! them apart at the destination ([`crate::marks`]).

use std::collections::{BTreeMap, VecDeque};

use thiserror::Error;

use crate::bitmap::{PageBitmap, Run};
use crate::limits::{CHUNK_PAGES, MAX_IN_FLIGHT_RANGES, MAX_RANGES_PER_CHUNK};
use crate::mistake::{Mistake, planted};

/// Pages of one region that lie side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRange {
    /// The region's identifier in the region table.
    pub region: u16,
    /// Which pages of it.
    pub run: Run,
}

/// What a lane sends next. The lane's thread owns one and hands it in again,
/// so that no chunk costs an allocation.
#[derive(Debug, Default)]
pub struct ChunkPlan {
    /// The chunk's number, never used twice in a session.
    pub number: u64,
    /// The iteration to which the chunk belongs, counted from 1.
    pub iteration: u32,
    /// The pages, in the order of the region table.
    pub ranges: Vec<PageRange>,
    /// How many pages the ranges hold together.
    pub pages: u64,
}

/// The answer to a lane that asks for work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// The plan has been filled.
    Chunk,
    /// Send the mark that ends this iteration.
    Mark(u32),
    /// Nothing more will come: send *end* with the number of chunks that
    /// this lane has carried, and close.
    End {
        /// Chunks that this lane has carried.
        chunks: u64,
    },
    /// Nothing to do now; ask again when something has changed.
    Wait,
    /// The lane is not to go on: it was given up.
    Stop,
}

/// An acknowledgement that cannot be right. The peer is at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "the destination acknowledged chunks {first} to {last}, of which {first_unknown} was never sent: the destination does not keep the protocol"
)]
pub struct UnknownChunk {
    /// First chunk of the acknowledged set.
    pub first: u64,
    /// Last chunk of the acknowledged set.
    pub last: u64,
    /// The chunk that has not been cut yet.
    pub first_unknown: u64,
}

#[derive(Debug)]
struct RegionWork {
    id: u16,
    pending: PageBitmap,
}

#[derive(Debug)]
struct LaneWork {
    /// The iteration of its next chunk.
    iteration: u32,
    chunks: u64,
    acknowledged: u64,
    mark: u32,
    leaving: bool,
    ended: bool,
}

/// What a lane has been given and the destination has confirmed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneCourse {
    /// Chunks given to it.
    pub chunks: u64,
    /// Those of them that are acknowledged.
    pub acknowledged: u64,
    /// The last mark given to it; 0 for none.
    pub mark: u32,
    /// Whether it was given its *end*.
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

/// The pending pages, the lanes and what is under way on them.
#[derive(Debug)]
pub struct Schedule {
    regions: Vec<RegionWork>,
    cursor: (usize, u64),
    iteration: u32,
    /// Pages were added that belong to the iteration to come.
    adding: bool,
    finishing: bool,
    next_chunk: u64,
    lanes: BTreeMap<u16, LaneWork>,
    in_flight: VecDeque<InFlight>,
    in_flight_ranges: usize,
    in_flight_pages: u64,
    pages: u64,
    lost_chunks: u64,
    lost_pages: u64,
    spare: Vec<Vec<PageRange>>,
}

impl Schedule {
    /// A schedule over regions given as (identifier, pages), in the order in
    /// which they shall be sent. Nothing is pending.
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
            cursor: (0, 0),
            iteration: 0,
            adding: false,
            finishing: false,
            next_chunk: 0,
            lanes: BTreeMap::new(),
            in_flight: VecDeque::new(),
            in_flight_ranges: 0,
            in_flight_pages: 0,
            pages: 0,
            lost_chunks: 0,
            lost_pages: 0,
            spare: Vec::new(),
        }
    }

    /// Pages that have not been given to a lane.
    #[must_use]
    pub fn pending_pages(&self) -> u64 {
        self.regions.iter().map(|r| r.pending.count()).sum()
    }

    /// Pages given to a lane and not acknowledged.
    #[must_use]
    pub fn in_flight_pages(&self) -> u64 {
        self.in_flight_pages
    }

    /// Pages that have still to arrive: those that no lane has been given, and
    /// those that are under way.
    #[must_use]
    pub fn remaining_pages(&self) -> u64 {
        self.pending_pages() + self.in_flight_pages
    }

    /// Ranges given to a lane and not acknowledged: what
    /// [`MAX_IN_FLIGHT_RANGES`] bounds.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn in_flight_ranges(&self) -> usize {
        self.in_flight_ranges
    }

    /// The iteration that is being cut, counted from 1; 0 before the first.
    #[must_use]
    pub fn iteration(&self) -> u32 {
        self.iteration
    }

    /// How many chunks have been cut: the number that the next one will bear.
    #[must_use]
    pub fn chunks(&self) -> u64 {
        self.next_chunk
    }

    /// Chunks and pages that have been cut, without those that lost lanes took
    /// with them: what the destination has received once all is over.
    #[must_use]
    pub fn kept(&self) -> (u64, u64) {
        (
            self.next_chunk - self.lost_chunks,
            self.pages - self.lost_pages,
        )
    }

    /// Whether no iteration comes after this one.
    #[must_use]
    pub fn finishing(&self) -> bool {
        self.finishing
    }

    /// How far a lane has come; `None` for one that is not open.
    #[must_use]
    pub fn course(&self, lane: u16) -> Option<LaneCourse> {
        self.lanes.get(&lane).map(|state| LaneCourse {
            chunks: state.chunks,
            acknowledged: state.acknowledged,
            mark: state.mark,
            ended: state.ended,
        })
    }

    /// Adds a lane, which takes part at once. The destination must have let
    /// it in: it counts there, and no other lane passes a mark without it.
    pub fn open_lane(&mut self, lane: u16) {
        self.lanes.insert(
            lane,
            LaneWork {
                iteration: self.iteration.saturating_sub(1).max(1),
                chunks: 0,
                acknowledged: 0,
                mark: 0,
                leaving: false,
                ended: false,
            },
        );
    }

    /// Lets `lane` end as soon as it asks for work.
    pub fn leave(&mut self, lane: u16) {
        if let Some(state) = self.lanes.get_mut(&lane) {
            state.leaving = true;
        }
    }

    /// Forgets a lane that has ended, when all that it carried is confirmed.
    pub fn forget(&mut self, lane: u16) {
        self.lanes.remove(&lane);
    }

    /// Marks a run of pages of region number `index` (its place in the list
    /// given to [`Schedule::new`]) as waiting for the next iteration. Until
    /// [`Schedule::begin_iteration`] no chunk is cut: an older version of such
    /// a page may still be under way in this one, and no mark would keep the
    /// two apart (I4).
    pub fn mark_run(&mut self, index: usize, run: Run) {
        self.adding = true;
        if let Some(region) = self.regions.get_mut(index) {
            region.pending.insert(run);
        }
    }

    /// Adds a dirty log's bitmap for region number `index`, as
    /// [`Schedule::mark_run`] does a run. Returns how many pages the log named.
    pub fn mark_dirty(&mut self, index: usize, log: &[u64]) -> u64 {
        self.adding = true;
        self.regions
            .get_mut(index)
            .map_or(0, |region| region.pending.union(log))
    }

    /// The pages that wait now are the next iteration's. Lanes still busy
    /// with the one before go on with it.
    pub fn begin_iteration(&mut self) {
        self.iteration += 1;
        self.adding = false;
        self.cursor = (0, 0);
    }

    /// No iteration comes after this one: when its pages are gone, each lane
    /// is given its last mark and its *end*.
    pub fn finish(&mut self) {
        self.finishing = true;
    }

    /// What `lane` shall do now. A chunk is put into `plan`.
    pub fn next(&mut self, lane: u16, plan: &mut ChunkPlan) -> Work {
        let Some(state) = self.lanes.get_mut(&lane) else {
            return Work::Stop;
        };
        if state.ended {
            return Work::Wait;
        }
        if state.leaving {
            state.ended = true;
            return Work::End {
                chunks: state.chunks,
            };
        }
        if self.iteration > state.iteration {
            let passed = state.iteration;
            state.iteration += 1;
            state.mark = passed;
            return Work::Mark(passed);
        }
        if self.iteration == 0 || state.iteration > self.iteration && !self.finishing {
            return Work::Wait;
        }
        if state.iteration > self.iteration {
            state.ended = true;
            return Work::End {
                chunks: state.chunks,
            };
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
                state.mark = self.iteration;
            }
            return Work::Mark(self.iteration);
        }
        Work::Wait
    }

    /// Adds up to `room` waiting pages to the chunk in `plan`, which its lane was given last and has
    /// not sent: for a lane that has found zero pages in it, which take no payload. Their ranges
    /// come behind those that are there. Returns whether there are any.
    ///
    /// None are, like chunks, while the waiting pages are another iteration's (I4); and none when
    /// the lane has been lost, since the chunk waits again as it was.
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

    /// The destination has written chunks `first` to `first + count - 1`.
    /// Naming a chunk twice does no harm. Returns the pages that this
    /// acknowledged for the first time.
    ///
    /// # Errors
    /// A chunk that has not been cut yet is named.
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
                    lane.acknowledged += 1;
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

    /// `lane` is lost and fenced: what it was given and the destination has
    /// not acknowledged waits again. Returns how many pages that is.
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

    /// Moves up to `room` pages that wait to the plan.
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
            state.chunks += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn run(first: u64, count: u64) -> Run {
        Run { first, count }
    }

    fn schedule(pages: u64, lanes: u16) -> Schedule {
        let mut schedule = Schedule::new([(7, pages)]);
        for lane in 1..=lanes {
            schedule.open_lane(lane);
        }
        schedule
    }

    /// Asks for `lane` until it has to wait; returns what it was given.
    fn drain(schedule: &mut Schedule, lane: u16) -> (u64, Vec<Work>) {
        let mut plan = ChunkPlan::default();
        let mut pages = 0;
        let mut works = Vec::new();
        loop {
            let work = schedule.next(lane, &mut plan);
            match work {
                Work::Wait | Work::Stop => return (pages, works),
                Work::Chunk => pages += plan.pages,
                Work::End { .. } => {
                    works.push(work);
                    return (pages, works);
                }
                Work::Mark(_) => {}
            }
            works.push(work);
        }
    }

    #[test]
    fn i4_a_dirty_log_waits_for_the_next_iteration() {
        let mut schedule = schedule(2, 3);
        schedule.mark_run(0, run(0, 2));
        schedule.begin_iteration();
        assert_eq!(drain(&mut schedule, 1).0, 2);
        // Lane 1 still carries page 0, which is written to again: in this
        // iteration nothing would keep lane 2 from overtaking it. What lane 3
        // took along, if anything, would be looked for from page 0 on.
        schedule.lose_lane(3);
        schedule.mark_dirty(0, &[1]);
        assert_eq!(drain(&mut schedule, 2), (0, vec![]));
        schedule.begin_iteration();
        let (pages, work) = drain(&mut schedule, 2);
        assert_eq!(pages, 1);
        assert_eq!(work, [Work::Mark(1), Work::Chunk]);
    }

    #[test]
    fn a_lane_sends_chunks_then_mark_then_end() {
        let mut schedule = schedule(CHUNK_PAGES + 1, 1);
        schedule.mark_run(0, run(0, CHUNK_PAGES + 1));
        schedule.begin_iteration();
        schedule.finish();
        let (pages, works) = drain(&mut schedule, 1);
        assert_eq!(pages, CHUNK_PAGES + 1);
        assert_eq!(
            works,
            [
                Work::Chunk,
                Work::Chunk,
                Work::Mark(1),
                Work::End { chunks: 2 }
            ]
        );
        assert!(schedule.course(1).unwrap().ended);
    }

    #[test]
    fn i4_a_lane_marks_the_old_iteration_before_its_first_chunk_of_the_new() {
        let mut schedule = schedule(4 * CHUNK_PAGES, 2);
        schedule.mark_run(0, run(0, 2 * CHUNK_PAGES));
        schedule.begin_iteration();
        let mut plan = ChunkPlan::default();
        assert_eq!(schedule.next(1, &mut plan), Work::Chunk);
        assert_eq!(schedule.next(2, &mut plan), Work::Chunk);
        assert_eq!(schedule.next(1, &mut plan), Work::Wait);
        schedule.mark_run(0, run(0, 2 * CHUNK_PAGES));
        schedule.begin_iteration();
        assert_eq!(schedule.next(1, &mut plan), Work::Mark(1));
        assert_eq!(schedule.next(1, &mut plan), Work::Chunk);
        assert_eq!(plan.iteration, 2);
        assert_eq!(schedule.next(2, &mut plan), Work::Mark(1));
        assert_eq!(schedule.next(2, &mut plan), Work::Chunk);
    }

    #[test]
    fn a_lane_idle_through_several_iterations_sends_each_mark() {
        let mut schedule = schedule(CHUNK_PAGES, 2);
        for _ in 0..3 {
            schedule.mark_run(0, run(0, 1));
            schedule.begin_iteration();
            drain(&mut schedule, 1);
        }
        schedule.finish();
        let (_, works) = drain(&mut schedule, 2);
        assert_eq!(
            works,
            [
                Work::Mark(1),
                Work::Mark(2),
                Work::Mark(3),
                Work::End { chunks: 0 }
            ]
        );
    }

    #[test]
    fn i5_a_lost_lanes_unacknowledged_pages_wait_again() {
        let mut schedule = schedule(3 * CHUNK_PAGES, 2);
        schedule.mark_run(0, run(0, 3 * CHUNK_PAGES));
        schedule.begin_iteration();
        let mut plan = ChunkPlan::default();
        schedule.next(1, &mut plan);
        schedule.next(1, &mut plan);
        schedule.next(2, &mut plan);
        assert_eq!(schedule.pending_pages(), 0);
        assert_eq!(schedule.acknowledge(0, 1), Ok(CHUNK_PAGES));
        assert_eq!(schedule.lose_lane(1), CHUNK_PAGES);
        assert_eq!(schedule.pending_pages(), CHUNK_PAGES);
        assert_eq!(schedule.next(2, &mut plan), Work::Chunk);
        assert_eq!(plan.ranges[0].run, run(CHUNK_PAGES, CHUNK_PAGES));
        assert_eq!(schedule.next(1, &mut plan), Work::Stop);
    }

    #[test]
    fn i4_a_lane_that_comes_later_begins_with_the_mark_before_its_first_chunk() {
        let mut schedule = schedule(3 * CHUNK_PAGES, 1);
        for _ in 0..3 {
            schedule.mark_run(0, run(0, 3 * CHUNK_PAGES));
            schedule.begin_iteration();
        }
        schedule.open_lane(2);
        let mut plan = ChunkPlan::default();
        assert_eq!(schedule.next(2, &mut plan), Work::Mark(2));
        assert_eq!(schedule.next(2, &mut plan), Work::Chunk);
        assert_eq!(plan.iteration, 3);
    }

    #[test]
    fn a_lane_that_leaves_ends_at_once() {
        let mut schedule = schedule(3 * CHUNK_PAGES, 2);
        schedule.mark_run(0, run(0, 3 * CHUNK_PAGES));
        schedule.begin_iteration();
        let mut plan = ChunkPlan::default();
        assert_eq!(schedule.next(1, &mut plan), Work::Chunk);
        schedule.leave(1);
        assert_eq!(schedule.next(1, &mut plan), Work::End { chunks: 1 });
        assert_eq!(schedule.next(1, &mut plan), Work::Wait);
        assert_eq!(schedule.next(2, &mut plan), Work::Chunk);
        let course = schedule.course(1).unwrap();
        assert!(course.ended && course.chunks == 1 && course.acknowledged == 0);
    }

    #[test]
    fn what_a_lost_lane_took_with_it_is_not_counted() {
        let mut schedule = schedule(3 * CHUNK_PAGES, 2);
        schedule.mark_run(0, run(0, 3 * CHUNK_PAGES));
        schedule.begin_iteration();
        let mut plan = ChunkPlan::default();
        schedule.next(1, &mut plan);
        schedule.next(1, &mut plan);
        schedule.acknowledge(0, 1).unwrap();
        schedule.lose_lane(1);
        assert_eq!(schedule.kept(), (1, CHUNK_PAGES));
    }

    #[test]
    fn i8_a_lost_lane_leaves_its_room_to_the_others() {
        let pages = 4 * MAX_IN_FLIGHT_RANGES as u64;
        let mut schedule = schedule(pages, 2);
        let every_other: Vec<u64> = vec![0x5555_5555_5555_5555; (pages / 64) as usize];
        schedule.mark_dirty(0, &every_other);
        schedule.begin_iteration();
        let mut plan = ChunkPlan::default();
        // Lane 1 takes all the room there is, with a gap that is acknowledged.
        while schedule.next(1, &mut plan) == Work::Chunk {}
        schedule.acknowledge(1, 1).unwrap();
        while schedule.next(1, &mut plan) == Work::Chunk {}
        assert!(schedule.in_flight_ranges >= MAX_IN_FLIGHT_RANGES);
        assert_eq!(schedule.next(2, &mut plan), Work::Wait);
        schedule.lose_lane(1);
        assert_eq!(
            (schedule.in_flight_ranges, schedule.in_flight_pages()),
            (0, 0)
        );
        assert_eq!(schedule.next(2, &mut plan), Work::Chunk);
        assert_eq!(schedule.in_flight_ranges, plan.ranges.len());
    }

    #[test]
    fn acknowledging_twice_counts_once() {
        let mut schedule = schedule(2 * CHUNK_PAGES, 1);
        schedule.mark_run(0, run(0, 2 * CHUNK_PAGES));
        schedule.begin_iteration();
        drain(&mut schedule, 1);
        assert_eq!(schedule.acknowledge(1, 1), Ok(CHUNK_PAGES));
        assert_eq!(schedule.acknowledge(0, 2), Ok(CHUNK_PAGES));
        assert_eq!(schedule.acknowledge(0, 2), Ok(0));
        assert_eq!(schedule.in_flight_pages(), 0);
    }

    #[test]
    fn a_chunk_takes_in_what_waits_behind_it() {
        let mut schedule = schedule(4 * CHUNK_PAGES, 2);
        schedule.mark_run(0, run(0, 3 * CHUNK_PAGES));
        schedule.begin_iteration();
        let mut plan = ChunkPlan::default();
        let mut other = ChunkPlan::default();
        assert_eq!(schedule.next(1, &mut plan), Work::Chunk);
        assert_eq!(schedule.next(2, &mut other), Work::Chunk);
        assert!(schedule.extend(&mut plan, 8));
        let ranges: Vec<_> = plan.ranges.iter().map(|range| range.run).collect();
        assert_eq!(ranges, [run(0, CHUNK_PAGES), run(2 * CHUNK_PAGES, 8)]);
        assert_eq!(plan.pages, CHUNK_PAGES + 8);
        assert!(schedule.extend(&mut plan, u64::MAX));
        assert!(!schedule.extend(&mut plan, u64::MAX), "nothing waits");
        assert_eq!(schedule.in_flight_pages(), 3 * CHUNK_PAGES);
        assert_eq!(schedule.kept(), (2, 3 * CHUNK_PAGES));
        assert_eq!(schedule.acknowledge(0, 1), Ok(2 * CHUNK_PAGES));
        assert_eq!(schedule.acknowledge(1, 1), Ok(CHUNK_PAGES));
        assert_eq!(schedule.in_flight_ranges, 0);
    }

    #[test]
    fn i5_what_was_added_to_a_lost_lanes_chunk_waits_again() {
        let mut schedule = schedule(4 * CHUNK_PAGES, 2);
        schedule.mark_run(0, run(0, 3 * CHUNK_PAGES));
        schedule.begin_iteration();
        let mut plan = ChunkPlan::default();
        assert_eq!(schedule.next(1, &mut plan), Work::Chunk);
        assert!(schedule.extend(&mut plan, CHUNK_PAGES));
        assert_eq!(schedule.lose_lane(1), 2 * CHUNK_PAGES);
        // Its thread may still be at it.
        assert!(!schedule.extend(&mut plan, CHUNK_PAGES));
        assert_eq!(schedule.kept(), (0, 0));
        assert_eq!(drain(&mut schedule, 2).0, 3 * CHUNK_PAGES);
    }

    /// Identifiers are not places, and the regions are of different lengths.
    #[test]
    fn i5_a_lost_lanes_pages_wait_again_in_their_own_regions() {
        const SECOND: u64 = CHUNK_PAGES + 7;
        let mut schedule = Schedule::new([(7, 10), (3, SECOND)]);
        schedule.open_lane(1);
        schedule.open_lane(2);
        schedule.mark_run(0, run(8, 2));
        schedule.mark_run(1, run(0, SECOND));
        schedule.begin_iteration();
        let mut plan = ChunkPlan::default();
        assert_eq!(schedule.next(1, &mut plan), Work::Chunk);
        assert!(schedule.extend(&mut plan, u64::MAX));
        let given = |plan: &ChunkPlan| -> Vec<_> {
            let ranges = plan.ranges.iter();
            ranges.map(|range| (range.region, range.run)).collect()
        };
        let all = [
            (7, run(8, 2)),
            (3, run(0, CHUNK_PAGES - 2)),
            (3, run(CHUNK_PAGES - 2, 9)),
        ];
        assert_eq!(given(&plan), all);
        assert_eq!(schedule.lose_lane(1), SECOND + 2);
        assert_eq!(schedule.next(2, &mut plan), Work::Chunk);
        assert_eq!(given(&plan), all[..2]);
        assert!(schedule.extend(&mut plan, u64::MAX));
        assert_eq!(given(&plan), all);
    }

    /// A lane is lost with what another had lost before, which had been added to its chunk.
    #[test]
    fn i5_what_is_lost_twice_waits_again_and_is_counted_once() {
        let mut schedule = schedule(4 * CHUNK_PAGES, 3);
        schedule.mark_run(0, run(0, 3 * CHUNK_PAGES));
        schedule.begin_iteration();
        let mut plan = ChunkPlan::default();
        let mut other = ChunkPlan::default();
        assert_eq!(schedule.next(1, &mut plan), Work::Chunk);
        assert!(schedule.extend(&mut plan, CHUNK_PAGES));
        assert_eq!(schedule.next(2, &mut other), Work::Chunk);
        assert_eq!(schedule.lose_lane(1), 2 * CHUNK_PAGES);
        // The second takes the first one's pages along, and is lost too.
        assert!(schedule.extend(&mut other, CHUNK_PAGES));
        assert_eq!(schedule.next(2, &mut plan), Work::Chunk);
        assert_eq!(schedule.pending_pages(), 0);
        assert_eq!(schedule.lose_lane(2), 3 * CHUNK_PAGES);
        assert_eq!(schedule.lose_lane(2), 0);
        assert_eq!(schedule.kept(), (0, 0));
        assert_eq!(
            (schedule.in_flight_pages(), schedule.in_flight_ranges),
            (0, 0)
        );
        assert_eq!(drain(&mut schedule, 3).0, 3 * CHUNK_PAGES);
        assert_eq!(schedule.kept(), (3, 3 * CHUNK_PAGES));
        // What the lost lanes were given is confirmed by nobody any more.
        assert_eq!(schedule.acknowledge(0, 3), Ok(0));
        assert_eq!(schedule.acknowledge(3, 3), Ok(3 * CHUNK_PAGES));
        assert_eq!(schedule.remaining_pages(), 0);
    }

    #[test]
    fn i4_no_page_of_the_next_iteration_is_added_to_a_chunk() {
        let mut schedule = schedule(4 * CHUNK_PAGES, 1);
        schedule.mark_run(0, run(0, CHUNK_PAGES));
        schedule.begin_iteration();
        let mut plan = ChunkPlan::default();
        assert_eq!(schedule.next(1, &mut plan), Work::Chunk);
        schedule.mark_dirty(0, &[0, 1]);
        assert!(!schedule.extend(&mut plan, CHUNK_PAGES), "it waits");
        schedule.begin_iteration();
        assert!(!schedule.extend(&mut plan, CHUNK_PAGES), "it is the next");
        assert_eq!(drain(&mut schedule, 1).0, 1);
    }

    #[test]
    fn i7_an_acknowledgement_of_a_chunk_never_sent_is_refused() {
        let mut schedule = schedule(CHUNK_PAGES, 1);
        assert!(schedule.acknowledge(0, 1).is_err());
        assert!(schedule.acknowledge(u64::MAX, u64::MAX).is_err());
    }

    #[test]
    fn i8_scattered_pages_in_flight_are_bounded() {
        let pages = 4 * MAX_IN_FLIGHT_RANGES as u64;
        let mut schedule = schedule(pages, 1);
        let every_other: Vec<u64> = vec![0x5555_5555_5555_5555; (pages / 64) as usize];
        schedule.mark_dirty(0, &every_other);
        schedule.begin_iteration();
        let mut plan = ChunkPlan::default();
        while schedule.next(1, &mut plan) == Work::Chunk {}
        assert!(schedule.pending_pages() > 0);
        assert!(schedule.in_flight_ranges < MAX_IN_FLIGHT_RANGES + MAX_RANGES_PER_CHUNK);
        assert!(!schedule.extend(&mut plan, CHUNK_PAGES), "nor added to");
        let chunks = schedule.chunks();
        schedule.acknowledge(0, chunks).unwrap();
        assert_eq!(schedule.next(1, &mut plan), Work::Chunk);
    }
}
