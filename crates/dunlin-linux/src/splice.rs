//! Moves bytes from one descriptor to another through a pipe in the kernel, without copying them to
//! the process (splice(2)).

use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::AsFd;

use rustix::io::retry_on_intr;
use rustix::pipe::SpliceFlags;

/// The capacity of a pipe: sixteen pieces of one page. A user with too many pipes gets smaller
/// pipes.
///
/// The value is the kernel's default for a new pipe. A larger pipe, such as 256 KiB, would need
/// fewer calls. But from Linux 6.5 to the end of 2025 a kernel TLS socket sends uninitialised
/// memory if more than seventeen pieces arrive for one record (the fix is "tls: trim encrypted
/// message to match the plaintext on short splice"). A pipe of sixteen pieces cannot cause that.
/// With 256 KiB an unprivileged user could also have only a quarter as many pipes.
const PIPE_BYTES: usize = 64 << 10;

/// A pipe between two descriptors. Bytes stay in it from [`Conduit::take`] until
/// [`Conduit::give`].
#[derive(Debug)]
pub struct Conduit {
    reader: PipeReader,
    writer: PipeWriter,
    held: usize,
}

impl Conduit {
    /// Creates an empty pipe.
    ///
    /// # Errors
    /// An error from pipe2(2), such as `EMFILE`.
    pub fn new() -> io::Result<Self> {
        let (reader, writer) = io::pipe()?;
        Ok(Self {
            reader,
            writer,
            held: 0,
        })
    }

    /// The number of bytes in the pipe, which [`Conduit::take`] has added and [`Conduit::give`] has
    /// not removed yet.
    pub fn held(&self) -> usize {
        self.held
    }

    /// Moves the bytes that can be read from `from`, at most 64 KiB, to the pipe and returns their
    /// number; zero means the end. Call it only when the pipe is empty.
    ///
    /// # Errors
    /// `WouldBlock` if `from` is in non-blocking mode and has no bytes; otherwise an error from
    /// splice(2). A kernel TLS socket returns `EINVAL` at a record that is not application data and
    /// leaves it in the socket.
    pub fn take(&mut self, from: impl AsFd) -> io::Result<usize> {
        self.take_at_most(from, PIPE_BYTES)
    }

    /// Like [`Conduit::take`], but moves at most `bytes` bytes.
    ///
    /// # Errors
    /// Same as [`Conduit::take`].
    pub fn take_at_most(&mut self, from: impl AsFd, bytes: usize) -> io::Result<usize> {
        let count = splice(&from, &self.writer, bytes.min(PIPE_BYTES))?;
        self.held += count;
        Ok(count)
    }

    /// Moves as many bytes from the pipe as `to` accepts, and returns how many remain.
    ///
    /// # Errors
    /// `WouldBlock` if `to` is in non-blocking mode and full; otherwise an error from splice(2).
    pub fn give(&mut self, to: impl AsFd) -> io::Result<usize> {
        if self.held > 0 {
            let count = splice(&self.reader, &to, self.held)?;
            self.held = self.held.saturating_sub(count);
        }
        Ok(self.held)
    }
}

fn splice(from: impl AsFd, to: impl AsFd, most: usize) -> io::Result<usize> {
    // SPLICE_F_NONBLOCK: the call does not wait if the pipe is full or empty. If the socket has
    // kernel TLS, the flag also keeps the call from waiting for the socket.
    let flags = SpliceFlags::MOVE | SpliceFlags::NONBLOCK;
    let count = retry_on_intr(|| rustix::pipe::splice(&from, None, &to, None, most, flags))?;
    Ok(count)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{Shutdown, TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

    use super::*;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let far = listener.accept().unwrap().0;
        far.set_nonblocking(true).unwrap();
        (near, far)
    }

    fn kind(result: io::Result<usize>) -> io::ErrorKind {
        result.unwrap_err().kind()
    }

    #[test]
    fn bytes_arrive_in_order_and_the_end_differs_from_would_block() {
        let (mut near, from) = pair();
        let (to, mut far) = UnixStream::pair().unwrap();
        let mut conduit = Conduit::new().unwrap();
        assert_eq!(kind(conduit.take(&from)), io::ErrorKind::WouldBlock);
        assert_eq!(conduit.give(&to).unwrap(), 0);
        near.write_all(b"one and two").unwrap();
        let mut arrived = [0; 11];
        let mut at = 0;
        while at < arrived.len() {
            match conduit.take(&from) {
                Ok(count) => assert_eq!(conduit.held(), count),
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            }
            let held = conduit.held();
            assert_eq!(conduit.give(&to).unwrap(), 0);
            far.read_exact(&mut arrived[at..at + held]).unwrap();
            at += held;
        }
        assert_eq!(&arrived, b"one and two");
        near.shutdown(Shutdown::Write).unwrap();
        let end = loop {
            match conduit.take(&from) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                end => break end,
            }
        };
        assert_eq!(end.unwrap(), 0);
    }

    #[test]
    fn bytes_that_a_full_socket_does_not_accept_stay_in_the_pipe() {
        let (mut near, from) = pair();
        let (to, mut far) = UnixStream::pair().unwrap();
        to.set_nonblocking(true).unwrap();
        while (&to).write(&[0; 4096]).is_ok() {}
        let mut conduit = Conduit::new().unwrap();
        near.write_all(b"later").unwrap();
        while conduit.held() == 0 {
            let _ = conduit.take(&from);
        }
        let held = conduit.held();
        assert_eq!(kind(conduit.give(&to)), io::ErrorKind::WouldBlock);
        assert_eq!(conduit.held(), held);
        let mut scrap = [0; 4096];
        while conduit.give(&to).is_err() {
            assert!(far.read(&mut scrap).unwrap() > 0);
        }
        assert_eq!(conduit.held(), 0);
    }

    #[test]
    fn a_reset_is_an_error_on_either_side() {
        let (near, from) = pair();
        let (to, far) = UnixStream::pair().unwrap();
        let mut conduit = Conduit::new().unwrap();
        (&near).write_all(b"x").unwrap();
        while conduit.held() == 0 {
            let _ = conduit.take(&from);
        }
        drop(far);
        assert_eq!(kind(conduit.give(&to)), io::ErrorKind::BrokenPipe);
        crate::socket::set_reset_on_close(&near).unwrap();
        drop(near);
        assert_eq!(kind(conduit.take(&from)), io::ErrorKind::ConnectionReset);
    }
}
