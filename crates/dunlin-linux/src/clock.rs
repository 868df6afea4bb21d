//! The monotonic clock (clock_gettime(2)) as a number that processes of one host can compare.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Time since the host booted, excluding the time during which it was suspended
/// (`CLOCK_MONOTONIC`).
#[must_use]
pub fn monotonic() -> Duration {
    let time = clock_gettime(ClockId::Monotonic);
    Duration::try_from(time).expect("the monotonic clock is not negative")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_advances_like_the_standard_librarys() {
        let (other, own) = (std::time::Instant::now(), monotonic());
        std::thread::sleep(Duration::from_millis(2));
        let advanced = monotonic() - own;
        assert!(advanced >= Duration::from_millis(2), "{advanced:?}");
        assert!(
            advanced <= other.elapsed() + Duration::from_millis(1),
            "{advanced:?}"
        );
    }
}
