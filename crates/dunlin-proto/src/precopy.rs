//! When to go on copying while the guest runs, when to pause it, and when to
//! slow it down.
//!
//! After each iteration the engine fetches the dirty log and asks
//! [`Precopy::after_iteration`]. The rule, in this order:
//!
//! 1. The predicted downtime is what remains, over the measured bandwidth,
//!    with a quarter more for the unsteadiness of both, plus the fixed costs
//!    (state, round trips, the journal's sync).
//! 2. Above the downtime limit: another iteration. If the remainder does not
//!    shrink either, the guest outruns the link, and it is slowed down where
//!    the VMM can.
//! 3. At or below the limit: go on as long as a pass still shrinks the
//!    remainder by a quarter, since that buys downtime for little; then
//!    switch over.
//! 4. Fixed costs that alone exceed the limit, with next to nothing left:
//!    there is no use in going on.
//! 5. A time limit ends it: by cancelling, or by switching over regardless.

/// The guest is slowed down by this much when it first outruns the link, in
/// percent of its dirty rate; QEMU's `cpu-throttle-initial` has the same
/// default.
pub const THROTTLE_FIRST: u8 = 20;
/// And by this much more for each further iteration that gains nothing.
pub const THROTTLE_STEP: u8 = 10;
/// Never beyond this: a guest that stands still might as well be paused.
pub const THROTTLE_LAST: u8 = 99;
/// Iterations in a row that gain nothing before the guest is slowed down.
/// One can be an accident of the working set.
const FRUITLESS_BEFORE_THROTTLE: u32 = 2;
/// A remainder this small is not worth another pass (4 MiB: about a
/// millisecond on a 25 GbE link, less than the fixed costs).
const NEGLIGIBLE_PAGES: u64 = 1024;

/// What to do when the time limit is reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AtTimeLimit {
    /// Give up; the VM goes on at the source.
    #[default]
    Cancel,
    /// Pause and switch over, however long the downtime.
    Stop,
}

/// What the operator asked for.
#[derive(Clone, Copy, Debug)]
pub struct Goals {
    /// Longest downtime that is acceptable, in nanoseconds.
    pub downtime_limit_ns: u64,
    /// Longest time for the whole migration, in nanoseconds; none is forever.
    pub time_limit_ns: Option<u64>,
    /// What happens then.
    pub at_time_limit: AtTimeLimit,
    /// Whether the guest may be slowed down.
    pub throttle: bool,
}

/// What one iteration showed.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    /// Time since the migration began, in nanoseconds.
    pub since_start_ns: u64,
    /// Bytes per second that the destination took in.
    pub bytes_per_s: u64,
    /// Bytes that the last pages would bring onto the wire: dirty now, or
    /// under way and not acknowledged.
    pub remaining_bytes: u64,
    /// Pages that the guest dirtied during the iteration.
    pub dirtied_pages: u64,
    /// Expected fixed cost of the switchover, in nanoseconds: saving and
    /// loading state, one and a half round trips, the journal's sync.
    pub fixed_ns: u64,
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Another iteration, with the guest slowed down by `throttle` percent.
    Iterate {
        /// 0 to 99; 0 is full speed.
        throttle: u8,
    },
    /// Pause the guest and switch over.
    SwitchOver,
    /// Nothing worth mentioning remains, and the fixed costs alone exceed the
    /// downtime limit: no pass makes those smaller.
    OutOfReach,
    /// The time limit is reached and the operator wants no switchover then.
    GiveUp,
}

/// The course of pre-copy, one iteration after the other.
#[derive(Clone, Debug)]
pub struct Precopy {
    goals: Goals,
    page_bytes: u64,
    last_remaining: Option<u64>,
    fruitless: u32,
    throttle: u8,
}

impl Precopy {
    /// Pre-copy towards `goals`, for pages of `page_bytes`.
    #[must_use]
    pub fn new(goals: Goals, page_bytes: u64) -> Self {
        Self {
            goals,
            page_bytes,
            last_remaining: None,
            fruitless: 0,
            throttle: 0,
        }
    }

    /// Downtime to expect at most if the guest were paused now, in nanoseconds.
    ///
    /// The bandwidth of the last pass is not that of the next moment: on a
    /// capped link with both hosts busy, one transfer in four took longer than
    /// it promises, up to 1.27 times as long (30 migrations, `namespaces.rs`
    /// among the command's tests). A limit is a promise, so there is room.
    #[must_use]
    pub fn predict_ns(pass: &Pass) -> u64 {
        let transfer =
            u128::from(pass.remaining_bytes) * 1_000_000_000 / u128::from(pass.bytes_per_s.max(1));
        u64::try_from(transfer + transfer / 4)
            .unwrap_or(u64::MAX)
            .saturating_add(pass.fixed_ns)
    }

    /// Decides after an iteration. See the rule at the top of this file.
    pub fn after_iteration(&mut self, pass: &Pass) -> Decision {
        let shrunk = self
            .last_remaining
            .is_none_or(|last| pass.remaining_bytes <= last / 4 * 3);
        self.last_remaining = Some(pass.remaining_bytes);
        let negligible = pass.remaining_bytes <= NEGLIGIBLE_PAGES * self.page_bytes;
        if Self::predict_ns(pass) <= self.goals.downtime_limit_ns {
            if negligible || !shrunk {
                return Decision::SwitchOver;
            }
            return Decision::Iterate {
                throttle: self.throttle,
            };
        }
        if negligible && pass.fixed_ns > self.goals.downtime_limit_ns {
            return Decision::OutOfReach;
        }
        if self
            .goals
            .time_limit_ns
            .is_some_and(|limit| pass.since_start_ns >= limit)
        {
            return match self.goals.at_time_limit {
                AtTimeLimit::Cancel => Decision::GiveUp,
                AtTimeLimit::Stop => Decision::SwitchOver,
            };
        }
        if shrunk {
            self.fruitless = 0;
        } else {
            self.fruitless += 1;
        }
        if self.goals.throttle && self.fruitless >= FRUITLESS_BEFORE_THROTTLE {
            self.throttle = match self.throttle {
                0 => THROTTLE_FIRST,
                now => now.saturating_add(THROTTLE_STEP).min(THROTTLE_LAST),
            };
        }
        Decision::Iterate {
            throttle: self.throttle,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const GOALS: Goals = Goals {
        downtime_limit_ns: 300_000_000,
        time_limit_ns: None,
        at_time_limit: AtTimeLimit::Cancel,
        throttle: true,
    };

    fn pass(remaining_bytes: u64) -> Pass {
        Pass {
            since_start_ns: 0,
            bytes_per_s: 1000 * MIB,
            remaining_bytes,
            dirtied_pages: remaining_bytes / 4096,
            fixed_ns: 10_000_000,
        }
    }

    #[test]
    fn goes_on_below_the_limit_while_it_pays_then_switches() {
        let mut precopy = Precopy::new(GOALS, 4096);
        let iterate = Decision::Iterate { throttle: 0 };
        assert_eq!(precopy.after_iteration(&pass(4000 * MIB)), iterate);
        assert_eq!(precopy.after_iteration(&pass(200 * MIB)), iterate);
        assert_eq!(precopy.after_iteration(&pass(100 * MIB)), iterate);
        assert_eq!(
            precopy.after_iteration(&pass(99 * MIB)),
            Decision::SwitchOver
        );
    }

    #[test]
    fn a_negligible_remainder_switches_at_once() {
        let mut precopy = Precopy::new(GOALS, 4096);
        assert_eq!(precopy.after_iteration(&pass(MIB)), Decision::SwitchOver);
    }

    #[test]
    fn fixed_costs_beyond_the_limit_end_it_instead_of_going_on_for_ever() {
        let mut costly = pass(MIB);
        costly.fixed_ns = 400_000_000;
        let mut precopy = Precopy::new(GOALS, 4096);
        assert_eq!(precopy.after_iteration(&costly), Decision::OutOfReach);
    }

    #[test]
    fn fixed_costs_count_against_the_limit() {
        let mut costly = pass(200 * MIB);
        costly.fixed_ns = 150_000_000;
        let mut precopy = Precopy::new(GOALS, 4096);
        assert_eq!(
            precopy.after_iteration(&costly),
            Decision::Iterate { throttle: 0 }
        );
    }

    #[test]
    fn a_guest_that_outruns_the_link_is_slowed_step_by_step() {
        let mut precopy = Precopy::new(GOALS, 4096);
        let throttles: Vec<u8> = (0..14)
            .map(|_| match precopy.after_iteration(&pass(1000 * MIB)) {
                Decision::Iterate { throttle } => throttle,
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(
            throttles,
            [0, 0, 20, 30, 40, 50, 60, 70, 80, 90, 99, 99, 99, 99]
        );
    }

    #[test]
    fn without_leave_the_guest_is_never_slowed() {
        let mut precopy = Precopy::new(
            Goals {
                throttle: false,
                ..GOALS
            },
            4096,
        );
        for _ in 0..10 {
            assert_eq!(
                precopy.after_iteration(&pass(1000 * MIB)),
                Decision::Iterate { throttle: 0 }
            );
        }
    }

    #[test]
    fn the_time_limit_cancels_or_stops() {
        let mut late = pass(1000 * MIB);
        late.since_start_ns = 5_000_000_000;
        for (at_time_limit, decision) in [
            (AtTimeLimit::Cancel, Decision::GiveUp),
            (AtTimeLimit::Stop, Decision::SwitchOver),
        ] {
            let mut precopy = Precopy::new(
                Goals {
                    time_limit_ns: Some(5_000_000_000),
                    at_time_limit,
                    ..GOALS
                },
                4096,
            );
            assert_eq!(precopy.after_iteration(&late), decision);
        }
    }
}
