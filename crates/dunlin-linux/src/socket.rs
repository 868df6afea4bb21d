//! TCP sockets as lanes need them: connections with a deadline, waits with a deadline, and the
//! options that the standard library leaves out.
//!
//! Options are set through [`std::os::fd::AsFd`], so they serve a stream, a listener or a socket
//! that was handed over. Every function returns the kernel's own error.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use crate::poll::{Interest, Wakeup, poll};

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

/// Connects to `address` before `deadline`.
///
/// # Errors
/// `TimedOut` when the deadline passes, otherwise what connect(2) says.
pub fn connect(address: SocketAddr, deadline: Instant) -> io::Result<TcpStream> {
    TcpStream::connect_timeout(&address, remaining(deadline)?)
}

/// The same, unless `stop` is woken before.
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

/// Whether `stop` has been woken.
///
/// # Errors
/// What poll(2) says.
pub fn is_woken(stop: &Wakeup) -> io::Result<bool> {
    let stopped = Interest {
        fd: stop.as_fd(),
        read: true,
        write: false,
    };
    Ok(poll(&[stopped], Some(Duration::ZERO))?[0])
}

fn finish_connect(stream: TcpStream, deadline: Instant, stop: &Wakeup) -> io::Result<TcpStream> {
    loop {
        let left = remaining(deadline)?;
        let connected = Interest {
            fd: stream.as_fd(),
            read: false,
            write: true,
        };
        let stopped = Interest {
            fd: stop.as_fd(),
            read: true,
            write: false,
        };
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
    let domain = match address {
        SocketAddr::V4(_) => libc::AF_INET,
        SocketAddr::V6(_) => libc::AF_INET6,
    };
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: socket(2) takes no pointers.
    let descriptor = unsafe { libc::socket(domain, kind, 0) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just handed out `descriptor`, and nobody else has it.
    let stream = TcpStream::from(unsafe { OwnedFd::from_raw_fd(descriptor) });
    if let Some(local) = local
        && name(&stream, local, libc::bind) != 0
    {
        return Err(io::Error::last_os_error());
    }
    if name(&stream, address, libc::connect) == 0 {
        return Ok(stream);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        // It goes on in the kernel, also after a signal (connect(2)).
        Some(libc::EINPROGRESS | libc::EINTR) => Ok(stream),
        _ => Err(error),
    }
}

/// bind(2) or connect(2).
type Name =
    unsafe extern "C" fn(libc::c_int, *const libc::sockaddr, libc::socklen_t) -> libc::c_int;

fn name(stream: &TcpStream, address: SocketAddr, call: Name) -> libc::c_int {
    match address {
        SocketAddr::V4(address) => {
            let name = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: address.port().to_be(),
                sin_addr: libc::in_addr {
                    s_addr: u32::from_ne_bytes(address.ip().octets()),
                },
                sin_zero: [0; 8],
            };
            let length = size_of_val(&name) as libc::socklen_t;
            // SAFETY: `name` is an initialised address of `length` bytes that lives through the
            // call, which only reads it; the descriptor is open while `stream` lives. `call` is
            // bind(2) or connect(2), which take the same.
            unsafe { call(stream.as_raw_fd(), (&raw const name).cast(), length) }
        }
        SocketAddr::V6(address) => {
            let name = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: address.port().to_be(),
                sin6_flowinfo: address.flowinfo(),
                sin6_addr: libc::in6_addr {
                    s6_addr: address.ip().octets(),
                },
                sin6_scope_id: address.scope_id(),
            };
            let length = size_of_val(&name) as libc::socklen_t;
            // SAFETY: as above.
            unsafe { call(stream.as_raw_fd(), (&raw const name).cast(), length) }
        }
    }
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
        let stopped = Interest {
            fd: stop.as_fd(),
            read: true,
            write: false,
        };
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
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: socket(2) takes no pointers.
    let descriptor = unsafe { libc::socket(libc::AF_UNIX, kind, 0) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just handed out `descriptor`, and nobody else has it.
    let stream = UnixStream::from(unsafe { OwnedFd::from_raw_fd(descriptor) });
    let mut name = libc::sockaddr_un {
        sun_family: libc::AF_UNIX as libc::sa_family_t,
        sun_path: [0; 108],
    };
    let bytes = path.as_os_str().as_bytes();
    if bytes.len() >= name.sun_path.len() || bytes.contains(&0) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (slot, &byte) in name.sun_path.iter_mut().zip(bytes) {
        *slot = byte as libc::c_char;
    }
    let length = size_of_val(&name) as libc::socklen_t;
    loop {
        // SAFETY: `name` is an initialised address of `length` bytes that lives through the
        // call, which only reads it; the descriptor is open while `stream` lives.
        let status = unsafe { libc::connect(stream.as_raw_fd(), (&raw const name).cast(), length) };
        if status == 0 {
            return Ok(stream);
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EAGAIN) => wait()?,
            Some(libc::EINTR) => {}
            _ => return Err(error),
        }
    }
}

/// How many bytes can be read from `socket` now (`FIONREAD`, tcp(7) and unix(7)).
///
/// # Errors
/// What ioctl(2) says.
pub fn unread_bytes(socket: impl AsFd) -> io::Result<u64> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: FIONREAD writes one int, for which `bytes` is valid; the descriptor is borrowed.
    let status = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), libc::FIONREAD, &raw mut bytes) };
    if status < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(u64::try_from(bytes).unwrap_or(0))
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
/// What poll(2) says.
pub fn wait_readable(socket: impl AsFd, deadline: Instant) -> io::Result<bool> {
    wait(socket.as_fd(), libc::POLLIN, deadline)
}

/// The same, until `socket` takes bytes again.
///
/// # Errors
/// What poll(2) says.
pub fn wait_writable(socket: impl AsFd, deadline: Instant) -> io::Result<bool> {
    wait(socket.as_fd(), libc::POLLOUT, deadline)
}

fn wait(socket: BorrowedFd<'_>, events: libc::c_short, deadline: Instant) -> io::Result<bool> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        // Rounded up, so that the last fraction of a millisecond is waited for and not spun on.
        let milliseconds = i32::try_from(left.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX);
        let mut entry = libc::pollfd {
            fd: socket.as_raw_fd(),
            events,
            revents: 0,
        };
        // SAFETY: `entry` is one initialised pollfd that lives through the call, and the count
        // passed is one; its descriptor is open because `socket` is borrowed.
        let ready = unsafe { libc::poll(&raw mut entry, 1, milliseconds) };
        match ready {
            1 => return Ok(true),
            0 if Instant::now() >= deadline => return Ok(false),
            0 => {}
            _ => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
}

/// Makes the kernel notice a dead peer; see [`Liveness`].
///
/// # Errors
/// What setsockopt(2) says; the options set before the one that failed stay set.
pub fn set_liveness(socket: impl AsFd, liveness: &Liveness) -> io::Result<()> {
    let socket = socket.as_fd();
    let seconds = |time: Duration| int(time.as_secs().max(1));
    set(socket, libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1)?;
    set(
        socket,
        libc::IPPROTO_TCP,
        libc::TCP_KEEPIDLE,
        seconds(liveness.keepalive_idle),
    )?;
    set(
        socket,
        libc::IPPROTO_TCP,
        libc::TCP_KEEPINTVL,
        seconds(liveness.keepalive_interval),
    )?;
    set(
        socket,
        libc::IPPROTO_TCP,
        libc::TCP_KEEPCNT,
        i32::from(liveness.keepalive_probes),
    )?;
    let milliseconds = int(u64::try_from(liveness.user_timeout.as_millis()).unwrap_or(u64::MAX));
    set(
        socket,
        libc::IPPROTO_TCP,
        libc::TCP_USER_TIMEOUT,
        milliseconds,
    )
}

/// Caps what the kernel sends on this connection, in bytes per second; `None` lifts the cap
/// (`SO_MAX_PACING_RATE`, socket(7)).
///
/// # Errors
/// What setsockopt(2) says.
pub fn set_pacing_rate(socket: impl AsFd, bytes_per_second: Option<u64>) -> io::Result<()> {
    // The kernel keeps an unsigned long and reads all ones as "no limit" (net/core/sock.c).
    set(
        socket.as_fd(),
        libc::SOL_SOCKET,
        libc::SO_MAX_PACING_RATE,
        bytes_per_second.unwrap_or(u64::MAX),
    )
}

/// Asks for socket buffers of the given sizes in bytes. A direction left `None` keeps the
/// kernel's own tuning, which a fixed size switches off; the system's limits
/// (`net.core.wmem_max`, `rmem_max`) cut what is asked for without an error.
///
/// # Errors
/// What setsockopt(2) says.
pub fn set_buffers(
    socket: impl AsFd,
    send_bytes: Option<u32>,
    receive_bytes: Option<u32>,
) -> io::Result<()> {
    let socket = socket.as_fd();
    if let Some(bytes) = send_bytes {
        set(socket, libc::SOL_SOCKET, libc::SO_SNDBUF, int(bytes.into()))?;
    }
    if let Some(bytes) = receive_bytes {
        set(socket, libc::SOL_SOCKET, libc::SO_RCVBUF, int(bytes.into()))?;
    }
    Ok(())
}

/// Counts a socket as readable only when it has so many bytes, its end or an error
/// (`SO_RCVLOWAT`, socket(7)): whoever has looked at what is there, and left it, is not woken for
/// what he has seen. It is the kernel's to say so earlier where its buffers are short; it makes
/// room for the bytes up to its own limit. One, as a socket begins with, is any byte.
///
/// # Errors
/// What setsockopt(2) says.
pub fn set_readable_from(socket: impl AsFd, bytes: u32) -> io::Result<()> {
    let bytes = int(bytes.into());
    set(socket.as_fd(), libc::SOL_SOCKET, libc::SO_RCVLOWAT, bytes)
}

/// Lets the connection end with a reset when its last descriptor is closed: what has not been
/// sent is dropped, and the peer reads an error and no end (`SO_LINGER` of zero seconds,
/// socket(7)).
///
/// # Errors
/// What setsockopt(2) says.
pub fn set_reset_on_close(socket: impl AsFd) -> io::Result<()> {
    // struct linger: whether to linger, and for how many seconds.
    set(socket.as_fd(), libc::SOL_SOCKET, libc::SO_LINGER, [1, 0])
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
/// What getsockopt(2) says.
pub fn peer_user(stream: &UnixStream) -> io::Result<u32> {
    // SAFETY: `ucred` consists of integers alone, for which all zeroes are valid.
    let mut user: libc::ucred = unsafe { std::mem::zeroed() };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `user` and `length` are initialised, live through the call and are borrowed
    // exclusively; `length` states the room at `user`, beyond which the kernel does not write.
    let status = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut user).cast(),
            &raw mut length,
        )
    };
    match status {
        0 => Ok(user.uid),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The user as which this process acts.
pub fn own_user() -> u32 {
    // SAFETY: takes nothing and always succeeds.
    unsafe { libc::geteuid() }
}

/// Whether `socket` listens for connections (`SO_ACCEPTCONN`, socket(7)).
///
/// # Errors
/// `ENOTSOCK` where it is no socket at all.
pub fn is_listening(socket: impl AsFd) -> io::Result<bool> {
    Ok(get(socket.as_fd(), libc::SO_ACCEPTCONN)? != 0)
}

/// The send and receive buffer in bytes as the kernel accounts them, which is twice what was
/// asked for (socket(7)).
///
/// # Errors
/// What getsockopt(2) says.
pub fn buffers(socket: impl AsFd) -> io::Result<(u32, u32)> {
    let socket = socket.as_fd();
    Ok((get(socket, libc::SO_SNDBUF)?, get(socket, libc::SO_RCVBUF)?))
}

fn int(value: u64) -> i32 {
    i32::try_from(value).unwrap_or(i32::MAX)
}

/// What setsockopt takes by address. Private: [`set`] relies on these being plain integers
/// without padding.
trait Number: Copy {}
impl Number for i32 {}
impl Number for u64 {}
impl Number for [i32; 2] {}

fn set<T: Number>(socket: BorrowedFd<'_>, level: i32, name: i32, value: T) -> io::Result<()> {
    // SAFETY: the pointer and the length describe `value`, initialised integers that live
    // through the call, and the kernel only reads it; the descriptor is open while borrowed.
    let status = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            name,
            (&raw const value).cast(),
            size_of::<T>() as libc::socklen_t,
        )
    };
    if status == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

fn get(socket: BorrowedFd<'_>, name: i32) -> io::Result<u32> {
    let mut value: i32 = 0;
    let mut length = size_of::<i32>() as libc::socklen_t;
    // SAFETY: `value` and `length` are initialised, live through the call and are borrowed
    // exclusively; `length` states the room at `value`, beyond which the kernel does not write.
    let status = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            name,
            (&raw mut value).cast(),
            &raw mut length,
        )
    };
    if status == 0 {
        Ok(value.unsigned_abs())
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;
    use std::net::{Shutdown, TcpListener};

    use dunlin_scratch::Scratch;

    use super::*;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = connect(
            listener.local_addr().unwrap(),
            Instant::now() + Duration::from_secs(5),
        )
        .unwrap();
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
        assert_eq!(buffers(&near).unwrap(), (128 << 10, 64 << 10));
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
            let (waker, stop) = crate::poll::waker().unwrap();
            let until = Instant::now() + Duration::from_secs(60);
            let near = connect_from_unless(from, to, until, &stop).unwrap();
            assert_eq!(listener.accept().unwrap().1, from);
            assert_eq!(near.local_addr().unwrap(), from);
            let error = connect_from_unless(from, to, until, &stop).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
            assert!(!is_woken(&stop).unwrap());
            waker.wake();
            assert!(is_woken(&stop).unwrap());
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
