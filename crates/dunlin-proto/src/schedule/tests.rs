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

/// Asks for work for `lane` until it must wait or has ended; returns the number of pages and the
/// tasks.
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
    // Page 0 becomes dirty again while lane 1 still carries it. Lane 2 must not send the page in
    // this iteration, because the new version could arrive before the old one. The loss of a third
    // lane resets the search for pages to page 0, so that a mistake would be found.
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
fn a_lane_idle_for_several_iterations_sends_each_mark() {
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
fn i5_a_lost_lanes_unacknowledged_pages_are_pending_again() {
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
fn i4_a_lane_opened_later_starts_with_the_previous_mark() {
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
fn chunks_of_a_lost_lane_are_not_counted() {
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
fn i8_a_lost_lane_frees_its_room_in_flight() {
    let pages = 4 * MAX_IN_FLIGHT_RANGES as u64;
    let mut schedule = schedule(pages, 2);
    let every_other: Vec<u64> = vec![0x5555_5555_5555_5555; (pages / 64) as usize];
    schedule.mark_dirty(0, &every_other);
    schedule.begin_iteration();
    let mut plan = ChunkPlan::default();
    // Lane 1 reaches the limit of ranges in flight. An acknowledged chunk makes room again.
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
fn a_chunk_is_extended_by_the_pending_pages_behind_it() {
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
    assert!(!schedule.extend(&mut plan, u64::MAX), "no page was pending");
    assert_eq!(schedule.in_flight_pages(), 3 * CHUNK_PAGES);
    assert_eq!(schedule.kept(), (2, 3 * CHUNK_PAGES));
    assert_eq!(schedule.acknowledge(0, 1), Ok(2 * CHUNK_PAGES));
    assert_eq!(schedule.acknowledge(1, 1), Ok(CHUNK_PAGES));
    assert_eq!(schedule.in_flight_ranges, 0);
}

#[test]
fn i5_pages_added_to_a_lost_lanes_chunk_are_pending_again() {
    let mut schedule = schedule(4 * CHUNK_PAGES, 2);
    schedule.mark_run(0, run(0, 3 * CHUNK_PAGES));
    schedule.begin_iteration();
    let mut plan = ChunkPlan::default();
    assert_eq!(schedule.next(1, &mut plan), Work::Chunk);
    assert!(schedule.extend(&mut plan, CHUNK_PAGES));
    assert_eq!(schedule.lose_lane(1), 2 * CHUNK_PAGES);
    // The thread of the lost lane may still be working on the chunk.
    assert!(!schedule.extend(&mut plan, CHUNK_PAGES));
    assert_eq!(schedule.kept(), (0, 0));
    assert_eq!(drain(&mut schedule, 2).0, 3 * CHUNK_PAGES);
}

/// The regions have identifiers that differ from their positions, and different lengths, so that a
/// confusion of regions is detected.
#[test]
fn i5_a_lost_lanes_pages_are_pending_again_in_their_own_regions() {
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

/// Two lanes are lost. The chunk that the second lane loses includes pages of the first lane.
#[test]
fn i5_pages_lost_twice_are_pending_again_and_counted_once() {
    let mut schedule = schedule(4 * CHUNK_PAGES, 3);
    schedule.mark_run(0, run(0, 3 * CHUNK_PAGES));
    schedule.begin_iteration();
    let mut plan = ChunkPlan::default();
    let mut other = ChunkPlan::default();
    assert_eq!(schedule.next(1, &mut plan), Work::Chunk);
    assert!(schedule.extend(&mut plan, CHUNK_PAGES));
    assert_eq!(schedule.next(2, &mut other), Work::Chunk);
    assert_eq!(schedule.lose_lane(1), 2 * CHUNK_PAGES);
    // Lane 2 takes the pages of lane 1 and is lost too.
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
    // Acknowledging chunks of lost lanes has no effect.
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
    assert!(
        !schedule.extend(&mut plan, CHUNK_PAGES),
        "a page that waits for the next iteration was added"
    );
    schedule.begin_iteration();
    assert!(
        !schedule.extend(&mut plan, CHUNK_PAGES),
        "a page of the next iteration was added"
    );
    assert_eq!(drain(&mut schedule, 1).0, 1);
}

#[test]
fn i7_an_acknowledgement_of_an_unsent_chunk_is_rejected() {
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
    assert!(
        !schedule.extend(&mut plan, CHUNK_PAGES),
        "a chunk was extended at the limit"
    );
    let chunks = schedule.chunks();
    schedule.acknowledge(0, chunks).unwrap();
    assert_eq!(schedule.next(1, &mut plan), Work::Chunk);
}
