//! `dunlin pki`: an authority, identities, and their content.
#![allow(clippy::unwrap_used)]

mod support;

use std::os::unix::fs::PermissionsExt;

use serde_json::Value;
use support::{Scratch, finish, succeed, words};

#[test]
fn what_is_issued_is_shown() {
    let scratch = Scratch::new();
    let (ca, host) = (scratch.join("ca"), scratch.join("host"));
    let mut init = words("pki init --json");
    init.arg(&ca);
    let made: Value = serde_json::from_str(&succeed(init)).unwrap();
    assert_eq!(made["directory"], ca.to_str().unwrap());
    let issue = || {
        let mut issue = words("pki issue --name host.test --name 192.0.2.7 --name 2001:db8::1");
        issue
            .args(["--name", "spiffe://test/host", "--days", "30", "--ca"])
            .arg(&ca)
            .arg(&host);
        issue
    };
    succeed(issue());
    for (file, mode) in [
        ("key.pem", 0o600),
        ("cert.pem", 0o644),
        ("ca-cert.pem", 0o644),
    ] {
        let found = std::fs::metadata(host.join(file)).unwrap().permissions();
        assert_eq!(found.mode() & 0o777, mode, "{file}");
    }
    // The authority's key stays in its directory.
    assert!(!host.join("ca-key.pem").exists());

    let show = |flags: &str| {
        let mut show = words(&format!("pki show {flags}"));
        show.arg(&host);
        show
    };
    let shown: Value = serde_json::from_str(&succeed(show("--json"))).unwrap();
    let names = shown["names"].as_array().unwrap();
    for name in [
        "host.test",
        "192.0.2.7",
        "2001:db8::1",
        "spiffe://test/host",
    ] {
        assert!(
            names.iter().any(|n| n.as_str().unwrap().contains(name)),
            "{shown}"
        );
    }
    assert_eq!(shown["sha256"].as_str().unwrap().len(), 64);
    assert_eq!(shown["authorities"], 1);
    assert_eq!(shown["warnings"], Value::Array(Vec::new()));
    let said = succeed(show(""));
    let pin = shown["pin"].as_str().unwrap();
    assert!(said.contains("host.test") && said.contains(pin), "{said}");

    // None of these names can be configured as the name of a peer.
    for name in ["host test", "", "sha256:00"] {
        let mut issue = words("pki issue --ca");
        issue.arg(&ca).args(["--name", name]).arg(scratch.join("x"));
        let done = finish(issue).expect(2);
        assert!(done.err.contains("--name"), "{done:?}");
        assert!(!scratch.join("x").exists());
    }

    // Existing files are never overwritten.
    let again = finish(issue()).expect(1);
    let host = host.display().to_string();
    assert!(again.err.contains(&host), "{again:?}");
    let mut init = words("pki init");
    init.arg(&ca);
    finish(init).expect(1);
}

#[test]
fn a_certificate_is_valid_for_a_day_or_more() {
    let scratch = Scratch::new();
    let mut init = words("pki init --days 0");
    init.arg(scratch.join("ca"));
    finish(init).expect(2);
    assert!(!scratch.join("ca").exists());
}

#[test]
fn a_directory_without_an_identity_is_an_error() {
    let scratch = Scratch::new();
    let mut show = words("pki show");
    show.arg(scratch.join("nothing"));
    let done = finish(show).expect(1);
    assert!(done.err.contains("nothing"), "{done:?}");
    assert_eq!(done.err.matches("No such file").count(), 1, "{done:?}");
    let mut issue = words("pki issue --name x.test --ca");
    issue.arg(scratch.join("no-ca")).arg(scratch.join("host"));
    let done = finish(issue).expect(1);
    assert!(done.err.contains("ca-cert.pem"), "{done:?}");
    assert!(!scratch.join("host").exists());
}
