//! Fuzz entries for pages, chunks and lanes at the source, and for chunk numbers at the
//! destination, compared with plain sets.

use std::collections::{BTreeMap, BTreeSet};

use super::Choices;
use crate::bitmap::Run;
use crate::limits::{CHUNK_PAGES, MAX_RANGES_PER_CHUNK};
use crate::received::{ChunkError, Received};
use crate::schedule::{ChunkPlan, Schedule, Work};

/// The identifier and the number of pages of each region.
const REGIONS: [(u16, u64); 2] = [(3, 200), (9, 70)];
/// The lanes have the numbers from 1 to `LANES`.
const LANES: u64 = 4;

/// A page: its region's identifier and its index.
type Page = (u16, u64);

/// A chunk assigned to a lane.
struct Given {
    lane: u16,
    pages: BTreeSet<Page>,
    /// Number of ranges.
    ranges: usize,
}

/// A model of a schedule's state that uses plain sets.
#[derive(Default)]
struct Model {
    pending: BTreeSet<Page>,
    /// Chunks that are not acknowledged.
    given: BTreeMap<u64, Given>,
    cut: u64,
    cut_pages: u64,
    lost_chunks: u64,
    lost_pages: u64,
    iteration: u32,
    /// Whether pages are being added for the next iteration.
    adding: bool,
    /// Pages in the chunks of this iteration. The pages of a lost lane are removed again.
    cut_now: BTreeSet<Page>,
    /// Chunks, marks and acknowledged chunks of each lane since it was opened.
    lanes: BTreeMap<u16, Course>,
}

#[derive(Default)]
struct Course {
    first_mark: u32,
    mark: u32,
    chunks: u64,
    acknowledged: u64,
    ended: bool,
    leaving: bool,
}

/// Drives a schedule with any sequence of operations. Checks that a page is sent at most once per
/// iteration, unless its lane was lost (I4), and that no page is forgotten. Also checks that each
/// lane gets its marks in order and, after a mark, only chunks of the next iteration.
pub fn fuzz_schedule(bytes: &[u8]) {
    let mut choices = Choices::new(bytes);
    let mut schedule = Schedule::new(REGIONS);
    let mut model = Model::default();
    let mut plan = ChunkPlan::default();
    let mut finishing = false;
    while choices.more() {
        let lane = choices.below(LANES) as u16 + 1;
        match choices.byte() % 16 {
            0 => {
                let index = choices.below(3) as usize;
                let first = choices.below(220);
                let count = match choices.byte() {
                    255 => u64::MAX,
                    count => u64::from(count),
                };
                schedule.mark_run(index, Run { first, count });
                model.adding = true;
                if let Some(&(id, pages)) = REGIONS.get(index) {
                    let end = first.saturating_add(count).min(pages);
                    model.pending.extend((first..end).map(|page| (id, page)));
                }
            }
            1 => {
                let index = choices.below(3) as usize;
                let log: Vec<u64> = (0..choices.below(6))
                    .map(|_| u64::from(choices.byte()).wrapping_mul(0x0101_0011_0100_0101))
                    .collect();
                let named = schedule.mark_dirty(index, &log);
                model.adding = true;
                let Some(&(id, pages)) = REGIONS.get(index) else {
                    assert_eq!(named, 0);
                    continue;
                };
                let set = |page: &u64| {
                    log.get((page / 64) as usize)
                        .is_some_and(|word| word >> (page % 64) & 1 == 1)
                };
                let pages: Vec<u64> = (0..pages).filter(set).collect();
                assert_eq!(named, pages.len() as u64);
                model.pending.extend(pages.iter().map(|&page| (id, page)));
            }
            2 => {
                schedule.begin_iteration();
                model.iteration += 1;
                model.adding = false;
                model.cut_now.clear();
            }
            3 if !model.lanes.contains_key(&lane) => {
                schedule.open_lane(lane);
                let first_mark = model.iteration.saturating_sub(1).max(1);
                let course = Course {
                    first_mark,
                    ..Course::default()
                };
                model.lanes.insert(lane, course);
            }
            4 => model.lose(&mut schedule, lane),
            5 if choices.byte().is_multiple_of(4) => {
                schedule.leave(lane);
                if let Some(course) = model.lanes.get_mut(&lane) {
                    course.leaving = true;
                }
            }
            6 if choices.byte().is_multiple_of(8) => {
                schedule.finish();
                finishing = true;
            }
            7 | 8 => {
                let first = choices.below(model.cut + 2);
                let count = u64::from(choices.byte() % 8);
                model.acknowledge(&mut schedule, first, count);
            }
            9 => {
                let known = schedule.acknowledge(choices.number(), choices.number());
                // Before the first chunk is cut, an acknowledgement is either an error or confirms
                // no page.
                assert!(known.is_err() || known == Ok(0) || model.cut > 0);
                // This acknowledgement does not update the model, so the run stops.
                if known.is_ok_and(|pages| pages > 0) {
                    return;
                }
            }
            10 => {
                let room = choices.below(80);
                let before = plan.ranges.len();
                let has_more = schedule.extend(&mut plan, room);
                model.extend(has_more, room, &plan, before);
            }
            _ => {
                let work = schedule.next(lane, &mut plan);
                model.take(work, lane, &plan, finishing);
            }
        }
        model.compare(&schedule);
    }
}

impl Model {
    /// Checks the work that the schedule gave to `lane`.
    fn take(&mut self, work: Work, lane: u16, plan: &ChunkPlan, finishing: bool) {
        let Some(course) = self.lanes.get_mut(&lane) else {
            assert_eq!(work, Work::Stop);
            return;
        };
        // The iteration of the lane's next chunk.
        let at = course.mark.max(course.first_mark - 1) + 1;
        match work {
            Work::Stop => panic!("lane {lane} is open"),
            Work::Chunk => {
                assert!(!course.ended && !course.leaving && !self.adding);
                assert_eq!((plan.iteration, at), (self.iteration, self.iteration));
                assert_eq!(plan.number, self.cut);
                assert!(plan.ranges.len() <= MAX_RANGES_PER_CHUNK);
                let mut pages = BTreeSet::new();
                for range in &plan.ranges {
                    let run = range.run;
                    for page in run.first..run.first + run.count {
                        let page = (range.region, page);
                        assert!(self.pending.remove(&page), "{page:?} was not pending");
                        assert!(self.cut_now.insert(page), "{page:?} is sent twice");
                        pages.insert(page);
                    }
                }
                assert!(!pages.is_empty() && pages.len() as u64 <= CHUNK_PAGES);
                assert_eq!(plan.pages, pages.len() as u64);
                self.cut_pages += plan.pages;
                self.cut += 1;
                course.chunks += 1;
                let ranges = plan.ranges.len();
                let given = Given {
                    lane,
                    pages,
                    ranges,
                };
                self.given.insert(plan.number, given);
            }
            Work::Mark(mark) => {
                assert!(!course.ended && !course.leaving);
                assert_eq!(mark, at, "a mark is missing or comes twice");
                let over = finishing && !self.adding && self.pending.is_empty();
                assert!(mark < self.iteration || (mark == self.iteration && over));
                course.mark = mark;
            }
            Work::End { chunks } => {
                assert!(!course.ended);
                assert_eq!(chunks, course.chunks);
                assert!(course.leaving || (finishing && course.mark == self.iteration));
                course.ended = true;
            }
            Work::Wait => {
                let behind = at < self.iteration;
                assert!(
                    course.ended || (!behind && !course.leaving),
                    "a mark is due"
                );
                let waits = self.adding || self.pending.is_empty() || self.iteration == 0;
                assert!(
                    course.ended || waits || at > self.iteration,
                    "pages are pending"
                );
            }
        }
    }

    /// Checks the pages that the schedule added to the last chunk, if it may add any.
    fn extend(&mut self, has_more: bool, room: u64, plan: &ChunkPlan, before: usize) {
        let may = !self.adding && plan.iteration == self.iteration;
        let given = self.given.get_mut(&plan.number).filter(|_| may);
        let Some(given) = given else {
            assert!(!has_more && plan.ranges.len() == before);
            return;
        };
        let waiting = self.pending.len() as u64;
        let mut added = 0;
        for range in &plan.ranges[before..] {
            let run = range.run;
            for page in run.first..run.first + run.count {
                let page = (range.region, page);
                assert!(self.pending.remove(&page), "{page:?} was not pending");
                assert!(self.cut_now.insert(page), "{page:?} is sent twice");
                given.pages.insert(page);
                added += 1;
            }
        }
        given.ranges += plan.ranges.len() - before;
        assert_eq!(has_more, added > 0);
        assert_eq!(plan.pages, given.pages.len() as u64);
        assert!(plan.ranges.len() <= MAX_RANGES_PER_CHUNK);
        assert!(added == room.min(waiting) || plan.ranges.len() == MAX_RANGES_PER_CHUNK);
        self.cut_pages += added;
    }

    fn acknowledge(&mut self, schedule: &mut Schedule, first: u64, count: u64) {
        let acknowledged = schedule.acknowledge(first, count);
        if first + count > self.cut {
            assert!(acknowledged.is_err(), "chunks never cut are acknowledged");
            return;
        }
        let mut pages = 0;
        for number in first..first + count {
            if let Some(given) = self.given.remove(&number) {
                pages += given.pages.len() as u64;
                if let Some(course) = self.lanes.get_mut(&given.lane) {
                    course.acknowledged += 1;
                }
            }
        }
        assert_eq!(acknowledged, Ok(pages));
    }

    fn lose(&mut self, schedule: &mut Schedule, lane: u16) {
        let again = schedule.lose_lane(lane);
        self.lanes.remove(&lane);
        let mut pages = 0;
        self.given.retain(|_, given| {
            if given.lane != lane {
                return true;
            }
            pages += given.pages.len() as u64;
            self.lost_chunks += 1;
            for &page in &given.pages {
                self.cut_now.remove(&page);
                self.pending.insert(page);
            }
            false
        });
        self.lost_pages += pages;
        assert_eq!(again, pages);
    }

    fn compare(&self, schedule: &Schedule) {
        assert_eq!(schedule.pending_pages(), self.pending.len() as u64);
        let in_flight = self.given.values().map(|given| given.pages.len() as u64);
        assert_eq!(schedule.in_flight_pages(), in_flight.sum());
        let ranges = self.given.values().map(|given| given.ranges);
        assert_eq!(schedule.in_flight_ranges, ranges.sum());
        assert_eq!(schedule.iteration(), self.iteration);
        assert_eq!(schedule.chunks(), self.cut);
        let kept = (
            self.cut - self.lost_chunks,
            self.cut_pages - self.lost_pages,
        );
        assert_eq!(schedule.kept(), kept);
        for lane in 1..=LANES as u16 {
            let course = schedule.course(lane);
            assert_eq!(course.is_some(), self.lanes.contains_key(&lane));
            if let (Some(course), Some(model)) = (course, self.lanes.get(&lane)) {
                assert_eq!(course.chunks, model.chunks);
                assert_eq!(course.acknowledged, model.acknowledged);
                assert_eq!((course.mark, course.ended), (model.mark, model.ended));
            }
        }
    }
}

/// Records received chunk numbers, in any order and with repetitions, and compares the result with
/// a plain set of the numbers.
pub fn fuzz_received(bytes: &[u8]) {
    let mut choices = Choices::new(bytes);
    let mut received = Received::default();
    let mut model = BTreeSet::new();
    while choices.more() {
        let number = match choices.byte() % 4 {
            0 => choices.number(),
            _ => choices.below(64),
        };
        let twice = Err(ChunkError::Twice { number });
        let new = number < u64::MAX && model.insert(number);
        assert_eq!(received.insert(number), if new { Ok(()) } else { twice });
        assert_eq!(received.contains(number), number < u64::MAX);
        assert_eq!(received.count(), model.len() as u64);
    }
    let mut sets = received.sets().peekable();
    let mut named = 0;
    while let Some(set) = sets.next() {
        let end = set.first + u64::from(set.count);
        for number in set.first..end {
            assert!(model.contains(&number));
        }
        named += u64::from(set.count);
        // Adjacent numbers must be in one set.
        assert!(sets.peek().is_none_or(|next| next.first > end));
    }
    assert_eq!(named, received.count());
}
