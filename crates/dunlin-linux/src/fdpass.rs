//! Descriptors passed between processes over a unix socket (unix(7), SCM_RIGHTS; cmsg(3)), and
//! those that a parent has left open for this one.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};

use rustix::io::retry_on_intr;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recvmsg, sendmsg, sockopt,
};

/// The most that the kernel takes in one message (SCM_MAX_FD).
pub const MOST: usize = 253;
/// Room for the control message with that many.
const CONTROL_ROOM: usize = rustix::cmsg_space!(ScmRights(MOST));

/// One message.
#[derive(Debug)]
pub struct Received {
    /// How many bytes of the payload it filled; 0 is the sender's end.
    pub bytes: usize,
    /// What came with them. Programs that this process starts do not get it.
    pub descriptors: Vec<OwnedFd>,
}

/// Sends as much of `payload` as fits, with all of `descriptors` attached to its first byte.
/// Returns how much that was. Never waits.
///
/// # Errors
/// `WouldBlock` when the socket takes nothing now; `InvalidInput` without payload, which a stream
/// would swallow together with the descriptors, or with more than [`MOST`] descriptors; otherwise
/// what sendmsg(2) says.
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
        debug_assert!(fits, "there is room for the most that were let through");
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let payload = [IoSlice::new(payload)];
    let count = retry_on_intr(|| sendmsg(&socket, &payload, &mut control, flags))?;
    Ok(count)
}

/// Waits for one message and takes its bytes, as far as `payload` has room, and its descriptors.
///
/// # Errors
/// `InvalidData` when descriptors were lost, since there were more than [`MOST`] or this process
/// may have no more; those that came are closed. Otherwise what recvmsg(2) says.
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
            "descriptors were lost on their way: too many in one message, or this process may \
             have no more (ulimit -n)",
        ));
    }
    let bytes = message.bytes;
    Ok(Received { bytes, descriptors })
}

/// The descriptor that a parent has left open under this number, as one of this process's own.
/// The number itself is kept from programs that this process starts.
///
/// # Errors
/// The error of fcntl(2): EBADF when nothing is open there.
pub fn inherited(number: RawFd) -> io::Result<OwnedFd> {
    keep_from_programs(number)?;
    // SAFETY: the number is open, as the call above has shown. The parent has left it open for this
    // process, so nothing here owns it and closes it meanwhile.
    unsafe { BorrowedFd::borrow_raw(number) }.try_clone_to_owned()
}

/// Sets the close-on-exec flag of an open descriptor.
///
/// # Errors
/// The error of fcntl(2): EBADF when nothing is open there.
pub(crate) fn keep_from_programs(number: RawFd) -> io::Result<()> {
    // Not by `rustix`, which takes only descriptors that are known to be open.
    // SAFETY: fcntl(2) with F_SETFD takes no pointers, and fails if nothing is open. An owner of
    // the number loses nothing by the flag.
    match unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether it is a unix socket, as descriptors can be passed over.
///
/// # Errors
/// The error of getsockopt(2): ENOTSOCK for a file or a pipe.
pub fn is_unix_socket(socket: impl AsFd) -> io::Result<bool> {
    Ok(sockopt::socket_domain(socket)? == AddressFamily::UNIX)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::fs::File;
    use std::io::{Read, Write, pipe};
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    use rustix::io::FdFlags;

    use super::*;

    fn is_kept_from_programs(descriptor: &OwnedFd) -> bool {
        let flags = rustix::io::fcntl_getfd(descriptor).unwrap();
        flags.contains(FdFlags::CLOEXEC)
    }

    #[test]
    fn descriptors_come_with_the_first_byte_and_are_this_process_s_alone() {
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
            assert!(is_kept_from_programs(&passed));
            drop(writer);
            File::from(passed).write_all(b"x").unwrap();
            let mut all = Vec::new();
            // To the end: no other writer is left.
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
    fn what_cannot_be_sent_is_refused() {
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
    fn an_inherited_descriptor_is_another_that_leads_to_the_same() {
        let (here, mut there) = UnixStream::pair().unwrap();
        let own = inherited(here.as_raw_fd()).unwrap();
        assert_ne!(own.as_raw_fd(), here.as_raw_fd());
        assert!(is_kept_from_programs(&own));
        assert!(is_unix_socket(&own).unwrap());
        drop(here);
        UnixStream::from(own).write_all(b"x").unwrap();
        there.read_exact(&mut [0]).unwrap();
        assert!(inherited(1 << 20).is_err());
        let (reader, _writer) = pipe().unwrap();
        assert!(is_unix_socket(&reader).is_err());
    }
}
