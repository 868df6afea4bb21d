//! A limit of the CPU time of `dunlin serve-status`, so that its clients cannot slow down
//! migrations.

use std::time::Duration;

/// Unused CPU time is kept, but at most as much as accrues in this period. This reserve covers the
/// requests that a browser sends when it opens the page.
const KEPT: Duration = Duration::from_secs(10);

/// The longest wait. If clients have used more CPU time than this wait makes up for, the excess is
/// ignored, so that other clients are served within seconds.
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// CPU time that may be used, as a token bucket.
#[derive(Debug)]
pub(super) struct Budget {
    /// CPUs that may be busy on average.
    cpus: f64,
    /// Seconds of CPU time that may be used now; negative after too much was used.
    left: f64,
    /// The times of the last call of [`Self::wait`].
    last: Times,
}

/// The time since a fixed moment, and the CPU time that the process has used.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    pub(super) elapsed: Duration,
    pub(super) used: Duration,
}

impl Budget {
    /// A full budget of `percent` percent of `cpus` CPUs.
    pub(super) fn new(percent: u8, cpus: usize, now: Times) -> Self {
        let cpus = cpus as f64 * f64::from(percent) / 100.0;
        Self {
            cpus,
            left: cpus * KEPT.as_secs_f64(),
            last: now,
        }
    }

    /// The time to wait before further work.
    pub(super) fn wait(&mut self, now: Times) -> Duration {
        let elapsed = now.elapsed.saturating_sub(self.last.elapsed);
        let used = now.used.saturating_sub(self.last.used);
        self.last = now;
        let of = |time: Duration| self.cpus * time.as_secs_f64();
        let left = self.left + of(elapsed) - used.as_secs_f64();
        self.left = left.clamp(-of(LONGEST_WAIT), of(KEPT));
        Duration::from_secs_f64((-self.left / self.cpus).max(0.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(elapsed: u64, used: u64) -> Times {
        Times {
            elapsed: Duration::from_millis(elapsed),
            used: Duration::from_millis(used),
        }
    }

    #[test]
    fn i8_the_average_is_limited_and_unused_time_is_kept_for_a_while() {
        // 1 % of 4 CPUs: 40 ms of each second.
        let mut budget = Budget::new(1, 4, at(0, 0));
        // The full budget is that of ten seconds.
        assert_eq!(budget.wait(at(0, 400)), Duration::ZERO);
        assert_eq!(budget.wait(at(0, 440)), Duration::from_secs(1));
        // After half of the wait, the other half remains.
        assert_eq!(budget.wait(at(500, 440)), Duration::from_millis(500));
        assert_eq!(budget.wait(at(1000, 440)), Duration::ZERO);
        // After an hour without use, the full budget is still that of ten seconds.
        assert_eq!(budget.wait(at(3_601_000, 440)), Duration::ZERO);
        assert_eq!(budget.wait(at(3_601_000, 920)), Duration::from_secs(2));
        // However much was used, the wait is bounded.
        let most = Duration::from_secs(5);
        assert_eq!(budget.wait(at(3_601_000, 60_000)), most);
        assert_eq!(budget.wait(at(3_606_000, 60_000)), Duration::ZERO);
    }
}
