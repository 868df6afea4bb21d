//! The kernel's state of a TCP connection, and how to make the kernel look up the connection's
//! route again (tcp(7)).

use std::io;
use std::mem::offset_of;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::ioctl::{Getter, Opcode, ioctl};
use rustix::net::{AddressFamily, sockopt};

use crate::option;

/// How long the peer has sent nothing, and what the peer has not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Silence {
    /// Time since the peer's last acknowledgement (also of a probe) or last data, whichever is
    /// later. During bulk reception the kernel may update only the time of the data.
    pub since_heard: Duration,
    /// Time since the last data segment was sent or retransmitted.
    pub since_sent: Duration,
    /// The number of segments that were sent and not acknowledged.
    pub unacknowledged: u32,
    /// The number of zero-window probes that were not answered.
    pub unanswered_probes: u8,
}

impl Silence {
    /// Whether the peer must answer and has sent nothing for `limit`.
    ///
    /// Unacknowledged data alone is not sufficient: a peer with a full buffer may drop data and
    /// acknowledge only earlier data. The kernel doubles the time until the next retransmission,
    /// and until then the peer has nothing to answer. The peer must answer only if this side sent
    /// data after the peer last sent something.
    ///
    /// Drawback: if the peer fails while its window is closed, this method detects the failure only
    /// after the next retransmission or the third probe. The kernel may wait two minutes between
    /// two retransmissions or probes (RFC 9293, 3.8.6.1).
    #[must_use]
    pub fn is_overdue(&self, limit: Duration) -> bool {
        let owes_acknowledgement = self.unacknowledged > 0 && self.since_sent < self.since_heard;
        // A peer limits the rate of its answers to probes (net.ipv4.tcp_invalid_ratelimit), so it
        // may leave one or two probes unanswered.
        let owes_window = self.unanswered_probes > 2;
        (owes_acknowledgement || owes_window) && self.since_heard >= limit
    }
}

/// Reads how long the peer of a TCP connection has sent nothing (`TCP_INFO`).
///
/// # Errors
/// An error from getsockopt(2).
pub fn silence(socket: impl AsFd) -> io::Result<Silence> {
    // Fields that an older kernel does not have stay zero.
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

const SIOCOUTQ: Opcode = libc::TIOCOUTQ as Opcode;

/// Bytes that were written and not acknowledged, whether sent or not (`SIOCOUTQ`, tcp(7)).
///
/// # Errors
/// An error from ioctl(2).
pub fn unacknowledged_bytes(socket: impl AsFd) -> io::Result<u64> {
    // SAFETY: SIOCOUTQ, which has the number of TIOCOUTQ, writes one int.
    let bytes = unsafe { ioctl(socket, Getter::<SIOCOUTQ, libc::c_int>::new()) }?;
    Ok(u64::try_from(bytes).unwrap_or(0))
}

/// The CPU that received the connection's last packet (`SO_INCOMING_CPU`, socket(7)), or 0 before
/// the first packet. Answers to that packet are sent from this CPU, through the connection's cached
/// SA.
///
/// # Errors
/// An error from getsockopt(2).
pub fn incoming_cpu(socket: impl AsFd) -> io::Result<u32> {
    // For a connection that has not received a packet yet, the kernel returns -1. `rustix` would
    // return that value as a CPU number.
    let (cpu, _) = option::get(socket, libc::SOL_SOCKET, libc::SO_INCOMING_CPU)?;
    Ok(u32::try_from(i32::from_ne_bytes(cpu)).unwrap_or(0))
}

/// Offset of `tcpi_bytes_sent` in `struct tcp_info` (include/uapi/linux/tcp.h). The kernel extends
/// the structure only at its end.
const BYTES_SENT_AT: usize = 200;
const INFO_BYTES: usize = BYTES_SENT_AT + 8;

/// Bytes of data that the connection has sent, retransmissions included (`tcpi_bytes_sent` of
/// `TCP_INFO`, Linux 4.19).
///
/// # Errors
/// An error from getsockopt(2); `Unsupported` if the kernel lacks the field.
pub fn sent_bytes(socket: impl AsFd) -> io::Result<u64> {
    let (info, length) = info(socket)?;
    match info.last_chunk() {
        Some(bytes) if length == INFO_BYTES => Ok(u64::from_ne_bytes(*bytes)),
        _ => Err(io::ErrorKind::Unsupported.into()),
    }
}

/// What a connection has carried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes of data that the peer has acknowledged.
    pub acknowledged_bytes: u64,
    /// Bytes of data that were received in order.
    pub received_bytes: u64,
    /// The number of segments that were sent again.
    pub retransmits: u32,
}

/// Offset of `tcpi_bytes_acked`, which `tcpi_bytes_received` follows.
const BYTES_ACKED_AT: usize = 120;

/// Reads what a connection has carried (`TCP_INFO`, Linux 4.1).
///
/// # Errors
/// An error from getsockopt(2).
pub fn traffic(socket: impl AsFd) -> io::Result<Traffic> {
    let (info, _) = info(socket)?;
    let bytes = |at: usize| {
        let field = info[at..].first_chunk();
        field.map_or(0, |bytes| u64::from_ne_bytes(*bytes))
    };
    Ok(Traffic {
        acknowledged_bytes: bytes(BYTES_ACKED_AT),
        received_bytes: bytes(BYTES_ACKED_AT + 8),
        retransmits: option::number(&info, offset_of!(libc::tcp_info, tcpi_total_retrans)),
    })
}

/// The smoothed round-trip time of a connection, as its TCP measures it (`tcpi_rtt` of
/// `TCP_INFO`).
///
/// # Errors
/// An error from getsockopt(2).
pub fn round_trip(socket: impl AsFd) -> io::Result<Duration> {
    let (info, _) = info(socket)?;
    let microseconds = option::number(&info, offset_of!(libc::tcp_info, tcpi_rtt));
    Ok(Duration::from_micros(microseconds.into()))
}

/// Whether the connection is established and neither side has closed it (`tcpi_state` of
/// `TCP_INFO`).
///
/// # Errors
/// An error from getsockopt(2).
pub fn is_established(socket: impl AsFd) -> io::Result<bool> {
    // TCP_ESTABLISHED of include/net/tcp_states.h.
    const ESTABLISHED: u8 = 1;
    let (info, _) = info(socket)?;
    Ok(info[offset_of!(libc::tcp_info, tcpi_state)] == ESTABLISHED)
}

/// The start of `struct tcp_info`, and the number of bytes that the kernel has written.
fn info(socket: impl AsFd) -> io::Result<([u8; INFO_BYTES], usize)> {
    option::get(socket, libc::IPPROTO_TCP, libc::TCP_INFO)
}

/// Sets the traffic class of a connection's packets (`IP_TOS`, `IPV6_TCLASS`). The upper six bits
/// are the DSCP; TCP keeps the lower two.
///
/// If the class changes, the kernel looks up the connection's route and SA again at the next send,
/// on the CPU of that send. With IPsec, the connection thus moves to the SA of the CPU that sends
/// next.
///
/// # Errors
/// An error from getsockopt(2) or setsockopt(2).
pub fn set_traffic_class(socket: impl AsFd, class: u8) -> io::Result<()> {
    // An IPv6 socket may carry an IPv4 connection, so set the options of both versions.
    if sockopt::socket_domain(&socket)? == AddressFamily::INET6 {
        sockopt::set_ipv6_tclass(&socket, class.into())?;
    }
    Ok(sockopt::set_ip_tos(&socket, class)?)
}

/// Makes a connection send a window probe immediately, from the CPU of the calling thread. A window
/// probe is an empty segment, which the peer answers. A pending route lookup
/// ([`set_traffic_class`]) happens at that moment.
///
/// The kernel sends the probe at the end of a repair (`TCP_REPAIR_OFF`), even if the connection was
/// not in repair mode. A connection that is not established sends nothing.
///
/// # Errors
/// `EPERM` without `CAP_NET_ADMIN` in the network namespace, and an error from getsockopt(2) or
/// setsockopt(2).
pub fn send_window(socket: impl AsFd) -> io::Result<()> {
    // TCP_REPAIR_OFF also clears SO_REUSEADDR, without which no new listener could use the port.
    // Restore it.
    let reuse = sockopt::socket_reuseaddr(&socket)?;
    option::set_int(&socket, libc::IPPROTO_TCP, libc::TCP_REPAIR, 0)?;
    Ok(sockopt::set_socket_reuseaddr(&socket, reuse)?)
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
            // The bind fails on a host without IPv6.
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
            assert_eq!(traffic(&far).unwrap().received_bytes, 2);
            assert!(incoming_cpu(&far).unwrap() < 4096);
        }
    }

    #[test]
    fn a_connection_is_established_until_a_side_closes_it() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut far, _) = listener.accept().unwrap();
        assert!(is_established(&far).unwrap());
        drop(near);
        assert_eq!(far.read(&mut [0]).unwrap(), 0);
        assert!(!is_established(&far).unwrap());
    }

    #[test]
    fn send_window_sends_at_once_and_changes_nothing_else() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut far, _) = listener.accept().unwrap();
        let since_heard = || silence(&far).unwrap().since_heard;
        let before = loop {
            // Wait until the silence is much longer than the step of the kernel's clock, which is
            // at most ten milliseconds.
            match since_heard() {
                silent if silent >= Duration::from_millis(100) => break silent,
                _ => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        match send_window(&far) {
            Err(error) => assert_eq!(error.kind(), ErrorKind::PermissionDenied),
            // The peer has answered the probe, so its silence is shorter than before.
            Ok(()) => assert!(since_heard() < before),
        }
        far.write_all(b"x").unwrap();
        near.write_all(b"y").unwrap();
        near.read_exact(&mut [0]).unwrap();
        far.read_exact(&mut [0]).unwrap();
        // Bind the port while a connection from it is open, as a restarted server does. This fails
        // if the connection lacks SO_REUSEADDR.
        let at = listener.local_addr().unwrap();
        drop(listener);
        TcpListener::bind(at).unwrap();
    }

    #[test]
    fn a_peer_is_overdue_only_if_data_was_sent_after_it_last_answered() {
        let limit = Duration::from_secs(30);
        let silence = |received, sent, unacknowledged, unanswered_probes| Silence {
            since_heard: Duration::from_secs(received),
            since_sent: Duration::from_secs(sent),
            unacknowledged,
            unanswered_probes,
        };
        // (since_heard and since_sent in seconds, unacknowledged segments, unanswered probes), overdue
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
    fn a_peer_that_answers_is_not_silent_although_it_reads_nothing() {
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
        // The window is closed: only probes are sent, and the peer answers them.
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
