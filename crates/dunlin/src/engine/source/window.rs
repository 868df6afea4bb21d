//! Measures the bandwidth of a migration for pre-copy.

use std::time::{Duration, Instant};

use dunlin_proto::limits::PAGE_BYTES;

use super::super::report::Traffic;

/// If a pass sends more than this number of zero pages for each other page, it measures the
/// bandwidth only if the previous pass did so too.
const MOSTLY_ZERO: u64 = 4;

/// A measurement of the bandwidth, over one pass or over several short ones.
pub(super) struct Window {
    pub(super) since: Instant,
    /// At the start of the window: the number of acknowledged pages, and the numbers of non-zero
    /// and zero pages sent.
    acked_pages: u64,
    raw_pages: u64,
    zero_pages: u64,
    /// Whether the previous window had mostly zero pages.
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

    /// Pages acknowledged in this window. [`Window::end`] may have counted pages in flight as
    /// acknowledged. Until those pages are acknowledged, the result is 0.
    pub(super) fn acked_since(&self, acked_pages: u64) -> u64 {
        acked_pages.saturating_sub(self.acked_pages)
    }

    /// Ends the window after `measured`, given the acknowledged pages and the traffic sent
    /// so far, and begins the next. Returns bytes per second, or `None` if the window does
    /// not measure the bandwidth.
    ///
    /// Zero pages are sent much faster than the pages that a guest works on. A window of zero pages
    /// would suggest a bandwidth that does not exist. Zero pages occur in untouched memory, in huge
    /// pages that were touched once, and in pages that a guest clears before use. A window with
    /// mostly zero pages therefore measures the bandwidth only if the previous window had mostly
    /// zero pages too.
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
            // Count zero pages in flight as acknowledged, so that they do not count for the next
            // window.
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

    /// Each pass takes 100 ms on a link of 100 MiB/s. It sends 2560 non-zero pages, or forty times
    /// as many zero pages, which do not load the link.
    #[test]
    fn a_pass_of_mostly_zero_pages_counts_only_after_another() {
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
        // The first passes send untouched memory. A guest that has only zero pages must finish too.
        assert_eq!(pass(0, ZERO), None);
        assert_eq!(pass(0, ZERO), Some(40 * BYTES_PER_S));
        // The next passes send pages that the guest works on. One pass between them sends pages
        // that the guest has only touched.
        assert_eq!(pass(RAW, 0), Some(BYTES_PER_S));
        assert_eq!(pass(RAW / 100, ZERO), None);
        assert_eq!(pass(RAW, RAW), Some(2 * BYTES_PER_S));
        assert_eq!(pass(0, 0), None);
    }

    /// The last zero pages of a pass are acknowledged during the next pass, and must not count
    /// there.
    #[test]
    fn zero_pages_in_flight_do_not_count_for_the_next_pass() {
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
        // One page was lost with a lane, and so it is sent twice and acknowledged once. While fewer
        // pages are acknowledged than were sent, `acked_since` returns 0, not a negative number.
        assert_eq!(window.acked_since(ZERO - 1), 0);
        traffic.raw_pages += RAW;
        let bytes_per_s = window.end(tenth, ZERO + RAW, &traffic);
        assert_eq!(bytes_per_s, Some(100 << 20));
    }
}
