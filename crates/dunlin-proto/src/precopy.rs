//! Decides when to continue pre-copy, when to pause the guest, and when to
//! throttle it.
//!
//! After each iteration the engine fetches the dirty log and calls
//! [`Precopy::after_iteration`]. The rules:
//!
//! 1. The predicted downtime is the transfer time, plus a quarter of it, plus the fixed costs
//!    (state, round trips, the journal's sync). The transfer time is the remainder divided by the
//!    measured bandwidth. The quarter is added because the bandwidth varies.
//! 2. If the prediction is within the downtime limit, iterations continue as long as two conditions
//!    hold: each iteration shrinks the remainder by a quarter, and more than a negligible remainder
//!    is left. These iterations reduce the downtime at little cost. When one of the conditions no
//!    longer holds, the source switches over.
//! 3. Otherwise, if almost nothing remains and the fixed costs alone exceed the
//!    downtime limit, pre-copy ends, because no iteration helps.
//! 4. Otherwise, at the time limit, the source cancels, or switches over with any downtime
//!    ([`AtTimeLimit`]).
//! 5. Otherwise another iteration starts. If two or more iterations in a row do not shrink the
//!    remainder by a quarter, the guest probably dirties memory faster than the link carries it.
//!    The guest is then throttled, if the operator allows it.

/// The first throttle: by how many percent the guest is slowed. QEMU's `cpu-throttle-initial` has
/// the same default.
pub const THROTTLE_FIRST: u8 = 20;
/// The increase of the throttle, in percentage points, each time that the guest is throttled again.
pub const THROTTLE_STEP: u8 = 10;
/// The maximum throttle, in percent. At 100 percent the guest would not run, as if it were
/// paused.
pub const THROTTLE_LAST: u8 = 99;
/// The guest is throttled after this number of consecutive iterations that each shrink the
/// remainder by less than a quarter. A change of the guest's working set can cause a single such
/// iteration.
const FRUITLESS_BEFORE_THROTTLE: u32 = 2;
/// The number of pages up to which a remainder is not worth another iteration. 1024
/// pages are 4 MiB, which take about a millisecond on a 25 GbE link, less than the
/// fixed costs.
const NEGLIGIBLE_PAGES: u64 = 1024;

/// What the source does at the time limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AtTimeLimit {
    /// Cancels the migration, so that the VM continues at the source.
    #[default]
    Cancel,
    /// Pauses the guest and switches over, whatever the downtime.
    Stop,
}

/// The operator's goals.
#[derive(Clone, Copy, Debug)]
pub struct Goals {
    /// Longest acceptable downtime, in nanoseconds.
    pub downtime_limit_ns: u64,
    /// Longest duration of the migration up to the pause, in nanoseconds; `None` is unlimited.
    pub time_limit_ns: Option<u64>,
    /// What the source does at the time limit.
    pub at_time_limit: AtTimeLimit,
    /// Whether the guest may be throttled.
    pub throttle: bool,
}

/// Measurements of one iteration.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    /// Time since the migration started, in nanoseconds.
    pub since_start_ns: u64,
    /// Bytes per second that the destination received.
    pub bytes_per_s: u64,
    /// Bytes that the remaining pages take on the wire. The remaining pages are those that are
    /// dirty now, and those that are in flight and not acknowledged.
    pub remaining_bytes: u64,
    /// Pages that the guest dirtied during the iteration.
    pub dirtied_pages: u64,
    /// Expected fixed cost of the switchover, in nanoseconds: saving and
    /// loading state, one and a half round trips, the journal's sync.
    pub fixed_ns: u64,
}

/// What the source does after an iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Starts another iteration, with the guest throttled by `throttle` percent.
    Iterate {
        /// 0 to 99; 0 is full speed.
        throttle: u8,
    },
    /// Pauses the guest and switches over.
    SwitchOver,
    /// Ends pre-copy, because almost nothing remains and the fixed costs alone exceed the downtime
    /// limit, so another iteration cannot help.
    OutOfReach,
    /// Ends pre-copy, because the time limit is reached and the operator chose
    /// [`AtTimeLimit::Cancel`].
    GiveUp,
}

/// The state of pre-copy across iterations.
#[derive(Clone, Debug)]
pub struct Precopy {
    goals: Goals,
    page_bytes: u64,
    last_remaining: Option<u64>,
    fruitless: u32,
    throttle: u8,
}

impl Precopy {
    /// Creates the state before the first iteration, for pages of `page_bytes`.
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

    /// Cautious estimate of the downtime if the guest were paused now, in nanoseconds.
    ///
    /// The bandwidth of the last iteration is not exactly that of the switchover. On a capped link
    /// with both hosts busy, one transfer in four took longer than predicted, up to 1.27 times as
    /// long (30 migrations in the test `namespaces.rs` of dunlin-cli). The estimate adds a quarter,
    /// so that the downtime rarely exceeds its limit.
    #[must_use]
    pub fn predict_ns(pass: &Pass) -> u64 {
        let transfer =
            u128::from(pass.remaining_bytes) * 1_000_000_000 / u128::from(pass.bytes_per_s.max(1));
        u64::try_from(transfer + transfer / 4)
            .unwrap_or(u64::MAX)
            .saturating_add(pass.fixed_ns)
    }

    /// Decides what happens after an iteration, by the rules at the top of this module.
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
    fn iterates_below_the_limit_while_it_pays_then_switches() {
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
    fn fixed_costs_beyond_the_limit_end_pre_copy() {
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
    fn a_guest_that_outruns_the_link_is_throttled_step_by_step() {
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
    fn without_permission_the_guest_is_never_throttled() {
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
