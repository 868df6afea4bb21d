//! Established connections that the rules concern.

use std::collections::BTreeSet;
use std::fs;
use std::net::SocketAddr;

use anyhow::Result;
use dunlin_ipsec::connections;
use dunlin_ipsec::sock_diag::TcpConnection;

use super::peers::Addressed;

/// The first ephemeral port, if the kernel does not report it (ip(7)).
const FIRST_EPHEMERAL: u16 = 32768;

/// The established connections of this host's network namespace.
pub(super) fn established() -> Result<Vec<TcpConnection>> {
    let mut all = connections()?;
    all.retain(TcpConnection::is_established);
    Ok(all)
}

/// The clients' addresses of redirected connections. A connection is redirected if a listener on
/// loopback has accepted it from an address that is not loopback. With `ports`, returns only the
/// clients of listeners at these ports.
pub(super) fn redirected(
    all: &[TcpConnection],
    ports: Option<&BTreeSet<u16>>,
) -> BTreeSet<SocketAddr> {
    let accepted = all.iter().filter(|one| {
        let is_redirected = one.local.ip().is_loopback() && !one.peer.ip().is_loopback();
        is_redirected && ports.is_none_or(|ports| ports.contains(&one.local.port()))
    });
    accepted.map(|one| one.peer).collect()
}

/// Connections between this host and a peer on the redirects' ports that do not go through the
/// tunnel. One end of such a connection has a port of a redirect, and the port of the other end
/// must be ephemeral. This excludes, for example, a connection to an ssh server if the ephemeral
/// port of the ssh client happens to be a port of a redirect.
pub(super) fn unprotected(all: &[TcpConnection], redirects: &[Addressed]) -> Vec<TcpConnection> {
    let first = first_ephemeral();
    // Consider listeners at any port, because the tunnel may have accepted the connections at ports
    // of an earlier configuration.
    let redirected = redirected(all, None);
    let concerns = |one: &TcpConnection| {
        redirects.iter().any(|to| {
            let ports = to.redirect.ports;
            let pair = |ours: u16, other: u16| ports.contains(ours) && other >= first;
            to.addresses.contains_key(&one.peer.ip())
                && (pair(one.peer.port(), one.local.port())
                    || pair(one.local.port(), one.peer.port()))
        })
    };
    let mut found = all.to_vec();
    found.retain(|one| {
        concerns(one) && one.local.ip() != one.peer.ip() && !redirected.contains(&one.local)
    });
    found
}

fn first_ephemeral() -> u16 {
    let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range");
    let range = range.unwrap_or_default();
    let first = range.split_whitespace().next();
    first
        .and_then(|port| port.parse().ok())
        .unwrap_or(FIRST_EPHEMERAL)
}

#[cfg(test)]
mod tests;
