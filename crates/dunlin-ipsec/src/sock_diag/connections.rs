//! Lists all TCP connections of a network namespace, of any process, and ends one of them.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use netlink_packet_core::{NLM_F_ACK, NLM_F_DUMP};

use super::{FIXED_BYTES, REQUEST_BYTES, SOCK_DIAG_BY_FAMILY};
use crate::netlink::{Failure, Link, Request, number};

/// The type of the request that ends a connection (include/uapi/linux/sock_diag.h).
const SOCK_DESTROY: u16 = 21;
/// The maximum number of attempts to read a list that changes while it is read. The result of the
/// last attempt is used even if it is inconsistent.
const ATTEMPTS: usize = 4;

/// A connection of this host. An IPv4 address has IPv4 form regardless of the socket's family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpConnection {
    /// This host's address and port.
    pub local: SocketAddr,
    /// The other side's address and port.
    pub peer: SocketAddr,
    /// The connection's state, one of the numbers in include/net/tcp_states.h.
    pub state: u8,
}

impl TcpConnection {
    /// The number of the state in which [`Self::is_established`] is true.
    pub const ESTABLISHED: u8 = 1;

    /// Whether the handshake is complete and neither side has closed the connection.
    #[must_use]
    pub fn is_established(&self) -> bool {
        self.state == Self::ESTABLISHED
    }
}

/// Returns the connections of the calling thread's network namespace in the given states; `states`
/// is a bit mask. Connections that no process owns are included.
///
/// # Errors
/// Errors of socket(2) and netlink; `NotFound` if the kernel has no inet_diag; `InvalidData` for a
/// malformed answer.
pub(crate) fn tcp_connections(states: u32) -> io::Result<Vec<TcpConnection>> {
    let mut link = Link::open(libc::NETLINK_SOCK_DIAG)?;
    let mut connections = Vec::new();
    for family in [libc::AF_INET, libc::AF_INET6] {
        connections.extend(of_family(&mut link, family as u8, states)?);
    }
    Ok(connections)
}

/// Ends a connection of any process of the calling thread's network namespace. The process gets
/// `ECONNABORTED`, the other side a reset. Needs `CAP_NET_ADMIN`.
///
/// # Errors
/// Errors from socket(2) and netlink: `NotFound` if the connection has ended already, `EOPNOTSUPP` if
/// the kernel was built without `INET_DIAG_DESTROY`.
pub fn destroy(connection: &TcpConnection) -> io::Result<()> {
    let mut request = Request::new(SOCK_DESTROY, NLM_F_ACK);
    request.put_bytes(&super::query(connection.local, connection.peer));
    let mut link = Link::open(libc::NETLINK_SOCK_DIAG)?;
    Ok(link.exchange(request, |_, _| Ok(()))?)
}

fn of_family(link: &mut Link, family: u8, states: u32) -> io::Result<Vec<TcpConnection>> {
    let mut all = Vec::new();
    for _ in 0..ATTEMPTS {
        all.clear();
        let listed = link.exchange(query(family, states), |kind, body| {
            if kind == SOCK_DIAG_BY_FAMILY {
                all.extend(connection(body).ok_or("truncated connection")?);
            }
            Ok(())
        });
        match listed {
            Ok(()) => break,
            Err(Failure::Changed) => {}
            Err(failure) => return Err(failure.into()),
        }
    }
    Ok(all)
}

/// A `struct inet_diag_req_v2` for any addresses and ports.
fn query(family: u8, states: u32) -> Request {
    let mut content = [0; REQUEST_BYTES];
    content[..2].copy_from_slice(&[family, libc::IPPROTO_TCP as u8]);
    content[4..8].copy_from_slice(&states.to_ne_bytes());
    let mut request = Request::new(SOCK_DIAG_BY_FAMILY, NLM_F_DUMP);
    request.put_bytes(&content);
    request
}

/// Parses a `struct inet_diag_msg`; `Some(None)` for another address family, `None` if the bytes
/// are too few.
fn connection(body: &[u8]) -> Option<Option<TcpConnection>> {
    let fixed = body.get(..FIXED_BYTES)?;
    let end = |port: usize, address: usize| {
        let host: IpAddr = match i32::from(fixed[0]) {
            libc::AF_INET => Ipv4Addr::from(number::<4>(fixed, address)?).into(),
            libc::AF_INET6 => Ipv6Addr::from(number::<16>(fixed, address)?).to_canonical(),
            _ => return None,
        };
        Some(SocketAddr::new(
            host,
            u16::from_be_bytes(number(fixed, port)?),
        ))
    };
    let ends = end(4, 8).zip(end(6, 24));
    Some(ends.map(|(local, peer)| TcpConnection {
        local,
        peer,
        state: fixed[1],
    }))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    /// Returns a message as `inet_diag_msg_common_fill` writes it.
    fn row(family: i32, state: u8) -> Vec<u8> {
        let mut bytes = vec![family as u8, state, 0, 0];
        bytes.extend(4444_u16.to_be_bytes());
        bytes.extend(50_000_u16.to_be_bytes());
        for last in [1, 2] {
            let address = match family {
                libc::AF_INET => [&[192, 0, 2, last][..], &[0; 12]].concat(),
                _ => Ipv4Addr::new(192, 0, 2, last)
                    .to_ipv6_mapped()
                    .octets()
                    .to_vec(),
            };
            bytes.extend(address);
        }
        bytes.resize(FIXED_BYTES, 0);
        bytes
    }

    #[test]
    fn a_connection_of_either_family_is_read() {
        let one = TcpConnection {
            local: "192.0.2.1:4444".parse().unwrap(),
            peer: "192.0.2.2:50000".parse().unwrap(),
            state: 1,
        };
        for family in [libc::AF_INET, libc::AF_INET6] {
            assert_eq!(connection(&row(family, 1)), Some(Some(one)));
        }
        assert_eq!(connection(&row(libc::AF_UNIX, 1)), Some(None));
    }

    #[test]
    fn i7_a_truncated_or_changed_connection_does_not_panic() {
        let whole = row(libc::AF_INET, 1);
        for end in 0..whole.len() {
            assert_eq!(connection(&whole[..end]), None, "{end}");
        }
        for at in 0..whole.len() {
            for value in 0..=255 {
                let mut changed = whole.clone();
                changed[at] = value;
                let _ = connection(&changed);
            }
        }
    }

    /// This test checks nothing if the kernel has no inet_diag, or if the process is not allowed to
    /// open netlink sockets.
    #[test]
    fn the_kernel_lists_a_connection_by_its_state() {
        const ESTABLISHED: u8 = TcpConnection::ESTABLISHED;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let near = TcpStream::connect(at).unwrap();
        let from = near.local_addr().unwrap();
        let listed = |states| match tcp_connections(states) {
            Ok(listed) => Some(listed),
            Err(error) => {
                println!("not available here: {error}");
                None
            }
        };
        let Some(all) = listed(1 << ESTABLISHED) else {
            return;
        };
        let of = |local, peer| {
            all.contains(&TcpConnection {
                local,
                peer,
                state: ESTABLISHED,
            })
        };
        assert!(of(from, at) && of(at, from));
        assert!(all.iter().all(|one| one.state == ESTABLISHED));
        let listening = listed(1 << 10).unwrap();
        assert!(
            listening
                .iter()
                .any(|one| one.local == at && one.state == 10)
        );
    }
}
