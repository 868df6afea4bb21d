//! Waits for many sockets at once (epoll(7)). A socket that [`Epoll::add`] added is reported once,
//! to one of the waiting threads, and again only after the caller arms it again (`EPOLLONESHOT`).
//!
//! A socket leaves the set when its last descriptor is closed.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;

use crate::poll::timespec;

/// The maximum number of sockets that one call of [`Epoll::wait`] reports.
const REPORTS: usize = 64;

/// The longest timeout of epoll_pwait(2), which takes milliseconds as an `int`.
const LONGEST: Duration = Duration::from_millis(i32::MAX as u64);

const ENDED: EventFlags = EventFlags::RDHUP.union(EventFlags::HUP);

/// A set of sockets.
#[derive(Debug)]
pub struct Epoll(OwnedFd);

/// The event to wait for on a socket. Hang-up and errors are always reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// The socket can be read.
    Read,
    /// The socket can be written.
    Write,
    /// Only hang-up or an error.
    Failure,
}

/// A socket that is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready {
    /// The token that the socket was added with.
    pub token: u64,
    /// Whether the socket has a pending error.
    pub failed: bool,
    /// Whether the peer has ended its direction (`EPOLLRDHUP`, only after [`Epoll::add_news`] with
    /// `wanted`) or the connection has hung up (`EPOLLHUP`).
    pub ended: bool,
}

impl Epoll {
    /// Creates an empty set.
    ///
    /// # Errors
    /// An error from epoll_create1(2), such as `EMFILE`.
    pub fn new() -> io::Result<Self> {
        Ok(Self(epoll::create(CreateFlags::CLOEXEC)?))
    }

    /// Adds a socket that is reported once; [`Epoll::again`] arms it again.
    ///
    /// # Errors
    /// An error from epoll_ctl(2).
    pub fn add(&self, socket: impl AsFd, token: u64, readiness: Readiness) -> io::Result<()> {
        self.add_for(socket, token, events(readiness) | EventFlags::ONESHOT)
    }

    /// Adds a descriptor that every [`Epoll::wait`] reports while it is readable.
    ///
    /// # Errors
    /// An error from epoll_ctl(2).
    pub fn add_always(&self, descriptor: impl AsFd, token: u64) -> io::Result<()> {
        self.add_for(descriptor, token, EventFlags::IN)
    }

    /// Adds a socket that is reported on each change only (`EPOLLET`): when new bytes arrive, when
    /// its buffer has room again, and on the end of the peer's data. If `wanted` is false, only
    /// hang-up and errors are reported. After a report the caller must read and write until the
    /// socket would block.
    ///
    /// # Errors
    /// An error from epoll_ctl(2).
    pub fn add_news(&self, socket: impl AsFd, token: u64, wanted: bool) -> io::Result<()> {
        let wanted = match wanted {
            true => EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP,
            false => EventFlags::empty(),
        };
        self.add_for(socket, token, wanted | EventFlags::ET)
    }

    /// Removes a socket from the set. This is necessary while the socket has other open
    /// descriptors, because the kernel removes a socket automatically only when its last descriptor
    /// is closed.
    ///
    /// # Errors
    /// An error from epoll_ctl(2).
    pub fn remove(&self, socket: impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.0, socket)?)
    }

    /// Arms a socket that was added with [`Epoll::add`], so that its next event is reported.
    ///
    /// # Errors
    /// An error from epoll_ctl(2).
    pub fn again(&self, socket: impl AsFd, token: u64, readiness: Readiness) -> io::Result<()> {
        let events = events(readiness) | EventFlags::ONESHOT;
        Ok(epoll::modify(
            &self.0,
            socket,
            EventData::new_u64(token),
            events,
        )?)
    }

    fn add_for(&self, socket: impl AsFd, token: u64, events: EventFlags) -> io::Result<()> {
        Ok(epoll::add(
            &self.0,
            socket,
            EventData::new_u64(token),
            events,
        )?)
    }

    /// Waits until a socket is ready or `timeout` has passed. Appends to `ready` at most 64 of the
    /// sockets that are ready. If a signal interrupts the wait, the function returns and appends
    /// none.
    ///
    /// # Errors
    /// An error from epoll_pwait(2).
    pub fn wait(&self, ready: &mut Vec<Ready>, timeout: Option<Duration>) -> io::Result<()> {
        let mut reports = [const { MaybeUninit::<Event>::uninit() }; REPORTS];
        let timeout = timeout.map(|left| timespec(left.min(LONGEST)));
        let reported = match epoll::wait(&self.0, &mut reports, timeout.as_ref()) {
            Err(Errno::INTR) => return Ok(()),
            reported => reported?.0,
        };
        ready.extend(reported.iter().map(|&Event { flags, data, .. }| Ready {
            token: data.u64(),
            failed: flags.contains(EventFlags::ERR),
            ended: flags.intersects(ENDED),
        }));
        Ok(())
    }
}

fn events(readiness: Readiness) -> EventFlags {
    match readiness {
        Readiness::Read => EventFlags::IN,
        Readiness::Write => EventFlags::OUT,
        Readiness::Failure => EventFlags::empty(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_socket_is_reported_once_until_it_is_armed_again() {
        let epoll = Epoll::new().unwrap();
        let (near, mut far) = UnixStream::pair().unwrap();
        let brief = Some(Duration::from_millis(1));
        let mut ready = Vec::new();
        epoll.add(&near, 7, Readiness::Read).unwrap();
        epoll.wait(&mut ready, brief).unwrap();
        assert_eq!(ready, []);
        far.write_all(b"x").unwrap();
        let reported = Ready {
            token: 7,
            failed: false,
            ended: false,
        };
        for expected in [&[reported][..], &[]] {
            ready.clear();
            epoll.wait(&mut ready, brief).unwrap();
            assert_eq!(ready, expected);
        }
        epoll.again(&near, 7, Readiness::Read).unwrap();
        epoll.wait(&mut ready, None).unwrap();
        assert_eq!(ready, [reported]);
    }

    #[test]
    fn a_reset_is_reported_as_a_failure_for_every_readiness() {
        let epoll = Epoll::new().unwrap();
        let (near, far) = UnixStream::pair().unwrap();
        epoll.add(&near, 1, Readiness::Failure).unwrap();
        // Closing a socket with unread data resets the other end (`unix_release_sock`,
        // net/unix/af_unix.c).
        (&near).write_all(b"x").unwrap();
        drop(far);
        let mut ready = Vec::new();
        epoll.wait(&mut ready, None).unwrap();
        assert!(ready[0].failed);
    }

    #[test]
    fn each_change_is_reported_once_and_so_is_the_end() {
        use std::net::{TcpListener, TcpStream};

        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let near = listener.accept().unwrap().0;
        let epoll = Epoll::new().unwrap();
        let brief = Some(Duration::from_millis(20));
        let wait = |timeout| {
            let mut ready = Vec::new();
            epoll.wait(&mut ready, timeout).unwrap();
            ready
        };
        epoll.add_news(&near, 3, true).unwrap();
        // The socket is writable. This is reported only once.
        assert_eq!(wait(None).len(), 1);
        assert_eq!(wait(brief), []);
        far.write_all(b"x").unwrap();
        let [byte] = wait(None)[..] else { panic!() };
        assert!(!byte.ended && !byte.failed);
        // The unread byte is not reported again.
        assert_eq!(wait(brief), []);
        drop(far);
        assert!(wait(None)[0].ended);
        assert_eq!(wait(brief), []);
    }
}
