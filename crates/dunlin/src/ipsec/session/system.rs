//! What a session asks of the system beside its IPsec.

use std::fs::File;
use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};

use dunlin_proto::negotiate::SessionId;

use crate::ipsec::error::IpsecError;

/// Whether packets to an address stay on this host: they come from it then, or from the
/// loopback's.
pub(super) fn is_of_this_host(address: IpAddr) -> Result<bool, IpsecError> {
    const DISCARD: u16 = 9;
    let any: IpAddr = match address {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    // Nothing is sent by it.
    let routed = UdpSocket::bind((any, 0)).and_then(|socket| {
        socket.connect((address, DISCARD))?;
        let source = socket.local_addr()?.ip();
        Ok(source == address || source.is_loopback())
    });
    routed.map_err(|source| IpsecError::Resources {
        what: "the route to the peer",
        source,
    })
}

pub(super) fn random<const N: usize>() -> Result<[u8; N], IpsecError> {
    let mut bytes = [0; N];
    let filled = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    filled.map_err(|source| IpsecError::Resources {
        what: "random numbers",
        source,
    })?;
    Ok(bytes)
}

pub(in crate::ipsec) fn random_session() -> Result<SessionId, IpsecError> {
    random()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn an_address_of_this_host_is_known() {
        assert!(is_of_this_host([127, 0, 0, 1].into()).unwrap());
        assert!(is_of_this_host([127, 9, 0, 7].into()).unwrap());
    }
}
