//! Routes with mode *stripe* in the configuration.

use std::ops::Range;

use dunlin_tunnel::{Entrance, Exit, Listen, MAX_WINDOW_BYTES, Mode, WINDOW_BYTES};

use super::table::{Found, RouteTable, at, check_entrance, check_exit, lacks_peer, parse_listen};
use crate::options::parse_bytes;

pub(super) fn check(
    name: &str,
    at: &Range<usize>,
    table: &RouteTable,
    over_ipsec: bool,
    found: &mut Found<'_>,
) -> (Option<Entrance>, Option<Exit>) {
    let window_bytes = found.or(&table.window, WINDOW_BYTES, parse_window);
    let entrance = entrance(name, table, window_bytes, over_ipsec, found);
    let exit = exit(name, at, table, window_bytes, found);
    (entrance, exit)
}

pub(super) fn parse_window(text: &str) -> Result<u64, String> {
    match parse_bytes(text)? {
        bytes if (256 << 10..=MAX_WINDOW_BYTES).contains(&bytes) => Ok(bytes),
        _ => Err(format!("window {text} out of range (256K to 1G)")),
    }
}

fn entrance(
    name: &str,
    table: &RouteTable,
    window_bytes: u64,
    over_ipsec: bool,
    found: &mut Found<'_>,
) -> Option<Entrance> {
    let Some(to) = &table.to else {
        if let Some(listen) = &table.listen {
            lacks_peer(name, listen, found);
        } else {
            let keys = [("peers", at(&table.peers)), ("lanes", at(&table.lanes))];
            found.misplaced(name, "`to`", &keys);
        }
        return None;
    };
    let listen = match &table.listen {
        Some(listen) => found.parsed(listen, |text| parse_listen(text)),
        None => Some(Listen::OnDemand),
    };
    let mode = match over_ipsec {
        true => Mode::StripeOverIpsec,
        false => Mode::Stripe,
    };
    let entrance = check_entrance(name, table, listen, to, mode, found);
    let lanes = found.lanes(&table.lanes);
    Some(Entrance {
        lanes,
        window_bytes,
        ..entrance?
    })
}

fn exit(
    name: &str,
    at: &Range<usize>,
    table: &RouteTable,
    window_bytes: u64,
    found: &mut Found<'_>,
) -> Option<Exit> {
    if table.target.is_some() || table.exec.is_some() {
        let (target, allow) = check_exit(name, at, table, found)?;
        return Some(Exit {
            route: name.to_owned(),
            allow,
            target,
            window_bytes,
        });
    }
    if let Some(allow) = &table.allow {
        let text = format!(
            "route {name} has `allow` and no target: add target = \"unix:PATH\" or \
             \"tcp:HOST:PORT\""
        );
        found.add(&allow.span(), text);
    } else if table.listen.is_none() && table.to.is_none() {
        let text = format!(
            "route {name} has neither a peer nor a target: add `to`, or `target` and `allow`"
        );
        found.add(at, text);
    }
    None
}
