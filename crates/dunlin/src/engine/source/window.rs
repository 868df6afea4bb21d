//! The bandwidth of a migration, as pre-copy measures it.

use std::time::{Duration, Instant};

use dunlin_proto::limits::PAGE_BYTES;

use super::super::report::Traffic;

/// From so many zero pages to one that is not, a pass says nothing about the
/// bandwidth, unless the one before was like that too.
const MOSTLY_ZERO: u64 = 4;

/// What the bandwidth is being measured over: one pass, or several that are too short to tell.
pub(super) struct Window {
    pub(super) since: Instant,
    /// Acknowledged pages beyond so many are this window's; and pages that had gone out by then.
    acked_pages: u64,
    raw_pages: u64,
    zero_pages: u64,
    /// Whether the window before was mostly of zero pages.
    mostly_zero: bool,
}

impl Window {
    pub(super) fn new(since: Instant) -> Self {
        Self {
            since,
            acked_pages: 0,
            raw_pages: 0,
            zero_pages: 0,
            mostly_zero: false,
        }
    }

    /// Pages that count for this window. What a lost lane had sent goes out twice, so that there may
    /// be fewer than it began with.
    pub(super) fn acked_since(&self, acked_pages: u64) -> u64 {
        acked_pages.saturating_sub(self.acked_pages)
    }

    /// Ends after `measured`, with so many pages acknowledged and `traffic` gone out; the next
    /// begins. Returns bytes per second, or none if this says nothing.
    ///
    /// Zero pages go by much faster than those that a guest works on, and would promise a
    /// bandwidth that is not there: in untouched memory, in huge pages that were touched once,
    /// in what a guest clears before it uses it. A guest that goes on like that is believed.
    pub(super) fn end(
        &mut self,
        measured: Duration,
        acked_pages: u64,
        traffic: &Traffic,
    ) -> Option<u64> {
        let raw_pages = traffic.raw_pages - self.raw_pages;
        let zero_pages = traffic.zero_pages - self.zero_pages;
        let mostly_zero = zero_pages > raw_pages * MOSTLY_ZERO;
        let acked = self.acked_since(acked_pages);
        let tells = acked > 0 && (!mostly_zero || self.mostly_zero);
        *self = Self {
            since: Instant::now(),
            // Zero pages that are still under way are not the next window's.
            acked_pages: if mostly_zero {
                traffic.raw_pages + traffic.zero_pages
            } else {
                acked_pages
            },
            raw_pages: traffic.raw_pages,
            zero_pages: traffic.zero_pages,
            mostly_zero,
        };
        tells.then(|| per_second(acked * PAGE_BYTES, measured))
    }
}

pub(super) fn per_second(amount: u64, duration: Duration) -> u64 {
    let nanos = duration.as_nanos().max(1);
    u64::try_from(u128::from(amount) * 1_000_000_000 / nanos).unwrap_or(u64::MAX)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Passes of 100 ms over a link of 100 MiB/s, which zero pages do not load: 2560 pages that
    /// are not zero go by in each, or forty times as many that are.
    #[test]
    fn a_pass_mostly_of_zeros_is_believed_only_after_another() {
        const BYTES_PER_S: u64 = 100 << 20;
        const RAW: u64 = 2560;
        const ZERO: u64 = 40 * RAW;
        let mut window = Window::new(Instant::now());
        let mut traffic = Traffic::default();
        let mut pass = |raw_pages, zero_pages| {
            traffic.raw_pages += raw_pages;
            traffic.zero_pages += zero_pages;
            let acked = traffic.raw_pages + traffic.zero_pages;
            window.end(Duration::from_millis(100), acked, &traffic)
        };
        // Untouched memory first; and a guest of which all is like that must come to an end.
        assert_eq!(pass(0, ZERO), None);
        assert_eq!(pass(0, ZERO), Some(40 * BYTES_PER_S));
        // What the guest works on, and in between what it has only touched.
        assert_eq!(pass(RAW, 0), Some(BYTES_PER_S));
        assert_eq!(pass(RAW / 100, ZERO), None);
        assert_eq!(pass(RAW, RAW), Some(2 * BYTES_PER_S));
        assert_eq!(pass(0, 0), None);
    }

    /// The end of a pass of zero pages is acknowledged in the next one.
    #[test]
    fn zero_pages_under_way_are_not_the_next_passs() {
        const RAW: u64 = 2560;
        const ZERO: u64 = 40 * RAW;
        const LATE: u64 = RAW;
        let tenth = Duration::from_millis(100);
        let mut window = Window::new(Instant::now());
        let mut traffic = Traffic {
            zero_pages: ZERO,
            ..Traffic::default()
        };
        assert_eq!(window.end(tenth, ZERO - LATE, &traffic), None);
        // A lost lane's pages are acknowledged once and go out twice.
        assert_eq!(window.acked_since(ZERO - 1), 0);
        traffic.raw_pages += RAW;
        let bytes_per_s = window.end(tenth, ZERO + RAW, &traffic);
        assert_eq!(bytes_per_s, Some(100 << 20));
    }
}
