//! All TCP connections of a network namespace, whoever has them.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use netlink_packet_core::{NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkBuffer};
use netlink_sys::{Socket, SocketAddr as Kernel, protocols::NETLINK_SOCK_DIAG};

use super::{FIXED_BYTES, REQUEST_BYTES, SOCK_DIAG_BY_FAMILY};
use crate::netlink::number;

const HEADER_BYTES: usize = 16;
const ERROR: u16 = 2;
const DONE: u16 = 3;
/// What one receive may bring.
const ROOM_BYTES: usize = 64 << 10;
/// How often a list that changed while it was read is read again, before it is taken as it is.
const ATTEMPTS: usize = 4;

/// A connection. Its state is a number of include/net/tcp_states.h.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpConnection {
    /// The end at this host.
    pub local: SocketAddr,
    /// The other one.
    pub peer: SocketAddr,
    /// Its state.
    pub state: u8,
}

/// Those of the calling thread's network namespace in one of these states, of which `states` has
/// the bits; those without an owner are among them. An IPv4 address has that form whatever the
/// socket's family.
///
/// # Errors
/// What socket(2) and netlink say, `NotFound` where the kernel has no inet_diag; `InvalidData` for
/// an answer that is none.
pub fn tcp_connections(states: u32) -> io::Result<Vec<TcpConnection>> {
    let mut socket = Socket::new(NETLINK_SOCK_DIAG)?;
    socket.bind_auto()?;
    socket.connect(&Kernel::new(0, 0))?;
    let mut connections = Vec::new();
    for (number, family) in (1..).zip([libc::AF_INET, libc::AF_INET6]) {
        connections.extend(of_family(&socket, number, family as u8, states)?);
    }
    Ok(connections)
}

fn of_family(
    socket: &Socket,
    first: u32,
    family: u8,
    states: u32,
) -> io::Result<Vec<TcpConnection>> {
    let mut all = Vec::new();
    for attempt in 0..ATTEMPTS as u32 {
        let sequence = first * 16 + attempt;
        let question = question(sequence, family, states);
        if socket.send(&question, 0)? != question.len() {
            return Err(io::ErrorKind::WriteZero.into());
        }
        let mut room = vec![0; ROOM_BYTES];
        let (mut changed, mut done) = (false, false);
        all.clear();
        while !done {
            // The kernel has its answer, or the next part of it, when it is asked.
            let flags = libc::MSG_DONTWAIT | libc::MSG_TRUNC;
            let length = socket.recv(&mut &mut room[..], flags)?;
            let answer = room.get(..length).ok_or(io::ErrorKind::InvalidData)?;
            done = take(answer, sequence, &mut changed, &mut all)?;
        }
        if !changed {
            break;
        }
    }
    Ok(all)
}

/// `struct inet_diag_req_v2` behind its header: any addresses and ports.
fn question(sequence: u32, family: u8, states: u32) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER_BYTES + REQUEST_BYTES);
    bytes.extend(((HEADER_BYTES + REQUEST_BYTES) as u32).to_ne_bytes());
    bytes.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    bytes.extend((NLM_F_REQUEST | NLM_F_DUMP).to_ne_bytes());
    bytes.extend(sequence.to_ne_bytes());
    bytes.extend([0; 4]);
    bytes.extend([family, libc::IPPROTO_TCP as u8, 0, 0]);
    bytes.extend(states.to_ne_bytes());
    bytes.resize(HEADER_BYTES + REQUEST_BYTES, 0);
    bytes
}

/// What one receive has brought; whether it was the last.
fn take(
    mut rest: &[u8],
    sequence: u32,
    changed: &mut bool,
    all: &mut Vec<TcpConnection>,
) -> io::Result<bool> {
    let invalid = || io::Error::from(io::ErrorKind::InvalidData);
    while !rest.is_empty() {
        let message = NetlinkBuffer::new_checked(rest).map_err(|_| invalid())?;
        let length = message.length() as usize;
        if length < HEADER_BYTES {
            return Err(invalid());
        }
        let body = message.payload();
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        // Of an answer before that was given up.
        if message.sequence_number() != sequence {
            continue;
        }
        *changed |= message.flags() & NLM_F_DUMP_INTR != 0;
        match message.message_type() {
            kind @ (ERROR | DONE) => {
                let code = number(body, 0).map_or(0, i32::from_ne_bytes);
                return match code {
                    0 if kind == DONE => Ok(true),
                    code if code < 0 => Err(io::Error::from_raw_os_error(code.saturating_neg())),
                    _ => Err(invalid()),
                };
            }
            SOCK_DIAG_BY_FAMILY => all.extend(connection(body).ok_or_else(invalid)?),
            _ => {}
        }
    }
    Ok(false)
}

/// `struct inet_diag_msg`; nothing of a family that is not asked for.
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

    fn message(kind: u16, sequence: u32, body: &[u8]) -> Vec<u8> {
        let mut bytes = (16 + body.len() as u32).to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend([0; 2]);
        bytes.extend(sequence.to_ne_bytes());
        bytes.extend([0; 4]);
        bytes.extend(body);
        bytes
    }

    /// As `inet_diag_msg_common_fill` writes it.
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
    fn an_answer_is_read_to_its_end_and_of_either_family() {
        let one = TcpConnection {
            local: "192.0.2.1:4444".parse().unwrap(),
            peer: "192.0.2.2:50000".parse().unwrap(),
            state: 1,
        };
        let mut all = Vec::new();
        let parts = [
            message(SOCK_DIAG_BY_FAMILY, 7, &row(libc::AF_INET, 1)),
            message(SOCK_DIAG_BY_FAMILY, 6, &row(libc::AF_INET, 9)),
            message(SOCK_DIAG_BY_FAMILY, 7, &row(libc::AF_INET6, 1)),
        ]
        .concat();
        assert!(!take(&parts, 7, &mut false, &mut all).unwrap());
        assert_eq!(all, [one, one]);
        assert!(take(&message(DONE, 7, &[0; 4]), 7, &mut false, &mut all).unwrap());
        let error = message(ERROR, 7, &(-libc::ENOENT).to_ne_bytes());
        let error = take(&error, 7, &mut false, &mut all).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn i7_an_answer_that_was_cut_anywhere_is_no_panic() {
        let whole = message(SOCK_DIAG_BY_FAMILY, 7, &row(libc::AF_INET, 1));
        for end in 1..whole.len() {
            let read = take(&whole[..end], 7, &mut false, &mut Vec::new());
            assert!(read.is_err(), "{end}");
        }
        for at in 0..whole.len() {
            for value in 0..=255 {
                let mut changed = whole.clone();
                changed[at] = value;
                let _ = take(&changed, 7, &mut false, &mut Vec::new());
            }
        }
    }

    /// Some kernels have no inet_diag, and some processes no netlink sockets.
    #[test]
    fn the_kernel_lists_a_connection_by_its_state() {
        const ESTABLISHED: u8 = 1;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let near = TcpStream::connect(at).unwrap();
        let from = near.local_addr().unwrap();
        let listed = |states| match tcp_connections(states) {
            Ok(listed) => Some(listed),
            Err(error) => {
                println!("not told here: {error}");
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
