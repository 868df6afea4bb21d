//! A channel's connection to a hypervisor, on either side.

use dunlin_lane::sync::lock;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use dunlin_linux::poll::{Interest, poll};
use dunlin_linux::socket::{Liveness, set_buffers, set_liveness, set_reset_on_close};

use super::failure::Failure;
use super::meter::{Count, Ending};

/// What is asked for as a unix socket's buffer towards the consumer: a piece and
/// the kernel's own. The kernel cuts it to its limit, and says nothing.
const SEND_BUFFER_BYTES: u32 = 512 * 1024;

/// A connection in non-blocking mode that no channel has yet.
#[derive(Debug)]
pub(super) enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

/// A channel's connection, in non-blocking mode until [`Socket::block`].
#[derive(Debug)]
pub(super) struct Socket {
    stream: Stream,
    /// Whether an error of the connection has been returned to one thread. The kernel returns it
    /// once; after that reading returns 0, as at an end.
    is_reset: Mutex<bool>,
    /// Whether a thread for each direction waits in the kernel.
    blocks: AtomicBool,
    /// Behind the stream: the connection is closed when its end is reported.
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

    /// The connection of a channel.
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

/// Repeats a call that a signal has interrupted.
fn repeated(mut call: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

impl Socket {
    pub(super) fn read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = repeated(|| match &self.stream {
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
        let written = repeated(|| {
            self.noting_resets(|| match &self.stream {
                Stream::Unix(stream) => (&*stream).write(bytes),
                Stream::Tcp(stream) => (&*stream).write(bytes),
            })
        })?;
        self.count.wrote(written);
        Ok(written)
    }

    /// Calls what may take the connection's error from the kernel. The lock is held meanwhile, so
    /// that a thread which then reads 0 sees that there was one; not where a call may wait.
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

    /// The kernel has read so many bytes for this process.
    pub(super) fn has_read(&self, bytes: usize) {
        self.count.read(bytes);
    }

    /// The kernel has written so many bytes for this process.
    pub(super) fn has_written(&self, bytes: usize) {
        self.count.wrote(bytes);
    }

    /// Lets it block, for whoever has a thread for each direction.
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

    /// Wakes who reads, behind [`Socket::abort`], and says nothing to the
    /// hypervisor, where an end would be a lie.
    pub(super) fn stop_reading(&self) {
        if matches!(self.stream, Stream::Tcp(_)) {
            // Fails only where it has gone.
            let _ = self.stream.shutdown(Shutdown::Read);
        }
    }

    /// Tells the hypervisor that nothing more comes.
    pub(super) fn end(&self) {
        // Fails only where it has gone, which reading tells.
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// Both directions have ended in order.
    pub(super) fn ended_well(&self) {
        self.count.ends(Ending::Well);
    }

    /// Both directions are over, and the consumer left a few bytes before the end unread. The rest
    /// of the connection is aborted.
    pub(super) fn left_unread(&self) {
        self.count.ends(Ending::LeftUnread);
        self.close_at_once();
    }

    /// Whether the hypervisor has closed its connection, and not only its own direction. A TCP
    /// socket cannot tell the two apart and says yes; ask it only when its end has been read.
    pub(super) fn is_gone(&self) -> bool {
        match &self.stream {
            Stream::Tcp(_) => true,
            Stream::Unix(stream) => {
                let nothing = Interest::failure(&stream);
                // An error or a hang-up is reported without being requested (poll(2)).
                poll(&[nothing], Some(Duration::ZERO)).is_ok_and(|ready| ready == [true])
            }
        }
    }

    /// Aborts it, and says why to whoever waits for its end.
    pub(super) fn fail(&self, why: &Failure) {
        self.count.ends(Ending::Badly(Some(why.clone())));
        self.abort();
    }

    /// Lets the connection end as an abort when its last owner lets go. A unix
    /// socket knows no such thing: its peer sees an end, in the middle of
    /// whatever it was reading, and an error when it writes.
    pub(super) fn abort(&self) {
        self.count.ends(Ending::Badly(None));
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

    /// The kernel returns the error once, to either of the two threads that find it.
    #[test]
    fn a_reset_that_another_call_has_found_is_no_end() {
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
    fn an_end_is_one_after_a_full_socket() {
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
