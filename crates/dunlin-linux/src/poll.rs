//! Waits for several descriptors at once (poll(2)), and wakes a waiting thread.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

/// The events to wait for on one descriptor. The descriptor is also ready after a hang-up or an
/// error.
#[derive(Clone, Copy, Debug)]
pub struct Interest<'a> {
    /// The descriptor.
    pub fd: BorrowedFd<'a>,
    /// Wait until the descriptor is readable.
    pub read: bool,
    /// Wait until the descriptor is writable.
    pub write: bool,
}

impl<'a> Interest<'a> {
    /// Creates an interest in reading from `descriptor`.
    pub fn read(descriptor: &'a impl AsFd) -> Self {
        Self {
            fd: descriptor.as_fd(),
            read: true,
            write: false,
        }
    }

    /// Creates an interest in writing to `descriptor`.
    pub fn write(descriptor: &'a impl AsFd) -> Self {
        Self {
            write: true,
            ..Self::failure(descriptor)
        }
    }

    /// Creates an interest in only a hang-up or an error of `descriptor`.
    pub fn failure(descriptor: &'a impl AsFd) -> Self {
        Self {
            read: false,
            ..Self::read(descriptor)
        }
    }
}

/// Waits until one of `interests` is ready or `timeout` has passed. Returns for each one whether
/// it is ready; after an interruption by a signal, none of them is.
///
/// # Errors
/// An error from poll(2), except `EINTR`.
pub fn poll(interests: &[Interest<'_>], timeout: Option<Duration>) -> io::Result<Vec<bool>> {
    let mut entries: Vec<PollFd<'_>> = interests
        .iter()
        .map(|interest| {
            let mut events = PollFlags::empty();
            events.set(PollFlags::IN, interest.read);
            events.set(PollFlags::OUT, interest.write);
            PollFd::from_borrowed_fd(interest.fd, events)
        })
        .collect();
    match rustix::event::poll(&mut entries, timeout.map(timespec).as_ref()) {
        // After an interruption `revents` is undefined, so report no descriptor as ready.
        Err(Errno::INTR) => return Ok(vec![false; entries.len()]),
        ready => ready?,
    };
    Ok(entries
        .iter()
        .map(|entry| !entry.revents().is_empty())
        .collect())
}

/// A timeout in the kernel's format; a timeout out of range becomes the longest possible.
pub(crate) fn timespec(timeout: Duration) -> Timespec {
    Timespec::try_from(timeout).unwrap_or(Timespec {
        tv_sec: i64::MAX,
        tv_nsec: 0,
    })
}

/// Wakes a thread that waits in [`poll`] for the [`Wakeup`] of the same pair.
#[derive(Debug)]
pub struct Waker(UnixStream);

/// A descriptor that becomes readable when its [`Waker`] wakes it.
#[derive(Debug)]
pub struct Wakeup(UnixStream);

/// Returns a connected [`Waker`] and [`Wakeup`].
///
/// # Errors
/// An error from socketpair(2), such as `EMFILE`.
pub fn waker() -> io::Result<(Waker, Wakeup)> {
    let (near, far) = UnixStream::pair()?;
    near.set_nonblocking(true)?;
    far.set_nonblocking(true)?;
    Ok((Waker(near), Wakeup(far)))
}

impl Waker {
    /// Wakes the waiting thread, now or when it next waits.
    pub fn wake(&self) {
        // A full buffer means that a wake-up is already pending; any other error means that the
        // `Wakeup` was dropped.
        let _ = (&self.0).write(&[1]);
    }
}

impl Wakeup {
    /// Consumes all pending wake-ups, so that the descriptor is no longer readable.
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
    fn several_wake_ups_are_cleared_together_and_a_timeout_reports_nothing() {
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
