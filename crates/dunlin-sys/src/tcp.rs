//! What the kernel knows of a TCP connection's far end (tcp(7)).

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

/// How long nothing has come from the far end, and whether something is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Silence {
    /// Since the last acknowledgement of anything, probes included, or the last data: a kernel
    /// that receives bulk may look at nothing else.
    pub since_heard: Duration,
    /// Segments that were sent and not acknowledged.
    pub unacknowledged: u32,
    /// Probes of a closed window that were not answered.
    pub unanswered_probes: u8,
}

/// Asks how silent the far end of a TCP connection is (`TCP_INFO`).
///
/// # Errors
/// What getsockopt(2) says.
pub fn silence(socket: impl AsFd) -> io::Result<Silence> {
    // SAFETY: `tcp_info` consists of integers alone, for which all zeroes are valid.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: `info` and `length` are initialised, live through the call and are borrowed
    // exclusively; `length` states the room at `info`, beyond which the kernel does not write.
    // A kernel that knows fewer fields leaves the others zero.
    let status = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut length,
        )
    };
    if status < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Silence {
        since_heard: Duration::from_millis(
            info.tcpi_last_ack_recv.min(info.tcpi_last_data_recv).into(),
        ),
        unacknowledged: info.tcpi_unacked,
        unanswered_probes: info.tcpi_probes,
    })
}

/// Bytes that were written and not acknowledged, sent or not (`SIOCOUTQ`, tcp(7)).
///
/// # Errors
/// What ioctl(2) says.
pub fn unacknowledged_bytes(socket: impl AsFd) -> io::Result<u64> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: SIOCOUTQ, which is TIOCOUTQ, writes one int, for which `bytes` is valid; the
    // descriptor is borrowed.
    let status = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if status < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(u64::try_from(bytes).unwrap_or(0))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_far_end_that_answers_is_not_silent_even_where_it_reads_nothing() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut far, _) = listener.accept().unwrap();
        near.write_all(b"x").unwrap();
        far.read_exact(&mut [0]).unwrap();
        far.write_all(b"y").unwrap();
        near.read_exact(&mut [0]).unwrap();
        assert_eq!(silence(&near).unwrap().unacknowledged, 0);
        assert_eq!(unacknowledged_bytes(&near).unwrap(), 0);
        near.set_nonblocking(true).unwrap();
        while near.write(&[0; 65536]).is_ok() {}
        std::thread::sleep(Duration::from_millis(300));
        // The window is closed: nothing is under way but probes, which are answered.
        let Silence {
            unacknowledged,
            unanswered_probes,
            ..
        } = silence(&near).unwrap();
        assert_eq!(unacknowledged, 0);
        assert!(unanswered_probes < 2, "{unanswered_probes}");
        assert!(unacknowledged_bytes(&near).unwrap() > 0);
    }
}
