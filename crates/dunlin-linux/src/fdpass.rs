//! Descriptors passed between processes over a unix socket (unix(7), SCM_RIGHTS; cmsg(3)), and
//! those that a parent has left open for this one.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// The most that the kernel takes in one message (SCM_MAX_FD).
pub const MOST: usize = 253;
/// The first descriptor behind standard error.
const FIRST: RawFd = 3;

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
    let mut part = libc::iovec {
        iov_base: payload.as_ptr().cast_mut().cast(),
        iov_len: payload.len(),
    };
    let mut control = Control::new(descriptors.len());
    let mut message = empty_message();
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    if !descriptors.is_empty() {
        control.attach(&mut message);
        // SAFETY: `message` points at a control buffer with room for one header, aligned for it.
        let header = unsafe { &mut *libc::CMSG_FIRSTHDR(&raw const message) };
        header.cmsg_level = libc::SOL_SOCKET;
        header.cmsg_type = libc::SCM_RIGHTS;
        let bytes = size_of_val(descriptors) as libc::c_uint;
        // SAFETY: CMSG_LEN does arithmetic only.
        header.cmsg_len = unsafe { libc::CMSG_LEN(bytes) } as usize;
        // SAFETY: the buffer was made for this many descriptors behind its header.
        let mut at = unsafe { libc::CMSG_DATA(header) }.cast::<RawFd>();
        for descriptor in descriptors {
            // SAFETY: as above; the place need not be aligned.
            unsafe { at.write_unaligned(descriptor.as_raw_fd()) };
            // SAFETY: at most one past the last.
            at = unsafe { at.add(1) };
        }
    }
    loop {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: `message` refers to `part`, to the payload behind it and to `control`, which
        // all live through the call; it only reads them.
        let count = unsafe { libc::sendmsg(socket.as_fd().as_raw_fd(), &raw const message, flags) };
        match usize::try_from(count) {
            Ok(count) => return Ok(count),
            Err(_) => interrupted()?,
        }
    }
}

/// Waits for one message and takes its bytes, as far as `payload` has room, and its descriptors.
///
/// # Errors
/// `InvalidData` when descriptors were lost, since there were more than [`MOST`] or this process
/// may have no more; those that came are closed. Otherwise what recvmsg(2) says.
pub fn receive(socket: impl AsFd, payload: &mut [u8]) -> io::Result<Received> {
    let mut part = libc::iovec {
        iov_base: payload.as_mut_ptr().cast(),
        iov_len: payload.len(),
    };
    let mut control = Control::new(MOST);
    let mut message = empty_message();
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    let bytes = loop {
        control.attach(&mut message);
        let flags = libc::MSG_CMSG_CLOEXEC;
        // SAFETY: `message` refers to `part`, to the payload behind it and to `control`, which
        // all live through the call and are borrowed by nobody else.
        let count = unsafe { libc::recvmsg(socket.as_fd().as_raw_fd(), &raw mut message, flags) };
        match usize::try_from(count) {
            Ok(count) => break count,
            Err(_) => interrupted()?,
        }
    };
    let descriptors = attached(&message);
    if message.msg_flags & libc::MSG_CTRUNC != 0 {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "descriptors were lost on their way: too many in one message, or this process may \
             have no more (ulimit -n)",
        ));
    }
    Ok(Received { bytes, descriptors })
}

/// The descriptor that a parent has left open under this number, as one of this process's own.
/// The number itself is kept from programs that this process starts.
///
/// # Errors
/// What fcntl(2) says: EBADF when nothing is open there.
pub fn inherited(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: fcntl(2) with F_DUPFD_CLOEXEC takes no pointers; it fails if nothing is open.
    let own = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, FIRST) };
    if own < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just handed out `own`, and nobody else has it.
    let own = unsafe { OwnedFd::from_raw_fd(own) };
    // SAFETY: as above; whoever else uses the number loses nothing by the flag.
    if unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(own)
}

/// Whether it is a unix socket, as descriptors can be passed over.
///
/// # Errors
/// What getsockopt(2) says: ENOTSOCK for a file or a pipe.
pub fn is_unix_socket(socket: impl AsFd) -> io::Result<bool> {
    let mut domain: libc::c_int = 0;
    let mut length = size_of_val(&domain) as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes into `domain` and the new length into
    // `length`; both live through the call.
    let status = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_DOMAIN,
            (&raw mut domain).cast(),
            &raw mut length,
        )
    };
    if status < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(domain == libc::AF_UNIX)
}

/// Room for control messages, in words because their headers want that alignment.
struct Control(Vec<u64>);

impl Control {
    fn new(descriptors: usize) -> Self {
        let bytes = (descriptors * size_of::<RawFd>()) as libc::c_uint;
        // SAFETY: CMSG_SPACE does arithmetic only.
        let space = unsafe { libc::CMSG_SPACE(bytes) } as usize;
        Self(vec![0; space.div_ceil(size_of::<u64>())])
    }

    fn attach(&mut self, message: &mut libc::msghdr) {
        message.msg_control = self.0.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&self.0[..]);
    }
}

fn empty_message() -> libc::msghdr {
    // SAFETY: a msghdr is integers and pointers, for which zero is a value.
    unsafe { std::mem::zeroed() }
}

/// Every descriptor in a message that the kernel has filled in, each of them ours from now on.
fn attached(message: &libc::msghdr) -> Vec<OwnedFd> {
    let mut descriptors = Vec::new();
    // SAFETY: the kernel has left whole control messages in the buffer and their length in
    // `msg_controllen`.
    let mut next = unsafe { libc::CMSG_FIRSTHDR(message) };
    // SAFETY: null or one of those messages.
    while let Some(header) = unsafe { next.as_ref() } {
        if header.cmsg_level == libc::SOL_SOCKET && header.cmsg_type == libc::SCM_RIGHTS {
            // SAFETY: CMSG_LEN does arithmetic only.
            let lead = unsafe { libc::CMSG_LEN(0) } as usize;
            let count = header.cmsg_len.saturating_sub(lead) / size_of::<RawFd>();
            // SAFETY: the data stands behind its header.
            let data = unsafe { libc::CMSG_DATA(header) }.cast::<RawFd>();
            for index in 0..count {
                // SAFETY: the message holds `count` descriptors; they need not be aligned.
                let number = unsafe { data.add(index).read_unaligned() };
                // SAFETY: the kernel has just installed it in this process, for us alone.
                descriptors.push(unsafe { OwnedFd::from_raw_fd(number) });
            }
        }
        // SAFETY: `header` is one of the message's own.
        next = unsafe { libc::CMSG_NXTHDR(message, header) };
    }
    descriptors
}

/// Nothing if a signal came in between, else the error of the last call.
fn interrupted() -> io::Result<()> {
    let error = io::Error::last_os_error();
    match error.kind() {
        io::ErrorKind::Interrupted => Ok(()),
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::fs::File;
    use std::io::{Read, Write, pipe};
    use std::os::unix::net::UnixStream;

    use super::*;

    fn is_kept_from_programs(descriptor: &OwnedFd) -> bool {
        // SAFETY: fcntl(2) with F_GETFD takes no pointers.
        let flags = unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_GETFD) };
        flags & libc::FD_CLOEXEC != 0
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
