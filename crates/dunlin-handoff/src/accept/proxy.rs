//! The PROXY protocol: a header before a client's first byte, which gives the backend the client's
//! address (HAProxy's proxy-protocol.txt, versions 1 and 2).

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// The header's version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyHeader {
    /// Version 1: a line of text.
    V1,
    /// Version 2: a block of bytes.
    V2,
}

/// The signature of version 2.
const SIGNATURE: [u8; 12] = *b"\r\n\r\n\0\r\nQUIT\n";
/// The byte of a header of version 2 that states the version and the command PROXY.
const PROXY: u8 = 0x21;
const STREAM_OVER_IPV4: u8 = 0x11;
const STREAM_OVER_IPV6: u8 = 0x21;

impl ProxyHeader {
    /// The header for an accepted connection from `client` to `server`.
    pub(super) fn encode(self, client: SocketAddr, server: SocketAddr) -> Vec<u8> {
        match self {
            Self::V1 => line(client, server).into_bytes(),
            Self::V2 => block(client, server),
        }
    }
}

/// Converts both addresses to one family: IPv4 if both are IPv4 addresses, otherwise IPv6. A
/// dual-stack listener reports IPv4 addresses as IPv4-mapped IPv6 addresses.
fn plain(client: SocketAddr, server: SocketAddr) -> (IpAddr, IpAddr) {
    let (client, server) = (client.ip().to_canonical(), server.ip().to_canonical());
    match (client, server) {
        (IpAddr::V4(_), IpAddr::V4(_)) | (IpAddr::V6(_), IpAddr::V6(_)) => (client, server),
        _ => (IpAddr::V6(wide(client)), IpAddr::V6(wide(server))),
    }
}

fn wide(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    }
}

fn line(client: SocketAddr, server: SocketAddr) -> String {
    let (from, to) = plain(client, server);
    let family = if from.is_ipv4() { "TCP4" } else { "TCP6" };
    let (client, server) = (client.port(), server.port());
    format!("PROXY {family} {from} {to} {client} {server}\r\n")
}

fn block(client: SocketAddr, server: SocketAddr) -> Vec<u8> {
    let (kind, addresses) = match plain(client, server) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            (STREAM_OVER_IPV4, [from.octets(), to.octets()].concat())
        }
        (from, to) => {
            let octets = [wide(from).octets(), wide(to).octets()];
            (STREAM_OVER_IPV6, octets.concat())
        }
    };
    let length = addresses.len() as u16 + 4;
    let mut bytes = SIGNATURE.to_vec();
    bytes.extend([PROXY, kind]);
    bytes.extend(length.to_be_bytes());
    bytes.extend(addresses);
    bytes.extend(client.port().to_be_bytes());
    bytes.extend(server.port().to_be_bytes());
    bytes
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn of(header: ProxyHeader, client: &str, server: &str) -> Vec<u8> {
        header.encode(client.parse().unwrap(), server.parse().unwrap())
    }

    #[test]
    fn version_1_is_a_line_of_family_addresses_and_ports() {
        let line = |client, server| String::from_utf8(of(ProxyHeader::V1, client, server)).unwrap();
        assert_eq!(
            line("192.0.2.7:56324", "192.0.2.1:443"),
            "PROXY TCP4 192.0.2.7 192.0.2.1 56324 443\r\n"
        );
        assert_eq!(
            line("[2001:db8::7]:9", "[2001:db8::1]:443"),
            "PROXY TCP6 2001:db8::7 2001:db8::1 9 443\r\n"
        );
        assert_eq!(
            line("[::ffff:192.0.2.7]:9", "[::ffff:192.0.2.1]:443"),
            "PROXY TCP4 192.0.2.7 192.0.2.1 9 443\r\n"
        );
    }

    #[test]
    fn version_2_is_a_binary_block() {
        let bytes = of(ProxyHeader::V2, "192.0.2.7:258", "192.0.2.1:443");
        let mut expected = b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c".to_vec();
        expected.extend([192, 0, 2, 7, 192, 0, 2, 1, 1, 2, 1, 187]);
        assert_eq!(bytes, expected);
        let bytes = of(ProxyHeader::V2, "[2001:db8::7]:9", "[2001:db8::1]:443");
        assert_eq!(bytes[12..16], [0x21, 0x21, 0, 36]);
        assert_eq!(bytes.len(), 16 + 36);
    }
}
