//! The routes of `[redirect.NAME]`: one entrance for each address of a peer, and an exit to the same
//! ports of this host.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};

use anyhow::{Result, anyhow};
use dunlin::lane::peers::{Peer, Peers};
use dunlin_tunnel::{Entrance, Exit, Listen, Ports, Routes, Target};

use super::config::Config;
use super::config::redirect::{Redirect, RedirectPeer};
use crate::log;

/// Adds the routes of the configuration's redirects. Logs a warning for each host name that cannot
/// be resolved; connections to its addresses are refused until the configuration is reloaded.
pub(super) fn routes(config: &Config) -> Result<Routes> {
    if config.redirects.is_empty() {
        return Ok(config.routes.clone());
    }
    let (mut entrances, mut exits) = (Vec::new(), Vec::new());
    for redirect in &config.redirects {
        let ports = Ports {
            first: redirect.ports.first(),
            last: redirect.ports.last(),
        };
        for (address, peers) in peers_by_address(redirect)? {
            entrances.push(Entrance {
                route: redirect.name.clone(),
                listen: Listen::Redirected { address, ports },
                to: SocketAddr::new(address, redirect.peer_port).to_string(),
                peers,
                lanes: redirect.lanes,
                window_bytes: redirect.window_bytes,
                mode: redirect.mode,
            });
        }
        let allow: Result<Vec<Peer>> = redirect.peers.iter().map(identity).collect();
        exits.push(Exit {
            route: redirect.name.clone(),
            allow: Peers::OneOf(allow?),
            target: Target::Ports {
                addresses: redirect.local.clone(),
                ports,
            },
            window_bytes: redirect.window_bytes,
        });
    }
    let routes = config.routes.clone();
    Ok(routes.with_redirected(entrances, exits, config.redirect_port)?)
}

/// The identities that may answer at each address of a redirect's peers. Several names may lead to
/// one address.
fn peers_by_address(redirect: &Redirect) -> Result<BTreeMap<IpAddr, Peers>> {
    let mut all = BTreeMap::<IpAddr, Vec<Peer>>::new();
    for peer in &redirect.peers {
        let identity = identity(peer)?;
        for address in addresses(&redirect.name, &peer.host) {
            all.entry(address).or_default().push(identity.clone());
        }
    }
    let peers = all.into_iter();
    Ok(peers.map(|(at, peers)| (at, Peers::OneOf(peers))).collect())
}

fn identity(peer: &RedirectPeer) -> Result<Peer> {
    let parsed = peer.identity.parse::<Peer>();
    parsed.map_err(|error| anyhow!("peer {}: {error}", peer.host))
}

/// The address `host`, or all addresses of the name `host`.
fn addresses(redirect: &str, host: &str) -> Vec<IpAddr> {
    if let Ok(address) = host.parse() {
        return vec![address];
    }
    match (host, 0).to_socket_addrs() {
        Ok(found) => found.map(|one| one.ip().to_canonical()).collect(),
        Err(error) => {
            log::warn([format!(
                "redirect {redirect}: cannot resolve {host} ({error}); connections to it are \
                 refused until a reload: write its addresses in peers, or add it to /etc/hosts"
            )]);
            Vec::new()
        }
    }
}
