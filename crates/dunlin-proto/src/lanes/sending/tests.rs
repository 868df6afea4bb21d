#![allow(clippy::unwrap_used)]

use super::*;
use crate::bitmap::Run;
use crate::limits::CHUNK_PAGES;

const TIMEOUTS: Timeouts = Timeouts {
    progress_ns: 100,
    open_ns: 1000,
    retry_first_ns: 10,
    retry_last_ns: 80,
    alone_ns: 5000,
};

fn actions(sending: &mut Sending, now_ns: u64) -> Vec<Action> {
    std::iter::from_fn(|| sending.poll(now_ns)).collect()
}

/// Creates the state at time 0, with `lanes` lanes that are up.
fn established(pages: u64, lanes: u16) -> Sending {
    let mut sending = Sending::new(Schedule::new([(7, pages)]), TIMEOUTS);
    sending.want(lanes);
    let opened: Vec<Action> = (1..=lanes).map(Action::Open).collect();
    assert_eq!(actions(&mut sending, 0), opened);
    for lane in 1..=lanes {
        assert_eq!(sending.lane_up(lane, 0), Ok(true));
    }
    sending
}

fn begin(sending: &mut Sending, count: u64) {
    let run = Run { first: 0, count };
    sending.schedule_mut().mark_run(0, run);
    sending.schedule_mut().begin_iteration();
}

fn next(sending: &mut Sending, lane: u16, now_ns: u64) -> Work {
    sending.next(lane, KeyUsage::Fresh, now_ns, &mut ChunkPlan::default())
}

fn reached(lane: u16, position: Position) -> [Reached; 1] {
    [Reached { lane, position }]
}

fn ack(first: u64) -> [ChunkSet; 1] {
    [ChunkSet { first, count: 1 }]
}

#[test]
fn i4_a_lost_lanes_pages_wait_until_it_is_fenced() {
    let mut sending = established(2 * CHUNK_PAGES, 2);
    begin(&mut sending, 2 * CHUNK_PAGES);
    assert_eq!(next(&mut sending, 1, 0), Work::Chunk);
    assert_eq!(next(&mut sending, 2, 0), Work::Chunk);
    sending.thread_ended(1, false, 5);
    assert_eq!(actions(&mut sending, 5), [Action::Fence(1)]);
    assert_eq!(next(&mut sending, 2, 5), Work::Wait);
    assert_eq!(sending.fenced(1, &[], 6), Ok(CHUNK_PAGES));
    assert_eq!(next(&mut sending, 2, 6), Work::Chunk);
    assert_eq!(sending.fenced_count(), 1);
    assert_eq!(sending.schedule().kept().0, 2);
    assert_eq!(sending.fenced(1, &[], 7), Ok(0), "a repetition");
    assert_eq!(sending.fenced_count(), 1);
}

#[test]
fn chunks_acknowledged_with_the_fence_are_not_resent() {
    let mut sending = established(2 * CHUNK_PAGES, 2);
    begin(&mut sending, 2 * CHUNK_PAGES);
    assert_eq!(next(&mut sending, 1, 0), Work::Chunk);
    assert_eq!(next(&mut sending, 1, 0), Work::Chunk);
    sending.thread_ended(1, false, 5);
    assert_eq!(sending.fenced(1, &ack(0), 6), Ok(CHUNK_PAGES));
    assert_eq!(sending.schedule().pending_pages(), CHUNK_PAGES);
}

#[test]
fn a_stalled_lane_is_cut_fenced_and_replaced() {
    let mut sending = established(4 * CHUNK_PAGES, 2);
    begin(&mut sending, 4 * CHUNK_PAGES);
    assert_eq!(next(&mut sending, 1, 0), Work::Chunk);
    assert_eq!(next(&mut sending, 2, 0), Work::Chunk);
    assert_eq!(sending.due_ns(), Some(100));
    assert_eq!(sending.acknowledge(&ack(1), &[], 60), Ok(CHUNK_PAGES));
    assert_eq!(next(&mut sending, 2, 60), Work::Chunk);
    assert_eq!(
        actions(&mut sending, 100),
        [Action::Cut(1), Action::Fence(1)]
    );
    assert_eq!(next(&mut sending, 1, 100), Work::Stop);
    assert_eq!(actions(&mut sending, 110), [Action::Open(3)]);
    assert_eq!(next(&mut sending, 3, 111), Work::Wait);
    assert_eq!(sending.lane_up(3, 112), Ok(true));
    assert_eq!(sending.lane_up(3, 113), Ok(false), "a repetition");
    assert_eq!(next(&mut sending, 3, 114), Work::Chunk);
}

#[test]
fn a_lane_that_waits_at_a_mark_is_not_stalled() {
    let mut sending = established(2 * CHUNK_PAGES, 2);
    begin(&mut sending, CHUNK_PAGES);
    assert_eq!(next(&mut sending, 1, 0), Work::Chunk);
    begin(&mut sending, 2 * CHUNK_PAGES);
    assert_eq!(next(&mut sending, 1, 0), Work::Mark(1));
    assert_eq!(next(&mut sending, 1, 0), Work::Chunk);
    assert_eq!(next(&mut sending, 2, 0), Work::Mark(1));
    // Lane 1 has reached its mark; the mark of lane 2 is lost.
    let at_mark = reached(1, Position::Mark(1));
    sending.acknowledge(&ack(0), &at_mark, 50).unwrap();
    assert_eq!(
        actions(&mut sending, 100),
        [Action::Cut(2), Action::Fence(2)]
    );
    assert_eq!(actions(&mut sending, 110), [Action::Open(3)]);
    // From here on, lane 1 does not wait for another lane, so its progress timeout applies. The
    // timeout runs from the time of the last poll, 110 ns.
    assert_eq!(sending.fenced(2, &[], 120), Ok(0));
    assert_eq!(actions(&mut sending, 130), []);
    assert_eq!(
        actions(&mut sending, 210),
        [Action::Cut(1), Action::Fence(1)]
    );
}

#[test]
fn a_lane_delayed_by_the_rate_cap_is_not_stalled() {
    let mut sending = established(CHUNK_PAGES, 1);
    begin(&mut sending, CHUNK_PAGES);
    assert_eq!(next(&mut sending, 1, 0), Work::Chunk);
    sending.paced(1, 500);
    assert_eq!(actions(&mut sending, 599), []);
    assert_eq!(
        actions(&mut sending, 600),
        [Action::Cut(1), Action::Fence(1)]
    );
}

#[test]
fn the_rate_cap_does_not_extend_the_deadline_of_earlier_chunks() {
    let mut sending = established(3 * CHUNK_PAGES, 1);
    begin(&mut sending, 3 * CHUNK_PAGES);
    // The lane takes one chunk after another, and none is acknowledged.
    assert_eq!(next(&mut sending, 1, 0), Work::Chunk);
    sending.paced(1, 40);
    assert_eq!(next(&mut sending, 1, 40), Work::Chunk);
    sending.paced(1, 80);
    assert_eq!(next(&mut sending, 1, 80), Work::Chunk);
    sending.paced(1, 120);
    assert_eq!(actions(&mut sending, 139), []);
    assert_eq!(
        actions(&mut sending, 140),
        [Action::Cut(1), Action::Fence(1)]
    );
}

#[test]
fn the_time_of_a_delayed_chunk_starts_with_the_next_one() {
    let mut sending = established(2 * CHUNK_PAGES, 1);
    begin(&mut sending, 2 * CHUNK_PAGES);
    assert_eq!(next(&mut sending, 1, 0), Work::Chunk);
    sending.paced(1, 500);
    assert_eq!(next(&mut sending, 1, 500), Work::Chunk);
    assert_eq!(actions(&mut sending, 599), []);
    assert_eq!(
        actions(&mut sending, 600),
        [Action::Cut(1), Action::Fence(1)]
    );
}

#[test]
fn no_lane_is_blamed_while_the_control_lane_is_silent() {
    let mut sending = established(CHUNK_PAGES, 1);
    begin(&mut sending, CHUNK_PAGES);
    assert_eq!(next(&mut sending, 1, 0), Work::Chunk);
    sending.unheard(90);
    assert_eq!(actions(&mut sending, 189), []);
    assert_eq!(
        actions(&mut sending, 190),
        [Action::Cut(1), Action::Fence(1)]
    );
}

/// Returns the actions from `from_ns` until just before `to_ns` for a caller that
/// polls regularly. With `silent`, the control lane is silent during that time.
fn during(sending: &mut Sending, from_ns: u64, to_ns: u64, silent: bool) -> Vec<Action> {
    let mut all = Vec::new();
    for now_ns in (from_ns..to_ns).step_by(10) {
        if silent {
            sending.unheard(now_ns);
        }
        all.extend(actions(sending, now_ns));
    }
    all
}

#[test]
fn the_time_of_an_opening_lane_restarts_after_a_silent_control_lane() {
    let mut sending = established(CHUNK_PAGES, 1);
    sending.want(2);
    assert_eq!(actions(&mut sending, 0), [Action::Open(2)]);
    // *lane up* cannot arrive, because the control lane is silent.
    assert_eq!(during(&mut sending, 0, 3 * TIMEOUTS.open_ns, true), []);
    let heard_ns = 3 * TIMEOUTS.open_ns;
    sending.unheard(heard_ns);
    let late_ns = heard_ns + TIMEOUTS.open_ns;
    assert_eq!(during(&mut sending, heard_ns, late_ns, false), []);
    assert_eq!(
        actions(&mut sending, late_ns),
        [Action::Cut(2), Action::Fence(2)]
    );
}

#[test]
fn the_time_of_a_fence_restarts_after_a_silent_control_lane() {
    let mut sending = established(CHUNK_PAGES, 2);
    sending.thread_ended(1, false, 0);
    sending.want(1);
    assert_eq!(actions(&mut sending, 0), [Action::Fence(1)]);
    // *fenced* cannot arrive, because the control lane is silent.
    assert_eq!(during(&mut sending, 0, 3 * TIMEOUTS.alone_ns, true), []);
    let heard_ns = 3 * TIMEOUTS.alone_ns;
    sending.unheard(heard_ns);
    let late_ns = heard_ns + TIMEOUTS.alone_ns;
    assert_eq!(during(&mut sending, heard_ns, late_ns, false), []);
    assert_eq!(actions(&mut sending, late_ns), [Action::GiveUp]);
}

#[test]
fn the_time_of_an_ended_lane_restarts_after_a_silent_control_lane() {
    let mut sending = established(CHUNK_PAGES, 2);
    let mut plan = ChunkPlan::default();
    let end = Work::End { chunks: 0 };
    assert_eq!(sending.next(1, KeyUsage::Spent, 0, &mut plan), end);
    sending.thread_ended(1, true, 0);
    sending.want(1);
    assert_eq!(during(&mut sending, 0, 3 * TIMEOUTS.progress_ns, true), []);
    let heard_ns = 3 * TIMEOUTS.progress_ns;
    sending.unheard(heard_ns);
    let late_ns = heard_ns + TIMEOUTS.progress_ns;
    assert_eq!(during(&mut sending, heard_ns, late_ns, false), []);
    assert_eq!(actions(&mut sending, late_ns), [Action::Fence(1)]);
}

#[test]
fn a_new_control_lane_restarts_the_time_of_every_lane() {
    let mut sending = established(CHUNK_PAGES, 3);
    let mut plan = ChunkPlan::default();
    let end = Work::End { chunks: 0 };
    assert_eq!(sending.next(1, KeyUsage::Spent, 0, &mut plan), end);
    sending.thread_ended(1, true, 0);
    sending.thread_ended(2, false, 0);
    assert_eq!(actions(&mut sending, 0), [Action::Fence(2)]);
    assert_eq!(
        actions(&mut sending, 10),
        [Action::Open(4), Action::Open(5)]
    );
    let resumed_ns = 3 * TIMEOUTS.alone_ns;
    assert_eq!(during(&mut sending, 20, resumed_ns, true), []);
    sending.control_resumed(resumed_ns);
    // The fence of lane 2 is requested again. Lane 1 has sent its end, but the destination does not
    // repeat the confirmation of an end, so lane 1 is fenced too.
    assert_eq!(
        actions(&mut sending, resumed_ns),
        [Action::Fence(2), Action::Fence(1)]
    );
    let late_ns = resumed_ns + TIMEOUTS.open_ns;
    assert_eq!(during(&mut sending, resumed_ns, late_ns, false), []);
    assert_eq!(sending.fenced(1, &[], late_ns), Ok(0));
    assert_eq!(sending.fenced(2, &[], late_ns), Ok(0));
}

#[test]
fn a_lane_opened_too_late_is_fenced_and_not_counted_as_lost() {
    let mut sending = established(CHUNK_PAGES, 2);
    sending.thread_ended(2, false, 0);
    assert_eq!(actions(&mut sending, 0), [Action::Fence(2)]);
    assert_eq!(sending.fenced(2, &[], 1), Ok(0));
    assert_eq!(actions(&mut sending, 10), [Action::Open(3)]);
    begin(&mut sending, CHUNK_PAGES);
    sending.finish(11);
    assert_eq!(
        actions(&mut sending, 11),
        [Action::Cut(3), Action::Fence(3)]
    );
    assert_eq!(sending.fenced(3, &[], 12), Ok(0));
    assert_eq!((sending.fenced_count(), sending.lost_count()), (2, 1));
}

#[test]
fn a_lane_refused_after_it_failed_is_no_longer_wanted() {
    let mut sending = Sending::new(Schedule::new([(7, CHUNK_PAGES)]), TIMEOUTS);
    sending.want(2);
    actions(&mut sending, 0);
    // The lane's connection fails while *lane open* is in flight.
    sending.thread_ended(2, false, 1);
    assert_eq!(actions(&mut sending, 1), [Action::Fence(2)]);
    assert_eq!(sending.refused(2, 2), Ok(false));
    assert_eq!(sending.fenced(2, &[], 3), Ok(0));
    assert_eq!(sending.refused(2, 4), Ok(false));
    assert_eq!(sending.refused(1, 5), Ok(true));
    assert_eq!(sending.refused(1, 6), Ok(false), "a repetition");
}

#[test]
fn a_lane_near_its_limit_continues_until_another_replaces_it() {
    let mut sending = established(9 * CHUNK_PAGES, 1);
    begin(&mut sending, 9 * CHUNK_PAGES);
    let mut plan = ChunkPlan::default();
    assert_eq!(
        sending.next(1, KeyUsage::NearLimit, 0, &mut plan),
        Work::Chunk
    );
    assert_eq!(actions(&mut sending, 1), [Action::Open(2)]);
    assert_eq!(
        sending.next(1, KeyUsage::NearLimit, 2, &mut plan),
        Work::Chunk
    );
    assert_eq!(sending.lane_up(2, 3), Ok(true));
    assert_eq!(
        sending.next(1, KeyUsage::NearLimit, 4, &mut plan),
        Work::End { chunks: 2 }
    );
    sending.thread_ended(1, true, 5);
    sending
        .acknowledge(
            &[ChunkSet { first: 0, count: 2 }],
            &reached(1, Position::End),
            6,
        )
        .unwrap();
    assert!(sending.lanes.get_mut(1).is_none());
    assert_eq!(sending.schedule().course(1), None);
    assert_eq!(actions(&mut sending, 7), []);
}

#[test]
fn a_spent_lane_ends_even_without_another() {
    let mut sending = established(CHUNK_PAGES, 1);
    begin(&mut sending, CHUNK_PAGES);
    let mut plan = ChunkPlan::default();
    assert_eq!(
        sending.next(1, KeyUsage::Spent, 0, &mut plan),
        Work::End { chunks: 0 }
    );
    assert_eq!(actions(&mut sending, 1), [Action::Open(2)]);
}

#[test]
fn a_lane_with_an_unconfirmed_end_is_lost() {
    let mut sending = established(CHUNK_PAGES, 1);
    begin(&mut sending, CHUNK_PAGES);
    sending.finish(0);
    assert_eq!(next(&mut sending, 1, 0), Work::Chunk);
    assert_eq!(next(&mut sending, 1, 0), Work::Mark(1));
    assert_eq!(next(&mut sending, 1, 0), Work::End { chunks: 1 });
    assert!(!sending.complete());
    sending.thread_ended(1, true, 1);
    assert!(sending.complete(), "final cannot be sent");
    assert_eq!(actions(&mut sending, 100), [Action::Fence(1)]);
    assert!(!sending.complete());
    assert_eq!(sending.fenced(1, &[], 101), Ok(CHUNK_PAGES));
    assert_eq!(actions(&mut sending, 111), [Action::Open(2)]);
    assert_eq!(sending.lane_up(2, 112), Ok(true));
    assert_eq!(next(&mut sending, 2, 113), Work::Chunk);
}

#[test]
fn after_a_lost_control_lane_fences_are_requested_again() {
    let mut sending = established(3 * CHUNK_PAGES, 3);
    begin(&mut sending, 3 * CHUNK_PAGES);
    assert_eq!(next(&mut sending, 1, 0), Work::Chunk);
    let mut plan = ChunkPlan::default();
    assert!(matches!(
        sending.next(2, KeyUsage::Spent, 0, &mut plan),
        Work::End { .. }
    ));
    sending.thread_ended(2, true, 1);
    sending.thread_ended(1, false, 1);
    assert_eq!(actions(&mut sending, 1), [Action::Fence(1)]);
    sending.control_resumed(50);
    assert_eq!(
        actions(&mut sending, 50)[..2],
        [Action::Fence(1), Action::Fence(2)]
    );
}

#[test]
fn without_any_lane_the_work_is_given_up() {
    let mut sending = established(CHUNK_PAGES, 1);
    begin(&mut sending, CHUNK_PAGES);
    sending.thread_ended(1, false, 1);
    let mut opened = Vec::new();
    let mut now_ns = 1;
    loop {
        let todo = actions(&mut sending, now_ns);
        if todo.contains(&Action::GiveUp) {
            assert_eq!(sending.due_ns(), None, "due after GiveUp");
            break;
        }
        for action in todo {
            if let Action::Open(lane) = action {
                opened.push(now_ns);
                sending.thread_ended(lane, false, now_ns + 1);
            }
        }
        now_ns += 1;
    }
    assert_eq!(now_ns, 5001);
    assert_eq!(opened[..6], [11, 32, 73, 154, 235, 316]);
}

#[test]
fn i7_reports_about_unsent_frames_are_rejected() {
    let mut sending = established(CHUNK_PAGES, 1);
    begin(&mut sending, CHUNK_PAGES);
    assert_eq!(next(&mut sending, 1, 0), Work::Chunk);
    let lies = [
        sending.acknowledge(&ack(1), &[], 1).unwrap_err(),
        sending
            .acknowledge(&[], &reached(1, Position::Mark(1)), 1)
            .unwrap_err(),
        sending
            .acknowledge(&[], &reached(1, Position::End), 1)
            .unwrap_err(),
        sending
            .acknowledge(&[], &reached(2, Position::End), 1)
            .unwrap_err(),
        sending.lane_up(2, 1).unwrap_err(),
        sending.lane_up(0, 1).unwrap_err(),
        sending.fenced(9, &[], 1).unwrap_err(),
        sending.refused(9, 1).unwrap_err(),
    ];
    assert!(matches!(lies[0], ReportError::Chunk(_)));
    assert!(
        lies[1..3]
            .iter()
            .all(|lie| matches!(lie, ReportError::Position { .. }))
    );
    assert!(
        lies[3..]
            .iter()
            .all(|lie| matches!(lie, ReportError::Lane { .. }))
    );
}

#[test]
fn time_while_the_source_was_suspended_counts_against_no_lane() {
    let mut sending = established(CHUNK_PAGES, 1);
    begin(&mut sending, CHUNK_PAGES);
    assert_eq!(next(&mut sending, 1, 0), Work::Chunk);
    assert_eq!(actions(&mut sending, 1), []);
    // This poll is late: it was due at 100.
    assert_eq!(actions(&mut sending, 900), []);
    assert_eq!(sending.acknowledge(&ack(0), &[], 910), Ok(CHUNK_PAGES));
    let mut stopped = established(CHUNK_PAGES, 1);
    begin(&mut stopped, CHUNK_PAGES);
    assert_eq!(next(&mut stopped, 1, 0), Work::Chunk);
    assert_eq!(actions(&mut stopped, 1), []);
    assert_eq!(actions(&mut stopped, 900), []);
    let lost = [Action::Cut(1), Action::Fence(1)];
    let due_ns = stopped.due_ns().unwrap();
    assert_eq!(actions(&mut stopped, due_ns), lost);
}

/// Polls until no action is left; returns the numbers of the lanes to open.
fn opened(sending: &mut Sending, now_ns: u64) -> Vec<u16> {
    let all = actions(sending, now_ns).into_iter();
    all.filter_map(|action| match action {
        Action::Open(lane) => Some(lane),
        _ => None,
    })
    .collect()
}

#[test]
fn a_lane_lost_first_at_the_destination_is_cut_and_counted_once() {
    let mut sending = established(2 * CHUNK_PAGES, 2);
    begin(&mut sending, 2 * CHUNK_PAGES);
    assert_eq!(next(&mut sending, 1, 0), Work::Chunk);
    assert_eq!(sending.fenced(1, &[], 5), Ok(CHUNK_PAGES));
    // The lane's thread may be blocked in a write, so the connection is closed.
    assert_eq!(actions(&mut sending, 5), [Action::Cut(1)]);
    sending.thread_ended(1, false, 6);
    assert_eq!(actions(&mut sending, 6), []);
    assert_eq!((sending.fenced_count(), sending.lost_count()), (1, 1));
    assert_eq!(actions(&mut sending, 15), [Action::Open(3)]);
}

#[test]
fn lanes_lost_together_cause_one_delay() {
    let mut sending = established(CHUNK_PAGES, 3);
    for lane in 1..=3 {
        sending.thread_ended(lane, false, 4 + u64::from(lane));
    }
    assert_eq!(opened(&mut sending, 14), []);
    assert_eq!(opened(&mut sending, 15), [4, 5, 6]);
}

#[test]
fn a_refused_lane_is_retried_after_a_delay() {
    let mut sending = established(CHUNK_PAGES, 1);
    sending.want(2);
    assert_eq!(opened(&mut sending, 0), [2]);
    assert_eq!(sending.refused(2, 5), Ok(true));
    assert_eq!(actions(&mut sending, 5), [Action::Cut(2)]);
    assert_eq!(opened(&mut sending, 14), []);
    assert_eq!(opened(&mut sending, 15), [3]);
    assert_eq!(sending.refused(3, 20), Ok(true));
    assert_eq!(opened(&mut sending, 39), []);
    assert_eq!(opened(&mut sending, 40), [4]);
}

#[test]
fn an_accepted_lane_resets_the_delay() {
    let mut sending = established(CHUNK_PAGES, 1);
    begin(&mut sending, CHUNK_PAGES);
    sending.thread_ended(1, false, 0);
    assert_eq!(opened(&mut sending, 10), [2]);
    sending.thread_ended(2, false, 10);
    assert_eq!(opened(&mut sending, 30), [3]);
    assert_eq!(sending.lane_up(3, 31), Ok(true));
    sending.thread_ended(3, false, 40);
    assert_eq!(opened(&mut sending, 49), []);
    assert_eq!(opened(&mut sending, 50), [4]);
}

#[test]
fn lanes_lost_in_the_last_iteration_are_replaced_by_one() {
    let mut sending = established(3 * CHUNK_PAGES, 3);
    begin(&mut sending, 3 * CHUNK_PAGES);
    sending.finish(0);
    for lane in 1..=3 {
        assert_eq!(next(&mut sending, lane, 0), Work::Chunk);
        sending.thread_ended(lane, false, 1);
        assert_eq!(sending.fenced(lane, &[], 2), Ok(CHUNK_PAGES));
    }
    assert_eq!(opened(&mut sending, 11), [4]);
    assert_eq!(opened(&mut sending, 12), []);
    // The replacement is lost too.
    sending.thread_ended(4, false, 13);
    assert_eq!(sending.fenced(4, &[], 14), Ok(0));
    assert_eq!(opened(&mut sending, 40), [5]);
    assert_eq!(sending.lane_up(5, 41), Ok(true));
    assert_eq!(next(&mut sending, 5, 41), Work::Chunk);
    assert_eq!(sending.schedule().pending_pages(), 2 * CHUNK_PAGES);
}

#[test]
fn time_while_the_source_was_suspended_counts_against_no_replacement() {
    const LATE_NS: u64 = 3 * TIMEOUTS.alone_ns;
    // While one lane is being fenced, another opens in its place.
    let mut sending = established(CHUNK_PAGES, 2);
    sending.thread_ended(1, false, 0);
    assert_eq!(actions(&mut sending, 0), [Action::Fence(1)]);
    assert_eq!(actions(&mut sending, 10), [Action::Open(3)]);
    assert_eq!(actions(&mut sending, LATE_NS), []);
    // No lane is left, and the process is suspended before the next attempt is due.
    let mut alone = established(CHUNK_PAGES, 1);
    begin(&mut alone, CHUNK_PAGES);
    alone.thread_ended(1, false, 0);
    assert_eq!(alone.fenced(1, &[], 1), Ok(0));
    actions(&mut alone, 2);
    assert_eq!(actions(&mut alone, LATE_NS), [Action::Open(2)]);
}
