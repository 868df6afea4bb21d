//! The TCP connections in the calling thread's network namespace. The kernel lists the connections
//! in given states (sock_diag); if that fails, they are read from procfs.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::sock_diag::{TcpConnection, tcp_connections};

use super::error::IpsecError;

/// States of include/net/tcp_states.h that send no data: TIME_WAIT, CLOSE, LISTEN.
const SILENT: [u8; 3] = [6, 7, 10];
/// The last of the states to ask for (`TCP_NEW_SYN_RECV`). The request has one bit per state. The
/// next bit would include sockets that are bound to a port without a connection
/// (`TCPF_BOUND_INACTIVE`).
const LAST: u8 = 12;

/// Returns the TCP connections that may still send data, in the calling thread's network namespace.
/// The list includes connections that no process owns.
///
/// # Errors
/// Neither netlink nor procfs lists them.
pub fn connections() -> Result<Vec<TcpConnection>, IpsecError> {
    let active = (TcpConnection::ESTABLISHED..=LAST).filter(|state| !SILENT.contains(state));
    let states = active.fold(0, |all, state| all | 1 << state);
    tcp_connections(states).or_else(|_| by_procfs())
}

fn by_procfs() -> Result<Vec<TcpConnection>, IpsecError> {
    let mut connections = Vec::new();
    for path in ["/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"] {
        match fs::read_to_string(path) {
            Ok(table) => connections.extend(table.lines().skip(1).filter_map(parse)),
            // A kernel without IPv6 has no second table.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && path.ends_with('6') => {}
            Err(source) => return Err(IpsecError::System { path, source }),
        }
    }
    Ok(connections)
}

/// Parses a row: number, local and remote address, state. Returns `None` if the row is malformed or
/// the connection sends no data.
fn parse(row: &str) -> Option<TcpConnection> {
    let mut words = row.split_whitespace().skip(1);
    let (local, peer) = (address(words.next()?)?, address(words.next()?)?);
    let state = u8::from_str_radix(words.next()?, 16).ok()?;
    (!SILENT.contains(&state)).then_some(TcpConnection { local, peer, state })
}

/// Parses an address (32-bit words in the host's byte order) and a port, in hexadecimal.
fn address(text: &str) -> Option<SocketAddr> {
    let (host, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let word = |at: usize| {
        let digits = host.get(8 * at..8 * at + 8)?;
        Some(u32::from_str_radix(digits, 16).ok()?.to_ne_bytes())
    };
    let host: IpAddr = match host.len() {
        8 => Ipv4Addr::from(word(0)?).into(),
        32 => {
            let mut octets = [0; 16];
            for (at, four) in octets.chunks_exact_mut(4).enumerate() {
                four.copy_from_slice(&word(at)?);
            }
            IpAddr::from(Ipv6Addr::from(octets)).to_canonical()
        }
        _ => return None,
    };
    Some(SocketAddr::new(host, port))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_connection_is_listed_until_it_is_over_and_a_listener_never() {
        listed_until_it_is_over(connections);
        listed_until_it_is_over(by_procfs);
    }

    fn listed_until_it_is_over(connections: fn() -> Result<Vec<TcpConnection>, IpsecError>) {
        for any in ["127.0.0.1:0", "[::1]:0"] {
            let listener = match TcpListener::bind(any) {
                Ok(listener) => listener,
                Err(error) => {
                    println!("{any}: {error}");
                    assert!(any.starts_with('['), "cannot listen on IPv4");
                    continue;
                }
            };
            let at = listener.local_addr().unwrap();
            let client = TcpStream::connect(at).unwrap();
            let (server, from) = listener.accept().unwrap();
            let listed = connections().unwrap();
            for (local, peer) in [(from, at), (at, from)] {
                let found = |one: &&TcpConnection| one.local == local && one.peer == peer;
                assert!(listed.iter().find(found).unwrap().is_established());
            }
            assert!(listed.iter().all(|one| one.peer.port() != 0));
            // The side that closes first keeps a TIME_WAIT socket, which sends no data.
            drop(client);
            drop(server);
            let mut left = connections().unwrap();
            // Another program may use the port by now, with another peer.
            left.retain(|one| one.local == from && one.peer == at && one.is_established());
            assert_eq!(left, []);
        }
    }

    #[test]
    fn addresses_are_read_as_the_kernel_writes_them() {
        let little = cfg!(target_endian = "little");
        let v4 = if little { "0100007F" } else { "7F000001" };
        assert_eq!(
            address(&format!("{v4}:1F90")),
            "127.0.0.1:8080".parse().ok()
        );
        let mapped = if little {
            "0000000000000000FFFF00000100007F"
        } else {
            "00000000000000000000FFFF7F000001"
        };
        assert_eq!(
            address(&format!("{mapped}:0001")),
            "127.0.0.1:1".parse().ok()
        );
        assert_eq!(address("0100:0001"), None);
        assert_eq!(address("ÄÄÄÄ:0001"), None);
    }
}
