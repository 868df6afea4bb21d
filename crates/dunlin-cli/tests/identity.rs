//! Identity options of the command: pins, directory layouts of other programs, world-readable keys,
//! certificates that expire or are reloaded.
#![allow(clippy::unwrap_used)]

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use support::{Hosts, Process, assert_at_source, finish, succeed, words};

const GUEST: &str = "--guest process --memory 64M --fill-size 8M";

fn shown(directory: &Path, flags: &str) -> Vec<Value> {
    let mut show = words(&format!("pki show --json {flags}"));
    show.arg(directory);
    succeed(show)
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// Copies the identity in `from` to the directory `to`, with QEMU's file names for `side`.
fn as_qemu(from: &Path, to: &Path, side: &str) {
    fs::create_dir_all(to).unwrap();
    let copy = |name: &str, there: &str| {
        fs::copy(from.join(name), to.join(there)).unwrap();
    };
    copy("ca-cert.pem", "ca-cert.pem");
    copy("cert.pem", &format!("{side}-cert.pem"));
    copy("key.pem", &format!("{side}-key.pem"));
}

fn moves(hosts: &Hosts, destination: &Process, identity: &str, flags: &str) {
    let source = hosts.run(&format!("from-{identity}"), GUEST);
    let flags = format!("--json --lanes 1 {flags}");
    let done = finish(hosts.migrate(&source, destination, identity, &flags)).expect(0);
    assert_eq!(done.last()["event"], "moved", "{done:?}");
    destination.wait_for("received");
}

#[test]
fn a_vm_moves_with_qemus_files_and_pinned_peers() {
    let hosts = Hosts::new();
    let at = |name: &str| hosts.scratch.join(name);
    as_qemu(&at("a"), &at("qemu"), "client");
    as_qemu(&at("b"), &at("qemu"), "server");
    let sides = shown(&at("qemu"), "");
    let sides: Vec<_> = sides
        .iter()
        .map(|side| side["side"].as_str().unwrap())
        .collect();
    assert_eq!(sides, ["source", "destination"]);

    let pin = |name: &str, which: &str| shown(&at(name), "")[0][which].as_str().unwrap().to_owned();
    let allowed = format!("--peer {} --identity-layout qemu", pin("a", "key_pin"));
    let destination = hosts.receive("qemu", "to", &allowed);
    moves(
        &hosts,
        &destination,
        "qemu",
        &format!("--peer {}", pin("b", "pin")),
    );

    let stranger = format!("--peer {}", pin("b", "key_pin"));
    let destination = hosts.receive("b", "to-another", &stranger);
    let source = hosts.run("stays", GUEST);
    let flags = "--json --peer b.test";
    let failed = finish(hosts.migrate(&source, &destination, "a", flags))
        .expect(1)
        .last();
    assert_at_source(&failed, "unauthorised", "configuration");
    let rejected = destination.wait_for("rejected");
    let text = rejected["text"].as_str().unwrap();
    assert!(text.contains(&pin("a", "pin")), "{text}");

    let mut bad = words("vm receive --listen 127.0.0.1:0 --peer sha256:12 --identity");
    bad.arg(at("b"));
    let done = finish(bad).expect(2);
    assert!(done.err.contains("64 hexadecimal digits"), "{done:?}");
}

/// Claim H2 of docs/security.
#[test]
fn a_world_readable_key_needs_a_flag() {
    let hosts = Hosts::new();
    let host = hosts.scratch.join("b");
    fs::set_permissions(host.join("key.pem"), PermissionsExt::from_mode(0o644)).unwrap();
    let mut refused = words("vm receive --listen 127.0.0.1:0 --identity");
    refused.arg(&host);
    let done = finish(refused).expect(1);
    assert!(done.err.contains("chmod 0600"), "{done:?}");
    let warnings = shown(&host, "--allow-open-key")[0]["warnings"].to_string();
    assert!(warnings.contains("mode 0644"), "{warnings}");
}

#[test]
fn each_side_warns_of_certificates_that_expire_soon() {
    let hosts = Hosts::new();
    for (directory, name) in [("short-a", "a.test"), ("short-b", "b.test")] {
        // More than two thirds of the certificate's validity period have passed, so the processes
        // warn.
        hosts.issue_for(directory, name, Duration::from_secs(25));
    }
    let dates = &shown(&hosts.scratch.join("short-a"), "")[0]["dates"];
    assert_eq!(dates[0]["item"], "certificate", "{dates}");
    assert_eq!(dates[0]["days_left"], 0);
    assert!(dates[1]["days_left"].as_u64().unwrap() > 3000, "{dates}");

    let mut receive = words("vm receive --listen 127.0.0.1:0 --identity");
    receive.arg(hosts.scratch.join("short-b"));
    let destination = Process::start(receive, &hosts.scratch.join("to"));
    let ends = |line: Value| {
        let text = line["text"].as_str().unwrap().to_owned();
        assert!(text.contains("cert.pem"), "{text}");
    };
    ends(destination.wait_for("warning"));
    let address = destination.wait_for("listening")["address"].clone();

    let source = hosts.run("from", GUEST);
    let mut migrate = words("vm migrate --name vm --lanes 1 --peer b.test --to");
    migrate
        .arg(address.as_str().unwrap())
        .arg("--identity")
        .arg(hosts.scratch.join("short-a"))
        .arg("--control")
        .arg(&source.control);
    let migration = Process::follow(migrate, &source.control);
    ends(migration.wait_for("warning"));
    migration.wait_for("moved");
    destination.wait_for("received");
}

#[test]
fn certificates_are_reloaded_at_a_hang_up() {
    let hosts = Hosts::new();
    let at = |name: &str| hosts.scratch.join(name);
    let destination = hosts.receive("b", "to", "");
    let pin = |name: &str| shown(&at(name), "")[0]["pin"].as_str().unwrap().to_owned();
    let old = pin("b");

    // After a reload of unusable files, the process keeps its identity.
    fs::rename(at("b").join("key.pem"), at("b").join("gone.pem")).unwrap();
    destination.signal("HUP");
    let warning = destination.wait_for("warning");
    let text = warning["text"].as_str().unwrap();
    assert!(text.contains("key.pem"), "{text}");

    hosts.issue("ca", "next", "b.test", 1);
    for file in ["cert.pem", "key.pem"] {
        fs::copy(at("next").join(file), at("b").join(file)).unwrap();
    }
    let new = pin("b");
    assert_ne!(old, new);
    destination.signal("HUP");
    let read = destination.wait_for("identity-read");
    assert!(!read["valid_until"].as_str().unwrap().is_empty());

    let source = hosts.run("from", GUEST);
    let flags = format!("--json --peer {old}");
    let failed = finish(hosts.migrate(&source, &destination, "a", &flags))
        .expect(1)
        .last();
    assert_at_source(&failed, "unauthorised", "configuration");
    let text = failed["text"].as_str().unwrap();
    assert!(text.contains(&new), "{text}");
    let flags = format!("--json --lanes 1 --peer {new}");
    finish(hosts.migrate(&source, &destination, "a", &flags)).expect(0);
    destination.wait_for("received");
}
