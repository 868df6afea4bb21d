//! Descriptors that processes pass over a unix socket (unix(7), SCM_RIGHTS; cmsg(3)), and
//! descriptors inherited from the parent process.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};

use rustix::io::retry_on_intr;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recvmsg, sendmsg, sockopt,
};

use crate::tcp::unacknowledged_bytes;

/// The maximum number of descriptors in one message (the kernel's SCM_MAX_FD).
pub const MOST: usize = 253;
/// The size in bytes of a control message with [`MOST`] descriptors.
const CONTROL_ROOM: usize = rustix::cmsg_space!(ScmRights(MOST));

/// A received message.
#[derive(Debug)]
pub struct Received {
    /// Bytes written to the payload; 0 at the end of the stream.
    pub bytes: usize,
    /// The descriptors of the message, with close-on-exec set.
    pub descriptors: Vec<OwnedFd>,
}

/// Sends as much of `payload` as fits, with all of `descriptors` attached to its first byte.
/// Returns the number of bytes sent. Never blocks.
///
/// # Errors
/// `WouldBlock` if the socket's buffer is full. `InvalidInput` for more than [`MOST`]
/// descriptors, and for an empty payload, because a stream socket would then drop the
/// descriptors. Otherwise an error from sendmsg(2).
pub fn send(
    socket: impl AsFd,
    payload: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<usize> {
    if payload.is_empty() || descriptors.len() > MOST {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut room = [MaybeUninit::uninit(); CONTROL_ROOM];
    let mut control = SendAncillaryBuffer::new(&mut room);
    if !descriptors.is_empty() {
        let fits = control.push(SendAncillaryMessage::ScmRights(descriptors));
        debug_assert!(fits, "CONTROL_ROOM is sized for MOST descriptors");
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let payload = [IoSlice::new(payload)];
    let count = retry_on_intr(|| sendmsg(&socket, &payload, &mut control, flags))?;
    Ok(count)
}

/// Waits for one message. Returns its descriptors and as many of its bytes as `payload` holds.
///
/// # Errors
/// `InvalidData` if the kernel dropped descriptors, for example because this process has reached
/// its limit of open files. The descriptors that were received are closed. Otherwise an error from
/// recvmsg(2).
pub fn receive(socket: impl AsFd, payload: &mut [u8]) -> io::Result<Received> {
    let mut room = [MaybeUninit::uninit(); CONTROL_ROOM];
    let mut control = RecvAncillaryBuffer::new(&mut room);
    let mut payload = [IoSliceMut::new(payload)];
    let message =
        retry_on_intr(|| recvmsg(&socket, &mut payload, &mut control, RecvFlags::CMSG_CLOEXEC))?;
    let mut descriptors = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(passed) = part {
            descriptors.extend(passed);
        }
    }
    if message.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "descriptors lost: more than 253 in one message, or the limit of open files is \
             reached (ulimit -n)",
        ));
    }
    let bytes = message.bytes;
    Ok(Received { bytes, descriptors })
}

/// Whether the peer of a unix stream socket has read all that was sent, or has closed its end
/// (`SIOCOUTQ`, `unix_outq_len` in net/unix/af_unix.c). If the peer never accepts the connection,
/// the peer's end is closed when its listener is closed.
///
/// # Errors
/// An error from ioctl(2).
pub fn is_received(socket: impl AsFd) -> io::Result<bool> {
    Ok(unacknowledged_bytes(socket)? == 0)
}

/// Duplicates the descriptor `number` that was inherited from the parent process. Sets
/// close-on-exec on `number` and on the duplicate.
///
/// # Errors
/// An error from fcntl(2): EBADF if `number` is not open.
pub fn inherited(number: RawFd) -> io::Result<OwnedFd> {
    set_close_on_exec(number)?;
    // SAFETY: the call above has shown that `number` is open. It was inherited from the parent, so
    // nothing in this process owns it or closes it during the call.
    unsafe { BorrowedFd::borrow_raw(number) }.try_clone_to_owned()
}

/// Sets the close-on-exec flag of a descriptor.
///
/// # Errors
/// An error from fcntl(2): EBADF if `number` is not open.
pub(crate) fn set_close_on_exec(number: RawFd) -> io::Result<()> {
    // `rustix` accepts only descriptors that are known to be open.
    // SAFETY: fcntl(2) with F_SETFD takes no pointers and fails if `number` is not open. If another
    // part of the process owns the descriptor, the flag does not invalidate it.
    match unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether `socket` is a unix socket, which can carry descriptors.
///
/// # Errors
/// An error from getsockopt(2): ENOTSOCK for a file or a pipe.
pub fn is_unix_socket(socket: impl AsFd) -> io::Result<bool> {
    Ok(sockopt::socket_domain(socket)? == AddressFamily::UNIX)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::fs::File;
    use std::io::{Read, Write, pipe};
    use std::net::Shutdown;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::{UnixListener, UnixStream};

    use dunlin_test_base::Scratch;

    use rustix::io::FdFlags;

    use super::*;

    fn is_close_on_exec(descriptor: &OwnedFd) -> bool {
        let flags = rustix::io::fcntl_getfd(descriptor).unwrap();
        flags.contains(FdFlags::CLOEXEC)
    }

    #[test]
    fn descriptors_arrive_with_the_first_byte_and_are_close_on_exec() {
        let (here, there) = UnixStream::pair().unwrap();
        let ends: Vec<_> = (0..3).map(|_| pipe().unwrap()).collect();
        let writers: Vec<_> = ends.iter().map(|(_, writer)| writer.as_fd()).collect();
        assert_eq!(send(&here, b"line", &writers).unwrap(), 4);
        let mut payload = [0; 2];
        let first = receive(&there, &mut payload).unwrap();
        assert_eq!((first.bytes, first.descriptors.len()), (2, 3));
        let rest = receive(&there, &mut payload).unwrap();
        assert_eq!((rest.bytes, rest.descriptors.len()), (2, 0));
        assert_eq!(&payload, b"ne");
        for ((mut reader, writer), passed) in ends.into_iter().zip(first.descriptors) {
            assert!(is_close_on_exec(&passed));
            drop(writer);
            File::from(passed).write_all(b"x").unwrap();
            let mut all = Vec::new();
            // The read reaches the end, because no other writer is left.
            reader.read_to_end(&mut all).unwrap();
            assert_eq!(all, b"x");
        }
    }

    #[test]
    fn an_end_has_neither_bytes_nor_descriptors() {
        let (here, there) = UnixStream::pair().unwrap();
        drop(here);
        let end = receive(&there, &mut [0; 8]).unwrap();
        assert_eq!((end.bytes, end.descriptors.len()), (0, 0));
    }

    #[test]
    fn a_message_is_received_when_all_of_it_was_read_or_the_peer_has_closed() {
        let (here, there) = UnixStream::pair().unwrap();
        let (passed, _other) = UnixStream::pair().unwrap();
        let is_received = || is_received(&here).unwrap();
        assert!(is_received());
        send(&here, b"line", &[passed.as_fd()]).unwrap();
        here.shutdown(Shutdown::Both).unwrap();
        for expected in [false, true] {
            assert!(!is_received());
            receive(&there, &mut [0; 2]).unwrap();
            assert_eq!(is_received(), expected);
        }

        let scratch = Scratch::new();
        let listener = UnixListener::bind(scratch.join("socket")).unwrap();
        let here = UnixStream::connect(scratch.join("socket")).unwrap();
        send(&here, b"line", &[passed.as_fd()]).unwrap();
        assert!(!super::is_received(&here).unwrap());
        drop(listener);
        assert!(super::is_received(&here).unwrap());
    }

    #[test]
    fn empty_payloads_and_too_many_descriptors_are_rejected() {
        let (here, there) = UnixStream::pair().unwrap();
        let kind = |result: io::Result<usize>| result.unwrap_err().kind();
        assert_eq!(
            kind(send(&here, b"", &[there.as_fd()])),
            io::ErrorKind::InvalidInput
        );
        let many = vec![there.as_fd(); MOST + 1];
        assert_eq!(kind(send(&here, b"x", &many)), io::ErrorKind::InvalidInput);
        assert_eq!(send(&here, b"x", &many[1..]).unwrap(), 1);
        assert_eq!(receive(&there, &mut [0]).unwrap().descriptors.len(), MOST);
        while send(&here, &[0; 4096], &[]).is_ok() {}
        assert_eq!(kind(send(&here, b"x", &[])), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn an_inherited_descriptor_is_duplicated() {
        let (here, mut there) = UnixStream::pair().unwrap();
        let own = inherited(here.as_raw_fd()).unwrap();
        assert_ne!(own.as_raw_fd(), here.as_raw_fd());
        assert!(is_close_on_exec(&own));
        assert!(is_unix_socket(&own).unwrap());
        drop(here);
        UnixStream::from(own).write_all(b"x").unwrap();
        there.read_exact(&mut [0]).unwrap();
        assert!(inherited(1 << 20).is_err());
        let (reader, _writer) = pipe().unwrap();
        assert!(is_unix_socket(&reader).is_err());
    }
}
