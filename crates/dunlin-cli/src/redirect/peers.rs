//! The addresses of a redirect's peers.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use anyhow::{Result, bail};

use crate::tunnel::{self, Listeners, Redirect};

/// A redirect and the addresses of its peers.
#[derive(Clone, Debug)]
pub(super) struct Addressed {
    pub(super) redirect: Redirect,
    /// Each address, and the identity of the peer with this address.
    pub(super) addresses: BTreeMap<IpAddr, String>,
    /// The port of the tunnel's listener for each address.
    pub(super) listeners: BTreeMap<IpAddr, u16>,
}

/// A name cannot be looked up, which may be temporary. Mistakes in the configuration have other
/// errors.
#[derive(Debug)]
pub(super) struct Unresolved(String);

impl fmt::Display for Unresolved {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for Unresolved {}

/// Looks up the addresses of all peers. `port` is the first port of the tunnel's listeners.
pub(super) fn addressed(redirects: Vec<Redirect>, port: u16) -> Result<Vec<Addressed>> {
    let listeners = Listeners::new(&redirects, port);
    let of = |redirect| Addressed::of(redirect, &listeners);
    redirects.into_iter().map(of).collect()
}

impl Addressed {
    fn of(redirect: Redirect, all: &Listeners) -> Result<Self> {
        let (mut addresses, mut listeners) = (BTreeMap::new(), BTreeMap::new());
        for peer in &redirect.peers {
            for address in look_up(&redirect.name, &peer.host)? {
                let before = addresses.insert(address, peer.identity.clone());
                listeners.entry(address).or_insert(all.port(&peer.host));
                if let Some(other) = before.filter(|other| *other != peer.identity) {
                    bail!(
                        "redirect {}: {address} is an address of two peers with different \
                         identities: {} has {}, and another peer has {other} (at fault: \
                         configuration): write addresses instead of names in peers",
                        redirect.name,
                        peer.host,
                        peer.identity
                    );
                }
            }
        }
        let plain = redirect.plain.iter().flat_map(|plain| &plain.from);
        for address in plain {
            if addresses.contains_key(address) {
                bail!(
                    "redirect {}: {address} in plain_from is an address of a peer (at fault: \
                     configuration): remove it from plain_from when the peer's tunnel runs",
                    redirect.name
                );
            }
        }
        Ok(Self {
            redirect,
            addresses,
            listeners,
        })
    }
}

/// All addresses of a host.
fn look_up(redirect: &str, name: &str) -> Result<Vec<IpAddr>> {
    match tunnel::look_up(name) {
        Ok(found) => Ok(found),
        Err(error) => bail!(Unresolved(format!(
            "redirect {redirect}: peer {name} has no address (at fault: network): {error}; write \
             the peer's addresses in peers, or a line in /etc/hosts, which needs no name server \
             when the host boots"
        ))),
    }
}
