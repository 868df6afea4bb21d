//! Tests of the configuration.
#![allow(clippy::unwrap_used)]

use super::*;

const GOOD: &str = r#"
listen = "0.0.0.0:18300"
identity = "/etc/dunlin"
drain = "5s"

[limits]
channels = 16
peer_memory = "64M"
vanished = "4s"

[route.ram]
listen = "unix:/run/dunlin/ram.sock"
to = "b.example:18300"
lanes = 2
window = "32M"
target = "unix:/run/qemu/in.sock"
allow = ["b.example", "spiffe://example/b"]

[route.disk]
target = "tcp:127.0.0.1:10809"
allow = ["b.example"]

[route.tool]
exec = ["/bin/cat", "-u"]
allow = ["b.example"]

[route.each]
to = "b.example:18300"
target = "unix:/run/qemu/{vm}.sock"
allow = ["b.example"]
"#;

fn mistakes(text: &str) -> Vec<String> {
    let mistakes = Config::parse(Path::new("t.toml"), text).unwrap_err();
    mistakes.to_string().lines().map(str::to_owned).collect()
}

#[test]
fn a_good_file_is_parsed() {
    let config = Config::parse(Path::new("t.toml"), GOOD).unwrap();
    let listen = Port::At("0.0.0.0:18300".parse().unwrap());
    assert_eq!(config.listen, Some(listen));
    let passed = GOOD.replacen("0.0.0.0:18300", "systemd:peers", 1);
    let passed = Config::parse(Path::new("t.toml"), &passed).unwrap();
    assert_eq!(passed.listen, Some(Port::Passed("peers".to_owned())));
    assert_eq!(config.drain, Duration::from_secs(5));
    assert_eq!(config.limits.channels, 16);
    assert_eq!(config.limits.peer_bytes, 64 << 20);
    assert_eq!(config.limits.vanished, Duration::from_secs(4));
    assert_eq!(config.limits.connect, Limits::default().connect);
    let routes = format!("{:?}", config.routes);
    for part in [
        "/run/qemu/in.sock",
        "127.0.0.1:10809",
        "/bin/cat",
        "33554432",
    ] {
        assert!(routes.contains(part), "{part} in {routes}");
    }
}

/// Each case replaces a part of the good file, and checks the line and the remedy in the report.
#[test]
fn every_mistake_is_reported_with_its_line_and_remedy() {
    for (good, bad, line, word) in [
        (
            "listen = \"0.0.0.0:18300\"",
            "listen = \"18300\"",
            2,
            "write 0.0.0.0:18300",
        ),
        ("0.0.0.0:18300", "systemd:", 2, "FileDescriptorName="),
        (
            "unix:/run/dunlin/ram.sock",
            "systemd:a:b",
            12,
            "FileDescriptorName=",
        ),
        ("identity = \"/etc/dunlin\"", "", 1, "identity"),
        ("drain = \"5s\"", "drain = \"5\"", 4, "300ms, 10s"),
        ("drain = \"5s\"", "drian = \"5s\"", 4, "drian"),
        ("channels = 16", "channels = 0", 7, "1 to 4096"),
        ("channels = 16", "channels = \"16\"", 7, "whole number"),
        ("channels = 16", "channels = 1024", 8, "raise peer_memory"),
        ("vanished = \"4s\"", "vanished = \"10ms\"", 9, "1s"),
        (
            "unix:/run/dunlin/ram.sock",
            "/run/dunlin/ram.sock",
            12,
            "unix:PATH",
        ),
        (
            "unix:/run/dunlin/ram.sock",
            "unix:ram.sock",
            12,
            "begin it with /",
        ),
        (
            "to = \"b.example:18300\"",
            "to = \"b.example\"",
            13,
            "host.example:18300",
        ),
        ("b.example:18300", "2001:db8::2:18300", 13, "in brackets"),
        ("b.example:18300", "2001:db8::2", 13, "in brackets"),
        ("to = \"b.example:18300\"", "", 12, "set `to"),
        ("lanes = 2", "lanes = 200", 14, "1 to 128"),
        ("lanes = 2", "lanes = \"all\"", 14, "or \"auto\""),
        ("lanes = 2", "lane = 2", 14, "lane"),
        ("lanes = 2", "security = \"plain\"", 14, "in the clear"),
        ("lanes = 2", "security = \"ssl\"", 14, "write \"tls\""),
        ("lanes = 2", "security = \"ipsec\"", 14, "add [ipsec]"),
        (
            "allow = [\"b.example\"]",
            "allow = [\"b.example\"]\nsecurity = \"ipsec\"",
            22,
            "only the side that connects",
        ),
        ("lanes = 2", "socket_mode = \"0888\"", 14, "as in 0660"),
        ("lanes = 2", "rate = \"1K\"", 14, "64K or more"),
        (
            "[route.disk]",
            "[peer.\"b.example\"]\nrate = \"0\"\n[route.disk]",
            20,
            "out of range",
        ),
        ("[route.disk]", "[peer.\"*\"]\n[route.disk]", 19, "*"),
        (
            "lanes = 2",
            "socket_owner = \"no such user\"",
            14,
            "number of a user",
        ),
        (
            "lanes = 2",
            "socket_group = \"no such group\"",
            14,
            "number of a group",
        ),
        (
            "allow = [\"b.example\"]",
            "allow = [\"b.example\"]\nsocket_mode = \"0600\"",
            22,
            "needs listen = \"unix:PATH\"",
        ),
        (
            "[route.disk]",
            "[ipsec]\nports = \"1-9\"\n[route.disk]",
            20,
            "contain no block of 64",
        ),
        (
            "[route.disk]",
            "[ipsec]\nmode = \"packet\"\n[route.disk]",
            20,
            "write \"cpu\"",
        ),
        (
            "[route.disk]",
            "[ipsec]\ncpus = \"all\"\n[route.disk]",
            20,
            "write 0,2-3",
        ),
        (
            "[route.disk]",
            "[ipsec]\nrekey_after = \"often\"\n[route.disk]",
            20,
            "300ms, 10s",
        ),
        ("window = \"32M\"", "window = \"1K\"", 15, "256K to 1G"),
        ("unix:/run/qemu/in.sock", "in.sock", 16, "unix:PATH"),
        ("qemu/in.sock", "{vm}/{id}.sock", 16, "one parameter"),
        ("qemu/in.sock", "{VM}.sock", 16, "such as {vm}"),
        (
            "tcp:127.0.0.1:10809",
            "tcp:{vm}:10809",
            20,
            "choose the host",
        ),
        ("/bin/cat", "/bin/{vm}", 24, "choose the host"),
        (
            "\"spiffe://example/b\"",
            "\"sha256:00\"",
            17,
            "64 hexadecimal",
        ),
        (
            "allow = [\"b.example\", \"spiffe://example/b\"]",
            "",
            11,
            "add allow",
        ),
        (
            "allow = [\"b.example\", \"spiffe://example/b\"]",
            "allow = []",
            17,
            "name the peers",
        ),
        ("target = \"tcp:127.0.0.1:10809\"", "", 21, "add target"),
        (
            "target = \"tcp:127.0.0.1:10809\"",
            "peers = [\"x\"]\nlanes = 2",
            20,
            "needs",
        ),
        (
            "exec = [\"/bin/cat\", \"-u\"]",
            "exec = [\"cat\"]",
            24,
            "absolute path",
        ),
        (
            "exec = [\"/bin/cat\", \"-u\"]",
            "exec = [\"/bin/cat\"]\ntarget = \"unix:/x\"",
            24,
            "remove one",
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

#[test]
fn a_target_may_have_a_range_of_ports_at_an_address() {
    let with = |target: &str| {
        let text = GOOD.replacen("tcp:127.0.0.1:10809", target, 1);
        Config::parse(Path::new("t.toml"), &text)
    };
    for target in ["tcp:127.0.0.1:49152-49215", "tcp:[::1]:49152-49215"] {
        let routes = format!("{:?}", with(target).unwrap().routes);
        assert!(routes.contains("first: 49152, last: 49215"), "{routes}");
    }
    for target in [
        "tcp:b.example:49152-49215",
        "tcp:127.0.0.1:49215-49152",
        "tcp:127.0.0.1:0-70000",
        "tcp:127.0.0.1:1-2-3",
    ] {
        assert!(with(target).is_err(), "{target}");
    }
}

#[test]
fn all_mistakes_are_reported_at_once() {
    let text = GOOD
        .replacen("lanes = 2", "lanes = 0", 1)
        .replacen("drain = \"5s\"", "drain = \"soon\"", 1)
        .replacen("unix:/run/qemu", "unix:run/qemu", 1);
    assert_eq!(mistakes(&text).len(), 3);
    assert!(mistakes("listen = ").len() == 1);
    let nothing = "listen = \"0.0.0.0:1\"\nidentity = \"/x\"\n";
    assert!(mistakes(nothing)[0].contains("no route"));
}

#[test]
fn a_route_may_name_its_security() {
    for text in ["security = \"tls\"", "lanes = 2"] {
        let text = GOOD.replacen("lanes = 2", text, 1);
        assert!(Config::parse(Path::new("t.toml"), &text).is_ok(), "{text}");
    }
}

#[test]
fn a_route_may_use_ipsec() {
    let text = GOOD
        .replacen("lanes = 2", "security = \"ipsec\"", 1)
        .replacen("[route.disk]", "[ipsec]\ncpus = \"0,2\"\n[route.disk]", 1);
    let config = Config::parse(Path::new("t.toml"), &text).unwrap();
    let expected = Ipsec {
        ports: "24576-28671".parse().unwrap(),
        mode: dunlin_ipsec::Mode::Cpu,
        cpus: Some(crate::options::Cpus(vec![0, 2])),
        rekey_after: Duration::from_secs(3600),
    };
    assert_eq!(config.ipsec, Some(expected));
    assert!(format!("{:?}", config.routes).contains("StripeOverIpsec"));
    // `[ipsec]` is valid even if no route uses it: it admits lanes over IPsec that peers open.
    let prepared = GOOD.replacen("[route.disk]", "[ipsec]\n[route.disk]", 1);
    let config = Config::parse(Path::new("t.toml"), &prepared).unwrap();
    assert!(config.ipsec.is_some());
    assert!(!format!("{:?}", config.routes).contains("StripeOverIpsec"));
}

#[test]
fn two_routes_with_one_listen_address_are_one_reported_mistake() {
    let second =
        "[route.other]\nlisten = \"unix:/run/dunlin/ram.sock\"\nto = \"b.example:18300\"\n";
    let text = format!("{GOOD}\n{second}");
    let line = text.lines().position(|line| line == "[route.ram]").unwrap() + 1;
    let said = mistakes(&text);
    // Routes are checked in the order of their names, so `ram` is the second one with this address.
    let expected = format!("t.toml:{line}: two routes listen on unix:/run/dunlin/ram.sock");
    assert!(said[0].starts_with(&expected), "{said:?}");
}

/// Tests `Config::parse`, with which `tunnel check`, `tunnel run` and a reload all parse their
/// files.
#[test]
fn a_route_whose_listen_is_its_target_is_a_mistake_of_that_route() {
    for (good, bad, line, words) in [
        (
            "unix:/run/qemu/in.sock",
            "unix:/run/dunlin//ram.sock",
            11,
            ["route \"ram\"", "is also the target"],
        ),
        (
            "unix:/run/qemu/{vm}.sock",
            "unix:/run/dunlin/{vm}.sock",
            27,
            ["route \"each\"", "the listener of route \"ram\""],
        ),
    ] {
        let text = GOOD.replacen(good, bad, 1);
        assert_ne!(text, GOOD);
        let found = mistakes(&text);
        let expected = format!("t.toml:{line}: ");
        let is_it = |one: &String| {
            one.starts_with(&expected) && words.iter().all(|word| one.contains(word))
        };
        assert!(found.len() == 1 && found.iter().all(is_it), "{found:#?}");
    }
}
