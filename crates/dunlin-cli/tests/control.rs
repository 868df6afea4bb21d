//! Control of a running migration: limits, signals, requests from another shell, clients that end.
#![allow(clippy::unwrap_used)]

#[path = "support/proxy.rs"]
mod proxy;
mod support;

use std::net::TcpListener;
use std::time::Duration;

use dunlin_test_base::kvm;
use proxy::Proxy;
use serde_json::Value;
use support::{Done, Hosts, Process, assert_at_source, finish, words};

const GUEST: &str = "--memory 64M --working-set 8M --dirty-rate 2000";
/// At this rate the first pass takes more than a minute.
const SLOW: &str = "--rate 1M --peer b.test";

/// Starts a migration that takes more than a minute.
fn under_way(hosts: &Hosts, from: &Process, to: &Process) -> Process {
    let client = hosts.begin(from, to, "a", SLOW);
    let progress = client.wait_for("progress");
    assert!(
        progress["remaining_bytes"].as_u64().unwrap() > 0,
        "{progress}"
    );
    client
}

/// Asserts that the client reports the cancellation, and that the guest keeps running.
fn assert_cancelled(hosts: &Hosts, client: Process, at: &Process) {
    let (code, last) = client.ended();
    assert_eq!(code, 4, "{last}");
    assert_eq!(
        [&last["event"], &last["fault"], &last["vm"]],
        ["failed", "cancelled", "at-source"]
    );
    assert_eq!(last["code"], 4);
    hosts.assert_runs(at);
    assert_eq!(hosts.status(at)["migration"], Value::Null);
}

/// Asserts that the next attempt to migrate succeeds, and that the digests of both memories are
/// equal.
fn assert_moves(hosts: &Hosts, from: Process, to: &Process) {
    let done = finish(hosts.migrate(&from, to, "a", "--json --verify --peer b.test")).expect(0);
    assert_eq!(done.last()["digests_equal"], true);
    assert_eq!(from.ended().0, 0);
    to.wait_for("received");
    hosts.assert_runs(to);
}

#[test]
fn i2_i5_a_signal_at_the_client_cancels_and_the_next_attempt_succeeds() {
    let Some(_turn) = kvm() else { return };
    let hosts = Hosts::new();
    let source = hosts.run("1", GUEST);
    let destination = hosts.receive("b", "2", "");
    for signal in ["INT", "TERM"] {
        let client = under_way(&hosts, &source, &destination);
        client.signal(signal);
        assert_cancelled(&hosts, client, &source);
        let rejected = destination.wait_for("rejected");
        let text = rejected["text"].as_str().unwrap();
        assert!(text.contains("(cancelled, at fault: peer)"), "{text}");
    }
    assert_moves(&hosts, source, &destination);
}

/// Claim P9 of docs/security.
#[test]
fn i2_a_third_shell_cancels_on_either_side() {
    let Some(_turn) = kvm() else { return };
    let hosts = Hosts::new();
    let source = hosts.run("1", GUEST);
    let destination = hosts.receive("b", "2", "");
    assert_eq!(hosts.status(&source)["migration"], Value::Null);
    hosts.cancel(&source).expect(1);

    let client = under_way(&hosts, &source, &destination);
    hosts.cancel(&source).expect(0);
    assert_cancelled(&hosts, client, &source);
    destination.wait_for("rejected");

    // Cancel at the destination, which then waits for the next source.
    let client = under_way(&hosts, &source, &destination);
    let status = hosts.status(&destination);
    assert_eq!(status["state"], "arriving");
    assert_eq!(status["migration"]["role"], "destination");
    assert_eq!(status["migration"]["peer"], "DNS a.test");
    hosts.ask(&destination, "resume").expect(1);
    assert_eq!(hosts.status(&destination)["state"], "arriving");
    hosts.cancel(&destination).expect(0);
    assert_cancelled(&hosts, client, &source);
    destination.wait_for("rejected");
    assert_moves(&hosts, source, &destination);
}

#[test]
fn a_signal_at_the_destination_cancels_with_its_reason_and_ends_it() {
    let Some(_turn) = kvm() else { return };
    let hosts = Hosts::new();
    let source = hosts.run("1", GUEST);
    let destination = hosts.receive("b", "2", "");
    let client = under_way(&hosts, &source, &destination);
    destination.signal("INT");
    let (code, last) = destination.ended();
    assert_eq!(code, 4);
    assert_at_source(&last, "cancelled", "this side");
    assert_cancelled(&hosts, client, &source);

    let idle = hosts.receive("b", "3", "");
    idle.signal("TERM");
    let (code, last) = idle.ended();
    assert_eq!((code, &last["vm"]), (4, &Value::from("none")));
    let next = hosts.receive("b", "4", "");
    assert_moves(&hosts, source, &next);
}

#[test]
fn a_signal_at_the_vms_process_cancels_first_and_then_ends_it() {
    let Some(_turn) = kvm() else { return };
    let hosts = Hosts::new();
    let source = hosts.run("1", GUEST);
    let destination = hosts.receive("b", "2", "");
    let client = under_way(&hosts, &source, &destination);
    source.signal("TERM");
    let (code, last) = client.ended();
    assert_eq!((code, &last["fault"]), (4, &Value::from("cancelled")));
    let (code, last) = source.ended();
    assert_eq!(
        (code, &last["state"]),
        (0, &Value::from("ended by SIGTERM"))
    );
    assert!(!hosts.scratch.join("1").join("vm.sock").exists());
    destination.wait_for("rejected");

    // On a signal, a process without a migration ends immediately, even if it has received a VM.
    let next = hosts.run("3", GUEST);
    assert_moves(&hosts, next, &destination);
    destination.signal("INT");
    let (code, last) = destination.ended();
    assert_eq!((code, &last["state"]), (0, &Value::from("ended by SIGINT")));
}

#[test]
fn i2_a_killed_or_stopped_client_does_not_end_the_migration() {
    let Some(_turn) = kvm() else { return };
    let hosts = Hosts::new();
    let source = hosts.run("1", GUEST);
    let destination = hosts.receive("b", "2", "");
    let client = under_way(&hosts, &source, &destination);
    client.kill();
    // The VM's process reports the disconnected client; status, watch and set still work.
    let warning = source.wait_for("warning");
    let text = warning["text"].as_str().unwrap();
    assert!(text.contains("disconnected"), "{text}");
    let migration = hosts.status(&source)["migration"].clone();
    assert_eq!(migration["role"], "source");
    assert_eq!(migration["phase"], "pre-copy");
    assert_eq!(migration["rate"], 1 << 20);
    assert_eq!(migration["peer"], destination.address.as_str());
    let mut watch = words("vm watch --name vm --control");
    watch.arg(&source.control);
    let follower = Process::follow(watch, &source.control);
    follower.wait_for("progress");
    // A client that follows the migration but has stopped reading does not delay the migration.
    follower.signal("STOP");
    set_rate(&source, "none").expect(0);
    destination.wait_for("received");
    hosts.assert_runs(&destination);
    follower.signal("CONT");
    let (code, last) = follower.ended();
    assert_eq!((code, &last["event"]), (0, &Value::from("moved")));
    assert_eq!(source.ended().0, 0);
}

fn set_rate(of: &Process, rate: &str) -> Done {
    let mut set = words(&format!("vm set --name vm --rate {rate} --control"));
    set.arg(&of.control);
    finish(set)
}

#[test]
fn the_rate_of_a_running_migration_can_be_changed() {
    let Some(_turn) = kvm() else { return };
    let hosts = Hosts::new();
    let source = hosts.run("1", GUEST);
    let destination = hosts.receive("b", "2", "");
    assert_eq!(hosts.status(&source)["migration"], Value::Null);
    set_rate(&source, "8M").expect(1);
    // At this rate more than a minute passes between two chunks of a lane.
    let client = hosts.begin(&source, &destination, "a", "--rate 2K --peer b.test");
    client.wait_for("progress");
    set_rate(&source, "1M").expect(0);
    assert_eq!(hosts.status(&source)["migration"]["rate"], 1 << 20);
    client.wait_for("progress");
    set_rate(&source, "none").expect(0);
    let (code, last) = client.ended();
    assert_eq!((code, &last["event"]), (0, &Value::from("moved")));
    assert!(last["total_s"].as_f64().unwrap() < 20.0, "{last}");
}

#[test]
fn the_flag_decides_what_happens_at_the_time_limit() {
    let Some(_turn) = kvm() else { return };
    let hosts = Hosts::new();
    // The guest writes 40 MB/s, and the lanes together carry 8 MB/s.
    let source = hosts.run("1", "--memory 64M --working-set 16M --dirty-rate 10000");
    let destination = hosts.receive("b", "2", "");
    let flags = "--json --peer b.test --rate 8M --throttle never --time-limit 500ms";
    let done = finish(hosts.migrate(&source, &destination, "a", flags)).expect(1);
    assert_at_source(&done.last(), "time-limit", "configuration");
    hosts.assert_runs(&source);
    let flags = format!("{flags} --at-time-limit stop");
    let done = finish(hosts.migrate(&source, &destination, "a", &flags)).expect(0);
    assert_eq!(done.last()["event"], "moved");
    assert!(!done.out.contains("throttled"), "{}", done.out);
}

#[test]
fn i1_after_commit_every_cancellation_is_refused() {
    let Some(_turn) = kvm() else { return };
    let hosts = Hosts::new();
    let source = hosts.run("1", GUEST);
    let mut destination = hosts.receive("b", "2", "");
    let proxy = Proxy::to(&destination.address);
    destination.address.clone_from(&proxy.address);
    let client = hosts.begin(&source, &destination, "a", "--peer b.test");
    client.wait_for("paused");
    proxy.hold(Duration::from_millis(1500));
    // The proxy delays the destination's answer for 1.5 s. During that time the source refuses all
    // cancellations.
    client.wait_for("committing");
    hosts.cancel(&source).expect(1);
    client.signal("INT");
    let warning = client.wait_for("warning");
    let text = warning["text"].as_str().unwrap();
    assert!(text.contains("too late to cancel"), "{text}");
    source.signal("TERM");
    let warning = source.wait_for("warning");
    let text = warning["text"].as_str().unwrap();
    assert!(text.contains("too late to cancel"), "{text}");
    let (code, last) = client.ended();
    assert_eq!((code, &last["event"]), (0, &Value::from("moved")));
    let (code, last) = source.ended();
    assert_eq!((code, &last["state"]), (0, &Value::from("moved")));
    hosts.assert_runs(&destination);
}

#[test]
fn a_second_signal_does_not_wait() {
    let Some(_turn) = kvm() else { return };
    let hosts = Hosts::new();
    let source = hosts.run("1", GUEST);
    // A listener that accepts connections and stays silent.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut client = words("vm migrate --name vm --peer b.test");
    client
        .args(["--to", &silent.local_addr().unwrap().to_string()])
        .arg("--identity")
        .arg(hosts.scratch.join("a"))
        .arg("--control")
        .arg(&source.control);
    let client = Process::follow(client, &source.control);
    let _connection = silent.accept().unwrap();
    assert_eq!(hosts.status(&source)["migration"]["phase"], "connecting");
    // Stop the VM's process, so that it cannot answer.
    source.signal("STOP");
    client.signal("INT");
    client.signal("TERM");
    assert_eq!(client.code(), 128 + 15);
    source.signal("CONT");
    hosts.assert_runs(&source);
}

#[test]
fn invalid_limits_are_refused_with_a_reason() {
    let migrate = "vm migrate --name x --to host:1 --identity d";
    for (flags, says) in [
        ("--downtime-limit 300", "300ms, 10s, 2m or 1h"),
        ("--downtime-limit 0ms", "limit 0"),
        ("--time-limit soon", "300ms, 10s, 2m or 1h"),
        ("--time-limit -5s", "unexpected argument"),
        ("--at-time-limit stop", "--time-limit"),
        ("--time-limit 5s --at-time-limit postcopy", "cancel, stop"),
        ("--throttle 50", "auto, never"),
        ("--rate 0", "rate 0"),
    ] {
        let done = finish(words(&format!("{migrate} {flags}"))).expect(2);
        assert!(done.err.contains(says), "{flags}: {}", done.err);
    }
    let done = finish(words("vm set --name x --rate fast")).expect(2);
    assert!(done.err.contains("none for no limit"), "{}", done.err);
    let done = finish(words("vm set --name x --rate 0")).expect(2);
    assert!(done.err.contains("none for no limit"), "{}", done.err);
}
