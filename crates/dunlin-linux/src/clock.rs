//! The clock that counts on whatever happens to the date (clock_gettime(2)), as a
//! number that another process understands too.

use std::time::Duration;

/// Time since the host's start, without the time that it slept (`CLOCK_MONOTONIC`).
#[must_use]
pub fn monotonic() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is writable, and this clock always exists, so that the call
    // cannot fail.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let nanoseconds = u64::try_from(time.tv_nsec).unwrap_or(0);
    Duration::from_secs(seconds) + Duration::from_nanos(nanoseconds)
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
