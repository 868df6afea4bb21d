//! Tests of redirects in the configuration.
#![allow(clippy::unwrap_used)]

use std::path::Path;

use dunlin::lane::fastest;

use super::super::Config;
use super::*;

/// A file with redirects and no route; a date replaces `UNTIL`.
const GOOD: &str = r#"
listen = "0.0.0.0:18300"
identity = "/etc/dunlin"
[redirect.libvirt]
ports = "49152-49215"
peers = { "192.0.2.2" = "b.example", "2001:DB8:0::2" = "b.example", "C.example" = "c.example" }
users = ["root", "107", "libvirt-qemu"]
plain_from = ["192.0.2.9"]
plain_until = "UNTIL"
[redirect.pve]
ports = "60000-60050"
peers = { "192.0.2.2" = "b.example" }
users = ["root"]
local = ["127.0.0.1", "::1", "::ffff:192.0.2.1"]
peer_port = 17300
lanes = 8
window = "32M"
"#;

fn until(text: &str, days: i64) -> String {
    text.replacen("UNTIL", &(today() + Duration::days(days)).to_string(), 1)
}

fn mistakes(text: &str) -> Vec<String> {
    let error = Config::parse(Path::new("t.toml"), text).unwrap_err();
    error.to_string().lines().map(str::to_owned).collect()
}

#[test]
fn a_file_may_have_redirects_and_no_route() {
    let config = Config::parse(Path::new("t.toml"), &until(GOOD, 90)).unwrap();
    assert_eq!(config.redirect_port, 18301);
    let [libvirt, pve] = &config.redirects[..] else {
        panic!("{:?}", config.redirects)
    };
    let hosts: Vec<_> = libvirt.peers.iter().map(|peer| &*peer.host).collect();
    assert_eq!(hosts, ["192.0.2.2", "2001:db8::2", "c.example"]);
    assert_eq!(libvirt.users, ["root", "107", "libvirt-qemu"]);
    let loopback: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    assert_eq!(libvirt.local, loopback);
    assert_eq!(
        (libvirt.peer_port, libvirt.lanes),
        (18300, fastest::lanes(None))
    );
    assert_eq!(libvirt.mode, Mode::Stripe);
    let plain = libvirt.plain.clone().unwrap();
    assert_eq!(plain.from, ["192.0.2.9".parse::<IpAddr>().unwrap()]);
    assert_eq!(plain.until, today() + Duration::days(90));
    assert!(!plain.is_over(today()));

    assert_eq!((pve.ports.first(), pve.ports.last()), (60000, 60050));
    assert_eq!(pve.local[2], "192.0.2.1".parse::<IpAddr>().unwrap());
    assert_eq!((pve.peer_port, pve.lanes), (17300, 8));
    assert_eq!((pve.window_bytes, &pve.plain), (32 << 20, &None));
}

#[test]
fn one_port_is_a_range_and_lanes_may_use_ipsec() {
    let text = until(GOOD, 1)
        .replacen("\"60000-60050\"", "\"60000\"\nsecurity = \"ipsec\"", 1)
        .replacen("[redirect.pve]", "[ipsec]\n[redirect.pve]", 1)
        .replacen("listen", "redirect_port = 9\nlisten", 1);
    let config = Config::parse(Path::new("t.toml"), &text).unwrap();
    let pve = &config.redirects[1];
    assert_eq!((pve.ports.first(), pve.ports.last()), (60000, 60000));
    assert_eq!(pve.mode, Mode::StripeOverIpsec);
    assert_eq!(config.redirect_port, 9);
}

#[test]
fn a_relay_has_a_port_of_its_own_and_a_rate() {
    let with = |port: u16| {
        let keys = format!("mode = \"relay\"\nrelay_port = {port}\nrate = \"1M\"");
        let text = until(GOOD, 1).replacen("lanes = 8\nwindow = \"32M\"", &keys, 1);
        Config::parse(Path::new("t.toml"), &text)
    };
    let config = with(18400).unwrap();
    let pve = &config.redirects[1];
    assert_eq!(
        (pve.mode, pve.relay_port),
        (Mode::RelayAt(18400), Some(18400))
    );
    // The ports of `listen`, of the listeners of three hosts, of the peers, and of the toolstacks.
    for taken in [18300, 18301, 18303, 17300, 49160, 60000] {
        assert!(with(taken).is_err(), "{taken}");
    }
}

/// Without `listen`, the host connects to its peers and accepts no connections from them.
#[test]
fn a_redirect_needs_no_listen() {
    let text = until(GOOD, 1).replacen("listen = \"0.0.0.0:18300\"\n", "", 1);
    let config = Config::parse(Path::new("t.toml"), &text).unwrap();
    assert_eq!(config.listen, None);
    let route = "[route.a]\nto = \"b.example:1\"\n";
    Config::parse(Path::new("t.toml"), &format!("{text}{route}")).unwrap();
    for (more, word) in [
        ("[ipsec]\n", "[ipsec] needs `listen`"),
        (
            "[route.a]\ntarget = \"unix:/x\"\nallow = [\"b.example\"]\n",
            "route a has a target",
        ),
    ] {
        let found = mistakes(&format!("{text}{more}"));
        assert!(found.len() == 1 && found[0].contains(word), "{found:#?}");
    }
}

/// If a past date were an error, a host that boots after that day would have no rules at all.
#[test]
fn a_past_date_is_valid_and_is_over() {
    let config = Config::parse(Path::new("t.toml"), &until(GOOD, -1)).unwrap();
    let plain = config.redirects[0].plain.clone().unwrap();
    assert!(plain.is_over(today()));
    assert!(!plain.is_over(plain.until));
}

/// Each case replaces a part of the good file, and checks the line and the remedy in the report.
#[test]
fn every_mistake_in_a_redirect_is_reported_with_its_line_and_remedy() {
    let users = "users = [\"root\", \"107\", \"libvirt-qemu\"]";
    let pve = "peers = { \"192.0.2.2\" = \"b.example\" }";
    for (good, bad, line, word) in [
        ("redirect.libvirt", "redirect.\"a b\"", 4, "use 1 to 64"),
        ("49152-49215", "49215-49152", 5, "such as 49152-49215"),
        ("49152-49215", "no", 5, "such as 49152-49215"),
        ("49152-49215", "1000-1100", 5, "below 1024"),
        ("49152-49215", "49152-50176", 5, "1 to 1024"),
        ("60000-60050", "49215-49300", 11, "overlap"),
        ("60000-60050", "18250-18300", 11, "which is `listen`"),
        ("60000-60050", "18301", 11, "which is redirect_port"),
        ("60000-60050", "17290-17300", 11, "which is peer_port"),
        ("\"192.0.2.2\" =", "\"192.0.2\" =", 6, "host name"),
        ("\"192.0.2.2\" =", "\"0.0.0.0\" =", 6, "one host"),
        ("\"192.0.2.2\" =", "\"b_.example:1\" =", 6, "host name"),
        ("\"C.example\"", "\"::ffff:192.0.2.2\"", 6, "two identities"),
        ("\"C.example\"", "\"2001:db8::2\"", 6, "two identities"),
        ("\"c.example\"", "\"sha256:00\"", 6, "64 hexadecimal"),
        (pve, "peers = {}", 12, "has no peer"),
        (users, "users = []", 7, "name the toolstack's users"),
        ("\"107\"", "\"4294967295\"", 7, "uid such as"),
        ("\"107\"", "\"a b\"", 7, "uid such as"),
        ("\"107\"", "\"\"", 7, "uid such as"),
        ("192.0.2.9", "192.0.2.2", 8, "in peers and in plain_from"),
        ("192.0.2.9", "b.example", 8, "write an address"),
        ("[\"192.0.2.9\"]", "[]", 8, "plain_from is empty"),
        ("plain_until = \"UNTIL\"", "", 8, "add plain_until"),
        ("plain_from = [\"192.0.2.9\"]", "", 9, "needs plain_from"),
        ("UNTIL", "next year", 9, "write YYYY-MM-DD"),
        ("UNTIL", "2026-02-30", 9, "write YYYY-MM-DD"),
        ("UNTIL", "2026-2-3", 9, "write YYYY-MM-DD"),
        ("UNTIL", "9999-01-01", 9, "90 days"),
        ("\"::1\"", "\"localhost\"", 14, "write an address"),
        ("= 17300", "= 0", 15, "1 to 65535"),
        ("lanes = 8", "lanes = 200", 16, "1 to 128"),
        ("lanes = 8", "mode = \"relay\"", 16, "add relay_port"),
        (
            "60000-60050",
            "60000-60050\"\nrelay_port = 0 # \"",
            12,
            "1 to 65535",
        ),
        ("lanes = 8", "rate = \"1K\"", 16, "64K or more"),
        (
            "60000-60050\"",
            "60000-60050\"\nmode = \"relay\"\nrelay_port = 18400",
            18,
            "lanes needs mode",
        ),
        ("lanes = 8", "mode = \"rely\"", 16, "unknown mode"),
        ("lanes = 8", "security = \"ipsec\"", 16, "add [ipsec]"),
        ("lanes = 8", "security = \"plain\"", 16, "write \"tls\""),
        ("lanes = 8", "lane = 8", 16, "lane"),
        ("\"32M\"", "\"1K\"", 17, "256K to 1G"),
        ("0.0.0.0:18300", "0.0.0.0:18301", 4, "from redirect_port on"),
        (
            "0.0.0.0:18300\"",
            "0.0.0.0:18300\"\nredirect_port = 0",
            3,
            "1 to 65535",
        ),
    ] {
        let text = until(&GOOD.replacen(good, bad, 1), 1);
        assert_ne!(text, until(GOOD, 1), "{good}");
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

/// If a route has the port or the name of a redirect, the configuration is refused. Otherwise the
/// rules would reject the peers of such a route, or lead the tunnel's own connections back to it.
#[test]
fn ports_and_names_of_routes_collide_with_redirects() {
    for (route, line, word) in [
        (
            "[route.libvirt]\ntarget = \"unix:/x\"\nallow = [\"b.example\"]\n",
            4,
            "same name",
        ),
        (
            "[route.a]\nlisten = \"tcp:127.0.0.1:49152\"\nto = \"b.example:18300\"\n",
            5,
            "`listen` of route a",
        ),
        (
            "[route.a]\nto = \"b.example:60050\"\n",
            11,
            "`to` of route a",
        ),
        (
            "[route.a]\nmode = \"relay\"\ntls_listen = \"0.0.0.0:60001\"\n\
             target = \"unix:/x\"\nallow = [\"b.example\"]\n",
            11,
            "tls_listen of route a",
        ),
    ] {
        let found = mistakes(&until(&format!("{GOOD}{route}"), 1));
        let expected = format!("t.toml:{line}: ");
        let is_it = |one: &String| one.starts_with(&expected) && one.contains(word);
        assert!(found.len() == 1 && found.iter().all(is_it), "{found:#?}");
    }
}
