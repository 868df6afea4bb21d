//! One rate cap for all lanes of a session.
//!
//! A shared virtual clock enforces the cap: each sending lane reserves its bytes and gets the time
//! until which it must wait. The caller supplies the current time, so the same code runs in a
//! simulator. Kernel pacing (SO_MAX_PACING_RATE) is not used for this cap: it limits each
//! connection separately, so other lanes could not use the share that a slow lane leaves unused.

/// How far the virtual clock may lag behind real time, in nanoseconds: the burst allowed after a
/// pause in sending. A larger burst fills queues on the path. A smaller burst reduces the rate when
/// threads wake up late.
pub const BURST_NS: u64 = 10_000_000;

/// A rate cap over the session's lanes.
#[derive(Clone, Debug)]
pub struct Pace {
    bytes_per_s: Option<u64>,
    free_at_ns: u64,
}

impl Pace {
    /// Creates a cap of `bytes_per_s`; `None` means no cap.
    #[must_use]
    pub fn new(bytes_per_s: Option<u64>) -> Self {
        Self {
            bytes_per_s,
            free_at_ns: 0,
        }
    }

    /// Changes the cap; existing reservations stay.
    pub fn set_rate(&mut self, bytes_per_s: Option<u64>) {
        self.bytes_per_s = bytes_per_s;
    }

    /// Reserves `bytes` at time `now_ns` and returns the time at which they may
    /// be sent: `now_ns` if there is no cap.
    pub fn reserve(&mut self, now_ns: u64, bytes: u64) -> u64 {
        let Some(rate) = self.bytes_per_s else {
            return now_ns;
        };
        let start = self.free_at_ns.max(now_ns.saturating_sub(BURST_NS));
        let cost = u128::from(bytes) * 1_000_000_000 / u128::from(rate.max(1));
        self.free_at_ns = start.saturating_add(u64::try_from(cost).unwrap_or(u64::MAX));
        start.max(now_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends 64 KiB pieces as early as the cap allows; returns bytes per second.
    fn rate_of(pace: &mut Pace, pieces: u64) -> u64 {
        let mut now = 1_000_000_000;
        for _ in 0..pieces {
            now = pace.reserve(now, 65_536);
        }
        pieces * 65_536 * 1_000_000_000 / (now - 1_000_000_000)
    }

    #[test]
    fn the_cap_holds_over_a_second() {
        let rate = rate_of(&mut Pace::new(Some(100 << 20)), 1600);
        let wanted = 100 << 20;
        assert!(rate >= wanted && rate < wanted + wanted / 50, "{rate}");
    }

    #[test]
    fn idle_time_saves_up_at_most_one_burst() {
        let mut pace = Pace::new(Some(1_000_000));
        assert_eq!(pace.reserve(0, 1_000_000), 0);
        let later = 10_000_000_000;
        assert_eq!(pace.reserve(later, 10_000), later);
        assert_eq!(pace.reserve(later, 10_000), later);
        assert_eq!(pace.reserve(later, 10_000), later + BURST_NS);
    }

    #[test]
    fn no_cap_never_waits() {
        let mut pace = Pace::new(None);
        assert_eq!(pace.reserve(5, u64::MAX), 5);
    }
}
