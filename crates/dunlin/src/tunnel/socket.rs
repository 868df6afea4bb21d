//! A channel's connection to a hypervisor, on either side.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use dunlin_sys::poll::{Interest, poll};
use dunlin_sys::socket::{Liveness, set_buffers, set_liveness, set_reset_on_close};

use super::failure::Failure;
use super::meter::Count;

/// What is asked for as a unix socket's buffer towards the consumer: a piece and
/// the kernel's own. The kernel cuts it to its limit, and says nothing.
const SEND_BUFFER_BYTES: u32 = 512 * 1024;

/// A connection in non-blocking mode, unless it is told to block.
#[derive(Debug)]
pub(super) struct Socket {
    stream: Stream,
    /// Behind the stream: when somebody hears that the connection has ended, it
    /// is closed.
    count: Option<Count>,
}

#[derive(Debug)]
enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Socket {
    pub(super) fn unix(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        set_buffers(&stream, Some(SEND_BUFFER_BYTES), None)?;
        Ok(Self {
            stream: Stream::Unix(stream),
            count: None,
        })
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
        Ok(Self {
            stream: Stream::Tcp(stream),
            count: None,
        })
    }

    /// The same, as one that counts.
    pub(super) fn counted(self, count: Count) -> Self {
        Self {
            count: Some(count),
            ..self
        }
    }

    pub(super) fn read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            let read = match &self.stream {
                Stream::Unix(stream) => (&*stream).read(bytes),
                Stream::Tcp(stream) => (&*stream).read(bytes),
            };
            match read {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(bytes) => {
                    if let Some(count) = &self.count {
                        count.read(bytes);
                    }
                    return Ok(bytes);
                }
                other => return other,
            }
        }
    }

    pub(super) fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            let written = match &self.stream {
                Stream::Unix(stream) => (&*stream).write(bytes),
                Stream::Tcp(stream) => (&*stream).write(bytes),
            };
            match written {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(bytes) => {
                    if let Some(count) = &self.count {
                        count.wrote(bytes);
                    }
                    return Ok(bytes);
                }
                other => return other,
            }
        }
    }

    /// Reads into several places, in their order.
    pub(super) fn read_vectored(&self, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        loop {
            let read = match &self.stream {
                Stream::Unix(stream) => (&*stream).read_vectored(slices),
                Stream::Tcp(stream) => (&*stream).read_vectored(slices),
            };
            match read {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(bytes) => {
                    if let Some(count) = &self.count {
                        count.read(bytes);
                    }
                    return Ok(bytes);
                }
                other => return other,
            }
        }
    }

    /// Writes from several places, in their order.
    pub(super) fn write_vectored(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        loop {
            let written = match &self.stream {
                Stream::Unix(stream) => (&*stream).write_vectored(slices),
                Stream::Tcp(stream) => (&*stream).write_vectored(slices),
            };
            match written {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(bytes) => {
                    if let Some(count) = &self.count {
                        count.wrote(bytes);
                    }
                    return Ok(bytes);
                }
                other => return other,
            }
        }
    }

    /// So many bytes were read by the kernel's hand.
    pub(super) fn has_read(&self, bytes: usize) {
        if let Some(count) = &self.count {
            count.read(bytes);
        }
    }

    /// The same of what was written.
    pub(super) fn has_written(&self, bytes: usize) {
        if let Some(count) = &self.count {
            count.wrote(bytes);
        }
    }

    /// Lets it block, for whoever has a thread for each direction.
    pub(super) fn block(&self, read: Duration, write: Duration) -> io::Result<()> {
        match &self.stream {
            Stream::Unix(stream) => {
                stream.set_nonblocking(false)?;
                stream.set_read_timeout(Some(read))?;
                stream.set_write_timeout(Some(write))
            }
            Stream::Tcp(stream) => {
                stream.set_nonblocking(false)?;
                stream.set_read_timeout(Some(read))?;
                stream.set_write_timeout(Some(write))
            }
        }
    }

    /// Wakes who reads, behind [`Socket::abort`], and says nothing to the
    /// hypervisor, where an end would be a lie.
    pub(super) fn stop_reading(&self) {
        if let Stream::Tcp(stream) = &self.stream {
            // Fails only where it has gone.
            let _ = stream.shutdown(Shutdown::Read);
        }
    }

    /// Tells the hypervisor that nothing more comes.
    pub(super) fn end(&self) {
        // Fails only where it has gone, which reading tells.
        let _ = match &self.stream {
            Stream::Unix(stream) => stream.shutdown(Shutdown::Write),
            Stream::Tcp(stream) => stream.shutdown(Shutdown::Write),
        };
    }

    /// Both directions have ended in order.
    pub(super) fn ended_well(&self) {
        if let Some(count) = &self.count {
            count.ends_well();
        }
    }

    /// Both directions are over, and the consumer left a few bytes before the end unread. The rest
    /// of the connection is aborted.
    pub(super) fn left_unread(&self) {
        if let Some(count) = &self.count {
            count.left_unread();
        }
        self.close_at_once();
    }

    /// Whether the hypervisor has closed its connection, and not only its own direction. A TCP
    /// socket cannot tell the two apart and says yes; ask it only when its end has been read.
    pub(super) fn is_gone(&self) -> bool {
        match &self.stream {
            Stream::Tcp(_) => true,
            Stream::Unix(stream) => {
                let nothing = Interest {
                    fd: stream.as_fd(),
                    read: false,
                    write: false,
                };
                // An error or a hang-up is reported without being requested (poll(2)).
                poll(&[nothing], Some(Duration::ZERO)).is_ok_and(|ready| ready == [true])
            }
        }
    }

    /// Aborts it, and says why to whoever waits for its end.
    pub(super) fn fail(&self, why: &Failure) {
        if let Some(count) = &self.count {
            count.fails(Some(why));
        }
        self.abort();
    }

    /// Lets the connection end as an abort when its last owner lets go. A unix
    /// socket knows no such thing: its peer sees an end, in the middle of
    /// whatever it was reading, and an error when it writes.
    pub(super) fn abort(&self) {
        if let Some(count) = &self.count {
            count.fails(None);
        }
        self.close_at_once();
    }

    fn close_at_once(&self) {
        match &self.stream {
            Stream::Unix(stream) => drop(stream.shutdown(Shutdown::Both)),
            // Fails only where it has gone.
            Stream::Tcp(stream) => drop(set_reset_on_close(stream)),
        }
    }

    /// Whether an error is told before what was received is read, so that it
    /// has to be looked for while nobody reads.
    pub(super) fn tells_resets(&self) -> bool {
        matches!(self.stream, Stream::Tcp(_))
    }

    /// What it has failed of.
    pub(super) fn error(&self) -> io::Error {
        let error = match &self.stream {
            Stream::Unix(stream) => stream.take_error(),
            Stream::Tcp(stream) => stream.take_error(),
        };
        match error {
            Ok(Some(error)) | Err(error) => error,
            Ok(None) => io::ErrorKind::ConnectionReset.into(),
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.stream {
            Stream::Unix(stream) => stream.as_fd(),
            Stream::Tcp(stream) => stream.as_fd(),
        }
    }
}
