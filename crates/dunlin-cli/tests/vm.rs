//! `dunlin vm` and `dunlin demo`: VMs migrate between processes on this host.
#![allow(clippy::unwrap_used)]

mod support;

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use dunlin_microvm::DEVICE_START;
use dunlin_test_base::kvm;
use serde_json::Value;
use support::{
    Done, Hosts, Orphans, Process, Scratch, assert_at_source, children, finish, lives, succeed,
    words,
};

const GUEST: &str = "--memory 64M --working-set 8M --dirty-rate 2000 --vcpus 2";

/// Names of the events in a command's output.
fn events(done: &Done) -> Vec<String> {
    done.lines()
        .iter()
        .map(|line| line["event"].as_str().unwrap().to_owned())
        .collect()
}

/// Migrates the VM, and checks the events of the client, of both processes and of the guest.
fn moves(hosts: &Hosts, from: Process, to: &Process, identity: &str, lanes: u64) {
    let peer = if identity == "a" { "b.test" } else { "a.test" };
    let flags = format!("--json --verify --lanes {lanes} --peer {peer}");
    let done = finish(hosts.migrate(&from, to, identity, &flags)).expect(0);
    let moved = done.last();
    assert_eq!(moved["event"], "moved");
    assert_eq!(moved["digests_equal"], true);
    assert_eq!(moved["runs"], true);
    assert_eq!(moved["security"], "tls");
    assert_eq!(moved["lanes"].as_array().unwrap().len() as u64, lanes);
    assert!(moved["downtime"]["guest_ms"].as_f64().unwrap() > 0.0);
    let events = events(&done);
    for event in [
        "accepted",
        "lane-up",
        "iterated",
        "paused",
        "committing",
        "running",
    ] {
        assert!(
            events.contains(&event.to_owned()),
            "no {event} in {events:?}"
        );
    }
    let (code, ended) = from.ended();
    assert_eq!((code, &ended["state"]), (0, &Value::from("moved")));
    let received = to.wait_for("received");
    assert_eq!(received["name"], "vm");
    assert_eq!(received["runs"], true);
    assert_eq!(received["pid"], to.pid());
    hosts.assert_runs(to);
}

#[test]
fn i3_a_vm_moves_between_processes_on_to_a_third_and_back() {
    let Some(_turn) = kvm() else { return };
    let hosts = Hosts::new();
    let first = hosts.run("1", GUEST);
    let checked = hosts.status(&first)["pages_checked"].as_u64().unwrap();
    let second = hosts.receive("b", "2", "--peer a.test");
    moves(&hosts, first, &second, "a", 2);
    let third = hosts.receive("a", "3", "--peer b.test");
    moves(&hosts, second, &third, "b", 8);
    let back = hosts.receive("b", "1", "--peer a.test");
    moves(&hosts, third, &back, "a", 1);
    let status = hosts.status(&back);
    assert!(status["pages_checked"].as_u64().unwrap() > checked);
    assert_eq!(status["memory_bytes"], 64 << 20);
    assert!(status["downtime_ms"].as_f64().unwrap() > 0.0);
    hosts.ask(&back, "power-off").expect(0);
    let (code, ended) = back.ended();
    assert_eq!((code, &ended["state"]), (0, &Value::from("powered-off")));
}

#[test]
fn without_json_the_output_is_plain_text() {
    let Some(_turn) = kvm() else { return };
    let hosts = Hosts::new();
    let first = hosts.run("1", GUEST);
    let second = hosts.receive("b", "2", "");
    let mut status = words("vm status --name vm --control");
    status.arg(&first.control);
    let said = succeed(status);
    assert!(said.starts_with("vm: running (process "), "{said}");
    let done = finish(hosts.migrate(&first, &second, "a", "--peer b.test")).expect(0);
    for part in [
        "iteration  1:",
        "guest paused",
        "moved\n",
        "downtime, seen by guest",
    ] {
        assert!(done.out.contains(part), "no {part:?} in {}", done.out);
    }
    // The output contains no control characters of a terminal if it goes to a pipe.
    assert!(!done.out.contains(['\x1b', '\r']), "{}", done.out);
    assert_eq!(done.err, "");
}

#[test]
fn a_vm_that_was_paused_arrives_paused() {
    let Some(_turn) = kvm() else { return };
    let hosts = Hosts::new();
    let first = hosts.run("1", GUEST);
    let second = hosts.receive("b", "2", "");
    hosts.ask(&first, "pause").expect(0);
    let checked = hosts.status(&first)["pages_checked"].clone();
    let done = finish(hosts.migrate(&first, &second, "a", "--json --peer b.test")).expect(0);
    assert_eq!(done.last()["runs"], false);
    assert_eq!(second.wait_for("received")["runs"], false);
    let status = hosts.status(&second);
    assert_eq!(status["state"], "paused");
    assert_eq!(status["pages_checked"], checked);
    hosts.ask(&second, "resume").expect(0);
    hosts.assert_runs(&second);
}

#[test]
fn a_power_off_during_a_migration_ends_the_vm_and_the_migration() {
    let Some(_turn) = kvm() else { return };
    let hosts = Hosts::new();
    let first = hosts.run("1", GUEST);
    let second = hosts.receive("b", "2", "");
    let mut migrate = hosts.migrate(&first, &second, "a", "--rate 16M --peer b.test");
    let migrating = std::thread::spawn(move || {
        migrate.arg("--json");
        finish(migrate)
    });
    second.wait_for("lane-up");
    // During a migration the VM can neither be migrated again nor be resumed (I1).
    finish(hosts.migrate(&first, &second, "a", "")).expect(1);
    hosts.ask(&first, "resume").expect(1);
    assert_eq!(hosts.status(&first)["migration"]["role"], "source");
    hosts.ask(&first, "power-off").expect(0);
    let done = migrating.join().unwrap().expect(1);
    let failed = done.last();
    assert_eq!(failed["event"], "failed");
    assert_eq!(failed["fault"], "guest-powered-off");
    assert_eq!(failed["at_fault"], "guest");
    assert_eq!(failed["vm"], "gone");
    let (code, ended) = first.ended();
    assert_eq!((code, &ended["state"]), (0, &Value::from("powered-off")));
    // The destination reports the reason, and receives the next VM.
    let rejected = second.wait_for("rejected");
    let text = rejected["text"].as_str().unwrap();
    assert!(text.contains("(guest-powered-off"), "{text}");
    let third = hosts.run("3", GUEST);
    moves(&hosts, third, &second, "a", 2);
}

/// Identities and flags of a migration that the source or the destination refuses.
struct Refused {
    at_source: &'static str,
    at_destination: &'static str,
    accepts: &'static str,
    flags: &'static str,
    fault: &'static str,
    /// Names that the message contains.
    names: &'static [&'static str],
}

/// Claim N5 of docs/security.
#[test]
fn i6_an_untrusted_peer_gets_nothing_and_the_vm_keeps_running() {
    let Some(_turn) = kvm() else { return };
    let hosts = Hosts::new();
    hosts.authority("other-ca");
    hosts.issue("other-ca", "stranger", "b.test", 1);
    let source = hosts.run("1", GUEST);
    for (number, refused) in [
        Refused {
            at_source: "a",
            at_destination: "stranger",
            accepts: "",
            flags: "--peer b.test",
            fault: "unauthorised",
            names: &["authority"],
        },
        Refused {
            at_source: "stranger",
            at_destination: "b",
            accepts: "",
            flags: "--peer b.test",
            fault: "unauthorised",
            names: &["authority"],
        },
        Refused {
            at_source: "a",
            at_destination: "b",
            accepts: "",
            flags: "--peer c.test",
            fault: "unauthorised",
            names: &["b.test", "c.test"],
        },
        Refused {
            at_source: "a",
            at_destination: "b",
            accepts: "--peer c.test",
            flags: "--peer b.test",
            fault: "unauthorised",
            names: &[],
        },
        Refused {
            at_source: "a",
            at_destination: "b",
            accepts: "",
            flags: "--peer b.test --security plain",
            fault: "security-not-agreed",
            names: &["plain"],
        },
    ]
    .into_iter()
    .enumerate()
    {
        let destination = hosts.receive(
            refused.at_destination,
            &format!("to-{number}"),
            refused.accepts,
        );
        let flags = format!("--json {}", refused.flags);
        let command = hosts.migrate(&source, &destination, refused.at_source, &flags);
        let started = Instant::now();
        let failed = finish(command).expect(1).last();
        assert!(started.elapsed() < Duration::from_secs(8), "case {number}");
        println!("{number}: {failed}");
        assert_at_source(&failed, refused.fault, "configuration");
        let text = failed["text"].as_str().unwrap();
        for name in refused.names {
            assert!(text.contains(name), "case {number}: no {name:?} in {text}");
        }
        hosts.assert_runs(&source);
    }
    // The VM can still migrate.
    let destination = hosts.receive("b", "at-last", "--peer a.test");
    moves(&hosts, source, &destination, "a", 2);
}

#[test]
fn i6_a_certificate_that_has_expired_is_refused_by_its_host_and_by_the_peer() {
    let Some(_turn) = kvm() else { return };
    let hosts = Hosts::new();
    let source = hosts.run("1", GUEST);
    hosts.issue_expired("expired", "b.test");
    let until = hosts.issue_for("short", "b.test", Duration::from_secs(3));
    let destination = hosts.receive("short", "2", "");

    // The process that loads an expired identity refuses it, at the source and at the destination.
    let mut receive = words("vm receive --listen 127.0.0.1:0 --identity");
    receive.arg(hosts.scratch.join("expired"));
    let done = finish(receive).expect(1);
    assert!(done.err.contains("expired on"), "{done:?}");
    let flags = "--json --peer b.test";
    let done = finish(hosts.migrate(&source, &destination, "expired", flags)).expect(1);
    let failed = done.last();
    assert!(
        failed["text"].as_str().unwrap().contains("expired on"),
        "{failed}"
    );
    assert_eq!(failed["vm"], "at-source");
    assert_eq!(failed["fault"], "certificate-date");
    hosts.assert_runs(&source);

    // Wait until the certificate that the destination has loaded has expired. The dates of
    // certificates have whole seconds, so the wait takes some seconds. The source then refuses the
    // certificate.
    std::thread::sleep(until.saturating_duration_since(Instant::now()));
    let done = finish(hosts.migrate(&source, &destination, "a", flags)).expect(1);
    assert_at_source(&done.last(), "certificate-date", "configuration");
    hosts.assert_runs(&source);
}

/// Claim N14 of docs/security.
#[test]
fn plain_lanes_need_both_sides_and_then_work() {
    let Some(_turn) = kvm() else { return };
    let hosts = Hosts::new();
    let source = hosts.run("1", GUEST);
    let flags = "--json --peer b.test --security plain";
    let refuses = hosts.receive("b", "refuses", "");
    let failed = finish(hosts.migrate(&source, &refuses, "a", flags)).expect(1);
    assert_at_source(&failed.last(), "security-not-agreed", "configuration");
    let destination = hosts.receive("b", "2", "--allow-plain");
    let done = finish(hosts.migrate(&source, &destination, "a", flags)).expect(0);
    assert_eq!(done.last()["security"], "plain");
}

#[test]
fn a_destination_without_a_control_socket_refuses_the_vm_before_it_moves() {
    let Some(_turn) = kvm() else { return };
    let hosts = Hosts::new();
    let source = hosts.run("same", GUEST);
    // Source and destination would have the same control socket, so the migration fails.
    let destination = hosts.receive("b", "same", "");
    let flags = "--json --peer b.test";
    let done = finish(hosts.migrate(&source, &destination, "a", flags)).expect(1);
    let failed = done.last();
    assert_eq!(failed["vm"], "at-source");
    assert!(
        failed["text"].as_str().unwrap().contains("--control"),
        "{failed}"
    );
    hosts.assert_runs(&source);
}

#[test]
fn an_unknown_vm_and_a_key_readable_by_all_are_refused() {
    use std::os::unix::fs::PermissionsExt;
    let hosts = Hosts::new();
    let mut status = words("vm status --name unknown --control");
    status.arg(hosts.scratch.join("nowhere"));
    let done = finish(status).expect(1);
    assert!(done.err.contains("unknown.sock"), "{done:?}");

    let key = hosts.scratch.join("b").join("key.pem");
    fs::set_permissions(&key, PermissionsExt::from_mode(0o644)).unwrap();
    let mut receive = words("vm receive --listen 127.0.0.1:0 --identity");
    receive.arg(hosts.scratch.join("b"));
    let done = finish(receive).expect(1);
    assert!(done.err.contains("chmod 0600"), "{done:?}");
    assert!(done.err.contains("key.pem"), "{done:?}");
}

#[test]
fn invalid_arguments_are_usage_errors() {
    for line in [
        "",
        "nonsense",
        "vm migrate",
        "vm migrate --name x --to host:1 --identity d --lanes 0",
        "vm migrate --name x --to host:1 --identity d --lanes 129",
        "vm migrate --name x --to host:1 --identity d --rate 0",
        "vm migrate --name x --to host:1 --identity d --security none",
        "vm migrate --name x --to host:1 --identity d --peer @",
        "vm run --name x --memory two",
        "vm run --name x --memory 4M",
        "vm run --name x --memory 64M --vcpus 9",
        "vm run --name x --memory 64M --working-set 1G",
        "demo --lanes 0",
        "pki issue --ca x",
    ] {
        let done = finish(words(line)).expect(2);
        assert_eq!(done.out, "", "{line}");
        assert!(!done.err.is_empty(), "{line}");
    }
    for line in [
        "--help",
        "--version",
        "vm --help",
        "vm migrate --help",
        "demo --help",
    ] {
        assert!(!succeed(words(line)).is_empty(), "{line}");
    }
}

/// Claim P15 of docs/security.
#[test]
fn a_name_does_not_lead_out_of_the_control_directory() {
    let done = finish(words(
        "vm run --name ../x --memory 64M --control /nonexistent",
    ))
    .expect(1);
    assert!(done.err.contains("../x"), "{done:?}");
}

#[test]
fn the_demo_ends_with_one_object() {
    let Some(_turn) = kvm() else { return };
    let done = finish(words("demo --json --memory 128M --lanes 3")).expect(0);
    assert_eq!(done.err, "");
    let last = done.last();
    let keys: Vec<&str> = last
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect();
    let mut wanted = [
        "guest",
        "memory_bytes",
        "lanes",
        "security",
        "iterations",
        "source_pid",
        "destination_pid",
        "downtime_ms",
        "pages_checked_by_guest",
        "digests_equal",
    ];
    wanted.sort_unstable();
    assert_eq!(keys, wanted);
    assert_eq!(last["guest"], "kvm");
    assert_eq!(last["memory_bytes"], 128 << 20);
    assert_eq!(last["lanes"], 3);
    assert_eq!(last["security"], "tls");
    assert_eq!(last["digests_equal"], true);
    assert!(last["iterations"].as_u64().unwrap() >= 2);
    assert!(last["downtime_ms"].as_f64().unwrap() > 0.0);
    assert!(last["pages_checked_by_guest"].as_u64().unwrap() > 0);
    for pid in ["source_pid", "destination_pid"] {
        let pid = last[pid].as_u64().unwrap();
        assert!(!lives(pid.try_into().unwrap()), "{pid} is left behind");
    }
}

/// Sets a byte of guest memory in another process, in a page that the guest leaves to the VMM.
/// Neither KVM nor the process logs the write.
fn poke(pid: u32, memory_bytes: u64) {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let number = |text: &str| u64::from_str_radix(text, 16).unwrap();
    let start = maps.lines().find_map(|line| {
        let (start, end) = line.split_once(' ')?.0.split_once('-')?;
        let (start, end) = (number(start), number(end));
        (end - start >= memory_bytes).then_some(start)
    });
    let memory = fs::OpenOptions::new()
        .write(true)
        .open(format!("/proc/{pid}/mem"));
    let address = start.expect("the process has no guest memory") + DEVICE_START;
    memory.unwrap().write_all_at(&[7], address).unwrap();
}

/// Changes one page, in one run at the destination and in another run at the source. At the
/// destination, the migration does not overwrite the page, because the page is zero at the source.
/// At the source, the dirty log does not record the change.
#[test]
fn i3_the_demo_fails_if_the_memories_differ() {
    let Some(_turn) = kvm() else { return };
    for (child, event) in [(0, "accepted"), (1, "progress")] {
        // The first progress line comes before the end of the first pass, and the page is sent at
        // the start of that pass. So the page at the source is changed after it was sent.
        let demo = Process::follow(words("demo --memory 1G"), Path::new(""));
        demo.wait_for_any(&[event, "iterated"]);
        // The destination is the first child, because it starts first.
        poke(children(demo.pid())[child], 1 << 30);
        let (code, failed) = demo.ended();
        assert_eq!(code, 1, "{failed}");
        assert_eq!(failed["event"], "failed");
        assert_eq!(failed["fault"], "verification-failed");
        assert_eq!(failed["code"], 1);
    }
}

#[test]
fn a_demo_that_is_killed_leaves_nothing_behind() {
    let Some(_turn) = kvm() else { return };
    let scratch = Scratch::new();
    let mut demo = words("demo --json --memory 128M")
        .env("TMPDIR", scratch.join(""))
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    let started = loop {
        let started = children(demo.id());
        if started.len() == 2 {
            break Orphans(started);
        }
        assert!(Instant::now() < deadline, "the demo does not start");
        std::thread::sleep(Duration::from_millis(5));
    };
    // Sleep, because no event shows whether the two processes have begun to watch their parent.
    // They must end in any case.
    std::thread::sleep(Duration::from_millis(100));
    demo.kill().unwrap();
    demo.wait().unwrap();
    let deadline = Instant::now() + Duration::from_secs(10);
    let left = || fs::read_dir(scratch.join("")).unwrap().count();
    while started.0.iter().any(|pid| lives(*pid)) || left() > 0 {
        assert!(
            Instant::now() < deadline,
            "{:?} or their files are left",
            started.0
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}
