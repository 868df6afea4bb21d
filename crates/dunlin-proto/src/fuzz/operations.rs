//! Performs operations on the decision modules, as the input bytes choose, and compares each result
//! with a simple, slow model or checks it against rules.

use std::collections::{BTreeMap, BTreeSet};

use super::Choices;
use crate::bitmap::{PageBitmap, Run};
use crate::control::{Region, RegionKind, RegionTable};
use crate::limits::{MAX_MEMORY_BYTES, MAX_NAME_BYTES, MAX_REGION_BYTES, MAX_REGIONS, PAGE_BYTES};
use crate::marks::Marks;
use crate::pace::{BURST_NS, Pace};
use crate::precopy::{AtTimeLimit, Decision, Goals, Pass, Precopy, THROTTLE_LAST};

/// Compares a bitmap with a set of page numbers.
pub fn fuzz_bitmap(bytes: &[u8]) {
    let mut choices = Choices::new(bytes);
    let pages = choices.below(300);
    let mut bitmap = PageBitmap::new(pages);
    let mut model = BTreeSet::new();
    while choices.more() {
        match choices.byte() % 4 {
            0 => {
                let first = choices.below(pages + 20);
                let count = match choices.byte() {
                    255 => u64::MAX,
                    count => u64::from(count),
                };
                bitmap.insert(Run { first, count });
                model.extend(first..first.saturating_add(count).min(pages));
            }
            1 => {
                let words = choices.below(7) as usize;
                let log: Vec<u64> = (0..words)
                    .map(|_| match choices.byte() {
                        0 => u64::MAX,
                        byte => u64::from(byte) << (byte % 57),
                    })
                    .collect();
                let named: BTreeSet<u64> = (0..pages)
                    .filter(|&page| {
                        log.get((page / 64) as usize)
                            .is_some_and(|word| word >> (page % 64) & 1 == 1)
                    })
                    .collect();
                assert_eq!(bitmap.union(&log), named.len() as u64);
                model.extend(named);
            }
            2 => {
                let from = choices.below(pages + 20);
                let limit = choices.below(200);
                let first = model.range(from..).next().copied();
                let run = bitmap.take_run(from, limit);
                if limit == 0 || first.is_none() {
                    assert_eq!(run, None);
                    continue;
                }
                let run = run.expect("a page is set");
                assert_eq!(Some(run.first), first);
                assert!((1..=limit).contains(&run.count));
                for page in run.first..run.first + run.count {
                    assert!(model.remove(&page), "page {page} was not set");
                }
                // A run ends at the limit, or before a page that is not set.
                let next = run.first + run.count;
                assert!(run.count == limit || !model.contains(&next));
            }
            _ => {
                let page = choices.number();
                assert_eq!(bitmap.contains(page), model.contains(&page));
            }
        }
        assert_eq!(bitmap.count(), model.len() as u64);
    }
    assert_eq!(bitmap.pages(), pages);
    for page in 0..pages {
        assert_eq!(bitmap.contains(page), model.contains(&page));
    }
}

/// Compares marks with a model of each lane's progress. No lane passes a mark that a live lane has
/// yet to reach (I4). A lane's first mark may have any number; each later mark is one higher. A
/// mark that the lanes may pass stays passable, unless a new lane's first mark is lower.
pub fn fuzz_marks(bytes: &[u8]) {
    let mut choices = Choices::new(bytes);
    let mut marks = Marks::default();
    let mut reached: BTreeMap<u16, u32> = BTreeMap::new();
    let mut new = BTreeSet::new();
    let mut passed = 0;
    while choices.more() {
        let lane = choices.below(6) as u16;
        match choices.byte() % 8 {
            0 if !reached.contains_key(&lane) => {
                if reached.is_empty() {
                    passed = 0;
                }
                marks.open(lane);
                // A new lane does not block a mark that the other lanes may already pass.
                reached.insert(lane, passed);
                new.insert(lane);
            }
            1 | 2 => {
                marks.end(lane);
                reached.remove(&lane);
                new.remove(&lane);
            }
            3 => {
                let mark = u32::from(choices.byte());
                let next = reached
                    .get(&lane)
                    .is_some_and(|&at| at + 1 == mark || new.contains(&lane));
                assert_eq!(marks.reach(lane, mark).is_ok(), next);
                if next {
                    if new.remove(&lane) {
                        passed = passed.min(mark);
                    }
                    reached.insert(lane, mark);
                }
            }
            4 => {
                marks.used(lane);
                new.remove(&lane);
            }
            _ => {
                if let Some(at) = reached.get_mut(&lane) {
                    *at += 1;
                    assert_eq!(marks.reach(lane, *at), Ok(()));
                    assert_eq!(marks.marked(lane), Some(*at));
                    new.remove(&lane);
                }
            }
        }
        let least = reached.values().copied().min();
        if let Some(least) = least {
            assert!(passed <= least, "a passed mark is blocked again");
            passed = least;
            for mark in 0..least + 4 {
                assert_eq!(marks.may_pass(mark), mark <= least);
            }
        }
        assert_eq!(marks.live(), reached.len());
    }
}

/// Drives a rate cap with any sequence of pieces, pauses and changes of the rate. No piece may
/// leave before its request or before an earlier piece. Between two changes, no more bytes may
/// leave than the rate allows in that time, plus one burst.
pub fn fuzz_pace(bytes: &[u8]) {
    let mut choices = Choices::new(bytes);
    let rate = |choices: &mut Choices<'_>| match choices.byte() % 4 {
        0 => None,
        1 => Some(choices.number()),
        _ => Some(choices.below(1000) << 20),
    };
    let mut cap = rate(&mut choices);
    let mut pace = Pace::new(cap);
    let mut now = choices.below(1 << 16) * 1_000_000;
    let mut last = 0;
    // The time of the first piece since the last change of the cap, and the bytes sent since then.
    let mut window = (None, 0_u128);
    while choices.more() {
        match choices.byte() % 4 {
            0 => {
                cap = rate(&mut choices);
                pace.set_rate(cap);
                window = (None, 0);
            }
            1 => now = now.saturating_add(choices.number() % 100_000_000_000),
            _ => {
                let bytes = choices.number() % (64 << 20);
                let at = pace.reserve(now, bytes);
                assert!(at >= now);
                let Some(rate) = cap else {
                    assert_eq!(at, now);
                    continue;
                };
                assert!(at >= last || at == now, "a later piece overtakes");
                last = at;
                let (began, sent) = &mut window;
                let began = *began.get_or_insert(at);
                let elapsed = u128::from(at.saturating_sub(began)) + u128::from(BURST_NS);
                // `Pace` rounds the time of each piece down to a nanosecond, so slightly more bytes
                // than the rate may be sent. The slack allows for that.
                let slack = (*sent / 1_000_000_000 + 1_000_000) * 2;
                let allowed = elapsed * u128::from(rate.max(1)) / 1_000_000_000 + slack;
                assert!(
                    *sent <= allowed || at == u64::MAX,
                    "{sent} bytes went in {elapsed} ns at {rate} bytes/s"
                );
                *sent += u128::from(bytes);
            }
        }
    }
}

/// Drives pre-copy with any sequence of measurements. Checks that it switches over only within the
/// downtime limit or, if configured, at the time limit. Also checks that it gives up only as
/// configured, never throttles a guest without permission, and ends at its time limit.
pub fn fuzz_precopy(bytes: &[u8]) {
    let mut choices = Choices::new(bytes);
    let goals = Goals {
        downtime_limit_ns: choices.number(),
        time_limit_ns: match choices.byte() % 3 {
            0 => None,
            _ => Some(choices.number()),
        },
        at_time_limit: match choices.byte() % 2 {
            0 => AtTimeLimit::Cancel,
            _ => AtTimeLimit::Stop,
        },
        throttle: choices.byte().is_multiple_of(2),
    };
    let mut precopy = Precopy::new(goals, PAGE_BYTES);
    let mut since_start_ns = 0_u64;
    let mut slowed = 0;
    while choices.more() {
        since_start_ns = since_start_ns.saturating_add(choices.number());
        let pass = Pass {
            since_start_ns,
            bytes_per_s: choices.number(),
            remaining_bytes: choices.number(),
            dirtied_pages: choices.number(),
            fixed_ns: choices.number(),
        };
        let predicted = Precopy::predict_ns(&pass);
        assert!(predicted >= pass.fixed_ns);
        let within = predicted <= goals.downtime_limit_ns;
        let late = goals
            .time_limit_ns
            .is_some_and(|limit| since_start_ns >= limit);
        match precopy.after_iteration(&pass) {
            Decision::Iterate { throttle } => {
                assert!(throttle <= THROTTLE_LAST);
                assert!(throttle >= slowed, "the throttle decreases");
                assert!(throttle == 0 || goals.throttle);
                assert!(within || !late, "the time limit does not hold");
                slowed = throttle;
            }
            Decision::SwitchOver => {
                assert!(within || (late && goals.at_time_limit == AtTimeLimit::Stop));
            }
            Decision::GiveUp => {
                assert!(!within && late && goals.at_time_limit == AtTimeLimit::Cancel);
            }
            Decision::OutOfReach => {
                assert!(pass.fixed_ns > goals.downtime_limit_ns);
            }
        }
    }
}

/// Checks that a region table is valid if and only if it obeys every rule.
pub fn fuzz_regions(bytes: &[u8]) {
    let mut choices = Choices::new(bytes);
    let mut regions = Vec::new();
    while choices.more() && regions.len() <= MAX_REGIONS {
        regions.push(Region {
            id: choices.below(40) as u16,
            kind: match choices.byte() % 4 {
                0 => RegionKind::Rom,
                1 => RegionKind::DeviceMemory,
                2 => RegionKind::StateStream,
                _ => RegionKind::Ram,
            },
            flags: match choices.byte() {
                255 => u32::MAX,
                byte => u32::from(byte),
            },
            backing_page_bytes: match choices.byte() % 16 {
                0 => choices.number() as u32,
                shift => 4096 << shift,
            },
            length: match choices.byte() % 8 {
                0 => choices.number(),
                _ => (choices.below(1 << 16) + 1) * PAGE_BYTES,
            },
            guest_physical: choices.number(),
            name: "n".repeat(choices.below(64) as usize * 4 + usize::from(choices.byte() % 5)),
        });
    }
    let distinct: BTreeSet<u16> = regions.iter().map(|region| region.id).collect();
    let total: u128 = regions.iter().map(|region| u128::from(region.length)).sum();
    let one_by_one = regions.iter().all(|region| {
        region.length > 0
            && region.length <= MAX_REGION_BYTES
            && region.length.is_multiple_of(PAGE_BYTES)
            && u64::from(region.backing_page_bytes) >= PAGE_BYTES
            && region.backing_page_bytes.is_power_of_two()
            && region.flags >> 16 == 0
            && region.name.len() <= MAX_NAME_BYTES
    });
    let possible = (1..=MAX_REGIONS).contains(&regions.len())
        && distinct.len() == regions.len()
        && total <= u128::from(MAX_MEMORY_BYTES)
        && one_by_one;
    let table = RegionTable::new(regions.clone());
    assert_eq!(table.is_ok(), possible, "{table:?}");
    let Ok(table) = table else {
        return;
    };
    for region in &regions {
        assert_eq!(table.get(region.id), Some(region));
    }
    for id in 0..=40 {
        assert_eq!(table.get(id).is_some(), distinct.contains(&id));
    }
    assert_eq!(u128::from(table.total_bytes()), total);
}
