//! Tests of the rules' text.
#![allow(clippy::unwrap_used)]

use std::path::Path;

use super::*;
use crate::redirect::peers::addressed;
use crate::tunnel::{Config, today};

const CONFIG: &str = r#"listen = "0.0.0.0:18300"
identity = "/etc/dunlin"
[redirect.libvirt]
ports = "49152-49215"
peers = { "192.0.2.3" = "c.example", "192.0.2.2" = "b.example", "2001:db8::2" = "b.example" }
users = ["root", "libvirt-qemu", "107"]
plain_from = ["2001:db8::9", "192.0.2.9"]
plain_until = "UNTIL"
[redirect.pve]
ports = "60000"
peers = { "192.0.2.2" = "b.example" }
users = ["0"]
"#;

fn made(text: &str) -> Rules {
    let text = text.replace("UNTIL", &today().to_string());
    let config = Config::parse(Path::new("t.toml"), &text).unwrap();
    let redirects = addressed(config.redirects, config.redirect_port).unwrap();
    rules(
        &redirects,
        config.redirect_user.as_deref().unwrap_or("root"),
    )
}

/// The whole text, as in docs/tunnel/redirect.md.
#[test]
fn the_rules_of_a_configuration() {
    let rules = made(CONFIG);
    let end = today().next_day().unwrap().with_time(Time::MIDNIGHT);
    let end = end.assume_utc().unix_timestamp().to_string();
    let text = rules
        .text
        .replace(&end, "END")
        .replace(&rules.digest, "DIGEST");
    assert_eq!(rules.digest.len(), 64);
    assert_eq!(text, include_str!("expected.nft"));
}

#[test]
fn the_digest_covers_what_the_rules_depend_on_and_no_more() {
    let digest = made(CONFIG).digest;
    assert_eq!(digest, made(CONFIG).digest);
    for (good, other) in [
        ("49152-49215", "49152-49216"),
        ("\"192.0.2.2\" = ", "\"192.0.2.4\" = "),
        ("\"root\"", "\"nova\""),
        ("\"192.0.2.9\"", "\"192.0.2.8\""),
        ("listen", "redirect_port = 18302\nlisten"),
        ("listen", "redirect_user = \"dunlin\"\nlisten"),
        ("redirect.pve", "redirect.proxmox"),
    ] {
        let changed = CONFIG.replacen(good, other, 1);
        assert_ne!(changed, CONFIG, "{good}");
        assert_ne!(made(&changed).digest, digest, "{other}");
    }
    // The rules depend neither on lanes nor on the peers' names.
    let same = CONFIG.replacen("users = [\"0\"]", "lanes = 9\nusers = [\"0\"]", 1);
    assert_eq!(made(&same).digest, digest);
    let same = CONFIG.replacen("c.example", "d.example", 1);
    assert_eq!(made(&same).digest, digest);
}

#[test]
fn without_addresses_of_a_family_there_is_no_rule_for_it() {
    let text = made(&CONFIG.replace(", \"2001:db8::2\" = \"b.example\"", "")).text;
    assert!(!text.contains("ip6 daddr"), "{text}");
    assert!(text.contains("ip daddr"), "{text}");
}

#[test]
fn two_peers_with_one_address_need_one_identity() {
    let text = CONFIG
        .replace("UNTIL", &today().to_string())
        .replace("\"192.0.2.3\"", "\"localhost\"")
        .replace("\"192.0.2.2\"", "\"127.0.0.1\"");
    let config = Config::parse(Path::new("t.toml"), &text).unwrap();
    let error = addressed(config.redirects, 18301).unwrap_err().to_string();
    assert!(error.contains("127.0.0.1"), "{error}");
    let same = text.replace("c.example", "b.example");
    let config = Config::parse(Path::new("t.toml"), &same).unwrap();
    assert!(addressed(config.redirects, 18301).is_ok());
    // Now plain_from contains 127.0.0.1. Only the lookup shows that this is the address of the peer
    // `localhost`.
    let plain = same.replace("\"192.0.2.9\"", "\"127.0.0.1\"").replace(
        "[redirect.pve]\nports = \"60000\"\npeers = { \"127.0.0.1\"",
        "[redirect.pve]\nports = \"60000\"\npeers = { \"192.0.2.2\"",
    );
    let plain = plain.replacen("\"127.0.0.1\" = \"b.example\", ", "", 1);
    let config = Config::parse(Path::new("t.toml"), &plain).unwrap();
    let error = addressed(config.redirects, 18301).unwrap_err().to_string();
    assert!(error.contains("plain_from"), "{error}");
}
