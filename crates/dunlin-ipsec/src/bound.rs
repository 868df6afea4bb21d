//! Restricts the addresses from which a peer may connect. A certificate does not state a peer's
//! addresses, so without this check a session would protect packets to any address from which the
//! control connection comes.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use super::error::IpsecError;
use super::xfrm::Network;
use dunlin_lane::peers::{Peer, PeerIdentity, Peers};

/// An address, or all addresses with a common prefix, written `192.0.2.0/24`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressBlock {
    network: Network,
}

/// The text is neither an address nor a block of addresses. The configuration is at fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid address {0:?}: expected a form such as 192.0.2.1, 192.0.2.0/24 or 2001:db8::/64")]
pub struct NotAddresses(String);

impl AddressBlock {
    /// Returns whether the block contains `address`.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        self.network.contains(address.to_canonical())
    }
}

impl FromStr for AddressBlock {
    type Err = NotAddresses;

    fn from_str(text: &str) -> Result<Self, NotAddresses> {
        let failed = || NotAddresses(text.to_owned());
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, Some(bits)),
            None => (text, None),
        };
        let mut network = Network::one(address.parse().map_err(|_| failed())?);
        if let Some(bits) = bits {
            let longest = network.prefix;
            network.prefix = bits.parse().map_err(|_| failed())?;
            if network.prefix > longest {
                return Err(failed());
            }
        }
        Ok(Self { network })
    }
}

impl fmt::Display for AddressBlock {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "{}/{}",
            self.network.address, self.network.prefix
        )
    }
}

/// Checks whether a peer may connect from an address. The blocks of every entry that fits the peer
/// count, and not only those of the entry that admitted it. A peer without configured blocks may
/// connect from any address.
pub(super) fn check_source(
    bound: &[(Peer, Vec<AddressBlock>)],
    peer: &PeerIdentity,
    address: IpAddr,
) -> Result<(), IpsecError> {
    let fits = |one: &Peer| {
        let alone: Peers = [one.clone()].into_iter().collect();
        alone.authorise_further(peer).is_ok()
    };
    let mut blocks = bound.iter().filter(|(one, _)| fits(one)).peekable();
    let Some((first, _)) = blocks.peek() else {
        return Ok(());
    };
    let first = first.to_string();
    if blocks.any(|(_, blocks)| blocks.iter().any(|block| block.contains(address))) {
        return Ok(());
    }
    Err(IpsecError::WrongAddress {
        peer: first,
        address,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::thread;

    use dunlin_lane::control;
    use dunlin_lane::provider::Crypto;
    use dunlin_test_support::lane::{Authority, DESTINATION, names, pair, soon};

    use super::*;

    /// A host with a certificate for `a.example`, as a server identifies it that allows `admitted`.
    fn peer(admitted: &[&str]) -> PeerIdentity {
        let authority = Authority::new();
        let crypto = Crypto::auto();
        let client = authority.identity(&["a.example"]);
        let client = client.client(&crypto, names(&[DESTINATION])).unwrap();
        let server = authority.identity(&[DESTINATION]);
        let server = server.server(&crypto, names(admitted)).unwrap();
        let (near, far) = pair();
        let accept = thread::spawn(move || control::server(far, &server, soon()).unwrap());
        let _near = control::client(near, &client, soon()).unwrap();
        accept.join().unwrap().peer().clone()
    }

    #[test]
    fn the_addresses_of_every_entry_that_fits_limit_a_peer() {
        let bound = |entries: &[(&str, &str)]| -> Vec<(Peer, Vec<AddressBlock>)> {
            let entries = entries.iter();
            let entry = |(name, block): &(&str, &str)| {
                (name.parse().unwrap(), vec![block.parse().unwrap()])
            };
            entries.map(entry).collect()
        };
        let may = |bound: &[(Peer, Vec<AddressBlock>)], peer: &PeerIdentity, from: &str| {
            check_source(bound, peer, from.parse().unwrap()).is_ok()
        };
        // The pattern admits the peer, because it is the first entry.
        let by_pattern = peer(&["*.example", "a.example"]);
        let own = bound(&[("a.example", "192.0.2.1")]);
        assert!(may(&own, &by_pattern, "192.0.2.1"));
        assert!(!may(&own, &by_pattern, "192.0.2.2"));
        let both = bound(&[("*.example", "192.0.2.2"), ("a.example", "192.0.2.1")]);
        assert!(may(&both, &by_pattern, "192.0.2.1") && may(&both, &by_pattern, "192.0.2.2"));
        assert!(!may(&both, &by_pattern, "192.0.2.3"));
        // The entry of another peer does not limit this peer.
        let other = bound(&[("b.example", "192.0.2.1")]);
        assert!(may(&other, &by_pattern, "192.0.2.3"));
    }

    #[test]
    fn a_block_has_the_addresses_with_its_first_bits() {
        let holds = |block: &str, address: &str| {
            let block: AddressBlock = block.parse().unwrap();
            block.contains(address.parse().unwrap())
        };
        for (block, inside, outside) in [
            ("192.0.2.1", "192.0.2.1", "192.0.2.2"),
            ("192.0.2.0/24", "192.0.2.255", "192.0.3.0"),
            ("192.0.2.129/25", "192.0.2.128", "192.0.2.127"),
            ("2001:db8::/64", "2001:db8::ffff:1", "2001:db8:0:1::"),
            ("2001:db8::1", "2001:db8::1", "2001:db8::2"),
        ] {
            assert!(holds(block, inside) && !holds(block, outside), "{block}");
        }
        assert!(holds("0.0.0.0/0", "255.0.0.1") && holds("::/0", "ff00::1"));
        assert!(!holds("::/0", "192.0.2.1") && !holds("0.0.0.0/0", "::1"));
        assert!(
            holds("192.0.2.1", "::ffff:192.0.2.1"),
            "the block does not contain the IPv4-mapped form of its address"
        );
    }

    #[test]
    fn text_that_is_not_an_address_is_rejected() {
        for text in [
            "",
            "host",
            "192.0.2.1/33",
            "::/129",
            "192.0.2.1/",
            "1.2.3.4/x",
            "/8",
        ] {
            assert!(text.parse::<AddressBlock>().is_err(), "{text}");
        }
    }
}
