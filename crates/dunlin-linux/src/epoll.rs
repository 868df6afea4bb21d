//! Waiting for many sockets at once, each of which is reported once until it is
//! asked for again (epoll(7), `EPOLLONESHOT`).
//!
//! Where several threads share the sockets, this hands each report to one of
//! them. A socket leaves the set by being closed, by all who have it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

/// Reports that one call takes at most.
const REPORTS: usize = 64;

const ENDED: i32 = libc::EPOLLRDHUP | libc::EPOLLHUP;

/// A set of sockets.
#[derive(Debug)]
pub struct Epoll(OwnedFd);

/// What is waited for on a socket. Its end and its errors always are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// It can be read.
    Read,
    /// It can be written.
    Write,
    /// Nothing but its end or an error.
    Failure,
}

/// A socket that is ready, by the number that it was added with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready {
    /// The number.
    pub token: u64,
    /// Whether the socket has an error to tell.
    pub failed: bool,
    /// Whether nothing more comes; where the socket was added for that.
    pub ended: bool,
}

impl Epoll {
    /// An empty set.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn new() -> io::Result<Self> {
        // SAFETY: epoll_create1(2) takes no pointers.
        let descriptor = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just handed out `descriptor`, and nobody else has it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(descriptor) }))
    }

    /// Adds a socket, which is reported once.
    ///
    /// # Errors
    /// What epoll_ctl(2) says.
    pub fn add(&self, socket: impl AsFd, token: u64, readiness: Readiness) -> io::Result<()> {
        let events = events(readiness) | libc::EPOLLONESHOT;
        self.control(libc::EPOLL_CTL_ADD, &socket, token, events)
    }

    /// Adds a descriptor that is reported whenever it can be read, as often as
    /// somebody asks.
    ///
    /// # Errors
    /// What epoll_ctl(2) says.
    pub fn add_always(&self, descriptor: impl AsFd, token: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, &descriptor, token, libc::EPOLLIN)
    }

    /// Adds a socket that is reported whenever something new has come or there is room again, and
    /// not for what was there before (`EPOLLET`); with nothing `wanted` for errors and ends alone.
    /// Whoever is told goes on until the socket would block.
    ///
    /// # Errors
    /// What epoll_ctl(2) says.
    pub fn add_news(&self, socket: impl AsFd, token: u64, wanted: bool) -> io::Result<()> {
        let wanted = match wanted {
            true => libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP,
            false => 0,
        };
        self.control(libc::EPOLL_CTL_ADD, &socket, token, wanted | libc::EPOLLET)
    }

    /// Takes a socket out that somebody else will have: it stays in the set as long as anybody has it
    /// open.
    ///
    /// # Errors
    /// What epoll_ctl(2) says.
    pub fn remove(&self, socket: impl AsFd) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_DEL, &socket, 0, 0)
    }

    /// Has a socket that was added reported once more.
    ///
    /// # Errors
    /// What epoll_ctl(2) says.
    pub fn again(&self, socket: impl AsFd, token: u64, readiness: Readiness) -> io::Result<()> {
        let events = events(readiness) | libc::EPOLLONESHOT;
        self.control(libc::EPOLL_CTL_MOD, &socket, token, events)
    }

    fn control(
        &self,
        operation: i32,
        socket: &impl AsFd,
        token: u64,
        events: i32,
    ) -> io::Result<()> {
        let mut event = libc::epoll_event {
            events: events as u32,
            u64: token,
        };
        let descriptor = socket.as_fd().as_raw_fd();
        // SAFETY: `event` is initialised and lives through the call, which only reads it; both
        // descriptors are open, one owned and one borrowed.
        let status =
            unsafe { libc::epoll_ctl(self.0.as_raw_fd(), operation, descriptor, &raw mut event) };
        if status < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Waits until something is ready, or `timeout` has passed, and appends what
    /// is ready to `ready`. A signal counts as nothing ready.
    ///
    /// # Errors
    /// What epoll_wait(2) says.
    pub fn wait(&self, ready: &mut Vec<Ready>, timeout: Option<Duration>) -> io::Result<()> {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; REPORTS];
        let milliseconds = timeout.map_or(-1, |left| {
            i32::try_from(left.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX)
        });
        // SAFETY: `events` has room for as many reports as are asked for, and lives through the
        // call; the descriptor is owned.
        let count = unsafe {
            libc::epoll_wait(
                self.0.as_raw_fd(),
                events.as_mut_ptr(),
                REPORTS as i32,
                milliseconds,
            )
        };
        let Ok(count) = usize::try_from(count) else {
            let error = io::Error::last_os_error();
            if error.kind() == io::ErrorKind::Interrupted {
                return Ok(());
            }
            return Err(error);
        };
        ready.extend(events[..count].iter().map(|event| Ready {
            token: event.u64,
            failed: event.events & libc::EPOLLERR as u32 != 0,
            ended: event.events & ENDED as u32 != 0,
        }));
        Ok(())
    }
}

fn events(readiness: Readiness) -> i32 {
    match readiness {
        Readiness::Read => libc::EPOLLIN,
        Readiness::Write => libc::EPOLLOUT,
        Readiness::Failure => 0,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_socket_is_reported_once_until_it_is_asked_for_again() {
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
    fn a_reset_is_a_failure_whatever_was_asked_for() {
        let epoll = Epoll::new().unwrap();
        let (near, far) = UnixStream::pair().unwrap();
        epoll.add(&near, 1, Readiness::Failure).unwrap();
        // Closed with something unread, it resets the other end (unix(7)).
        (&near).write_all(b"x").unwrap();
        drop(far);
        let mut ready = Vec::new();
        epoll.wait(&mut ready, None).unwrap();
        assert!(ready[0].failed);
    }
    #[test]
    fn news_are_told_once_and_an_end_is_one() {
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
        // There is room to write in.
        assert_eq!(wait(None).len(), 1);
        assert_eq!(wait(brief), []);
        far.write_all(b"x").unwrap();
        let [byte] = wait(None)[..] else { panic!() };
        assert!(!byte.ended && !byte.failed);
        // It lies there unread, and nobody is told again.
        assert_eq!(wait(brief), []);
        drop(far);
        assert!(wait(None)[0].ended);
        assert_eq!(wait(brief), []);
    }
}
