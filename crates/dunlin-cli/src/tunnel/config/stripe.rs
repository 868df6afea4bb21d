//! Routes of the mode *stripe* in the configuration.

use std::ops::Range;

use dunlin_tunnel::{DEFAULT_LANES, Entrance, Exit, Listen, MAX_WINDOW_BYTES, Mode, WINDOW_BYTES};
use toml::Spanned;

use super::table::{
    Found, RouteTable, between, check_answering, check_peers, check_target, host_of, parse_listen,
};
use crate::options::parse_bytes;

pub(super) fn check(
    name: &str,
    at: &Range<usize>,
    table: &RouteTable,
    over_ipsec: bool,
    found: &mut Found<'_>,
    entrances: &mut Vec<Entrance>,
    exits: &mut Vec<Exit>,
) {
    let window_bytes = found.or(
        table.window.as_ref(),
        WINDOW_BYTES,
        |text| match parse_bytes(text)? {
            bytes if (256 << 10..=MAX_WINDOW_BYTES).contains(&bytes) => Ok(bytes),
            _ => Err(format!("a window of {text} cannot be: 256K to 1G can")),
        },
    );
    let route = name.to_owned();
    match (&table.listen, &table.to) {
        (listen, Some(to)) => {
            let listen = match listen {
                Some(listen) => found.parsed(listen, |text| parse_listen(text)),
                None => Some(Listen::OnDemand),
            };
            let host = found.parsed(to, |text| host_of(text));
            let peers = check_answering(table.peers.as_ref(), to, host.as_deref(), found);
            let lanes = found.or(table.lanes.as_ref(), DEFAULT_LANES, |count| {
                between("lanes", *count, 1, 128)
            });
            if let (Some(listen), Some(peers)) = (listen, peers) {
                entrances.push(Entrance {
                    route: route.clone(),
                    listen,
                    to: to.get_ref().clone(),
                    peers,
                    lanes,
                    window_bytes,
                    mode: match over_ipsec {
                        true => Mode::StripeOverIpsec,
                        false => Mode::Stripe,
                    },
                });
            }
        }
        (Some(listen), None) => {
            let text = format!("route {name} listens and leads nowhere: add to = \"HOST:PORT\"");
            found.add(&listen.span(), text);
        }
        (None, None) => {
            for (key, value) in [
                ("peers", table.peers.as_ref().map(Spanned::span)),
                ("lanes", table.lanes.as_ref().map(Spanned::span)),
            ] {
                if let Some(at) = value {
                    let text = format!("route {name}: {key} goes with to");
                    found.add(&at, text);
                }
            }
        }
    }
    let target = match (&table.target, &table.exec) {
        (Some(_), _) | (_, Some(_)) => check_target(name, table, found),
        (None, None) => {
            if let Some(allow) = &table.allow {
                let text = format!(
                    "route {name} allows peers what there is not: add target = \"unix:PATH\" or \
                     \"tcp:HOST:PORT\""
                );
                found.add(&allow.span(), text);
            } else if table.listen.is_none() && table.to.is_none() {
                let text = format!("route {name} has no end here: add to, or target and allow");
                found.add(at, text);
            }
            return;
        }
    };
    let Some(allow) = &table.allow else {
        let text = format!(
            "route {name} has a target that nobody may reach: add allow = [\"NAME\"] with the \
             names in the peers' certificates"
        );
        found.add(at, text);
        return;
    };
    let allow = check_peers(allow, found);
    if let (Some(target), Some(allow)) = (target, allow) {
        exits.push(Exit {
            route,
            allow,
            target,
            window_bytes,
        });
    }
}
