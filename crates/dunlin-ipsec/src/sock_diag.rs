//! Queries about TCP connections over netlink (sock_diag(7), include/uapi/linux/inet_diag.h): which
//! engine seals and opens the records of a kernel TLS connection, and which connections exist.
//!
//! ```text
//!   this ── one connection's addresses ──▶ kernel
//!        ◀── its state, and as attributes ULP ▸ TLS ▸ one number for each direction ──
//! ```
//!
//! The kernel answers a query about one socket immediately (`inet_diag_dump_one_icsk`,
//! net/ipv4/inet_diag.c).

mod connections;

use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};

pub(crate) use self::connections::tcp_connections;
pub use self::connections::{TcpConnection, destroy};
use crate::netlink::{Request, ask, attribute, number};

/// The type of the request and of the answer (include/uapi/linux/sock_diag.h).
const SOCK_DIAG_BY_FAMILY: u16 = 20;
/// The size of `inet_diag_req_v2`.
const REQUEST_BYTES: usize = 56;
/// The size of `inet_diag_msg`, after which the attributes start.
const FIXED_BYTES: usize = 72;

const INET_DIAG_INFO: u8 = 2;
/// The attribute `INET_DIAG_ULP_INFO` contains `INET_ULP_INFO_TLS`
/// (include/uapi/linux/inet_diag.h), which contains the two attributes `TLS_INFO_*`
/// (include/uapi/linux/tls.h).
const ULP_INFO: u16 = 19;
const ULP_INFO_TLS: u16 = 2;
const TLS_INFO_TXCONF: u16 = 3;
const TLS_INFO_RXCONF: u16 = 4;

pub use dunlin_lane::kernel::{RecordEngine, RecordEngines};

/// Queries which engines seal and open a connection's records. `None` if the kernel reports no TLS:
/// the socket has none, or the kernel reports it only with `CAP_NET_ADMIN` (before Linux 6.15).
///
/// # Errors
/// Errors from socket(2), for example if the process is not allowed to open netlink sockets, and
/// from netlink (`NotFound` if the kernel has no inet_diag or the connection is not in this network
/// namespace); `InvalidData` for a malformed answer.
pub fn record_engines(connection: &TcpStream) -> io::Result<Option<RecordEngines>> {
    let query = query(connection.local_addr()?, connection.peer_addr()?);
    let mut request = Request::new(SOCK_DIAG_BY_FAMILY, 0);
    request.put_bytes(&query);
    let answer = ask(libc::NETLINK_SOCK_DIAG, request, FIXED_BYTES)?;
    Ok(engines_in(&answer))
}

/// A query about the one connection between `near`, this host's end, and `far`.
fn query(near: SocketAddr, far: SocketAddr) -> Vec<u8> {
    let (family, interface) = match near {
        SocketAddr::V4(_) => (libc::AF_INET, 0),
        SocketAddr::V6(near) => (libc::AF_INET6, near.scope_id()),
    };
    let mut bytes = Vec::with_capacity(REQUEST_BYTES);
    // The kernel sends the ULP attribute only together with `tcp_info` (`inet_sk_diag_fill`).
    let extensions = 1 << (INET_DIAG_INFO - 1);
    bytes.extend([family as u8, libc::IPPROTO_TCP as u8, extensions, 0]);
    // All states.
    bytes.extend(u32::MAX.to_ne_bytes());
    for end in [near, far] {
        bytes.extend(end.port().to_be_bytes());
    }
    for end in [near, far] {
        match end.ip() {
            IpAddr::V4(address) => {
                bytes.extend(address.octets());
                bytes.extend([0; 12]);
            }
            IpAddr::V6(address) => bytes.extend(address.octets()),
        }
    }
    bytes.extend(interface.to_ne_bytes());
    // Match by addresses only (`INET_DIAG_NOCOOKIE`).
    bytes.extend([0xff; 8]);
    bytes
}

fn engines_in(attributes: &[u8]) -> Option<RecordEngines> {
    let tls = attribute(attribute(attributes, ULP_INFO)?, ULP_INFO_TLS)?;
    Some(RecordEngines {
        sending: engine(tls, TLS_INFO_TXCONF),
        receiving: engine(tls, TLS_INFO_RXCONF),
    })
}

/// The value 1 means a direction without TLS.
fn engine(tls: &[u8], direction: u16) -> Option<RecordEngine> {
    match u16::from_ne_bytes(number(attribute(tls, direction)?, 0)?) {
        2 => Some(RecordEngine::Software),
        3 | 4 => Some(RecordEngine::Card),
        _ => None,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::netlink::attributes;

    /// Returns the attribute as net/tls/tls_main.c writes it, after an attribute of odd
    /// length.
    fn tls(sending: u16, receiving: u16) -> Vec<u8> {
        let numbers = [0x0303, 51, sending, receiving].map(u16::to_ne_bytes);
        let inner: Vec<_> = (1..).zip(numbers.iter().map(|two| &two[..])).collect();
        // The bit 0x8000 marks a nested attribute (NLA_F_NESTED).
        let ulp = [(1, &b"tls\0"[..]), (0x8000 | 2, &attributes(&inner))];
        attributes(&[(8, &[0]), (ULP_INFO, &attributes(&ulp))])
    }

    #[test]
    fn an_answer_names_the_engine_of_each_direction() {
        let of = |sending, receiving| engines_in(&tls(sending, receiving)).unwrap();
        let record_engines = of(2, 3);
        assert_eq!(record_engines.sending, Some(RecordEngine::Software));
        assert_eq!(record_engines.receiving, Some(RecordEngine::Card));
        let record_engines = of(4, 1);
        assert_eq!(record_engines.sending, Some(RecordEngine::Card));
        assert_eq!(record_engines.receiving, None, "engine without TLS");
        assert_eq!(engines_in(&[]), None);
        let other = attributes(&[(ULP_INFO, &attributes(&[(1, b"mptcp\0")]))]);
        assert_eq!(engines_in(&other), None);
    }

    #[test]
    fn a_query_has_the_length_that_the_kernel_requires() {
        for ends in [["127.0.0.1:1", "127.0.0.1:2"], ["[::1]:1", "[fe80::1%3]:2"]] {
            let [near, far] = ends.map(|end| end.parse().unwrap());
            assert_eq!(query(near, far).len(), REQUEST_BYTES);
        }
    }

    /// This test checks nothing if the kernel has no inet_diag, or if the process is not allowed to
    /// open netlink sockets.
    #[test]
    fn a_connection_without_tls_has_no_engines() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(address) else {
                println!("not tested, no {address}");
                continue;
            };
            let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            match record_engines(&near) {
                Ok(record_engines) => assert_eq!(record_engines, None),
                Err(error) => println!("not available here: {error}"),
            }
        }
    }
}
