//! Waiting for several descriptors at once (poll(2)), and waking whoever
//! waits.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// What to wait for on one descriptor. An end or an error of the descriptor
/// counts as ready.
#[derive(Clone, Copy, Debug)]
pub struct Interest<'a> {
    /// The descriptor.
    pub fd: BorrowedFd<'a>,
    /// Wait until it can be read.
    pub read: bool,
    /// Wait until it can be written.
    pub write: bool,
}

/// Waits until one of `interests` is ready or `timeout` has passed; returns
/// for each whether it is ready.
///
/// # Errors
/// What poll(2) says; an interruption by a signal counts as nothing ready.
pub fn poll(interests: &[Interest<'_>], timeout: Option<Duration>) -> io::Result<Vec<bool>> {
    let mut entries: Vec<libc::pollfd> = interests
        .iter()
        .map(|interest| libc::pollfd {
            fd: interest.fd.as_raw_fd(),
            events: if interest.read { libc::POLLIN } else { 0 }
                | if interest.write { libc::POLLOUT } else { 0 },
            revents: 0,
        })
        .collect();
    // Rounded up, so that the last fraction of a millisecond is not spun on.
    let milliseconds = timeout.map_or(-1, |left| {
        i32::try_from(left.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX)
    });
    // SAFETY: `entries` holds as many initialised pollfds as the count says,
    // and lives through the call; its descriptors are borrowed, hence open.
    let ready = unsafe {
        libc::poll(
            entries.as_mut_ptr(),
            entries.len() as libc::nfds_t,
            milliseconds,
        )
    };
    if ready < 0 {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
        return Ok(vec![false; entries.len()]);
    }
    Ok(entries.iter().map(|entry| entry.revents != 0).collect())
}

/// Wakes a thread that waits in [`poll`]; the other end of a [`Wakeup`].
#[derive(Debug)]
pub struct Waker(UnixStream);

/// A descriptor that becomes readable when its [`Waker`] is used.
#[derive(Debug)]
pub struct Wakeup(UnixStream);

/// A pair of the two.
///
/// # Errors
/// No descriptors are left.
pub fn waker() -> io::Result<(Waker, Wakeup)> {
    let (near, far) = UnixStream::pair()?;
    near.set_nonblocking(true)?;
    far.set_nonblocking(true)?;
    Ok((Waker(near), Wakeup(far)))
}

impl Waker {
    /// Wakes the waiting thread, now or when it next waits.
    pub fn wake(&self) {
        // A full buffer means that a wake-up is pending already; any other
        // failure means that nobody waits any more.
        let _ = (&self.0).write(&[1]);
    }
}

impl Wakeup {
    /// Takes all wake-ups so far; the descriptor is no longer readable then.
    pub fn clear(&self) {
        let mut scrap = [0; 64];
        while matches!((&self.0).read(&mut scrap), Ok(count) if count > 0) {}
    }
}

impl AsFd for Wakeup {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_wake_up_is_seen_once_and_a_timeout_as_nothing() {
        let (waker, wakeup) = waker().unwrap();
        let interest = Interest {
            fd: wakeup.as_fd(),
            read: true,
            write: false,
        };
        let brief = Some(Duration::from_millis(1));
        assert_eq!(poll(&[interest], brief).unwrap(), [false]);
        waker.wake();
        waker.wake();
        assert_eq!(poll(&[interest], None).unwrap(), [true]);
        wakeup.clear();
        assert_eq!(poll(&[interest], brief).unwrap(), [false]);
    }
}
