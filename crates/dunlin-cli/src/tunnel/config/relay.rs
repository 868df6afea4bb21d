//! Routes with mode *relay* in the configuration.

use std::net::SocketAddr;
use std::ops::Range;

use dunlin::lane::policy::OldestTls;
use dunlin_tunnel::{Entrance, Mode, RelayExit};
use toml::Spanned;

use super::table::{Found, RouteTable, at, check_entrance, check_exit, lacks_peer, parse_listen};

/// Whether a route is a relay. If not, reports settings in its table that only relays may have.
pub(super) fn is_one(name: &str, table: &RouteTable, found: &mut Found<'_>) -> bool {
    let before = found.all.len();
    let is_relay = found.or(&table.mode, false, |mode| match mode {
        "stripe" => Ok(false),
        "relay" => Ok(true),
        other => Err(format!(
            "unknown mode {other:?}: write \"stripe\", or \"relay\" for a peer other than Dunlin"
        )),
    });
    // If the mode is unknown, the valid keys are unknown too, so only the mode is reported.
    if !is_relay && found.all.len() == before {
        let keys = [
            ("tls_listen", at(&table.tls_listen)),
            ("tls", at(&table.tls)),
        ];
        found.misplaced(name, "mode = \"relay\"", &keys);
    }
    is_relay
}

pub(super) fn check(
    name: &str,
    at_route: &Range<usize>,
    table: &RouteTable,
    found: &mut Found<'_>,
) -> (Option<Entrance>, Option<RelayExit>) {
    let keys = [("lanes", at(&table.lanes)), ("window", at(&table.window))];
    found.misplaced(name, "mode = \"stripe\"", &keys);
    let oldest_tls = found.or(&table.tls, OldestTls::default(), |text| match text {
        "1.2" => Ok(OldestTls::V1_2),
        "1.3" => Ok(OldestTls::V1_3),
        other => Err(format!(
            "unsupported TLS version {other:?}: write \"1.3\", or \"1.2\" to allow both"
        )),
    });
    let is_near = table.listen.is_some() || table.to.is_some();
    let mut near = None;
    if is_near {
        near = entrance(name, table, oldest_tls, found);
    } else {
        found.misplaced(name, "`listen` and `to`", &[("peers", at(&table.peers))]);
    }
    if let Some(listen) = &table.tls_listen {
        return (near, exit(name, at_route, listen, table, oldest_tls, found));
    }
    let far = [
        ("target", at(&table.target)),
        ("exec", at(&table.exec)),
        ("allow", at(&table.allow)),
    ];
    if let Some(first) = far.iter().find(|(_, at)| at.is_some()) {
        let key = format!("{} of a relay", first.0);
        let with = "tls_listen = \"ADDRESS:PORT\", the address for TLS clients";
        found.misplaced(name, with, &[(&key, first.1.clone())]);
    } else if !is_near {
        let text = format!(
            "route {name} has neither `listen` nor `target`: add `listen` and `to`, or \
             `tls_listen`, `target` and `allow`"
        );
        found.add(at_route, text);
    }
    (near, None)
}

/// The route's plain end: the tunnel accepts local connections and forwards them as TLS.
fn entrance(
    name: &str,
    table: &RouteTable,
    oldest_tls: OldestTls,
    found: &mut Found<'_>,
) -> Option<Entrance> {
    let (listen, to) = match (&table.listen, &table.to) {
        (Some(listen), Some(to)) => (listen, to),
        (Some(listen), None) => {
            lacks_peer(name, listen, found);
            return None;
        }
        (None, to) => {
            let text = format!(
                "route {name} connects to a peer and accepts no connections: add listen = \
                 \"unix:PATH\" or \"tcp:ADDRESS:PORT\""
            );
            found.add(&at(to).unwrap_or_default(), text);
            return None;
        }
    };
    let listen = found.parsed(listen, |text| parse_listen(text));
    check_entrance(name, table, listen, to, Mode::Relay(oldest_tls), found)
}

/// The route's TLS end: TLS clients connect to it.
fn exit(
    name: &str,
    at: &Range<usize>,
    listen: &Spanned<String>,
    table: &RouteTable,
    oldest_tls: OldestTls,
    found: &mut Found<'_>,
) -> Option<RelayExit> {
    let listen = found.parsed(listen, |text| {
        text.parse::<SocketAddr>()
            .map_err(|_| format!("invalid address {text:?}: write 0.0.0.0:16514 or [::]:16514"))
    });
    if table.target.is_none() && table.exec.is_none() {
        let text = format!(
            "route {name} accepts TLS clients and has no target: add target = \"unix:PATH\" or \
             \"tcp:HOST:PORT\""
        );
        found.add(at, text);
        return None;
    }
    let (target, allow) = check_exit(name, at, table, found)?;
    Some(RelayExit {
        route: name.to_owned(),
        listen: listen?,
        allow,
        target,
        oldest_tls,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::Path;

    use super::super::Config;

    const GOOD: &str = r#"listen = "0.0.0.0:18300"
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
    fn a_mistake_in_a_relay_is_reported_with_its_line_and_remedy() {
        Config::parse(Path::new("t.toml"), GOOD).unwrap();
        let allow = "allow = [\"a.example\"]";
        for (good, bad, line, word) in [
            ("mode = \"relay\"", "mode = \"rely\"", 4, "unknown mode"),
            ("mode = \"relay\"", "", 7, "needs mode = \"relay\""),
            ("tls = \"1.2\"", "tls = \"1.1\"", 7, "write \"1.3\""),
            ("tls = \"1.2\"", "lanes = 4", 7, "needs mode = \"stripe\""),
            ("tls = \"1.2\"", "window = \"1M\"", 7, "needs mode"),
            ("to = \"b.example:16514\"", "", 5, "set `to"),
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
                "host.example:18300",
            ),
            ("\"0.0.0.0:16514\"", "\"16514\"", 10, "[::]:16514"),
            ("tls_listen = \"0.0.0.0:16514\"", "", 11, "needs tls_listen"),
            (
                "target = \"unix:/run/qemu/in.sock\"",
                "",
                8,
                "has no target",
            ),
            (allow, "", 8, "add allow"),
            (allow, "allow = []", 12, "name the peers"),
            (
                allow,
                "allow = [\"a.example\"]\npeers = [\"x\"]",
                13,
                "needs `listen`",
            ),
            (
                "[route.in]",
                "[route.none]\nmode = \"relay\"\n[route.in]",
                8,
                "neither `listen` nor `target`",
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
