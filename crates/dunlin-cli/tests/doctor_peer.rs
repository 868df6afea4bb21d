//! `dunlin doctor --peer`: what a running tunnel reports about its host, and to which peers.
#![allow(clippy::unwrap_used)]

mod support;
#[path = "support/tunnel.rs"]
mod tunnel;

use std::fs;
use std::io::Write;
use std::os::unix::net::UnixListener;
use std::thread;
use std::time::Duration;

use serde_json::Value;
use support::{Done, Hosts, finish, words};
use tunnel::{Tunnel, far_config, near_config};

/// Asks the peer at `to` with the identity of host a; `flags` are more flags.
fn ask(hosts: &Hosts, to: &str, flags: &str) -> Done {
    let config = hosts.scratch.join("asking.toml");
    fs::write(&config, near_config(hosts, to, "ram", "in")).unwrap();
    let mut command = words(&format!("doctor --json --peer {to} {flags} --config"));
    command.arg(&config);
    finish(command)
}

/// The state and value of a check of the peer.
fn found(done: &Done, check: &str) -> (String, String) {
    let lines = done.lines();
    let one = lines.iter().find(|line| line["check"] == check);
    let one = one.unwrap_or_else(|| panic!("no {check}: {}\n{}", done.out, done.err));
    let text = |field: &str| one[field].as_str().unwrap().to_owned();
    (text("state"), text("value"))
}

fn state(done: &Done, check: &str) -> String {
    found(done, check).0
}

/// Tunnels are confined by default, as far as this host allows.
#[test]
fn a_confined_tunnel_reports_its_host() {
    let hosts = Hosts::new();
    let far = Tunnel::start(&hosts, "far", &far_config(&hosts, "a.test"));
    far.wait_for("confined");
    let done = ask(&hosts, &far.address, "--path measured");
    let of = |check| found(&done, check);
    assert_eq!(of("peer.path").0, "ok");
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(of("peer.report"), ("ok".to_owned(), version.to_owned()));
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    assert_eq!(of("peer.kernel").1, release.trim());
    // The peer runs on this host too.
    assert_eq!(of("peer.records").1, of("auto.records").1);
    assert_eq!(of("peer.library").1, of("auto.library").1);
    // The identity is valid for a day from the second in which it was made.
    let (state, value) = of("peer.certificate");
    assert_eq!(state, "warn");
    assert!(["0 days", "1 day"].contains(&value.as_str()), "{value}");
    let (state, value) = of("peer.clock");
    assert_eq!(state, "ok", "{value}");
    let milliseconds: i64 = value.strip_suffix(" ms").unwrap().parse().unwrap();
    assert!(milliseconds.abs() < 10_000, "{value}");
    let buffers = of("net.buffers").1;
    assert!(buffers.starts_with(&of("peer.buffers").1), "{buffers}");
    assert_ne!(of("net.buffers").0, "unknown", "the path was not measured");
    // The kernel reports a path MTU of at most 65535, the longest IPv4 packet.
    let mtu = fs::read_to_string("/sys/class/net/lo/mtu").unwrap();
    let mtu = mtu.trim().parse::<u32>().unwrap().min(65535);
    assert_eq!(of("peer.mtu").1, mtu.to_string());
    // A tunnel without redirects has no rules.
    assert!(!done.out.contains("peer.rules"), "{}", done.out);
    let peers = done.lines();
    let peers = peers
        .iter()
        .filter(|one| one["check"].as_str().unwrap().starts_with("peer."));
    assert!(peers.clone().all(|one| one["peer"] == far.address.as_str()));
    assert_eq!(peers.count(), 9, "{}", done.out);
}

#[test]
fn a_peer_without_a_route_for_this_host_reports_nothing() {
    let hosts = Hosts::new();
    // The far tunnel admits host a as a peer, because its route `back` leads to host a. But only
    // host c may use the tunnel's target.
    let config = far_config(&hosts, "c.test")
        + &format!(
            "[route.back]\nlisten = \"unix:{}\"\nto = \"127.0.0.1:9\"\npeers = [\"a.test\"]\n",
            hosts.scratch.join("back").display()
        );
    let far = Tunnel::start(&hosts, "far", &config);
    let done = ask(&hosts, &far.address, "").expect(1);
    assert_eq!(
        found(&done, "peer.path"),
        ("fail".to_owned(), "unknown-route".to_owned())
    );
    assert_eq!(state(&done, "peer.report"), "unknown");
    assert!(!done.out.contains("peer.kernel"), "{}", done.out);
    // This tunnel does not admit host a at all.
    let far = Tunnel::start(&hosts, "closed", &far_config(&hosts, "c.test"));
    let done = ask(&hosts, &far.address, "").expect(1);
    assert_eq!(
        found(&done, "peer.path"),
        ("fail".to_owned(), "unauthorised".to_owned())
    );
}

#[test]
fn a_peer_that_does_not_listen_is_a_failure() {
    let hosts = Hosts::new();
    let done = ask(&hosts, "127.0.0.1:1", "").expect(1);
    assert_eq!(
        found(&done, "peer.path"),
        ("fail".to_owned(), "control-lost".to_owned())
    );
    finish(words(
        "doctor --peer 127.0.0.1:1 --config /nonexistent.toml",
    ))
    .expect(1);
    finish(words("doctor --path measured")).expect(1);
    finish(words("doctor --compare a b --peer c")).expect(2);
}

/// The peer has a target with the name under which reports are requested, so the test can send any
/// report.
///
/// Claim P26 of docs/security.
#[test]
fn i7_hostile_reports_are_refused_or_escaped() {
    let hosts = Hosts::new();
    let socket = hosts.scratch.join("report");
    let listener = UnixListener::bind(&socket).unwrap();
    let config = far_config(&hosts, "a.test")
        + &format!(
            "[route.dunlin-report]\ntarget = \"unix:{}\"\nallow = [\"a.test\"]\n",
            socket.display()
        );
    let far = Tunnel::start(&hosts, "far", &config);
    let escape = r#"{"kernel":"\u001b[2J\n{}","clock_ms":0,"rules":"different"}"#;
    for (answer, kernel) in [
        ("x".repeat(1 << 20), None),
        ("{\"kernel\":1}".to_owned(), None),
        ("{\"clock_ms\":-1}".to_owned(), None),
        (String::new(), None),
        (escape.to_owned(), Some("\\u{1b}[2J\\n{}")),
    ] {
        let served = listener.try_clone().unwrap();
        let sends = thread::spawn(move || {
            let (mut stream, _) = served.accept().unwrap();
            stream
                .set_write_timeout(Some(Duration::from_secs(20)))
                .unwrap();
            // The side that asks closes the channel before it has read a long answer.
            let _ = stream.write_all(answer.as_bytes());
        });
        let done = ask(&hosts, &far.address, "").expect(i32::from(kernel.is_some()));
        sends.join().unwrap();
        assert!(
            !done.out.contains('\u{1b}') && !done.err.contains('\u{1b}'),
            "{done:?}"
        );
        assert_eq!(state(&done, "peer.path"), "ok");
        let of_kernel = done.lines();
        let of_kernel = of_kernel.iter().find(|one| one["check"] == "peer.kernel");
        assert_eq!(
            of_kernel.map(|one| &one["value"]),
            kernel.map(Value::from).as_ref()
        );
        match kernel {
            Some(_) => {
                assert_eq!(state(&done, "peer.clock"), "fail");
                assert_eq!(state(&done, "peer.rules"), "fail");
            }
            None => assert_eq!(state(&done, "peer.report"), "unknown"),
        }
    }
}
