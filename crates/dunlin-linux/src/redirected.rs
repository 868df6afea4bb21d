//! Redirected connections: addresses of this host, and the destination of a connection before
//! nftables or iptables redirected it (`SO_ORIGINAL_DST`,
//! include/uapi/linux/netfilter_ipv4.h and netfilter_ipv6/ip6_tables.h).

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;

use rustix::net::{AddressFamily, sockopt};

use crate::option;

/// `SO_ORIGINAL_DST` and `IP6T_SO_ORIGINAL_DST`, which have the same number.
const ORIGINAL_DST: libc::c_int = 80;
/// Size of `struct sockaddr_in6`, which is larger than the `struct sockaddr_in` for IPv4.
const ADDRESS_BYTES: usize = 28;

/// The address to which the client connected, as the kernel's connection tracking recorded it. For
/// a tracked connection that was not redirected, this is the socket's own address.
///
/// # Errors
/// `NotFound` (`ENOENT`) if the kernel does not track the connection; `InvalidData` if the kernel
/// returns an address in another format; otherwise an error from getsockopt(2), such as
/// `ENOPROTOOPT` if the kernel has no connection tracking.
pub fn original_destination(socket: impl AsFd) -> io::Result<SocketAddr> {
    let level = match sockopt::socket_domain(&socket)? {
        AddressFamily::INET6 => libc::SOL_IPV6,
        _ => libc::SOL_IP,
    };
    let (address, length) = option::get::<ADDRESS_BYTES>(&socket, level, ORIGINAL_DST)?;
    parse(&address, length).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Whether `address` belongs to this host: a packet from this host to such an address has the same
/// address as its source. False if the kernel has no route to `address`.
#[must_use]
pub fn is_own_address(address: IpAddr) -> bool {
    let any: IpAddr = match address {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    // connect(2) on a UDP socket sends no packet, so any port is suitable.
    let connected = UdpSocket::bind((any, 0)).and_then(|socket| {
        socket.connect((address, 9))?;
        socket.local_addr()
    });
    // Every loopback address belongs to this host. The comparison with the source fails for some
    // of them: a packet to 127.0.0.2, for example, has the source 127.0.0.1.
    address.is_loopback() || connected.is_ok_and(|from| from.ip() == address)
}

/// Parses a `struct sockaddr_in` (16 bytes) or a `struct sockaddr_in6` (28 bytes). For IPv4 the
/// kernel writes 16 bytes, but returns the length of the buffer.
fn parse(address: &[u8; ADDRESS_BYTES], length: usize) -> Option<SocketAddr> {
    let (family, rest) = address.split_first_chunk::<2>()?;
    let (port, rest) = rest.split_first_chunk::<2>()?;
    let port = u16::from_be_bytes(*port);
    match (libc::c_int::from(u16::from_ne_bytes(*family)), length) {
        (libc::AF_INET, 16..) => {
            let ip = rest.first_chunk::<4>()?;
            Some((Ipv4Addr::from(*ip), port).into())
        }
        (libc::AF_INET6, ADDRESS_BYTES) => {
            // The address follows four bytes of flow information.
            let ip = rest.get(4..)?.first_chunk::<16>()?;
            Some((Ipv6Addr::from(*ip), port).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn only_addresses_of_this_host_are_its_own() {
        for own in ["127.0.0.1", "127.0.0.2", "::1"] {
            assert!(is_own_address(own.parse().unwrap()), "{own}");
        }
        for other in ["192.0.2.7", "2001:db8::7"] {
            assert!(!is_own_address(other.parse().unwrap()), "{other}");
        }
    }

    #[test]
    fn both_families_are_parsed_and_nothing_else() {
        let mut raw = [0; ADDRESS_BYTES];
        raw[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
        raw[2..8].copy_from_slice(&[0xc0, 0x00, 10, 77, 0, 2]);
        for length in [16, ADDRESS_BYTES] {
            assert_eq!(parse(&raw, length), "10.77.0.2:49152".parse().ok());
        }
        assert_eq!(parse(&raw, 15), None);
        let ip: Ipv6Addr = "fd77::2".parse().unwrap();
        raw[..2].copy_from_slice(&(libc::AF_INET6 as u16).to_ne_bytes());
        raw[4..8].fill(0xff);
        raw[8..24].copy_from_slice(&ip.octets());
        assert_eq!(parse(&raw, ADDRESS_BYTES), "[fd77::2]:49152".parse().ok());
        assert_eq!(parse(&raw, 16), None);
        assert_eq!(parse(&[0; ADDRESS_BYTES], 0), None);
    }
}
