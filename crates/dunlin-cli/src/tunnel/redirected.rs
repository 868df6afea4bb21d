//! The routes of `[redirect.NAME]`: one entrance for each address of a peer, and an exit to the
//! same ports of this host.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use dunlin::lane::peers::{Peer, Peers};
use dunlin::lane::policy::OldestTls;
use dunlin_lane::resolve;
use dunlin_linux::poll::waker;
use dunlin_linux::redirected::is_own_address;
use dunlin_tunnel::{Entrance, Exit, Listen, RelayExit, Routes, Target};

use super::config::Config;
use super::config::redirect::{Listeners, Redirect, RedirectPeer};
use super::config::table::Port;
use crate::log;

/// Time limit for the lookup of one name. It is short, because `dunlin redirect watch` looks up all
/// names before each comparison of the rules. The tunnel ignores a comparison that is older than
/// 30 s.
const LOOKUP_LIMIT: Duration = Duration::from_secs(5);

/// Adds the routes of the configuration's redirects. Logs a warning for each host name that cannot
/// be resolved; connections to its addresses are refused until the configuration is reloaded.
pub(super) fn routes(config: &Config) -> Result<Routes> {
    if config.redirects.is_empty() {
        return Ok(config.routes.clone());
    }
    let listeners = Listeners::new(&config.redirects, config.redirect_port);
    let (mut entrances, mut exits, mut relays) = (Vec::new(), Vec::new(), Vec::new());
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
        let Some(listen) = &config.listen else {
            continue;
        };
        let allow: Result<Vec<Peer>> = redirect.peers.iter().map(identity).collect();
        let allow = Peers::OneOf(allow?);
        let target = Target::Ports {
            addresses: redirect.local.clone(),
            ports,
        };
        relays.extend(redirect.relay_port.map(|port| RelayExit {
            route: redirect.name.clone(),
            listen: SocketAddr::new(ip_of(listen), port),
            allow: allow.clone(),
            target: target.clone(),
            oldest_tls: OldestTls::V1_3,
        }));
        exits.push(Exit {
            route: redirect.name.clone(),
            allow,
            target,
            window_bytes: redirect.window_bytes,
        });
    }
    let routes = config.routes.clone();
    Ok(routes.with_redirected(entrances, exits, relays)?)
}

/// The IP address at which the tunnel listens; all addresses if its socket was passed.
fn ip_of(listen: &Port) -> IpAddr {
    match listen {
        Port::At(address) => address.ip(),
        Port::Passed(_) => Ipv6Addr::UNSPECIFIED.into(),
    }
}

/// The listener of each address, and the identities that may answer there. If several names lead to
/// one address, the first name determines the listener, as in the rules.
fn peers_by_address(
    redirect: &Redirect,
    listeners: &Listeners,
) -> Result<BTreeMap<IpAddr, (u16, Vec<Peer>)>> {
    let mut all = BTreeMap::<IpAddr, (u16, Vec<Peer>)>::new();
    for peer in &redirect.peers {
        let identity = identity(peer)?;
        let mut addresses = addresses(&redirect.name, &peer.host);
        // One configuration can serve all hosts. This host opens no trunk to itself.
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

/// The addresses of a peer. If they cannot be looked up, logs a warning and returns none.
fn addresses(redirect: &str, host: &str) -> Vec<IpAddr> {
    look_up(host).unwrap_or_else(|error| {
        log::warn([format!(
            "redirect {redirect}: cannot resolve {host} ({error}); connections to it are refused \
             until a reload: write its addresses in peers, or add it to /etc/hosts"
        )]);
        Vec::new()
    })
}

/// The address `host`, or all addresses of the name `host`.
///
/// # Errors
/// The name cannot be looked up within [`LOOKUP_LIMIT`].
pub(crate) fn look_up(host: &str) -> Result<Vec<IpAddr>> {
    let (_never, stop) = waker()?;
    let found = resolve::host(host, 0, Instant::now() + LOOKUP_LIMIT, &stop)?;
    Ok(found.into_iter().map(|at| at.ip().to_canonical()).collect())
}
