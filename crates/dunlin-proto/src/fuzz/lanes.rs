//! Fuzz entries for the lanes of one side, with a peer that sends arbitrary reports.

use std::collections::{BTreeMap, BTreeSet};

use super::Choices;
use crate::bitmap::Run;
use crate::control::{ChunkSet, Final, Position, Reached};
use crate::lanes::{Action, Fence, KeyUsage, Receiving, Sending, Timeouts};
use crate::schedule::{ChunkPlan, Schedule, Work};

pub(super) const TIMEOUTS: Timeouts = Timeouts {
    progress_ns: 5_000,
    open_ns: 10_000,
    retry_first_ns: 200,
    retry_last_ns: 2_000,
    alone_ns: 30_000,
};
/// Pages of guest memory: slightly more than four chunks.
pub(super) const PAGES: u64 = 260;

pub(super) fn key_usage(choices: &mut Choices<'_>) -> KeyUsage {
    match choices.byte() {
        0..240 => KeyUsage::Fresh,
        240..252 => KeyUsage::NearLimit,
        _ => KeyUsage::Spent,
    }
}

/// Runs the source's lanes with arbitrary behaviour of the destination and the network. Checks that
/// no pending page is forgotten, that each lane gets a new number, and that no more lanes are
/// opened than wanted. Also checks that only opened lanes are closed or fenced, that giving up is
/// reported once, and that no deadline is in the past after a poll.
pub fn fuzz_sending(bytes: &[u8]) {
    let mut choices = Choices::new(bytes);
    let mut sending = Sending::new(Schedule::new([(0, PAGES)]), TIMEOUTS);
    let wanted = choices.below(4) as u16 + 1;
    sending.want(wanted);
    let mut plan = ChunkPlan::default();
    let mut now_ns = 0_u64;
    // The number of pending pages, and for each chunk in flight the lane and the number of pages.
    let mut pending = 0;
    let mut given: BTreeMap<u64, (u16, u64)> = BTreeMap::new();
    let mut threads = BTreeSet::new();
    let mut opened = 0;
    let mut given_up = false;
    while choices.more() {
        let lane = match choices.byte() {
            255 => choices.number() as u16,
            byte => u16::from(byte) % 6 + opened.max(3) - 3,
        };
        match choices.byte() % 16 {
            0 | 1 => now_ns += choices.below(4_000),
            2 if choices.byte() < 8 => now_ns += choices.below(60_000),
            3 => {
                let first = choices.below(PAGES);
                let count = choices.below(PAGES - first) + 1;
                sending.schedule_mut().mark_run(0, Run { first, count });
                pending = sending.schedule().pending_pages();
            }
            4 => sending.schedule_mut().begin_iteration(),
            5 if choices.byte() < 8 => sending.finish(now_ns),
            6 => {
                let news = sending.lane_up(lane, now_ns);
                assert_eq!(news.is_ok(), (1..=opened).contains(&lane));
            }
            7 => {
                let refused = sending.refused(lane, now_ns);
                assert_eq!(refused.is_ok(), (1..=opened).contains(&lane));
            }
            8 => {
                if threads.remove(&lane) {
                    let in_order = choices.byte().is_multiple_of(2);
                    sending.thread_ended(lane, in_order, now_ns);
                }
            }
            9 => {
                let set = ChunkSet {
                    first: choices.below(sending.schedule().chunks() + 1),
                    count: u32::from(choices.byte() % 4),
                };
                let end = set.first + u64::from(set.count);
                let honest = end <= sending.schedule().chunks();
                let mut pages = 0;
                if honest {
                    given.retain(|number, (_, count)| {
                        let named = (set.first..end).contains(number);
                        pages += u64::from(named) * *count;
                        !named
                    });
                }
                let taken = sending.acknowledge(&[set], &[], now_ns);
                assert_eq!(taken.ok(), honest.then_some(pages));
            }
            10 => {
                let position = match choices.byte() % 4 {
                    0 => Position::End,
                    mark => Position::Mark(u32::from(mark) - 1),
                };
                let course = sending.schedule().course(lane);
                let known = (1..=opened).contains(&lane);
                let sent = course.is_none_or(|course| match position {
                    Position::Mark(mark) => mark <= course.mark,
                    Position::End => course.ended,
                });
                let taken = sending.acknowledge(&[], &[Reached { lane, position }], now_ns);
                assert_eq!(taken.is_ok(), known && sent);
            }
            11 => {
                let again = sending.fenced(lane, &[], now_ns);
                assert_eq!(again.is_ok(), (1..=opened).contains(&lane));
                if again.is_ok() {
                    given.retain(|_, (carrier, _)| *carrier != lane);
                    pending = sending.schedule().pending_pages();
                }
            }
            12 if choices.byte() < 32 => sending.control_resumed(now_ns),
            12 => sending.unheard(now_ns),
            _ => {
                let usage = key_usage(&mut choices);
                match sending.next(lane, usage, now_ns, &mut plan) {
                    Work::Chunk => {
                        assert!(usage != KeyUsage::Spent, "a spent lane carries a chunk");
                        given.insert(plan.number, (lane, plan.pages));
                        pending -= plan.pages;
                        if choices.byte() < 16 {
                            sending.paced(lane, now_ns + choices.below(8_000));
                        }
                    }
                    Work::End { .. } | Work::Mark(_) | Work::Wait | Work::Stop => {}
                }
            }
        }
        let before = opened;
        while let Some(action) = sending.poll(now_ns) {
            assert!(
                !given_up || !matches!(action, Action::GiveUp),
                "reported twice"
            );
            match action {
                Action::Open(number) => {
                    assert_eq!(number, opened + 1, "the lane number is not the next one");
                    opened = number;
                    threads.insert(number);
                }
                Action::Cut(number) | Action::Fence(number) => {
                    assert!((1..=opened).contains(&number));
                }
                Action::GiveUp => given_up = true,
            }
            assert!(opened - before <= wanted);
        }
        assert!(sending.opening() <= usize::from(wanted));
        // A deadline in the past would make the caller poll without a pause.
        assert!(sending.due_ns().is_none_or(|due_ns| due_ns > now_ns));
        let schedule = sending.schedule();
        assert_eq!(schedule.pending_pages(), pending);
        let under_way = given.values().map(|(_, pages)| pages).sum::<u64>();
        assert_eq!(schedule.in_flight_pages(), under_way, "pages are forgotten");
        if sending.complete() {
            assert_eq!(pending, 0);
        }
    }
}

/// Runs the destination's lanes with any input. Checks that every written chunk is reported once,
/// and again on each new control lane. Also checks that no lane number is used twice, that a chunk
/// is accepted only on an open lane, and that the memory is complete only if the counts match and
/// no lane is left.
pub fn fuzz_receiving(bytes: &[u8]) {
    let mut choices = Choices::new(bytes);
    let lanes_max = choices.below(4) as u16 + 1;
    let mut receiving = Receiving::new(lanes_max);
    let mut used = BTreeSet::new();
    let mut open: BTreeMap<u16, u64> = BTreeMap::new();
    let mut written = BTreeSet::new();
    let mut unreported = BTreeSet::new();
    let mut pages = 0;
    let mut complete = false;
    while choices.more() {
        let lane = choices.below(8) as u16 + 1;
        match choices.byte() % 12 {
            0 | 1 => {
                let may = !complete && !used.contains(&lane) && open.len() < usize::from(lanes_max);
                assert_eq!(receiving.admit(lane).is_ok(), may);
                if may {
                    used.insert(lane);
                    open.insert(lane, 0);
                }
            }
            2 => {
                let counted = choices.below(4);
                let ended = receiving.ended(lane, counted);
                assert_eq!(ended.is_ok(), open.get(&lane) == Some(&counted));
                if ended.is_ok() {
                    open.remove(&lane);
                }
            }
            3 => {
                let fence = receiving.fence(lane);
                used.insert(lane);
                let here = open.contains_key(&lane);
                assert_eq!(fence == Fence::Close, here);
                assert!(receiving.is_closing(lane));
            }
            4 => {
                let reported = receiving.gone(lane);
                assert!(reported || !open.contains_key(&lane));
                open.remove(&lane);
            }
            5 => {
                let (sets, _) = receiving.take_reports();
                let named = numbers(&sets);
                assert_eq!(named, unreported, "wrong chunks are reported");
                unreported.clear();
                assert!(!receiving.has_reports());
            }
            6 if choices.byte() < 64 => {
                let (sets, reached) = receiving.repeat();
                assert_eq!(numbers(&sets), written, "wrong chunks are reported again");
                for Reached { lane, position } in reached {
                    assert!(
                        position == Position::End
                            || open.contains_key(&lane)
                            || used.contains(&lane)
                    );
                }
                unreported.clear();
            }
            7 => {
                let last = Final {
                    chunks: choices.below(6),
                    iteration: 1,
                    sections: 0,
                    pages: choices.below(12),
                    fenced: choices.below(3) as u32,
                    digest: None,
                };
                let agrees = (last.chunks, last.pages) == (written.len() as u64, pages);
                receiving.finish(last);
                if let Ok(true) = receiving.is_complete() {
                    assert!(complete || (agrees && open.is_empty()));
                    complete = true;
                } else {
                    assert!(!complete, "the memory is no longer complete");
                }
            }
            8 | 9 => {
                let mark = u32::from(choices.byte() % 6);
                let reached = receiving.mark(lane, mark);
                assert!(open.contains_key(&lane) || reached.is_err());
            }
            _ => {
                let number = choices.below(24);
                let iteration = u32::from(choices.byte() % 6);
                let checked = receiving.check_chunk(lane, number, iteration);
                if checked.is_err() {
                    continue;
                }
                assert!(open.contains_key(&lane), "lane {lane} is not open");
                assert!(!written.contains(&number), "chunk {number} arrived before");
                assert_eq!(receiving.written(lane, number, 2), Ok(()));
                written.insert(number);
                unreported.insert(number);
                pages += 2;
                *open.entry(lane).or_default() += 1;
            }
        }
        assert!(receiving.open().eq(open.keys().copied()));
        assert_eq!(receiving.totals(), (written.len() as u64, pages));
        assert!(receiving.has_reports() || unreported.is_empty());
    }
}

/// Returns the chunk numbers in the sets; panics if a number occurs twice.
fn numbers(sets: &[ChunkSet]) -> BTreeSet<u64> {
    let mut numbers = BTreeSet::new();
    for set in sets {
        for number in set.first..set.first + u64::from(set.count) {
            assert!(numbers.insert(number), "chunk {number} is named twice");
        }
    }
    numbers
}
