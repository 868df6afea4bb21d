//! TCP and unix sockets for lanes: connecting and waiting with a deadline, and socket options that
//! the standard library lacks.
//!
//! The functions that take [`std::os::fd::AsFd`] accept a stream, a listener or a passed socket.

use std::io;
use std::mem::offset_of;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use crate::option;
use crate::poll::{Interest, Wakeup, poll};

/// How the kernel detects that a connection's peer has failed.
///
/// After `keepalive_idle` without traffic the kernel sends a probe every `keepalive_interval`;
/// `keepalive_probes` unanswered probes end the connection. Keep-alive does not apply while data is
/// unacknowledged; in that case `user_timeout` ends the connection (tcp(7), RFC 5482).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Liveness {
    /// Time without traffic before the first probe; whole seconds, at least one.
    pub keepalive_idle: Duration,
    /// Time between probes; whole seconds, at least one.
    pub keepalive_interval: Duration,
    /// The number of unanswered probes that end the connection.
    pub keepalive_probes: u8,
    /// The longest time that sent data may stay unacknowledged, or that the peer's window may stay
    /// closed; whole milliseconds. Zero is the system's default.
    pub user_timeout: Duration,
}

impl Default for Liveness {
    /// Detects a failed peer within about 15 seconds, on idle and on busy connections.
    fn default() -> Self {
        Self {
            keepalive_idle: Duration::from_secs(5),
            keepalive_interval: Duration::from_secs(2),
            keepalive_probes: 5,
            user_timeout: Duration::from_secs(15),
        }
    }
}

/// Connects to `address`, from the local address and port `local` if given; gives up at `deadline`
/// or when `stop` is woken.
///
/// # Errors
/// `TimedOut` after the deadline, `ConnectionAborted` if `stop` was woken, `AddrInUse` if another
/// socket uses the local port; otherwise an error from socket(2), bind(2) or connect(2).
pub fn connect(
    local: Option<SocketAddr>,
    address: SocketAddr,
    deadline: Instant,
    stop: &Wakeup,
) -> io::Result<TcpStream> {
    let stream = TcpStream::from(stream_socket(match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    })?);
    if let Some(local) = local {
        rustix::net::bind(&stream, &local)?;
    }
    match rustix::net::connect(&stream, &address) {
        // The kernel continues to connect, also after a signal (connect(2)).
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    loop {
        let interests = [Interest::write(&stream), Interest::read(stop)];
        let ready = poll(&interests, Some(remaining(deadline)?))?;
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

/// Sends as many of `bytes` as the send buffer has space for, without waiting. Returns how many.
///
/// # Errors
/// `WouldBlock` if the send buffer is full; otherwise an error from send(2).
pub fn send_now(socket: impl AsFd, bytes: &[u8]) -> io::Result<usize> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    Ok(rustix::net::send(socket, bytes, flags)?)
}

/// A stream socket in non-blocking mode.
fn stream_socket(family: AddressFamily) -> io::Result<OwnedFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    Ok(socket)
}

/// The interval between attempts to connect to a listener with a full backlog.
const BACKLOG_STEP: Duration = Duration::from_millis(10);

/// Connects to the unix socket at `path`; gives up at `deadline` or when `stop` is woken. While the
/// listener's backlog is full, the function tries again, because a blocking connect(2) would wait
/// without a deadline. The stream is in non-blocking mode.
///
/// # Errors
/// `TimedOut` if the backlog stays full, `ConnectionAborted` if `stop` was woken while it is full,
/// `InvalidInput` if the path is too long; otherwise an error from socket(2) or connect(2).
pub fn connect_unix(path: &Path, deadline: Instant, stop: &Wakeup) -> io::Result<UnixStream> {
    let stream = UnixStream::from(stream_socket(AddressFamily::UNIX)?);
    let address = SocketAddrUnix::new(path).map_err(|_| io::ErrorKind::InvalidInput)?;
    loop {
        match rustix::net::connect(&stream, &address) {
            Ok(()) => return Ok(stream),
            Err(Errno::AGAIN) => {
                let step = BACKLOG_STEP.min(remaining(deadline)?);
                if poll(&[Interest::read(stop)], Some(step))?[0] {
                    return Err(io::ErrorKind::ConnectionAborted.into());
                }
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// The number of bytes that can be read from `socket` now (`FIONREAD`, tcp(7) and unix(7)).
///
/// # Errors
/// An error from ioctl(2).
pub fn unread_bytes(socket: impl AsFd) -> io::Result<u64> {
    Ok(rustix::io::ioctl_fionread(socket)?)
}

/// The memory in bytes that `socket` may still use for bytes to send before a send waits
/// (`SO_MEMINFO`, socket(7)). A byte takes more than one byte of it, because the kernel counts the
/// memory of its buffers.
///
/// # Errors
/// An error from getsockopt(2).
pub fn send_space(socket: impl AsFd) -> io::Result<usize> {
    /// Positions of numbers in the option's value, from linux/sock_diag.h.
    const SNDBUF: usize = 3;
    const WMEM_QUEUED: usize = 5;
    let (value, _) = option::get::<{ 9 * 4 }>(socket, libc::SOL_SOCKET, libc::SO_MEMINFO)?;
    let (numbers, _) = value.as_chunks();
    let number = |at: usize| u32::from_ne_bytes(numbers[at]);
    Ok(number(SNDBUF).saturating_sub(number(WMEM_QUEUED)) as usize)
}

/// The time left until `deadline`.
///
/// # Errors
/// `TimedOut` if no time is left. Zero is never returned, because a socket treats a timeout of zero
/// as unlimited.
pub fn remaining(deadline: Instant) -> io::Result<Duration> {
    deadline
        .checked_duration_since(Instant::now())
        .filter(|left| !left.is_zero())
        .ok_or_else(|| io::Error::from(io::ErrorKind::TimedOut))
}

/// Waits until `socket` is readable, has reached its end or has failed; returns `false` after
/// `deadline`. A socket that another thread shuts down is readable.
///
/// # Errors
/// An error from poll(2).
pub fn wait_readable(socket: impl AsFd, deadline: Instant) -> io::Result<bool> {
    wait(Interest::read(&socket), deadline)
}

/// Waits until `socket` is writable or failed; returns `false` after `deadline`.
///
/// # Errors
/// An error from poll(2).
pub fn wait_writable(socket: impl AsFd, deadline: Instant) -> io::Result<bool> {
    wait(Interest::write(&socket), deadline)
}

fn wait(interest: Interest<'_>, deadline: Instant) -> io::Result<bool> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match poll(&[interest], Some(left))?[0] {
            false if !left.is_zero() => {}
            ready => return Ok(ready),
        }
    }
}

/// Makes the kernel detect a failed peer; see [`Liveness`].
///
/// # Errors
/// An error from setsockopt(2); options set before the error remain set.
pub fn set_liveness(socket: impl AsFd, liveness: &Liveness) -> io::Result<()> {
    let second = Duration::from_secs(1);
    let timeout = u32::try_from(liveness.user_timeout.as_millis()).unwrap_or(u32::MAX);
    sockopt::set_socket_keepalive(&socket, true)?;
    sockopt::set_tcp_keepidle(&socket, liveness.keepalive_idle.max(second))?;
    sockopt::set_tcp_keepintvl(&socket, liveness.keepalive_interval.max(second))?;
    sockopt::set_tcp_keepcnt(&socket, liveness.keepalive_probes.into())?;
    // The kernel reads the value as a signed number, and rejects negative ones.
    sockopt::set_tcp_user_timeout(&socket, timeout.min(i32::MAX.unsigned_abs()))?;
    Ok(())
}

/// Sets how many connections may wait at a listening socket until they are accepted.
///
/// # Errors
/// An error from listen(2).
pub fn limit_queue(listener: impl AsFd, connections: i32) -> io::Result<()> {
    Ok(rustix::net::listen(listener, connections)?)
}

/// Limits the rate at which the kernel sends on this connection, in bytes per second; `None`
/// removes the limit (`SO_MAX_PACING_RATE`, tc-fq(8)).
///
/// # Errors
/// An error from setsockopt(2).
pub fn set_pacing_rate(socket: impl AsFd, bytes_per_second: Option<u64>) -> io::Result<()> {
    // The kernel stores an unsigned long, in which all bits set mean "no limit" (net/core/sock.c).
    let rate = bytes_per_second.unwrap_or(u64::MAX).to_ne_bytes();
    option::set(socket, libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE, &rate)
}

/// Sets the sizes of the socket's buffers in bytes. A fixed size disables the kernel's auto-tuning
/// for that direction; `None` leaves the size and the auto-tuning unchanged. The kernel reduces a
/// size to the system's limit (`net.core.wmem_max`, `rmem_max`) without an error.
///
/// # Errors
/// An error from setsockopt(2).
pub fn set_buffers(
    socket: impl AsFd,
    send_bytes: Option<u32>,
    receive_bytes: Option<u32>,
) -> io::Result<()> {
    // The option is an `int`, and `rustix` rejects a size that does not fit.
    let size = |bytes: u32| bytes.min(i32::MAX.unsigned_abs()) as usize;
    if let Some(bytes) = send_bytes {
        sockopt::set_socket_send_buffer_size(&socket, size(bytes))?;
    }
    if let Some(bytes) = receive_bytes {
        sockopt::set_socket_recv_buffer_size(&socket, size(bytes))?;
    }
    Ok(())
}

/// The largest packet in bytes that the kernel sends to the address of a connected socket now: the
/// MTU of the device on the route, or a lower MTU that a router on the path has reported (`IP_MTU`,
/// ip(7)).
///
/// # Errors
/// `ENOTCONN` if the socket is not connected; otherwise an error from getsockopt(2).
pub fn path_mtu(socket: impl AsFd) -> io::Result<u32> {
    let (level, name) = match sockopt::socket_domain(&socket)? {
        AddressFamily::INET6 => (libc::IPPROTO_IPV6, libc::IPV6_MTU),
        _ => (libc::IPPROTO_IP, libc::IP_MTU),
    };
    let (bytes, _) = option::get(socket, level, name)?;
    Ok(u32::from_ne_bytes(bytes))
}

/// Makes the kernel report a socket as readable only when it has at least `bytes` bytes, its end or
/// an error (`SO_RCVLOWAT`, socket(7)). A reader that leaves the first bytes unread is then not
/// woken for them again. The kernel enlarges the receive buffer to that size, up to the system's
/// limit. If buffer memory is short, the kernel may report the socket earlier. A new socket has the
/// value 1.
///
/// # Errors
/// An error from setsockopt(2).
pub fn set_readable_from(socket: impl AsFd, bytes: u32) -> io::Result<()> {
    let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
    option::set_int(socket, libc::SOL_SOCKET, libc::SO_RCVLOWAT, bytes)
}

/// Lets a TCP connection's receive window grow to `bytes` as data arrives, before the reader has read
/// any. By default it grows to 64 KiB, and further only as data is read. The kernel caps `bytes` at
/// half of the system's limit (`net.ipv4.tcp_rmem`), and ignores a value below the current size.
/// Unlike with [`set_buffers`], the kernel continues to tune the size.
///
/// # Errors
/// An error from setsockopt(2).
pub fn let_receive_window_grow(socket: impl AsFd, bytes: u32) -> io::Result<()> {
    // The buffer keeps the size that the option gave it (tcp_set_rcvlowat() in net/ipv4/tcp.c).
    set_readable_from(&socket, bytes)?;
    set_readable_from(&socket, 1)
}

/// Makes the connection end with a reset when its last descriptor is closed: unsent data is
/// dropped, and the peer reads an error instead of the end (`SO_LINGER` of zero seconds,
/// socket(7)).
///
/// # Errors
/// An error from setsockopt(2).
pub fn set_reset_on_close(socket: impl AsFd) -> io::Result<()> {
    Ok(sockopt::set_socket_linger(socket, Some(Duration::ZERO))?)
}

/// Whether a process has the unix socket at `path` open; the socket may be of any type. That
/// process does not notice the check. The function tries to connect a datagram socket to `path`. If
/// `path` is a stream socket, the kernel refuses without making a connection (unix(7)).
///
/// # Errors
/// An error from connect(2), such as `NotFound`.
pub fn is_held(path: &Path) -> io::Result<bool> {
    match UnixDatagram::unbound()?.connect(path) {
        Ok(()) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::EPROTOTYPE) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(false),
        Err(error) => Err(error),
    }
}

/// The user ID of the peer process of a unix socket, at the time when that process called
/// connect(2) or listen(2) (`SO_PEERCRED`, unix(7)).
///
/// # Errors
/// An error from getsockopt(2).
pub fn peer_user(stream: &UnixStream) -> io::Result<u32> {
    // `rustix` requires a non-zero process ID, but the kernel returns zero if the peer is outside
    // this process's PID namespace.
    let (credentials, _) =
        option::get::<{ size_of::<libc::ucred>() }>(stream, libc::SOL_SOCKET, libc::SO_PEERCRED)?;
    Ok(option::number(&credentials, offset_of!(libc::ucred, uid)))
}

/// The effective user ID of this process.
pub fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// The result of accept(2) on a listener in non-blocking mode.
#[derive(Debug)]
pub enum Accepted<T> {
    /// A connection.
    Connection(T),
    /// No connection was waiting, the waiting connection had already ended or failed with a network
    /// error, or a signal interrupted the call. Wait for the listener again.
    Nothing,
    /// Descriptors or memory ran out. Clients can cause this, so the shortage must not stop a
    /// listener (invariant I7).
    Shortage(io::Error),
    /// Any other error: the listener has failed.
    Failed(io::Error),
}

impl<T> From<io::Result<T>> for Accepted<T> {
    fn from(accepted: io::Result<T>) -> Self {
        match accepted {
            Ok(connection) => Self::Connection(connection),
            Err(error) => match error.raw_os_error() {
                Some(libc::EAGAIN | libc::ECONNABORTED | libc::EINTR) => Self::Nothing,
                // Errors of the new connection (accept(2), "Error handling").
                Some(
                    libc::ENETDOWN
                    | libc::EPROTO
                    | libc::ENOPROTOOPT
                    | libc::EHOSTDOWN
                    | libc::ENONET
                    | libc::EHOSTUNREACH
                    | libc::EOPNOTSUPP
                    | libc::ENETUNREACH,
                ) => Self::Nothing,
                Some(libc::ENOMEM | libc::ENFILE | libc::EMFILE | libc::ENOBUFS) => {
                    Self::Shortage(error)
                }
                _ => Self::Failed(error),
            },
        }
    }
}

/// Whether `socket` listens for connections (`SO_ACCEPTCONN`, socket(7)).
///
/// # Errors
/// `ENOTSOCK` if it is not a socket.
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

    #[test]
    fn the_mtu_towards_this_host_is_that_of_the_loopback_device() {
        let device = std::fs::read_to_string("/sys/class/net/lo/mtu").unwrap();
        let device: u32 = device.trim().parse().unwrap();
        let (near, _far) = pair();
        // The loopback device can have a larger MTU than IPv4 allows (65,535 bytes). In that case
        // the kernel returns the limit of IPv4.
        assert_eq!(path_mtu(&near).unwrap(), device.min(65535));
        let unconnected = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        assert!(path_mtu(&unconnected).is_err());
    }

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near, listener.accept().unwrap().0)
    }

    #[test]
    fn is_listening_distinguishes_a_listener_from_a_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(is_listening(&listener).unwrap());
        let (near, _far) = pair();
        assert!(!is_listening(&near).unwrap());
        assert!(is_listening(std::fs::File::open("/dev/null").unwrap()).is_err());
    }

    #[test]
    fn i7_only_an_error_of_the_listener_itself_is_a_failure() {
        let of = |error| Accepted::<()>::from(Err(io::Error::from_raw_os_error(error)));
        let passing = [libc::EAGAIN, libc::ECONNABORTED, libc::EINTR];
        let of_the_network = [
            libc::ENETDOWN,
            libc::EPROTO,
            libc::ENOPROTOOPT,
            libc::EHOSTDOWN,
            libc::ENONET,
            libc::EHOSTUNREACH,
            libc::EOPNOTSUPP,
            libc::ENETUNREACH,
        ];
        for passing in passing.into_iter().chain(of_the_network) {
            assert!(matches!(of(passing), Accepted::Nothing), "{passing}");
        }
        for short in [libc::ENOMEM, libc::ENFILE, libc::EMFILE, libc::ENOBUFS] {
            assert!(matches!(of(short), Accepted::Shortage(_)), "{short}");
        }
        assert!(matches!(of(libc::EINVAL), Accepted::Failed(_)));
    }

    #[test]
    fn is_held_finds_the_owner_of_a_unix_socket_without_connecting() {
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
    fn connect_unix_waits_for_a_full_backlog_until_the_deadline() {
        let scratch = Scratch::new();
        let path = scratch.join("socket");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let brief = || Instant::now() + Duration::from_millis(50);
        let (waker, stop) = crate::poll::waker().unwrap();
        let mut waiting = Vec::new();
        let error = loop {
            assert!(waiting.len() < 10_000, "the backlog has no end");
            match connect_unix(&path, brief(), &stop) {
                Ok(stream) => waiting.push(stream),
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        waker.wake();
        let error = connect_unix(&path, Instant::now() + Duration::from_secs(60), &stop);
        assert_eq!(error.unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
        listener.accept().unwrap();
        connect_unix(&path, brief(), &stop).unwrap();
    }

    #[test]
    fn a_path_without_a_socket_fails_at_once() {
        let scratch = Scratch::new();
        let (_waker, stop) = crate::poll::waker().unwrap();
        let soon = || Instant::now() + Duration::from_secs(5);
        let kind = |path: &Path| connect_unix(path, soon(), &stop).unwrap_err().kind();
        assert_eq!(kind(&scratch.join("none")), io::ErrorKind::NotFound);
        let long = scratch.join("x".repeat(108));
        assert_eq!(kind(&long), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn a_socket_has_space_until_a_send_would_wait() {
        let (mut near, _far) = pair();
        assert!(send_space(&near).unwrap() > 0);
        near.set_nonblocking(true).unwrap();
        let part = [0; 64 << 10];
        let until = Instant::now() + Duration::from_secs(5);
        // The kernel may enlarge the buffer while it is being filled.
        while send_space(&near).unwrap() > 0 {
            while near.write(&part).is_ok() {}
            assert!(Instant::now() < until, "{:?}", send_space(&near));
        }
    }

    #[test]
    fn unread_bytes_are_counted_on_tcp_and_unix_streams() {
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
    fn a_full_socket_becomes_writable_when_the_peer_reads() {
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
    fn a_wait_ends_at_the_deadline_a_byte_or_a_shutdown() {
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
    fn connecting_reports_a_stop_and_a_refused_connection() {
        use std::io::Read;

        let soon = || Instant::now() + Duration::from_secs(5);
        for address in ["127.0.0.1:0", "[::1]:0"] {
            // The bind fails on a host without IPv6.
            let Ok(listener) = TcpListener::bind(address) else {
                continue;
            };
            let to = listener.local_addr().unwrap();
            let (waker, stop) = crate::poll::waker().unwrap();
            let mut near = connect(None, to, soon(), &stop).unwrap();
            let mut far = listener.accept().unwrap().0;
            far.write_all(b"x").unwrap();
            // The read waits for the byte, because the stream is in blocking mode.
            near.read_exact(&mut [0]).unwrap();
            waker.wake();
            let error = connect(None, to, soon(), &stop).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
            stop.clear();
            drop(listener);
            let error = connect(None, to, soon(), &stop).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        }
    }

    #[test]
    fn options_reach_the_kernel() {
        let (near, _far) = pair();
        set_liveness(&near, &Liveness::default()).unwrap();
        set_buffers(&near, Some(64 << 10), Some(32 << 10)).unwrap();
        // The kernel doubles the value (socket(7)).
        assert_eq!(sockopt::socket_send_buffer_size(&near).unwrap(), 128 << 10);
        assert_eq!(sockopt::socket_recv_buffer_size(&near).unwrap(), 64 << 10);
        set_pacing_rate(&near, Some(1 << 20)).unwrap();
        set_pacing_rate(&near, None).unwrap();
    }

    #[test]
    fn a_socket_is_readable_from_the_given_number_of_bytes() {
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
        // The end of the connection makes the socket readable, even with fewer bytes.
        drop(far);
        assert!(wait_readable(&near, Instant::now() + Duration::from_secs(5)).unwrap());
    }

    #[test]
    fn a_receive_window_may_grow_and_the_reader_wakes_for_one_byte() {
        let receive_buffer = |socket: &TcpStream| sockopt::socket_recv_buffer_size(socket).unwrap();
        let (near, mut far) = pair();
        let before = receive_buffer(&near);
        let_receive_window_grow(&near, 1 << 20).unwrap();
        let after = receive_buffer(&near);
        assert!(after > before && after >= 1 << 20, "{before}, {after}");
        let_receive_window_grow(&near, 1).unwrap();
        assert_eq!(receive_buffer(&near), after);
        far.write_all(b"1").unwrap();
        assert!(wait_readable(&near, Instant::now() + Duration::from_secs(5)).unwrap());
    }

    #[test]
    fn a_connection_uses_the_given_local_port_which_is_then_in_use() {
        for any in ["127.0.0.1:0", "[::1]:0"] {
            // The bind fails on a host without IPv6.
            let Ok(listener) = TcpListener::bind(any) else {
                continue;
            };
            let to = listener.local_addr().unwrap();
            let free = TcpListener::bind(any).unwrap();
            let from = free.local_addr().unwrap();
            drop(free);
            let (_waker, stop) = crate::poll::waker().unwrap();
            let until = Instant::now() + Duration::from_secs(60);
            let near = connect(Some(from), to, until, &stop).unwrap();
            assert_eq!(listener.accept().unwrap().1, from);
            assert_eq!(near.local_addr().unwrap(), from);
            let error = connect(Some(from), to, until, &stop).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        }
    }

    #[test]
    fn a_reset_on_close_is_an_error_for_the_peer() {
        let (near, mut far) = pair();
        set_reset_on_close(&near).unwrap();
        drop(near);
        let error = std::io::Read::read(&mut far, &mut [0]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    }

    #[test]
    fn a_deadline_that_has_passed_is_an_error() {
        let error = remaining(Instant::now()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
