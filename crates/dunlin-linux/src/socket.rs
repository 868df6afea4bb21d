//! TCP and unix sockets as lanes need them: connections with a deadline, waits with a deadline, and
//! the options that the standard library leaves out.
//!
//! Options are set through [`std::os::fd::AsFd`], so they serve a stream, a listener or a socket
//! that was handed over. Every function returns the kernel's own error.

use std::io;
use std::mem::offset_of;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use crate::option;
use crate::poll::{Interest, Wakeup, poll, timespec};

/// How a connection finds out that its peer has gone.
///
/// `keepalive_idle` of silence starts probes every `keepalive_interval`; `keepalive_probes`
/// unanswered ones end the connection. `user_timeout` ends it when sent data stays unacknowledged
/// for that long, which keep-alive alone does not notice (tcp(7), RFC 5482).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Liveness {
    /// Silence before the first probe; whole seconds, at least one.
    pub keepalive_idle: Duration,
    /// Time between probes; whole seconds, at least one.
    pub keepalive_interval: Duration,
    /// Unanswered probes before the connection is given up.
    pub keepalive_probes: u8,
    /// Longest time that sent data may stay unacknowledged, or that the peer may take nothing;
    /// milliseconds. Zero leaves it to the system.
    pub user_timeout: Duration,
}

impl Default for Liveness {
    /// A peer that vanished is noticed within 15 seconds, idle or not.
    fn default() -> Self {
        Self {
            keepalive_idle: Duration::from_secs(5),
            keepalive_interval: Duration::from_secs(2),
            keepalive_probes: 5,
            user_timeout: Duration::from_secs(15),
        }
    }
}

/// Connects to `address` before `deadline`, unless `stop` is woken before.
///
/// # Errors
/// `TimedOut` when the deadline passes, `ConnectionAborted` when `stop` was woken, otherwise what
/// socket(2) or connect(2) says.
pub fn connect_unless(
    address: SocketAddr,
    deadline: Instant,
    stop: &Wakeup,
) -> io::Result<TcpStream> {
    finish_connect(begin_connect(None, address)?, deadline, stop)
}

/// The same from a local address and port. Whatever is bound to a port is so for good, connected
/// or not, as long as the socket is open.
///
/// # Errors
/// As [`connect_unless`]; `AddrInUse` where the local port is another socket's.
pub fn connect_from_unless(
    local: SocketAddr,
    address: SocketAddr,
    deadline: Instant,
    stop: &Wakeup,
) -> io::Result<TcpStream> {
    finish_connect(begin_connect(Some(local), address)?, deadline, stop)
}

fn finish_connect(stream: TcpStream, deadline: Instant, stop: &Wakeup) -> io::Result<TcpStream> {
    loop {
        let left = remaining(deadline)?;
        let connected = Interest {
            fd: stream.as_fd(),
            read: false,
            write: true,
        };
        let stopped = Interest::read(&stop);
        let ready = poll(&[connected, stopped], Some(left))?;
        if ready[1] {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        if ready[0] {
            break;
        }
    }
    if let Some(error) = stream.take_error()? {
        return Err(error);
    }
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// A socket in non-blocking mode that is connecting, from an address and port if one is given.
fn begin_connect(local: Option<SocketAddr>, address: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::from(stream_socket(match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    })?);
    if let Some(local) = local {
        rustix::net::bind(&stream, &local)?;
    }
    match rustix::net::connect(&stream, &address) {
        // It goes on in the kernel, also after a signal (connect(2)).
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(stream),
        Err(error) => Err(error.into()),
    }
}

/// A stream socket in non-blocking mode.
fn stream_socket(family: AddressFamily) -> io::Result<OwnedFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    Ok(socket)
}

/// How often a listener whose backlog is full is tried again.
const BACKLOG_STEP: Duration = Duration::from_millis(10);

/// Connects to the unix socket at `path` before `deadline`, also where the listener's backlog is
/// full, which a plain connect waits for without end (unix(7)). The stream is in non-blocking mode.
///
/// # Errors
/// `TimedOut` when the backlog stays full, otherwise what socket(2) or connect(2) says.
pub fn connect_unix(path: &Path, deadline: Instant) -> io::Result<UnixStream> {
    connect_unix_or(path, || {
        thread::sleep(BACKLOG_STEP.min(remaining(deadline)?));
        Ok(())
    })
}

/// The same, unless `stop` is woken before.
///
/// # Errors
/// As [`connect_unix`], and `ConnectionAborted` when `stop` was woken.
pub fn connect_unix_unless(
    path: &Path,
    deadline: Instant,
    stop: &Wakeup,
) -> io::Result<UnixStream> {
    connect_unix_or(path, || {
        let stopped = Interest::read(&stop);
        match poll(&[stopped], Some(BACKLOG_STEP.min(remaining(deadline)?)))?[0] {
            true => Err(io::ErrorKind::ConnectionAborted.into()),
            false => Ok(()),
        }
    })
}

/// Connects, and calls `wait` before each time that it tries again.
fn connect_unix_or(
    path: &Path,
    mut wait: impl FnMut() -> io::Result<()>,
) -> io::Result<UnixStream> {
    let stream = UnixStream::from(stream_socket(AddressFamily::UNIX)?);
    let address = SocketAddrUnix::new(path).map_err(|_| io::ErrorKind::InvalidInput)?;
    loop {
        match rustix::net::connect(&stream, &address) {
            Ok(()) => return Ok(stream),
            Err(Errno::AGAIN) => wait()?,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// How many bytes can be read from `socket` now (`FIONREAD`, tcp(7) and unix(7)).
///
/// # Errors
/// The error of ioctl(2).
pub fn unread_bytes(socket: impl AsFd) -> io::Result<u64> {
    Ok(rustix::io::ioctl_fionread(socket)?)
}

/// The time left until `deadline`.
///
/// # Errors
/// `TimedOut` when nothing is left, since a zero time-out means "wait for ever" to a socket.
pub fn remaining(deadline: Instant) -> io::Result<Duration> {
    deadline
        .checked_duration_since(Instant::now())
        .filter(|left| !left.is_zero())
        .ok_or_else(|| io::Error::from(io::ErrorKind::TimedOut))
}

/// Waits until `socket` has bytes to read, has reached its end or has failed; `false` when
/// `deadline` came first. A socket that another thread shuts down counts as readable.
///
/// # Errors
/// The error of poll(2).
pub fn wait_readable(socket: impl AsFd, deadline: Instant) -> io::Result<bool> {
    wait(socket, PollFlags::IN, deadline)
}

/// The same, until `socket` takes bytes again.
///
/// # Errors
/// The error of poll(2).
pub fn wait_writable(socket: impl AsFd, deadline: Instant) -> io::Result<bool> {
    wait(socket, PollFlags::OUT, deadline)
}

fn wait(socket: impl AsFd, events: PollFlags, deadline: Instant) -> io::Result<bool> {
    let mut entries = [PollFd::new(&socket, events)];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match rustix::event::poll(&mut entries, Some(&timespec(left))) {
            Ok(0) if Instant::now() >= deadline => return Ok(false),
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(true),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Makes the kernel notice a dead peer; see [`Liveness`].
///
/// # Errors
/// The error of setsockopt(2); the options set before the one that failed stay set.
pub fn set_liveness(socket: impl AsFd, liveness: &Liveness) -> io::Result<()> {
    let second = Duration::from_secs(1);
    let timeout = u32::try_from(liveness.user_timeout.as_millis()).unwrap_or(u32::MAX);
    sockopt::set_socket_keepalive(&socket, true)?;
    sockopt::set_tcp_keepidle(&socket, liveness.keepalive_idle.max(second))?;
    sockopt::set_tcp_keepintvl(&socket, liveness.keepalive_interval.max(second))?;
    sockopt::set_tcp_keepcnt(&socket, liveness.keepalive_probes.into())?;
    // The kernel's number is signed.
    sockopt::set_tcp_user_timeout(&socket, timeout.min(i32::MAX.unsigned_abs()))?;
    Ok(())
}

/// Caps what the kernel sends on this connection, in bytes per second; `None` lifts the cap
/// (`SO_MAX_PACING_RATE`, socket(7)).
///
/// # Errors
/// The error of setsockopt(2).
pub fn set_pacing_rate(socket: impl AsFd, bytes_per_second: Option<u64>) -> io::Result<()> {
    // The kernel keeps an unsigned long and reads all ones as "no limit" (net/core/sock.c).
    let rate = bytes_per_second.unwrap_or(u64::MAX).to_ne_bytes();
    option::set(socket, libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE, &rate)
}

/// Asks for socket buffers of the given sizes in bytes. A direction left `None` keeps the
/// kernel's own tuning, which a fixed size switches off; the system's limits
/// (`net.core.wmem_max`, `rmem_max`) cut what is asked for without an error.
///
/// # Errors
/// The error of setsockopt(2).
pub fn set_buffers(
    socket: impl AsFd,
    send_bytes: Option<u32>,
    receive_bytes: Option<u32>,
) -> io::Result<()> {
    // The kernel's number is signed.
    let size = |bytes: u32| bytes.min(i32::MAX.unsigned_abs()) as usize;
    if let Some(bytes) = send_bytes {
        sockopt::set_socket_send_buffer_size(&socket, size(bytes))?;
    }
    if let Some(bytes) = receive_bytes {
        sockopt::set_socket_recv_buffer_size(&socket, size(bytes))?;
    }
    Ok(())
}

/// Counts a socket as readable only when it has so many bytes, its end or an error
/// (`SO_RCVLOWAT`, socket(7)): a reader that left the first bytes in place is not woken for them
/// again. The kernel may report earlier where its buffers are short; it makes room for the bytes up
/// to its own limit. One, the value of a new socket, is any byte.
///
/// # Errors
/// The error of setsockopt(2).
pub fn set_readable_from(socket: impl AsFd, bytes: u32) -> io::Result<()> {
    let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
    option::set_int(socket, libc::SOL_SOCKET, libc::SO_RCVLOWAT, bytes)
}

/// Lets the connection end with a reset when its last descriptor is closed: what has not been
/// sent is dropped, and the peer reads an error and no end (`SO_LINGER` of zero seconds,
/// socket(7)).
///
/// # Errors
/// The error of setsockopt(2).
pub fn set_reset_on_close(socket: impl AsFd) -> io::Result<()> {
    Ok(sockopt::set_socket_linger(socket, Some(Duration::ZERO))?)
}

/// Whether a process has the unix socket at `path`, of whatever kind. That process does not hear
/// of it: a datagram socket is connected, which one for streams refuses unseen (unix(7)).
///
/// # Errors
/// `NotFound`, and what else connect(2) says of a path.
pub fn is_held(path: &Path) -> io::Result<bool> {
    match UnixDatagram::unbound()?.connect(path) {
        Ok(()) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::EPROTOTYPE) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(false),
        Err(error) => Err(error),
    }
}

/// The user of the process at the other end of a unix socket, as which it connected or listened
/// (`SO_PEERCRED`, unix(7)).
///
/// # Errors
/// The error of getsockopt(2).
pub fn peer_user(stream: &UnixStream) -> io::Result<u32> {
    // Not by `rustix`, whose process id is never zero: the kernel's is where the peer's process is
    // outside this one's process namespace.
    let (credentials, _) =
        option::get::<{ size_of::<libc::ucred>() }>(stream, libc::SOL_SOCKET, libc::SO_PEERCRED)?;
    Ok(option::number(&credentials, offset_of!(libc::ucred, uid)))
}

/// The user as which this process acts.
pub fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Whether `socket` listens for connections (`SO_ACCEPTCONN`, socket(7)).
///
/// # Errors
/// `ENOTSOCK` where it is not a socket.
pub fn is_listening(socket: impl AsFd) -> io::Result<bool> {
    Ok(sockopt::socket_acceptconn(socket)?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;
    use std::net::{Shutdown, TcpListener};

    use dunlin_test_base::Scratch;

    use super::*;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near, listener.accept().unwrap().0)
    }

    #[test]
    fn a_listener_is_told_from_a_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(is_listening(&listener).unwrap());
        let (near, _far) = pair();
        assert!(!is_listening(&near).unwrap());
        assert!(is_listening(std::fs::File::open("/dev/null").unwrap()).is_err());
    }

    #[test]
    fn who_has_a_unix_socket_is_found_out_unseen() {
        let folder = Scratch::new();
        let path = folder.join("socket");
        assert_eq!(is_held(&path).unwrap_err().kind(), io::ErrorKind::NotFound);
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert!(is_held(&path).unwrap());
        listener.set_nonblocking(true).unwrap();
        assert!(listener.accept().is_err());
        drop(listener);
        assert!(!is_held(&path).unwrap());
        let (near, _far) = UnixStream::pair().unwrap();
        assert_eq!(peer_user(&near).unwrap(), own_user());
    }

    #[test]
    fn a_unix_listener_with_a_full_backlog_is_waited_for_until_the_deadline() {
        let scratch = Scratch::new();
        let path = scratch.join("socket");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let brief = || Instant::now() + Duration::from_millis(50);
        let mut waiting = Vec::new();
        let error = loop {
            assert!(waiting.len() < 10_000, "the backlog has no end");
            match connect_unix(&path, brief()) {
                Ok(stream) => waiting.push(stream),
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let (waker, stop) = crate::poll::waker().unwrap();
        waker.wake();
        let error = connect_unix_unless(&path, Instant::now() + Duration::from_secs(60), &stop);
        assert_eq!(error.unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
        listener.accept().unwrap();
        connect_unix(&path, brief()).unwrap();
    }

    #[test]
    fn a_path_that_is_no_socket_s_is_refused_at_once() {
        let scratch = Scratch::new();
        let soon = || Instant::now() + Duration::from_secs(5);
        let kind = |path: &Path| connect_unix(path, soon()).unwrap_err().kind();
        assert_eq!(kind(&scratch.join("none")), io::ErrorKind::NotFound);
        let long = scratch.join("x".repeat(108));
        assert_eq!(kind(&long), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn unread_bytes_are_counted_on_both_kinds_of_stream() {
        let (near, mut far) = UnixStream::pair().unwrap();
        assert_eq!(unread_bytes(&near).unwrap(), 0);
        for part in [&b"abc"[..], b"de"] {
            far.write_all(part).unwrap();
        }
        assert_eq!(unread_bytes(&near).unwrap(), 5);
        let (near, mut far) = pair();
        far.write_all(b"abc").unwrap();
        wait_readable(&near, Instant::now() + Duration::from_secs(5)).unwrap();
        assert_eq!(unread_bytes(&near).unwrap(), 3);
    }

    #[test]
    fn a_full_socket_takes_bytes_again_when_some_were_read() {
        let (near, mut far) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        let brief = || Instant::now() + Duration::from_millis(20);
        assert!(wait_writable(&near, brief()).unwrap());
        let chunk = [0; 4096];
        let mut written = 0;
        while let Ok(count) = (&near).write(&chunk) {
            written += count;
        }
        assert!(!wait_writable(&near, brief()).unwrap());
        let mut all = vec![0; written];
        std::io::Read::read_exact(&mut far, &mut all).unwrap();
        assert!(wait_writable(&near, brief()).unwrap());
    }

    #[test]
    fn a_wait_ends_at_its_deadline_at_a_byte_and_at_a_shutdown() {
        let (near, mut far) = pair();
        let begin = Instant::now();
        assert!(!wait_readable(&near, begin + Duration::from_millis(30)).unwrap());
        assert!(begin.elapsed() >= Duration::from_millis(30));
        far.write_all(b"x").unwrap();
        assert!(wait_readable(&near, Instant::now() + Duration::from_secs(5)).unwrap());

        let other = far.try_clone().unwrap();
        let waker = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(30));
            other.shutdown(Shutdown::Both).unwrap();
        });
        assert!(wait_readable(&far, Instant::now() + Duration::from_secs(5)).unwrap());
        waker.join().unwrap();
    }

    #[test]
    fn connecting_ends_when_it_is_stopped_and_tells_a_refusal_from_a_connection() {
        use std::io::Read;

        let soon = || Instant::now() + Duration::from_secs(5);
        for address in ["127.0.0.1:0", "[::1]:0"] {
            // A machine without IPv6 has nothing to listen on.
            let Ok(listener) = TcpListener::bind(address) else {
                continue;
            };
            let to = listener.local_addr().unwrap();
            let (waker, stop) = crate::poll::waker().unwrap();
            let mut near = connect_unless(to, soon(), &stop).unwrap();
            let mut far = listener.accept().unwrap().0;
            far.write_all(b"x").unwrap();
            // It blocks again.
            near.read_exact(&mut [0]).unwrap();
            waker.wake();
            let error = connect_unless(to, soon(), &stop).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
            stop.clear();
            drop(listener);
            let error = connect_unless(to, soon(), &stop).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        }
    }

    #[test]
    fn options_reach_the_kernel() {
        let (near, _far) = pair();
        set_liveness(&near, &Liveness::default()).unwrap();
        set_buffers(&near, Some(64 << 10), Some(32 << 10)).unwrap();
        // The kernel accounts for twice as much (socket(7)).
        assert_eq!(sockopt::socket_send_buffer_size(&near).unwrap(), 128 << 10);
        assert_eq!(sockopt::socket_recv_buffer_size(&near).unwrap(), 64 << 10);
        set_pacing_rate(&near, Some(1 << 20)).unwrap();
        set_pacing_rate(&near, None).unwrap();
    }

    #[test]
    fn a_socket_counts_as_readable_when_it_has_what_was_asked_for() {
        let (near, mut far) = pair();
        let brief = || Instant::now() + Duration::from_millis(30);
        set_readable_from(&near, 5).unwrap();
        far.write_all(b"four").unwrap();
        assert!(!wait_readable(&near, brief()).unwrap());
        near.set_nonblocking(true).unwrap();
        assert_eq!(near.peek(&mut [0; 8]).unwrap(), 4);
        far.write_all(b"5").unwrap();
        assert!(wait_readable(&near, Instant::now() + Duration::from_secs(5)).unwrap());
        set_readable_from(&near, 6).unwrap();
        assert!(!wait_readable(&near, brief()).unwrap());
        // An end is one however little there is.
        drop(far);
        assert!(wait_readable(&near, Instant::now() + Duration::from_secs(5)).unwrap());
    }

    #[test]
    fn a_connection_comes_from_the_port_that_it_was_given_which_then_is_taken() {
        for any in ["127.0.0.1:0", "[::1]:0"] {
            // A machine without IPv6 has nothing to listen on.
            let Ok(listener) = TcpListener::bind(any) else {
                continue;
            };
            let to = listener.local_addr().unwrap();
            let free = TcpListener::bind(any).unwrap();
            let from = free.local_addr().unwrap();
            drop(free);
            let (_waker, stop) = crate::poll::waker().unwrap();
            let until = Instant::now() + Duration::from_secs(60);
            let near = connect_from_unless(from, to, until, &stop).unwrap();
            assert_eq!(listener.accept().unwrap().1, from);
            assert_eq!(near.local_addr().unwrap(), from);
            let error = connect_from_unless(from, to, until, &stop).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        }
    }

    #[test]
    fn a_connection_that_is_reset_ends_with_an_error_and_without_what_was_under_way() {
        let (near, mut far) = pair();
        set_reset_on_close(&near).unwrap();
        drop(near);
        let error = std::io::Read::read(&mut far, &mut [0]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    }

    #[test]
    fn a_deadline_that_has_passed_is_an_error_and_not_an_endless_wait() {
        let error = remaining(Instant::now()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
