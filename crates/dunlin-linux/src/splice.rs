//! Bytes moved from one descriptor to another by the kernel, without entering the process
//! (splice(2)): into a pipe and out of it.

use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::AsFd;

use rustix::io::retry_on_intr;
use rustix::pipe::SpliceFlags;

/// What a pipe holds, unless the user has too many of them: sixteen pieces of a page.
///
/// Formula: what every pipe begins with.
/// Drawback: a larger one takes fewer calls.
/// Alternative: 256 KiB. From Linux 6.5 to the end of 2025 a socket with TLS in the kernel sends
/// memory that nobody has written to where more than seventeen pieces come for one record ("tls:
/// trim encrypted message to match the plaintext on short splice"); from a pipe of sixteen none
/// such can come. And a user without privileges may have a quarter as many.
const PIPE_BYTES: usize = 64 << 10;

/// A pipe between two descriptors. Nothing is lost between calls: what was taken in stays until
/// it is given on.
#[derive(Debug)]
pub struct Conduit {
    reader: PipeReader,
    writer: PipeWriter,
    held: usize,
}

impl Conduit {
    /// An empty one.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn new() -> io::Result<Self> {
        let (reader, writer) = io::pipe()?;
        Ok(Self {
            reader,
            writer,
            held: 0,
        })
    }

    /// Bytes that were taken and not given on.
    pub fn held(&self) -> usize {
        self.held
    }

    /// Takes what `from` has, and returns how much that was; zero is its end. To be called when
    /// nothing is held.
    ///
    /// # Errors
    /// `WouldBlock` where `from` is in non-blocking mode and has nothing now; otherwise what
    /// splice(2) says. A socket with TLS in the kernel says `EINVAL` at a record that is no data,
    /// which stays where it is.
    pub fn take(&mut self, from: impl AsFd) -> io::Result<usize> {
        let count = splice(&from, &self.writer, PIPE_BYTES)?;
        self.held += count;
        Ok(count)
    }

    /// Gives on what is held, as much as `to` takes now; returns how much is left.
    ///
    /// # Errors
    /// `WouldBlock` where `to` is in non-blocking mode and takes nothing now; otherwise what
    /// splice(2) says.
    pub fn give(&mut self, to: impl AsFd) -> io::Result<usize> {
        if self.held > 0 {
            let count = splice(&self.reader, &to, self.held)?;
            self.held = self.held.saturating_sub(count);
        }
        Ok(self.held)
    }
}

fn splice(from: impl AsFd, to: impl AsFd, most: usize) -> io::Result<usize> {
    // A pipe that is full, or empty, does not wait; TLS in the kernel reads the flag as the socket's
    // own mode.
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
    fn bytes_come_through_in_order_and_an_end_is_told_from_nothing() {
        let (mut near, from) = pair();
        let (to, mut far) = UnixStream::pair().unwrap();
        let mut conduit = Conduit::new().unwrap();
        assert_eq!(kind(conduit.take(&from)), io::ErrorKind::WouldBlock);
        assert_eq!(conduit.give(&to).unwrap(), 0);
        near.write_all(b"one and two").unwrap();
        let mut come = [0; 11];
        let mut at = 0;
        while at < come.len() {
            match conduit.take(&from) {
                Ok(count) => assert_eq!(conduit.held(), count),
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            }
            let held = conduit.held();
            assert_eq!(conduit.give(&to).unwrap(), 0);
            far.read_exact(&mut come[at..at + held]).unwrap();
            at += held;
        }
        assert_eq!(&come, b"one and two");
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
    fn what_a_full_socket_does_not_take_is_held() {
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
