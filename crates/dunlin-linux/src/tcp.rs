//! The state of a TCP connection in the kernel, and a new lookup of its route (tcp(7)).

use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use rustix::net::{AddressFamily, sockopt};

use crate::option;

/// How long nothing has come from the far end, and whether something is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Silence {
    /// Since the last acknowledgement of anything, probes included, or the last data: a kernel
    /// that receives bulk may look at nothing else.
    pub since_heard: Duration,
    /// Since the last segment with data was sent, or sent again.
    pub since_sent: Duration,
    /// Segments that were sent and not acknowledged.
    pub unacknowledged: u32,
    /// Probes of a closed window that were not answered.
    pub unanswered_probes: u8,
}

impl Silence {
    /// Whether the far end owes an answer and has sent nothing for `limit`.
    ///
    /// Unacknowledged data alone proves nothing: a far end with a full buffer may drop data and
    /// acknowledge that, and the kernel doubles the time until it sends the data again. The far end
    /// owes an answer only to what was sent since it was last heard.
    ///
    /// Drawback: a far end that vanishes while its window is closed is noticed after the next
    /// retransmission or the third probe, which may be two minutes apart (RFC 9293, 3.8.6.1).
    #[must_use]
    pub fn is_overdue(&self, limit: Duration) -> bool {
        let owes_acknowledgement = self.unacknowledged > 0 && self.since_sent < self.since_heard;
        // A far end limits how often it answers probes (net.ipv4.tcp_invalid_ratelimit).
        let owes_window = self.unanswered_probes > 2;
        (owes_acknowledgement || owes_window) && self.since_heard >= limit
    }
}

/// Asks how silent the far end of a TCP connection is (`TCP_INFO`).
///
/// # Errors
/// The error of getsockopt(2).
pub fn silence(socket: impl AsFd) -> io::Result<Silence> {
    // A kernel that has fewer fields leaves the others zero.
    let (info, _) = info(socket)?;
    let milliseconds = |at| Duration::from_millis(option::number(&info, at).into());
    let since_ack = milliseconds(offset_of!(libc::tcp_info, tcpi_last_ack_recv));
    let since_data = milliseconds(offset_of!(libc::tcp_info, tcpi_last_data_recv));
    Ok(Silence {
        since_heard: since_ack.min(since_data),
        since_sent: milliseconds(offset_of!(libc::tcp_info, tcpi_last_data_sent)),
        unacknowledged: option::number(&info, offset_of!(libc::tcp_info, tcpi_unacked)),
        unanswered_probes: info[offset_of!(libc::tcp_info, tcpi_probes)],
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

/// The CPU that has taken in the connection's last packet (`SO_INCOMING_CPU`, socket(7)); what the
/// connection then sends in answer leaves from there, by the SA that the connection has.
///
/// # Errors
/// The error of getsockopt(2).
pub fn incoming_cpu(socket: impl AsFd) -> io::Result<u32> {
    // Not by `rustix`, which reads the -1 of a connection without a packet as a CPU.
    let (cpu, _) = option::get(socket, libc::SOL_SOCKET, libc::SO_INCOMING_CPU)?;
    Ok(u32::try_from(i32::from_ne_bytes(cpu)).unwrap_or(0))
}

/// Where `tcpi_bytes_sent` lies in `struct tcp_info` of include/uapi/linux/tcp.h, which only grows
/// at its end.
const BYTES_SENT_AT: usize = 200;
const INFO_BYTES: usize = BYTES_SENT_AT + 8;

/// Bytes of data that the connection has handed to the network, sent again included
/// (`tcpi_bytes_sent` of `TCP_INFO`, Linux 4.19).
///
/// # Errors
/// The error of getsockopt(2); `Unsupported` from a kernel that does not tell.
pub fn sent_bytes(socket: impl AsFd) -> io::Result<u64> {
    let (info, length) = info(socket)?;
    match info.last_chunk() {
        Some(bytes) if length == INFO_BYTES => Ok(u64::from_ne_bytes(*bytes)),
        _ => Err(io::ErrorKind::Unsupported.into()),
    }
}

/// The beginning of `struct tcp_info`, and how many bytes of it the kernel has.
fn info(socket: impl AsFd) -> io::Result<([u8; INFO_BYTES], usize)> {
    option::get(socket, libc::IPPROTO_TCP, libc::TCP_INFO)
}

/// Gives a connection's packets a traffic class: the upper six bits are the DSCP, the lower two are
/// TCP's own and stay (`IP_TOS`, `IPV6_TCLASS`).
///
/// A class other than before makes the kernel look for the connection's route anew, and with it for
/// the SA by which it goes, when it next sends, on whichever CPU that happens: with IPsec the way
/// to take a connection to the SA of the CPU that sends next.
///
/// # Errors
/// The error of getsockopt(2) or setsockopt(2).
pub fn set_traffic_class(socket: impl AsFd, class: u8) -> io::Result<()> {
    // A socket of IPv6 may carry a connection of IPv4, and takes both.
    if sockopt::socket_domain(&socket)? == AddressFamily::INET6 {
        sockopt::set_ipv6_tclass(&socket, class.into())?;
    }
    Ok(sockopt::set_ip_tos(&socket, class)?)
}

/// Has a connection send its window to its peer at once, from the CPU of the calling thread: an
/// empty segment, which the peer answers. Where the connection's route is to be looked up anew
/// ([`set_traffic_class`]), it is looked up here.
///
/// It is what the end of a repair does (`TCP_REPAIR_OFF`), also where there was none: the one call
/// after which the kernel sends although there is nothing to send. A connection that is being
/// closed sends nothing.
///
/// # Errors
/// `EPERM` without `CAP_NET_ADMIN` in the network namespace, and the error of getsockopt(2) or
/// setsockopt(2).
pub fn send_window(socket: impl AsFd) -> io::Result<()> {
    // The end of a repair also takes away that a listener may be bound beside the connection.
    let beside = sockopt::socket_reuseaddr(&socket)?;
    option::set_int(&socket, libc::IPPROTO_TCP, libc::TCP_REPAIR, 0)?;
    Ok(sockopt::set_socket_reuseaddr(&socket, beside)?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::{ErrorKind, Read, Write};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_connection_has_a_cpu_and_a_traffic_class_in_both_families() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            // A machine without IPv6 has nothing to listen on.
            let Ok(listener) = TcpListener::bind(address) else {
                continue;
            };
            let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (mut far, _) = listener.accept().unwrap();
            for class in [8, 0] {
                set_traffic_class(&near, class).unwrap();
                near.write_all(b"x").unwrap();
                far.read_exact(&mut [0]).unwrap();
            }
            assert_eq!(sent_bytes(&near).unwrap(), 2);
            assert!(incoming_cpu(&far).unwrap() < 4096);
        }
    }

    #[test]
    fn a_window_is_sent_at_once_and_changes_nothing_else() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut far, _) = listener.accept().unwrap();
        let heard = || silence(&far).unwrap().since_heard;
        let before = loop {
            // The kernel counts in milliseconds, and some kernels in steps of ten.
            match heard() {
                silent if silent >= Duration::from_millis(100) => break silent,
                _ => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        match send_window(&far) {
            Err(error) => assert_eq!(error.kind(), ErrorKind::PermissionDenied),
            // It is answered.
            Ok(()) => assert!(heard() < before),
        }
        far.write_all(b"x").unwrap();
        near.write_all(b"y").unwrap();
        near.read_exact(&mut [0]).unwrap();
        far.read_exact(&mut [0]).unwrap();
        // As whoever starts again does, with connections still open.
        let at = listener.local_addr().unwrap();
        drop(listener);
        TcpListener::bind(at).unwrap();
    }

    #[test]
    fn a_far_end_is_overdue_only_where_something_was_sent_since_it_was_heard() {
        let limit = Duration::from_secs(30);
        let silence = |heard, sent, unacknowledged, unanswered_probes| Silence {
            since_heard: Duration::from_secs(heard),
            since_sent: Duration::from_secs(sent),
            unacknowledged,
            unanswered_probes,
        };
        // (since heard, since sent, unacknowledged segments, unanswered probes), overdue
        for (silence, overdue) in [
            (silence(30, 12, 1, 0), true),
            (silence(29, 12, 1, 0), false),
            (silence(90, 12, 0, 0), false),
            // The last retransmission was answered; the next one is not due yet.
            (silence(45, 45, 2, 0), false),
            (silence(45, 46, 2, 0), false),
            (silence(45, 400, 0, 3), true),
            (silence(45, 400, 0, 2), false),
        ] {
            assert_eq!(silence.is_overdue(limit), overdue, "{silence:?}");
        }
    }

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
        // The first probe of a closed window is sent after 200 ms (TCP_RTO_MIN).
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
