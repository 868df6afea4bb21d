//! The routes of `[redirect.NAME]`: one entrance for each address of a peer, and an exit to the same
//! ports of this host.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};

use anyhow::{Result, anyhow};
use dunlin::lane::peers::{Peer, Peers};
use dunlin_linux::redirected::is_own_address;
use dunlin_tunnel::{Entrance, Exit, Listen, Routes, Target};

use super::config::Config;
use super::config::redirect::{Listeners, Redirect, RedirectPeer};
use crate::log;

/// Adds the routes of the configuration's redirects. Logs a warning for each host name that cannot
/// be resolved; connections to its addresses are refused until the configuration is reloaded.
pub(super) fn routes(config: &Config) -> Result<Routes> {
    if config.redirects.is_empty() {
        return Ok(config.routes.clone());
    }
    let listeners = Listeners::new(&config.redirects, config.redirect_port);
    let (mut entrances, mut exits) = (Vec::new(), Vec::new());
    for redirect in &config.redirects {
        let ports = redirect.ports;
        for (address, (at, peers)) in peers_by_address(redirect, &listeners)? {
            entrances.push(Entrance {
                route: redirect.name.clone(),
                listen: Listen::Redirected { address, ports, at },
                to: SocketAddr::new(address, redirect.peer_port).to_string(),
                peers: Peers::OneOf(peers),
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
    Ok(routes.with_redirected(entrances, exits)?)
}

/// The listener of each address, and the identities that may answer there. Several names may lead to
/// one address; the first one determines the listener, as in the rules.
fn peers_by_address(
    redirect: &Redirect,
    listeners: &Listeners,
) -> Result<BTreeMap<IpAddr, (u16, Vec<Peer>)>> {
    let mut all = BTreeMap::<IpAddr, (u16, Vec<Peer>)>::new();
    for peer in &redirect.peers {
        let identity = identity(peer)?;
        let mut addresses = addresses(&redirect.name, &peer.host);
        // One configuration may serve all hosts; this host keeps no trunk to itself.
        addresses.retain(|address| !is_own_address(*address));
        for address in addresses {
            let at = listeners.port(&peer.host);
            let (_, peers) = all.entry(address).or_insert((at, Vec::new()));
            peers.push(identity.clone());
        }
    }
    Ok(all)
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
