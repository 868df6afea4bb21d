//! Reads and writes of several pieces of memory in one call, such as the pages of a guest
//! (sendmsg(2), recvmsg(2)).
//!
//! The kernel reads each byte of a sent piece once. If the guest changes the pieces during a call,
//! the receiver gets the old or the new value of each byte, and a record of kernel TLS is valid
//! because the kernel seals what it read.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use vm_memory::VolatileSlice;

/// The maximum number of pieces that one call uses. A frame of a lane has at most 65: its header
/// and 64 pages.
const PIECES_LIMIT: usize = 128;

/// Sends several pieces of memory in order, at most the first 128. Waits until the send buffer has
/// space. Returns the number of bytes that the kernel accepted. On a socket with kernel TLS, the
/// bytes are application data, and the last accepted byte ends a record.
///
/// # Errors
/// An error from sendmsg(2).
pub fn send(socket: impl AsFd, from: &[VolatileSlice<'_>]) -> io::Result<usize> {
    send_message(socket, from, &mut [], 0)
}

/// Like [`send`], but never waits.
///
/// # Errors
/// `WouldBlock` if the send buffer is full; otherwise an error from sendmsg(2).
pub fn send_now(socket: impl AsFd, from: &[VolatileSlice<'_>]) -> io::Result<usize> {
    send_message(socket, from, &mut [], libc::MSG_DONTWAIT)
}

/// Like [`send`], with a control message (cmsg(3)).
pub(crate) fn send_with(
    socket: impl AsFd,
    from: &[VolatileSlice<'_>],
    control: &mut [u8],
) -> io::Result<usize> {
    send_message(socket, from, control, 0)
}

/// Fills several pieces of memory in order, at most the first 128, with the bytes that have
/// arrived. Waits until at least one byte has arrived. Returns the number of bytes; zero at the end
/// of the connection.
///
/// # Errors
/// An error from recvmsg(2).
pub fn receive(socket: impl AsFd, into: &[VolatileSlice<'_>]) -> io::Result<usize> {
    Ok(receive_with(socket, into, &mut [])?.0)
}

/// Like [`receive`], with a buffer for control messages (cmsg(3)). Returns the number of bytes, and
/// the number of bytes of control messages.
pub(crate) fn receive_with(
    socket: impl AsFd,
    into: &[VolatileSlice<'_>],
    control: &mut [u8],
) -> io::Result<(usize, usize)> {
    let mut pieces = [EMPTY; PIECES_LIMIT];
    let count = fill(&mut pieces, into);
    let mut message = message(&mut pieces[..count], control);
    // SAFETY: `message` names `count` pieces and a control buffer with its actual length. Each
    // piece is mapped and writable while its `VolatileSlice` in `into` lives, which includes the
    // call. The kernel writes to nothing else. The guest may write to its memory during the call;
    // no Rust reference to that memory exists.
    let status = unsafe { libc::recvmsg(socket.as_fd().as_raw_fd(), &raw mut message, 0) };
    let bytes = usize::try_from(status).map_err(|_| io::Error::last_os_error())?;
    Ok((bytes, message.msg_controllen))
}

fn send_message(
    socket: impl AsFd,
    from: &[VolatileSlice<'_>],
    control: &mut [u8],
    flags: libc::c_int,
) -> io::Result<usize> {
    let mut pieces = [EMPTY; PIECES_LIMIT];
    let count = fill(&mut pieces, from);
    let message = message(&mut pieces[..count], control);
    let flags = flags | libc::MSG_NOSIGNAL;
    // SAFETY: `message` names `count` pieces and a control buffer with its actual length, possibly
    // zero. Each piece is mapped and readable while its `VolatileSlice` in `from` lives, which
    // includes the call. The call only reads them.
    let status = unsafe { libc::sendmsg(socket.as_fd().as_raw_fd(), &raw const message, flags) };
    usize::try_from(status).map_err(|_| io::Error::last_os_error())
}

const EMPTY: libc::iovec = libc::iovec {
    iov_base: std::ptr::null_mut(),
    iov_len: 0,
};

/// Fills `pieces` from the first 128 slices. Slices that are adjacent in memory become one piece:
/// the kernel copies a few long pieces faster than many pages. Returns the number of pieces.
fn fill(pieces: &mut [libc::iovec; PIECES_LIMIT], slices: &[VolatileSlice<'_>]) -> usize {
    let mut count = 0;
    let mut end = 0;
    for slice in slices.iter().take(PIECES_LIMIT) {
        // On Linux the guard from `vm-memory` does nothing, so the address stays valid after the
        // guard is dropped.
        let start = slice.ptr_guard_mut().as_ptr();
        if count > 0 && start.addr() == end {
            pieces[count - 1].iov_len += slice.len();
        } else {
            pieces[count] = libc::iovec {
                iov_base: start.cast(),
                iov_len: slice.len(),
            };
            count += 1;
        }
        end = start.addr() + slice.len();
    }
    count
}

fn message(pieces: &mut [libc::iovec], control: &mut [u8]) -> libc::msghdr {
    // SAFETY: `msghdr` consists of integers and pointers, all of which may be zero.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_mut_ptr();
    message.msg_iovlen = pieces.len() as _;
    if !control.is_empty() {
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = control.len() as _;
    }
    message
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn pieces_are_sent_and_received_in_order_and_a_full_buffer_accepts_a_part() {
        let (near, far) = UnixStream::pair().unwrap();
        let mut sent: Vec<u8> = (0..8 << 20).map(|at: u32| (at % 251) as u8).collect();
        let slices: Vec<_> = sent.chunks_mut(99_991).map(VolatileSlice::from).collect();
        let accepted = send_now(&near, &slices).unwrap();
        assert!(0 < accepted && accepted < 8 << 20, "{accepted}");
        let full = send_now(&near, &slices).unwrap_err();
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
        drop(near);
        let mut came = vec![0; accepted];
        let (first, second) = came.split_at_mut(1000);
        let mut read = 0;
        while read < accepted {
            let into = match read {
                0 => vec![
                    VolatileSlice::from(&mut *first),
                    VolatileSlice::from(&mut *second),
                ],
                _ => vec![VolatileSlice::from(&mut second[read - 1000..])],
            };
            let count = receive(&far, &into).unwrap();
            assert!(count > 0);
            read += count;
        }
        assert_eq!(
            receive(&far, &[VolatileSlice::from(&mut [0][..])]).unwrap(),
            0
        );
        assert!(came == sent[..accepted]);
    }

    #[test]
    fn adjacent_slices_become_one_piece() {
        let mut memory = vec![0; 10_000];
        let base = memory.as_ptr().addr();
        let all = VolatileSlice::from(&mut memory[..]);
        let ranges = [
            (0, 4096),
            (4096, 100),
            (5000, 0),
            (5000, 96),
            (6000, 1),
            (0, 4096),
        ];
        let slices = ranges.map(|(at, length)| all.subslice(at, length).unwrap());
        let mut pieces = [EMPTY; PIECES_LIMIT];
        let count = fill(&mut pieces, &slices);
        let found: Vec<_> = pieces[..count]
            .iter()
            .map(|piece| (piece.iov_base.addr() - base, piece.iov_len))
            .collect();
        assert_eq!(found, [(0, 4196), (5000, 96), (6000, 1), (0, 4096)]);
        assert_eq!(fill(&mut pieces, &[all; 2 * PIECES_LIMIT]), PIECES_LIMIT);
    }

    #[test]
    fn a_connection_that_has_ended_is_an_error() {
        let (near, far) = UnixStream::pair().unwrap();
        drop(far);
        let error = send(&near, &[VolatileSlice::from(&mut [0][..])]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}
