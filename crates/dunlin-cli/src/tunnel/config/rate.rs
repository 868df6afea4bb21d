//! Limits on the rates of routes and peers.

use std::collections::BTreeMap;

use dunlin::lane::peers::Peer;
use dunlin_tunnel::{LEAST_RATE, Routes};
use serde::Deserialize;
use toml::Spanned;

use super::redirect::RedirectTable;
use super::table::{Found, RouteTable};
use crate::options::parse_rate;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PeerTable {
    rate: Option<Spanned<String>>,
}

/// The configured limits.
#[derive(Default)]
pub(super) struct Rates {
    routes: Vec<(String, u64)>,
    peers: Vec<(Peer, u64)>,
}

pub(super) fn check(
    routes: &BTreeMap<String, Spanned<RouteTable>>,
    redirects: &BTreeMap<String, Spanned<RedirectTable>>,
    peers: &BTreeMap<String, Spanned<PeerTable>>,
    found: &mut Found<'_>,
) -> Rates {
    let mut rates = Rates::default();
    let routes = routes.iter().map(|(name, one)| (name, &one.get_ref().rate));
    let redirects = redirects.iter();
    let redirects = redirects.map(|(name, one)| (name, &one.get_ref().rate));
    for (name, rate) in routes.chain(redirects) {
        let rate = found.or(rate, None, optional);
        rates.routes.extend(rate.map(|rate| (name.clone(), rate)));
    }
    for (name, table) in peers {
        let peer = found.parsed(table, |_| name.parse::<Peer>());
        let rate = found.or(&table.get_ref().rate, None, optional);
        rates.peers.extend(peer.zip(rate));
    }
    rates
}

impl Rates {
    pub(super) fn limit(self, mut routes: Routes) -> Routes {
        for (route, rate) in &self.routes {
            routes = routes.with_rate(route, *rate);
        }
        for (peer, rate) in &self.peers {
            routes = routes.with_peer_rate(peer, *rate);
        }
        routes
    }
}

fn optional(text: &str) -> Result<Option<u64>, String> {
    parse_tunnel_rate(text).map(Some)
}

/// Parses a rate in bytes per second, which must be at least the lowest limit of a tunnel.
pub(crate) fn parse_tunnel_rate(text: &str) -> Result<u64, String> {
    match parse_rate(text)? {
        rate if rate < LEAST_RATE => Err(format!("rate {text} out of range (64K or more)")),
        rate => Ok(rate),
    }
}
