//! The clock that counts on whatever happens to the date (clock_gettime(2)), as a
//! number that another process understands too.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Time since the host's start, without the time that it slept (`CLOCK_MONOTONIC`).
#[must_use]
pub fn monotonic() -> Duration {
    let time = clock_gettime(ClockId::Monotonic);
    Duration::try_from(time).expect("the clock does not go below zero")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_goes_on_with_the_standard_library_s() {
        let (other, own) = (std::time::Instant::now(), monotonic());
        std::thread::sleep(Duration::from_millis(2));
        let went = monotonic() - own;
        assert!(went >= Duration::from_millis(2), "{went:?}");
        assert!(
            went <= other.elapsed() + Duration::from_millis(1),
            "{went:?}"
        );
    }
}
