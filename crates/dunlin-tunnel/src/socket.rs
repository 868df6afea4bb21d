//! A channel's connection to a hypervisor, at an entrance or at a target.

use dunlin_lane::sync::lock;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use dunlin_linux::interrupted::until_not_interrupted;
use dunlin_linux::poll::{Interest, poll};
use dunlin_linux::redirected;
use dunlin_linux::socket::{Liveness, set_buffers, set_liveness, set_reset_on_close};

use super::failure::Failure;
use super::meter::{Count, Ending};
use super::rate::Pacer;

/// Requested size of a unix socket's send buffer towards the consumer: a piece and the kernel's
/// overhead. The kernel silently limits it to `net.core.wmem_max`.
const SEND_BUFFER_BYTES: u32 = 512 * 1024;

/// A connection in non-blocking mode that no channel uses yet.
#[derive(Debug)]
pub(super) enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

/// A channel's connection, in non-blocking mode until [`Socket::block`].
#[derive(Debug)]
pub(super) struct Socket {
    stream: Stream,
    /// Whether a call other than a read has returned that the connection was reset. The kernel
    /// returns this error once; later reads return 0, as at an end of file.
    is_reset: Mutex<bool>,
    /// Whether the socket is in blocking mode, with one thread for each direction.
    blocks: AtomicBool,
    /// Declared after the stream, and therefore dropped after it: the connection is closed before
    /// its end is counted.
    count: Count,
}

impl Stream {
    pub(super) fn unix(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        set_buffers(&stream, Some(SEND_BUFFER_BYTES), None)?;
        Ok(Self::Unix(stream))
    }

    pub(super) fn tcp(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        // A consumer may keep its window closed for any time, so set no TCP_USER_TIMEOUT, which
        // would limit that time (tcp(7)). Keep-alive detects a consumer that has vanished.
        let liveness = Liveness {
            user_timeout: Duration::ZERO,
            ..Liveness::default()
        };
        set_liveness(&stream, &liveness)?;
        Ok(Self::Tcp(stream))
    }

    /// The address to which the client connected before the packet filter redirected it.
    ///
    /// # Errors
    /// The errors of [`redirected::original_destination`].
    pub(super) fn original_destination(&self) -> io::Result<SocketAddr> {
        match self {
            Self::Unix(_) => Err(io::ErrorKind::Unsupported.into()),
            Self::Tcp(stream) => redirected::original_destination(stream),
        }
    }

    /// The client's address, for the log.
    pub(super) fn client(&self) -> String {
        match self {
            Self::Unix(_) => "a unix socket".to_owned(),
            Self::Tcp(stream) => stream
                .peer_addr()
                .map_or_else(|error| error.to_string(), |address| address.to_string()),
        }
    }

    /// Makes this stream the connection of a channel.
    pub(super) fn counted(self, count: Count) -> Socket {
        Socket {
            stream: self,
            is_reset: Mutex::default(),
            blocks: AtomicBool::new(false),
            count,
        }
    }

    fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        match self {
            Self::Unix(stream) => stream.shutdown(how),
            Self::Tcp(stream) => stream.shutdown(how),
        }
    }
}

impl Socket {
    pub(super) fn read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = until_not_interrupted(|| match &self.stream {
            Stream::Unix(stream) => (&*stream).read(bytes),
            Stream::Tcp(stream) => (&*stream).read(bytes),
        })?;
        if read == 0 && *self.lock_reset() {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        self.count.read(read);
        Ok(read)
    }

    pub(super) fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        let written = until_not_interrupted(|| {
            self.noting_resets(|| match &self.stream {
                Stream::Unix(stream) => (&*stream).write(bytes),
                Stream::Tcp(stream) => (&*stream).write(bytes),
            })
        })?;
        self.count.wrote(written);
        Ok(written)
    }

    /// Makes a call to which the kernel may return the connection's error, and records a reset. A
    /// call that cannot block runs under the lock of `is_reset`. A thread that then reads 0 waits
    /// for the lock, and sees the record.
    fn noting_resets<R>(&self, call: impl FnOnce() -> io::Result<R>) -> io::Result<R> {
        let held = (!self.blocks.load(Ordering::Relaxed)).then(|| self.lock_reset());
        let result = call();
        if let Err(error) = &result
            && error.kind() == io::ErrorKind::ConnectionReset
        {
            *held.unwrap_or_else(|| self.lock_reset()) = true;
        }
        result
    }

    fn lock_reset(&self) -> MutexGuard<'_, bool> {
        lock(&self.is_reset)
    }

    /// The limit of the rate at which the route's connections are read.
    pub(super) fn pacer(&self) -> &Pacer {
        self.count.pacer()
    }

    /// Counts bytes that the kernel has read for this process.
    pub(super) fn has_read(&self, bytes: usize) {
        self.count.read(bytes);
    }

    /// Counts bytes that the kernel has written for this process.
    pub(super) fn has_written(&self, bytes: usize) {
        self.count.wrote(bytes);
    }

    /// Switches to blocking mode with timeouts, for a caller with one thread per direction.
    pub(super) fn block(&self, read: Duration, write: Duration) -> io::Result<()> {
        self.blocks.store(true, Ordering::Relaxed);
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

    /// Wakes the blocked reader of a TCP socket after [`Socket::abort`]. Shuts down only the read
    /// direction, because the hypervisor must not see a clean end. Does nothing for a unix socket:
    /// `abort` has woken its reader.
    pub(super) fn stop_reading(&self) {
        if matches!(self.stream, Stream::Tcp(_)) {
            // Fails only if the connection is closed.
            let _ = self.stream.shutdown(Shutdown::Read);
        }
    }

    /// Shuts down the direction to the hypervisor.
    pub(super) fn end(&self) {
        // Fails only if the connection is closed, which the next read reports.
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// Counts the connection as ended cleanly in both directions.
    pub(super) fn ended_well(&self) {
        self.count.ends(Ending::Well);
    }

    /// Aborts the connection after both directions have ended and the consumer left the last few
    /// bytes unread.
    pub(super) fn left_unread(&self) {
        self.count.ends(Ending::LeftUnread);
        self.close_at_once();
    }

    /// Whether the hypervisor has closed its connection, and not only shut down its own direction.
    /// On a TCP socket the two look the same, and this returns true. Call it only after the end of
    /// file was read.
    pub(super) fn is_gone(&self) -> bool {
        match &self.stream {
            Stream::Tcp(_) => true,
            Stream::Unix(stream) => {
                let nothing = Interest::failure(&stream);
                // poll(2) reports errors and hang-ups even if they are not requested.
                poll(&[nothing], Some(Duration::ZERO)).is_ok_and(|ready| ready == [true])
            }
        }
    }

    /// Aborts the connection, and reports `why` as the reason.
    pub(super) fn fail(&self, why: &Failure) {
        self.count.ends(Ending::Badly(Some(why.clone())));
        self.abort();
    }

    /// Makes the connection end as an abort when its last owner drops it. A unix socket cannot
    /// signal an abort: its peer reads an end of file in the middle of the data, and gets an error
    /// when it writes.
    pub(super) fn abort(&self) {
        self.count.ends(Ending::Badly(None));
        self.close_at_once();
    }

    fn close_at_once(&self) {
        match &self.stream {
            Stream::Unix(stream) => drop(stream.shutdown(Shutdown::Both)),
            // Fails only if the connection is closed.
            Stream::Tcp(stream) => drop(set_reset_on_close(stream)),
        }
    }

    /// Whether an error of the connection fails its channel immediately, even if received bytes
    /// have not been read. True for TCP, so a thread polls for the error while no thread reads.
    /// False for a unix socket, so a thread first reads the received bytes. The kernel treats both
    /// kinds of sockets alike: it reports an error immediately, and reads return the received bytes
    /// before the error.
    pub(super) fn tells_resets(&self) -> bool {
        matches!(self.stream, Stream::Tcp(_))
    }

    /// The error of the connection.
    pub(super) fn error(&self) -> io::Error {
        let error = self.noting_resets(|| {
            let error = match &self.stream {
                Stream::Unix(stream) => stream.take_error()?,
                Stream::Tcp(stream) => stream.take_error()?,
            };
            error.map_or(Ok(()), Err)
        });
        match error {
            Err(error) => error,
            Ok(()) => io::ErrorKind::ConnectionReset.into(),
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::net::TcpListener;

    use super::*;

    fn accepted(listener: &TcpListener) -> Socket {
        let stream = Stream::tcp(listener.accept().unwrap().0).unwrap();
        stream.counted(Count::new(std::sync::Arc::default(), None))
    }

    /// The kernel returns the error of a connection only once, to one of the two threads that use
    /// the connection.
    #[test]
    fn a_reset_that_another_call_returned_is_not_read_as_an_end() {
        type Find = fn(&Socket);
        let found: [(&str, Find); 2] = [
            ("error", |socket| {
                assert_eq!(socket.error().kind(), io::ErrorKind::ConnectionReset);
            }),
            ("write", |socket| {
                let error = socket.write(b"x").unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
            }),
        ];
        for (what, find) in found {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let socket = accepted(&listener);
            set_reset_on_close(&peer).unwrap();
            drop(peer);
            let readable = Interest::read(&socket);
            assert_eq!(poll(&[readable], None).unwrap(), [true]);
            find(&socket);
            let read = socket.read(&mut [0]).unwrap_err();
            assert_eq!(read.kind(), io::ErrorKind::ConnectionReset, "{what}");
        }
    }

    #[test]
    fn an_end_of_file_is_read_as_one_after_the_send_buffer_was_full() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let socket = accepted(&listener);
        let full = loop {
            if let Err(error) = socket.write(&[0; 1 << 16]) {
                break error.kind();
            }
        };
        assert_eq!(full, io::ErrorKind::WouldBlock);
        peer.shutdown(Shutdown::Write).unwrap();
        let readable = Interest::read(&socket);
        assert_eq!(poll(&[readable], None).unwrap(), [true]);
        assert_eq!(socket.read(&mut [0]).unwrap(), 0);
    }
}
