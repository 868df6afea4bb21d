//! A channel's connection to a hypervisor, on either side.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use dunlin_sys::socket::{Liveness, set_buffers, set_liveness, set_reset_on_close};

/// What is asked for as a unix socket's buffer towards the consumer: a piece and
/// the kernel's own. The kernel cuts it to its limit, and says nothing.
const SEND_BUFFER_BYTES: u32 = 512 * 1024;

/// A connection in non-blocking mode.
#[derive(Debug)]
pub(super) enum Socket {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Socket {
    pub(super) fn unix(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        set_buffers(&stream, Some(SEND_BUFFER_BYTES), None)?;
        Ok(Self::Unix(stream))
    }

    pub(super) fn tcp(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        // A consumer that does not read keeps its window closed for as long as
        // it likes (TCP_USER_TIMEOUT would end that, tcp(7)); one that has gone
        // answers no probe.
        let liveness = Liveness {
            user_timeout: Duration::ZERO,
            ..Liveness::default()
        };
        set_liveness(&stream, &liveness)?;
        Ok(Self::Tcp(stream))
    }

    pub(super) fn read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            let read = match self {
                Self::Unix(stream) => (&*stream).read(bytes),
                Self::Tcp(stream) => (&*stream).read(bytes),
            };
            match read {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => return other,
            }
        }
    }

    pub(super) fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            let written = match self {
                Self::Unix(stream) => (&*stream).write(bytes),
                Self::Tcp(stream) => (&*stream).write(bytes),
            };
            match written {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => return other,
            }
        }
    }

    /// Tells the hypervisor that nothing more comes.
    pub(super) fn end(&self) {
        // Fails only where it has gone, which reading tells.
        let _ = match self {
            Self::Unix(stream) => stream.shutdown(Shutdown::Write),
            Self::Tcp(stream) => stream.shutdown(Shutdown::Write),
        };
    }

    /// Lets the connection end as an abort when its last owner lets go. A unix
    /// socket knows no such thing: its peer sees an end, in the middle of
    /// whatever it was reading, and an error when it writes.
    pub(super) fn abort(&self) {
        match self {
            Self::Unix(stream) => drop(stream.shutdown(Shutdown::Both)),
            // Fails only where it has gone.
            Self::Tcp(stream) => drop(set_reset_on_close(stream)),
        }
    }

    /// Whether an error is told before what was received is read, so that it
    /// has to be looked for while nobody reads.
    pub(super) fn tells_resets(&self) -> bool {
        matches!(self, Self::Tcp(_))
    }

    /// What it has failed of.
    pub(super) fn error(&self) -> io::Error {
        let error = match self {
            Self::Unix(stream) => stream.take_error(),
            Self::Tcp(stream) => stream.take_error(),
        };
        match error {
            Ok(Some(error)) | Err(error) => error,
            Ok(None) => io::ErrorKind::ConnectionReset.into(),
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(stream) => stream.as_fd(),
            Self::Tcp(stream) => stream.as_fd(),
        }
    }
}
