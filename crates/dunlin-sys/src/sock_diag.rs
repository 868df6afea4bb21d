//! What the kernel tells of a TCP connection to whoever asks over netlink (sock_diag(7), its
//! include/uapi/linux/inet_diag.h): with the kernel's TLS, who seals and opens the records.
//!
//! ```text
//!   this ── one connection's addresses ──▶ kernel
//!        ◀── its state, and as attributes ULP ▸ TLS ▸ one number for each direction ──
//! ```
//!
//! The answer to a question about one socket lies in the netlink socket before the question's
//! write(2) returns (`inet_diag_dump_one_icsk`, net/ipv4/inet_diag.c), so nothing here waits.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::{FromRawFd, OwnedFd};

/// The question, and the answer (include/uapi/linux/sock_diag.h).
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NETLINK_ERROR: u16 = libc::NLMSG_ERROR as u16;
/// `nlmsghdr`: length, kind, flags, number, sender.
const HEADER_BYTES: usize = 16;
/// Header and `inet_diag_req_v2`.
const REQUEST_BYTES: usize = HEADER_BYTES + 56;
/// Header and `inet_diag_msg`, behind which the attributes begin.
const FIXED_BYTES: usize = HEADER_BYTES + 72;
/// Room for any answer about one socket, most of which is `tcp_info`.
const ANSWER_BYTES: usize = 8192;

const INET_DIAG_INFO: u8 = 2;
/// The attribute `INET_DIAG_ULP_INFO`, within it `INET_ULP_INFO_TLS`, within that two numbers
/// (include/uapi/linux/tls.h).
const ULP_INFO: u16 = 19;
const ULP_INFO_TLS: u16 = 2;
const TLS_INFO_TXCONF: u16 = 3;
const TLS_INFO_RXCONF: u16 = 4;

/// The kinds of attributes are below their flags.
const KIND_MASK: u16 = 0x3fff;

/// Who seals or opens the records of a direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The kernel, on this host's processors (`TLS_CONF_SW`, or `sw` as ss(8) has it).
    Software,
    /// The network card (`TLS_CONF_HW`, `TLS_CONF_HW_RECORD`).
    Card,
}

/// The same of both directions; `None` is a direction without a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TlsPlaces {
    /// What this side sends.
    pub sending: Option<Place>,
    /// What the peer sends.
    pub receiving: Option<Place>,
}

/// Asks who seals and opens a connection's records. `None` where the kernel says nothing of TLS:
/// the socket has none, or nobody without `CAP_NET_ADMIN` is told (before Linux 6.15).
///
/// # Errors
/// What socket(2) says where there may be no netlink sockets, what netlink says (`NotFound` for a
/// kernel without inet_diag or a connection that is not of this network namespace), `InvalidData`
/// for an answer that is none.
pub fn tls_places(connection: &TcpStream) -> io::Result<Option<TlsPlaces>> {
    let question = question(connection.local_addr()?, connection.peer_addr()?);
    let mut netlink = netlink()?;
    netlink.write_all(&question)?;
    let mut answer = [0; ANSWER_BYTES];
    let count = netlink.read(&mut answer)?;
    places_in(&answer[..count])
}

fn netlink() -> io::Result<File> {
    let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: socket takes no pointers.
    let made = unsafe { libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_SOCK_DIAG) };
    if made < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made it, and nobody else knows of it.
    Ok(unsafe { OwnedFd::from_raw_fd(made) }.into())
}

/// About the one connection between these addresses, as its own side has them.
fn question(near: SocketAddr, far: SocketAddr) -> Vec<u8> {
    let (family, interface) = match near {
        SocketAddr::V4(_) => (libc::AF_INET, 0),
        SocketAddr::V6(near) => (libc::AF_INET6, near.scope_id()),
    };
    let mut bytes = Vec::with_capacity(REQUEST_BYTES);
    bytes.extend((REQUEST_BYTES as u32).to_ne_bytes());
    bytes.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    bytes.extend((libc::NLM_F_REQUEST as u16).to_ne_bytes());
    // Its number, and that of a sender whom the kernel has still to name.
    bytes.extend([0; 8]);
    // What a protocol has on TCP comes with `tcp_info` and not without (`inet_sk_diag_fill`).
    let extensions = 1 << (INET_DIAG_INFO - 1);
    bytes.extend([family as u8, libc::IPPROTO_TCP as u8, extensions, 0]);
    // In any state.
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
    // By its addresses alone (`INET_DIAG_NOCOOKIE`).
    bytes.extend([0xff; 8]);
    bytes
}

fn places_in(answer: &[u8]) -> io::Result<Option<TlsPlaces>> {
    let length = number::<4>(answer, 0).map(|bytes| u32::from_ne_bytes(bytes) as usize);
    let kind = number(answer, 4).map(u16::from_ne_bytes);
    let (Some(length), Some(kind)) = (length, kind) else {
        return Err(io::ErrorKind::InvalidData.into());
    };
    let answer = answer
        .get(..length)
        .ok_or(io::Error::from(io::ErrorKind::InvalidData))?;
    if kind == NETLINK_ERROR {
        let error = number(answer, HEADER_BYTES).map(i32::from_ne_bytes);
        return Err(match error {
            Some(error) if error < 0 => io::Error::from_raw_os_error(error.saturating_neg()),
            _ => io::ErrorKind::InvalidData.into(),
        });
    }
    let fixed = (kind == SOCK_DIAG_BY_FAMILY).then_some(FIXED_BYTES);
    let attributes = fixed.and_then(|fixed| answer.get(fixed..));
    let attributes = attributes.ok_or(io::Error::from(io::ErrorKind::InvalidData))?;
    let tls = attribute(attributes, ULP_INFO).and_then(|ulp| attribute(ulp, ULP_INFO_TLS));
    Ok(tls.map(|tls| TlsPlaces {
        sending: place(tls, TLS_INFO_TXCONF),
        receiving: place(tls, TLS_INFO_RXCONF),
    }))
}

/// 1 is a direction that is as if there were no TLS.
fn place(tls: &[u8], direction: u16) -> Option<Place> {
    match u16::from_ne_bytes(number(attribute(tls, direction)?, 0)?) {
        2 => Some(Place::Software),
        3 | 4 => Some(Place::Card),
        _ => None,
    }
}

/// The first attribute of a kind: each has its length, itself included, and its kind in front, and
/// begins at a multiple of four.
fn attribute(mut attributes: &[u8], wanted: u16) -> Option<&[u8]> {
    loop {
        let length = usize::from(u16::from_ne_bytes(number(attributes, 0)?));
        let kind = u16::from_ne_bytes(number(attributes, 2)?) & KIND_MASK;
        let content = attributes.get(4..length)?;
        if kind == wanted {
            return Some(content);
        }
        attributes = attributes.get(length.next_multiple_of(4)..)?;
    }
}

/// So many bytes from a place on.
fn number<const BYTES: usize>(bytes: &[u8], at: usize) -> Option<[u8; BYTES]> {
    bytes.get(at..)?.first_chunk().copied()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn attributes(of: &[(u16, &[u8])]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (kind, content) in of {
            bytes.extend((4 + content.len() as u16).to_ne_bytes());
            bytes.extend(kind.to_ne_bytes());
            bytes.extend(*content);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        }
        bytes
    }

    fn answer(attributes: &[u8]) -> Vec<u8> {
        let mut bytes = ((FIXED_BYTES + attributes.len()) as u32)
            .to_ne_bytes()
            .to_vec();
        bytes.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
        bytes.resize(FIXED_BYTES, 7);
        bytes.extend(attributes);
        bytes
    }

    /// As net/tls/tls_main.c writes it, behind an attribute of an odd length.
    fn tls(sending: u16, receiving: u16) -> Vec<u8> {
        let numbers = [0x0303, 51, sending, receiving].map(u16::to_ne_bytes);
        let inner: Vec<_> = (1..).zip(numbers.iter().map(|two| &two[..])).collect();
        // The flag says that there are more within.
        let ulp = [(1, &b"tls\0"[..]), (0x8000 | 2, &attributes(&inner))];
        answer(&attributes(&[(8, &[0]), (ULP_INFO, &attributes(&ulp))]))
    }

    #[test]
    fn an_answer_says_of_each_direction_who_seals_it() {
        let of = |sending, receiving| places_in(&tls(sending, receiving)).unwrap().unwrap();
        let places = of(2, 3);
        assert_eq!(places.sending, Some(Place::Software));
        assert_eq!(places.receiving, Some(Place::Card));
        let places = of(4, 1);
        assert_eq!(places.sending, Some(Place::Card));
        assert_eq!(places.receiving, None, "it has no key");
        assert_eq!(places_in(&answer(&[])).unwrap(), None);
        let other = attributes(&[(ULP_INFO, &attributes(&[(1, b"mptcp\0")]))]);
        assert_eq!(places_in(&answer(&other)).unwrap(), None);
    }

    #[test]
    fn i7_an_answer_that_was_cut_or_changed_anywhere_is_none_and_no_panic() {
        let whole = tls(2, 2);
        for end in 0..whole.len() {
            let error = places_in(&whole[..end]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{end}");
        }
        for at in 0..whole.len() {
            for value in 0..=255 {
                let mut changed = whole.clone();
                changed[at] = value;
                let _ = places_in(&changed);
            }
        }
    }

    #[test]
    fn an_error_is_the_kernel_s() {
        let mut bytes = 36_u32.to_ne_bytes().to_vec();
        bytes.extend(NETLINK_ERROR.to_ne_bytes());
        bytes.resize(HEADER_BYTES, 0);
        bytes.extend((-libc::ENOENT).to_ne_bytes());
        bytes.resize(36, 0);
        let error = places_in(&bytes).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    /// Some kernels have no inet_diag, and some processes no netlink sockets.
    #[test]
    fn a_connection_without_tls_has_no_places() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(address) else {
                println!("not tested, no {address}");
                continue;
            };
            let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            match tls_places(&near) {
                Ok(places) => assert_eq!(places, None),
                Err(error) => println!("not told here: {error}"),
            }
        }
    }
}
