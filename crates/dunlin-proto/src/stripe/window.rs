//! The size of a channel's window: bounded in time, in bytes, and by the sum of all windows (I8).

use crate::limits::LEAST_WINDOW_BYTES;

/// How long a channel's bytes may wait in addition to the round trip.
///
/// A hypervisor counts bytes that wait in the tunnel as sent. It therefore overestimates the link's
/// bandwidth and predicts too short a downtime, by a millisecond for each millisecond here. 10 ms
/// cover a consumer that is scheduled late and a lane that is a few chunks behind.
pub const SLACK_NS: u64 = 10_000_000;

/// The period over which the shortest round trip is measured. The shortest of the current and the
/// previous period is used. Round trips are longer while queues on the path are full. If windows
/// followed these longer round trips, the windows would grow and fill the queues further.
const ROUND_TRIP_AGE_NS: u64 = 10_000_000_000;

/// The bytes that a channel has delivered in the current span of time and in the span before it.
#[derive(Clone, Debug, Default)]
pub(super) struct Meter {
    began_ns: u64,
    current: u64,
    before: u64,
}

impl Meter {
    /// Records that `bytes` were delivered.
    pub(super) fn add(&mut self, bytes: u64, span_ns: u64, now_ns: u64) {
        let elapsed = now_ns.saturating_sub(self.began_ns);
        if elapsed >= span_ns.saturating_mul(2) {
            (self.before, self.current, self.began_ns) = (0, 0, now_ns);
        } else if elapsed >= span_ns {
            (self.before, self.current) = (self.current, 0);
            self.began_ns = self.began_ns.saturating_add(span_ns);
        }
        self.current = self.current.saturating_add(bytes);
    }

    /// Approximately the bytes delivered in the last `span_ns`, plus a quarter so that the window
    /// can grow. Callers use it immediately after [`Meter::add`].
    pub(super) fn window(&self, span_ns: u64, now_ns: u64) -> u64 {
        let elapsed = now_ns.saturating_sub(self.began_ns).min(span_ns);
        let rest = u128::from(self.before) * u128::from(span_ns - elapsed);
        let rest = u64::try_from(rest / u128::from(span_ns.max(1))).unwrap_or(u64::MAX);
        let recent = self.current.saturating_add(rest);
        recent.saturating_add(recent / 4)
    }
}

/// The shortest recent round trip.
#[derive(Clone, Debug, Default)]
pub(super) struct RoundTrip {
    began_ns: u64,
    current: Option<u64>,
    before: Option<u64>,
}

impl RoundTrip {
    pub(super) fn measured(&mut self, round_trip_ns: u64, now_ns: u64) {
        if now_ns.saturating_sub(self.began_ns) >= ROUND_TRIP_AGE_NS {
            self.before = self.current.take();
            self.began_ns = now_ns;
        }
        let shortest = self
            .current
            .map_or(round_trip_ns, |old| old.min(round_trip_ns));
        self.current = Some(shortest);
    }

    /// The shortest recent round trip; 0 before the first measurement.
    pub(super) fn shortest_ns(&self) -> u64 {
        let both = self.current.into_iter().chain(self.before);
        both.min().unwrap_or(0)
    }

    /// The span over which a channel's recent bytes are counted.
    pub(super) fn span_ns(&self) -> u64 {
        self.shortest_ns().saturating_add(SLACK_NS)
    }
}

/// Limits the bytes that all channels of the peer together may have in addition to their minimum
/// windows.
///
/// The pool does not contain the minimum windows: there is space for one for each permitted
/// channel. So a new channel always gets its minimum, even if the other channels are stalled.
#[derive(Clone, Debug)]
pub(super) struct Pool {
    room: u64,
    used: u64,
}

impl Pool {
    /// Creates a pool of `bytes` for up to `channels` channels.
    pub(super) fn new(bytes: u64, channels: u64) -> Self {
        Self {
            room: bytes.saturating_sub(channels.saturating_mul(LEAST_WINDOW_BYTES)),
            used: 0,
        }
    }

    /// Records that a channel's grant has changed from `before` to `now` bytes.
    pub(super) fn changed(&mut self, before: u64, now: u64) {
        self.used = (self.used + beyond(now)).saturating_sub(beyond(before));
    }

    /// The most that may be granted to a channel that has a grant of `now` bytes.
    pub(super) fn most(&self, now: u64) -> u64 {
        LEAST_WINDOW_BYTES + beyond(now) + self.room.saturating_sub(self.used)
    }
}

/// The bytes that a grant takes from the pool.
fn beyond(granted: u64) -> u64 {
    granted.saturating_sub(LEAST_WINDOW_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Delivers `bytes` every `step_ns`, 1000 times, and returns the window.
    fn steady(bytes: u64, step_ns: u64, span_ns: u64) -> u64 {
        let mut meter = Meter::default();
        let mut now = 5_000 * MS;
        for _ in 0..1000 {
            now += step_ns;
            meter.add(bytes, span_ns, now);
        }
        meter.window(span_ns, now)
    }

    #[test]
    fn i8_a_steady_channels_window_is_what_it_delivers_in_the_span_and_a_quarter() {
        // 1 GB/s in pieces of 100 KB, so 10 MB in 10 ms.
        let window = steady(100_000, MS / 10, 10 * MS);
        assert!((12_400_000..12_900_000).contains(&window), "{window}");
    }

    /// A sender that is limited by its window sends a burst of one window per round trip. The
    /// window must grow in spite of such bursts. Otherwise the sender could never use the whole
    /// bandwidth of a path with a long round trip.
    #[test]
    fn bursts_of_a_window_per_round_trip_grow_it() {
        for round_trip_ms in [1, 10, 50, 200] {
            let span = (round_trip_ms + 10) * MS;
            let window = steady(1 << 20, round_trip_ms * MS, span);
            assert!(window > (1 << 20) * 6 / 5, "{round_trip_ms} ms: {window}");
        }
    }

    #[test]
    fn i8_what_was_delivered_long_ago_does_not_count() {
        let mut meter = Meter::default();
        meter.add(1 << 30, 10 * MS, MS);
        meter.add(1, 10 * MS, 1000 * MS);
        assert_eq!(meter.window(10 * MS, 1000 * MS), 1);
    }

    #[test]
    fn the_shortest_round_trip_counts_until_it_is_old() {
        let mut round_trip = RoundTrip::default();
        assert_eq!(round_trip.span_ns(), SLACK_NS);
        for (at_ms, measured_ms, shortest_ms) in [
            (1, 5, 5),
            (2, 50, 5),
            (11_000, 40, 5),
            (22_000, 30, 30),
            (22_001, 60, 30),
        ] {
            round_trip.measured(measured_ms * MS, at_ms * MS);
            assert_eq!(round_trip.shortest_ns(), shortest_ms * MS, "at {at_ms} ms");
        }
    }

    #[test]
    fn i8_the_pool_always_has_the_minimum_for_every_channel() {
        let mut pool = Pool::new(10 * LEAST_WINDOW_BYTES, 4);
        assert_eq!(pool.most(0), 7 * LEAST_WINDOW_BYTES);
        pool.changed(0, 7 * LEAST_WINDOW_BYTES);
        assert_eq!(pool.most(0), LEAST_WINDOW_BYTES);
        assert_eq!(pool.most(7 * LEAST_WINDOW_BYTES), 7 * LEAST_WINDOW_BYTES);
        pool.changed(7 * LEAST_WINDOW_BYTES, 2 * LEAST_WINDOW_BYTES);
        assert_eq!(pool.used, LEAST_WINDOW_BYTES);
        pool.changed(2 * LEAST_WINDOW_BYTES, 5);
        assert_eq!(pool.used, 0);
    }
}
