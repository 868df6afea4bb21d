//! Sockets for tests, with time limits for reading, writing and accepting.

use std::io::{self, ErrorKind, Read};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;
use std::time::{Duration, Instant};

/// Longer than any operation in a test that passes.
pub const TIMEOUT: Duration = Duration::from_secs(30);

/// A connected stream socket.
pub trait Stream: Sized {
    /// Makes reads and writes block, for at most `timeout` each.
    ///
    /// # Errors
    /// An error from setsockopt(2) or fcntl(2).
    fn limit(&self, timeout: Duration) -> io::Result<()>;
}

impl Stream for TcpStream {
    fn limit(&self, timeout: Duration) -> io::Result<()> {
        self.set_nonblocking(false)?;
        // A test that writes single bytes expects a segment for each.
        self.set_nodelay(true)?;
        self.set_read_timeout(Some(timeout))?;
        self.set_write_timeout(Some(timeout))
    }
}

impl Stream for UnixStream {
    fn limit(&self, timeout: Duration) -> io::Result<()> {
        self.set_nonblocking(false)?;
        self.set_read_timeout(Some(timeout))?;
        self.set_write_timeout(Some(timeout))
    }
}

/// A listening socket.
pub trait Listener {
    /// The type of its connections.
    type Stream: Stream;

    /// Accepts a pending connection without waiting.
    ///
    /// # Errors
    /// An error from accept(2).
    fn accept_now(&self) -> io::Result<Self::Stream>;
}

impl Listener for TcpListener {
    type Stream = TcpStream;

    fn accept_now(&self) -> io::Result<TcpStream> {
        self.set_nonblocking(true)?;
        Ok(self.accept()?.0)
    }
}

impl Listener for UnixListener {
    type Stream = UnixStream;

    fn accept_now(&self) -> io::Result<UnixStream> {
        self.set_nonblocking(true)?;
        Ok(self.accept()?.0)
    }
}

/// Limits each read and write of the connection to [`TIMEOUT`].
///
/// # Panics
/// The socket is closed.
pub fn with_timeout<S: Stream>(stream: S) -> S {
    stream.limit(TIMEOUT).expect("the socket is open");
    stream
}

/// The next connection, limited by [`with_timeout`].
///
/// # Panics
/// No connection arrives within [`TIMEOUT`], or accept(2) fails.
pub fn accepted<L: Listener>(listener: &L) -> L::Stream {
    let until = Instant::now() + TIMEOUT;
    loop {
        match listener.accept_now() {
            Ok(stream) => return with_timeout(stream),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => panic!("{error}"),
        }
        assert!(Instant::now() < until, "no connection");
        thread::sleep(Duration::from_millis(2));
    }
}

/// Like [`Read::read`], but retries after EINTR. A socket with a timeout returns EINTR if its
/// process was stopped and continued.
pub trait ReadOnce {
    /// Reads once.
    ///
    /// # Errors
    /// An error from read(2), except EINTR.
    fn read_once(&mut self, bytes: &mut [u8]) -> io::Result<usize>;
}

impl<R: Read> ReadOnce for R {
    fn read_once(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.read(bytes) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                done => return done,
            }
        }
    }
}

/// A TCP port on 127.0.0.1 that refuses connections. No other program can listen on the port while
/// this value exists, because the port is the local port of a connection.
#[derive(Debug)]
pub struct ClosedPort {
    port: u16,
    _held: (TcpStream, TcpStream),
}

impl ClosedPort {
    /// Reserves a port.
    ///
    /// # Panics
    /// The host has no free port or descriptor.
    #[must_use]
    pub fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let address = listener.local_addr().expect("the listener is bound");
        let near = TcpStream::connect(address).expect("the listener is open");
        let (far, from) = listener.accept().expect("a connection is pending");
        Self {
            port: from.port(),
            _held: (near, far),
        }
    }

    /// The port's number.
    #[must_use]
    pub fn number(&self) -> u16 {
        self.port
    }
}

impl Default for ClosedPort {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_closed_port_refuses_connections() {
        let closed = ClosedPort::new();
        let error = TcpStream::connect(("127.0.0.1", closed.number())).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
        let error = TcpListener::bind(("127.0.0.1", closed.number())).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AddrInUse);
    }
}
