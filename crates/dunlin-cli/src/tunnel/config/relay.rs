//! Routes of the mode *relay* in the configuration.

use std::net::SocketAddr;
use std::ops::Range;

use dunlin::lane::policy::OldestTls;
use dunlin_tunnel::{Entrance, Mode, RelayExit, WINDOW_BYTES};
use toml::Spanned;

use super::table::{
    Found, RouteTable, check_answering, check_peers, check_target, host_of, parse_listen,
};

/// Whether a route is a relay. One that is not may not have what belongs to relays.
pub(super) fn is_one(name: &str, table: &RouteTable, found: &mut Found<'_>) -> bool {
    let mode = table.mode.as_ref();
    let is_relay = found.or(mode, false, |mode| match mode.as_str() {
        "stripe" => Ok(false),
        "relay" => Ok(true),
        other => Err(format!(
            "there is no mode {other:?}: write \"stripe\", or \"relay\" for a peer that is no \
             Dunlin"
        )),
    });
    // A mode that there is not was a mistake enough.
    let is_known = mode.is_none_or(|mode| matches!(mode.get_ref().as_str(), "stripe" | "relay"));
    if !is_relay && is_known {
        for (key, value) in [("tls_listen", &table.tls_listen), ("tls", &table.tls)] {
            if let Some(value) = value {
                let text = format!("route {name}: {key} goes with mode = \"relay\"");
                found.add(&value.span(), text);
            }
        }
    }
    is_relay
}

pub(super) fn check(
    name: &str,
    at: &Range<usize>,
    table: &RouteTable,
    found: &mut Found<'_>,
    entrances: &mut Vec<Entrance>,
    exits: &mut Vec<RelayExit>,
) {
    for (key, value) in [
        ("lanes", table.lanes.as_ref().map(Spanned::span)),
        ("window", table.window.as_ref().map(Spanned::span)),
    ] {
        if let Some(at) = value {
            let text = format!("route {name}: {key} goes with mode = \"stripe\"");
            found.add(&at, text);
        }
    }
    let oldest_tls = found.or(
        table.tls.as_ref(),
        OldestTls::default(),
        |text| match text.as_str() {
            "1.2" => Ok(OldestTls::V1_2),
            "1.3" => Ok(OldestTls::V1_3),
            other => Err(format!(
                "{other:?} is no TLS that a relay speaks: write \"1.3\", or \"1.2\" to allow both"
            )),
        },
    );
    let is_near = table.listen.is_some() || table.to.is_some();
    let is_far = table.tls_listen.is_some();
    if is_near {
        entrance(name, table, oldest_tls, found, entrances);
    } else if let Some(peers) = &table.peers {
        let text = format!("route {name}: peers goes with listen and to");
        found.add(&peers.span(), text);
    }
    if is_far {
        exit(name, at, table, oldest_tls, found, exits);
        return;
    }
    for (key, value) in [
        ("target", table.target.as_ref().map(Spanned::span)),
        ("exec", table.exec.as_ref().map(Spanned::span)),
        ("allow", table.allow.as_ref().map(Spanned::span)),
    ] {
        if let Some(at) = value {
            let text = format!(
                "route {name}: {key} of a relay goes with tls_listen = \"ADDRESS:PORT\", where TLS \
                 clients come in"
            );
            found.add(&at, text);
            return;
        }
    }
    if !is_near {
        let text = format!(
            "route {name} has no end here: add listen and to, or tls_listen, target and allow"
        );
        found.add(at, text);
    }
}

/// The end that TLS leaves.
fn entrance(
    name: &str,
    table: &RouteTable,
    oldest_tls: OldestTls,
    found: &mut Found<'_>,
    entrances: &mut Vec<Entrance>,
) {
    let (listen, to) = match (&table.listen, &table.to) {
        (Some(listen), Some(to)) => (listen, to),
        (Some(listen), None) => {
            let text = format!("route {name} listens and leads nowhere: add to = \"HOST:PORT\"");
            return found.add(&listen.span(), text);
        }
        (None, to) => {
            let text = format!(
                "route {name} leads to a peer and takes no connections: add listen = \
                 \"unix:PATH\" or \"tcp:ADDRESS:PORT\""
            );
            return found.add(&to.as_ref().map(Spanned::span).unwrap_or_default(), text);
        }
    };
    let listen = found.parsed(listen, |text| parse_listen(text));
    let host = found.parsed(to, |text| host_of(text));
    let peers = check_answering(table.peers.as_ref(), to, host.as_deref(), found);
    if let (Some(listen), Some(peers)) = (listen, peers) {
        entrances.push(Entrance {
            route: name.to_owned(),
            listen,
            to: to.get_ref().clone(),
            peers,
            lanes: 1,
            window_bytes: WINDOW_BYTES,
            mode: Mode::Relay(oldest_tls),
        });
    }
}

/// The end that TLS enters.
fn exit(
    name: &str,
    at: &Range<usize>,
    table: &RouteTable,
    oldest_tls: OldestTls,
    found: &mut Found<'_>,
    exits: &mut Vec<RelayExit>,
) {
    let listen = table.tls_listen.as_ref().and_then(|listen| {
        found.parsed(listen, |text| {
            text.parse::<SocketAddr>()
                .map_err(|_| format!("{text:?} is no address: write 0.0.0.0:16514 or [::]:16514"))
        })
    });
    if table.target.is_none() && table.exec.is_none() {
        let text = format!(
            "route {name} takes TLS clients and leads nowhere: add target = \"unix:PATH\" or \
             \"tcp:HOST:PORT\""
        );
        return found.add(at, text);
    }
    let target = check_target(name, table, found);
    let Some(allow) = &table.allow else {
        let text = format!(
            "route {name} has a target that nobody may reach: add allow = [\"NAME\"] with the \
             names in the peers' certificates"
        );
        return found.add(at, text);
    };
    let allow = check_peers(allow, found);
    if let (Some(listen), Some(target), Some(allow)) = (listen, target, allow) {
        exits.push(RelayExit {
            route: name.to_owned(),
            listen,
            allow,
            target,
            oldest_tls,
        });
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::Path;

    use super::super::Config;

    const GOOD: &str = r#"listen = "0.0.0.0:7300"
identity = "/etc/dunlin"
[route.out]
mode = "relay"
listen = "unix:/run/dunlin/ram.sock"
to = "b.example:16514"
tls = "1.2"
[route.in]
mode = "relay"
tls_listen = "0.0.0.0:16514"
target = "unix:/run/qemu/in.sock"
allow = ["a.example"]
"#;

    fn mistakes(text: &str) -> Vec<String> {
        let error = Config::parse(Path::new("t.toml"), text).unwrap_err();
        error.to_string().lines().map(str::to_owned).collect()
    }

    #[test]
    fn a_mistake_in_a_relay_is_named_with_its_line_and_what_to_do() {
        Config::parse(Path::new("t.toml"), GOOD).unwrap();
        let allow = "allow = [\"a.example\"]";
        for (good, bad, line, word) in [
            ("mode = \"relay\"", "mode = \"rely\"", 4, "there is no mode"),
            ("mode = \"relay\"", "", 7, "goes with mode = \"relay\""),
            ("tls = \"1.2\"", "tls = \"1.1\"", 7, "write \"1.3\""),
            (
                "tls = \"1.2\"",
                "lanes = 4",
                7,
                "goes with mode = \"stripe\"",
            ),
            ("tls = \"1.2\"", "window = \"1M\"", 7, "goes with mode"),
            ("to = \"b.example:16514\"", "", 5, "add to"),
            (
                "listen = \"unix:/run/dunlin/ram.sock\"",
                "",
                6,
                "add listen",
            ),
            (
                "to = \"b.example:16514\"",
                "to = \"b.example\"",
                6,
                "host.example:7300",
            ),
            ("\"0.0.0.0:16514\"", "\"16514\"", 10, "[::]:16514"),
            (
                "tls_listen = \"0.0.0.0:16514\"",
                "",
                11,
                "goes with tls_listen",
            ),
            (
                "target = \"unix:/run/qemu/in.sock\"",
                "",
                8,
                "leads nowhere",
            ),
            (allow, "", 8, "add allow"),
            (allow, "allow = []", 12, "name the peers"),
            (
                allow,
                "allow = [\"a.example\"]\npeers = [\"x\"]",
                13,
                "goes with listen",
            ),
            (
                "[route.in]",
                "[route.none]\nmode = \"relay\"\n[route.in]",
                8,
                "no end here",
            ),
        ] {
            let text = GOOD.replacen(good, bad, 1);
            assert_ne!(text, GOOD, "{good}");
            let found = mistakes(&text);
            let expected = format!("t.toml:{line}: ");
            assert!(
                found
                    .iter()
                    .any(|one| one.starts_with(&expected) && one.contains(word)),
                "{bad:?}: {expected}…{word} in {found:#?}"
            );
        }
    }
}
