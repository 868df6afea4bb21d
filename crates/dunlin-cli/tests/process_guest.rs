//! Tests of the guest that needs no KVM. It migrates like a VM. On a host without /dev/kvm, the
//! demo uses this guest, and errors suggest it.
#![allow(clippy::unwrap_used)]

mod support;

use std::process::{Command, Stdio};

use dunlin_test_base::kvm;
use serde_json::Value;
use support::{Hosts, Process, Scratch, finish, words};

const GUEST: &str = "--guest process --memory 64M --working-set 16M --dirty-rate 2000 --vcpus 2";

#[test]
fn i3_a_process_guest_moves_to_another_process_and_back() {
    let hosts = Hosts::new();
    for (backing, workload) in [("private", "hot-set"), ("memfd", "random")] {
        let flags = format!("{GUEST} --fill mixed --backing {backing} --workload {workload}");
        let mut here = hosts.run("1", &flags);
        for (from, to, control) in [("a", "b", "2"), ("b", "a", "1")] {
            let there = hosts.receive(to, control, "");
            let flags = format!("--json --verify --peer {to}.test");
            let done = finish(hosts.migrate(&here, &there, from, &flags)).expect(0);
            let moved = done.last();
            assert_eq!(moved["event"], "moved");
            assert_eq!(moved["digests_equal"], true);
            assert_eq!(moved["runs"], true);
            assert!(
                moved["downtime"]["guest_ms"].as_f64().unwrap() > 0.0,
                "{moved}"
            );
            let (code, ended) = here.ended();
            assert_eq!((code, &ended["state"]), (0, &Value::from("moved")));
            there.wait_for("received");
            hosts.assert_runs(&there);
            here = there;
        }
        hosts.ask(&here, "pause").expect(0);
        assert_eq!(hosts.status(&here)["state"], "paused");
        hosts.ask(&here, "resume").expect(0);
        hosts.ask(&here, "power-off").expect(0);
        let (code, ended) = here.ended();
        assert_eq!((code, &ended["state"]), (0, &Value::from("powered-off")));
    }
}

#[test]
fn a_process_guest_that_outruns_the_link_is_throttled_and_moves() {
    let hosts = Hosts::new();
    let flags = "--guest process --memory 24M --workload sequential --dirty-rate 10000";
    let here = hosts.run("1", flags);
    let there = hosts.receive("b", "2", "");
    // The guest writes 39 MiB/s, and `--rate` allows 30 MiB/s.
    let flags =
        "--json --verify --peer b.test --rate 30M --last-pass-rate 400M --downtime-limit 20ms";
    let done = finish(hosts.migrate(&here, &there, "a", flags)).expect(0);
    assert!(
        done.lines().iter().any(|line| line["event"] == "throttled"),
        "{}",
        done.out
    );
    assert_eq!(done.last()["digests_equal"], true);
    hosts.assert_runs(&there);
}

#[test]
fn the_demo_shows_a_process_guest_when_asked() {
    let flags = "demo --json --guest process --memory 64M --dirty-rate 2000";
    let done = finish(words(flags)).expect(0);
    let shown = done.last();
    assert_eq!(shown["guest"], "process");
    assert_eq!(shown["digests_equal"], true);
    assert!(shown["pages_checked_by_guest"].as_u64().unwrap() > 0);
}

/// A shell script that runs its arguments without access to /dev/kvm: no user can open devices on a
/// mount with `nodev`.
const HIDE: &str = "if test -e /dev/kvm; then \
                    mount --bind /dev/kvm /dev/kvm && \
                    mount -o remount,bind,nodev /dev/kvm || exit 99; fi; exec \"$@\"";

/// Returns a `dunlin` command line in a new mount namespace without /dev/kvm. If this user cannot
/// create the namespace, returns `None`, or panics in CI.
fn without_kvm(line: &str) -> Option<Command> {
    for flags in [&["--mount"][..], &["--mount", "--map-root-user"]] {
        let hidden = |program: &str| {
            let mut command = Command::new("unshare");
            command.args(flags).args(["sh", "-c", HIDE, "sh", program]);
            command
        };
        let opens = hidden("sh")
            .args(["-c", ": <>/dev/kvm"])
            .stderr(Stdio::null())
            .status();
        if opens.is_ok_and(|status| !matches!(status.code(), Some(0 | 99))) {
            let mut command = hidden(env!("CARGO_BIN_EXE_dunlin"));
            command
                .args(line.split_whitespace())
                .env_remove("RUNTIME_DIRECTORY");
            return Some(command);
        }
    }
    let why = "no mount namespace in which /dev/kvm is hidden can be made";
    assert!(
        std::env::var_os("CI").is_none_or(|ci| ci != "true"),
        "CI: {why}"
    );
    println!("skipped: {why}");
    None
}

#[test]
fn the_demo_without_kvm_reports_it_and_shows_a_process_guest() {
    let flags = "demo --memory 64M --dirty-rate 2000";
    let Some(command) = without_kvm(flags) else {
        return;
    };
    let done = finish(command).expect(0);
    let said = done.out.lines().next().unwrap();
    assert!(said.contains("/dev/kvm"), "{said}");
    assert!(said.contains("threads"), "{said}");

    let Some(command) = without_kvm(&format!("{flags} --json")) else {
        return;
    };
    let done = finish(command).expect(0);
    assert_eq!(done.lines()[0]["event"], "warning");
    assert_eq!(done.last()["guest"], "process");
    assert_eq!(done.last()["digests_equal"], true);
}

#[test]
fn a_kvm_guest_without_kvm_is_an_error_with_a_remedy() {
    for line in [
        "demo --guest kvm",
        "vm run --name vm --guest kvm --memory 64M --control",
        "vm run --name vm --memory 64M --control",
    ] {
        let Some(mut command) = without_kvm(line) else {
            return;
        };
        let scratch = Scratch::new();
        if line.ends_with("--control") {
            command.arg(scratch.join("1"));
        }
        let done = finish(command).expect(1);
        for part in ["/dev/kvm", "load the kvm module", "--guest"] {
            assert!(
                done.err.contains(part),
                "{line}: no {part:?} in {}",
                done.err
            );
        }
        // The command prints only its confinement on standard output.
        let is_confinement = |line: &str| {
            line.starts_with("confined: ") || line.starts_with("warning: this process is confined")
        };
        assert!(done.out.lines().all(is_confinement), "{done:?}");
    }
}

#[test]
fn i2_a_host_without_kvm_refuses_a_kvm_guest_and_takes_a_process_guest() {
    let Some(_turn) = kvm() else { return };
    let hosts = Hosts::new();
    let Some(mut receive) = without_kvm("vm receive --listen 127.0.0.1:0 --identity") else {
        return;
    };
    receive.arg(hosts.scratch.join("b"));
    let mut there = Process::start(receive, &hosts.scratch.join("2"));
    there.address = there.wait_for("listening")["address"]
        .as_str()
        .unwrap()
        .to_owned();
    let real = hosts.run("1", "--memory 64M --working-set 8M --dirty-rate 2000");
    let done = finish(hosts.migrate(&real, &there, "a", "--json --peer b.test")).expect(1);
    let failed = done.last();
    assert_eq!(failed["fault"], "description-refused", "{failed}");
    assert_eq!(failed["vm"], "at-source");
    let text = failed["text"].as_str().unwrap();
    assert!(text.contains("/dev/kvm"), "{text}");
    hosts.assert_runs(&real);
    drop(real);
    let process = hosts.run("3", GUEST);
    let flags = "--json --verify --peer b.test";
    let done = finish(hosts.migrate(&process, &there, "a", flags)).expect(0);
    assert_eq!(done.last()["digests_equal"], true);
    hosts.assert_runs(&there);
}
