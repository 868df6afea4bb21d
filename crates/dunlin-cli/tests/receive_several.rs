//! `dunlin vm receive --sessions` and `dunlin demo --evacuate`: several VMs arrive in one process.
#![allow(clippy::unwrap_used)]

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use serde_json::Value;
use support::{Done, Hosts, Process, assert_at_source, children, finish, lives, words};

/// A guest that needs no KVM.
const GUEST: &str = "--guest process --memory 32M --working-set 4M --dirty-rate 1000";

/// The source of one VM.
struct Source {
    name: String,
    process: Process,
}

impl Source {
    fn start(hosts: &Hosts, number: u32) -> Self {
        let name = format!("vm{number}");
        let command = words(&format!("vm run --name {name} {GUEST}"));
        let process = Process::start(command, &hosts.scratch.join(format!("source{number}")));
        process.wait_for("started");
        Self { name, process }
    }

    fn begin(&self, hosts: &Hosts, to: &Process, flags: &str) -> Process {
        migrate(hosts, (&self.name, &self.process), to, "a", flags)
    }

    fn status(&self) -> Value {
        status(&self.name, &self.process)
    }
}

/// Starts to migrate the VM of a process.
fn migrate(
    hosts: &Hosts,
    (name, from): (&str, &Process),
    to: &Process,
    identity: &str,
    flags: &str,
) -> Process {
    let peer = if identity == "a" { "b.test" } else { "a.test" };
    let mut command = words(&format!("vm migrate --name {name} --peer {peer} {flags}"));
    command
        .args(["--to", &to.address])
        .arg("--identity")
        .arg(hosts.scratch.join(identity))
        .arg("--control")
        .arg(&from.control);
    Process::follow(command, &from.control)
}

fn ask(what: &str, name: &str, of: &Process) -> Done {
    let mut command = words(&format!("vm {what} --name {name} --json --control"));
    command.arg(&of.control);
    finish(command)
}

fn status(name: &str, of: &Process) -> Value {
    ask("status", name, of).expect(0).last()
}

/// The number of seccomp filters of a process.
fn filters(pid: u32) -> u32 {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("Seccomp_filters:"));
    line.unwrap().trim().parse().unwrap()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap().to_owned()
}

#[test]
fn i1_i3_three_vms_arrive_in_one_process_and_leave_it_one_by_one() {
    let hosts = Hosts::new();
    let to = hosts.receive("b", "to", "--sessions 3 --peer a.test");
    let sources = [1, 2, 3].map(|number| Source::start(&hosts, number));
    let confined = filters(to.pid());
    // The third VM migrates later, so that the destination still waits for it while the first two
    // arrive.
    let mut named = BTreeSet::new();
    let mut received = BTreeSet::new();
    for group in [&sources[..2], &sources[2..]] {
        assert_eq!(filters(to.pid()), confined);
        let clients: Vec<_> = group
            .iter()
            .map(|source| source.begin(&hosts, &to, "--verify --lanes 2"))
            .collect();
        for client in clients {
            let moved = client.wait_for_any(&["moved", "failed"]);
            assert_eq!(
                (&moved["event"], &moved["digests_equal"]),
                (&"moved".into(), &true.into())
            );
        }
        let mut left = group.len();
        while left > 0 {
            let line = to.wait_for_any(&["accepted", "lane-up", "received"]);
            let name = text(&line["name"]);
            if line["event"] == "received" {
                assert!(text(&line["control"]).ends_with(&format!("/{name}.sock")));
                assert_eq!(line["pid"], to.pid());
                received.insert(name);
                left -= 1;
            } else {
                named.insert((name, text(&line["event"])));
            }
        }
    }
    assert_eq!(received.len(), 3);
    assert_eq!(named.len(), 6, "{named:?}");
    // All VMs have arrived, so the process has added a filter that forbids new sockets.
    assert_eq!(filters(to.pid()), confined + 1);
    let published = fs::read_dir(to.control.join("status")).unwrap();
    assert_eq!(published.count(), 3);
    for source in sources {
        assert_eq!(status(&source.name, &to)["state"], "running");
        assert_eq!(source.process.ended().1["state"], "moved");
    }
    // One VM moves on to a third process, and the others stay.
    let third = hosts.receive("a", "third", "--peer b.test");
    let client = migrate(&hosts, ("vm1", &to), &third, "b", "--verify");
    assert_eq!(client.wait_for_any(&["moved", "failed"])["event"], "moved");
    third.wait_for("received");
    assert_eq!(status("vm1", &third)["state"], "running");
    for name in ["vm2", "vm3"] {
        assert_eq!(status(name, &to)["state"], "running");
        ask("ask power-off", name, &to).expect(0);
    }
    let (code, last) = to.ended();
    assert_eq!((code, &last["event"]), (0, &"ended".into()));
    assert!(["vm1", "vm2", "vm3"].contains(&&*text(&last["name"])));
}

#[test]
fn i1_i3_two_vms_leave_the_process_that_runs_both() {
    let hosts = Hosts::new();
    let to = hosts.receive("b", "to", "--sessions 2 --peer a.test");
    let command = words(&format!("vm run --name vm --vms 2 {GUEST}"));
    let from = Process::start(command, &hosts.scratch.join("from"));
    let names = [(); 2].map(|()| text(&from.wait_for("started")["name"]));
    assert_eq!(names, ["vm-1", "vm-2"]);
    let published = fs::read_dir(from.control.join("status")).unwrap();
    assert_eq!(published.count(), 2);
    for name in &names {
        assert_eq!(status(name, &from)["state"], "running");
        let client = migrate(&hosts, (name, &from), &to, "a", "--verify");
        let moved = client.wait_for_any(&["moved", "failed"]);
        assert_eq!(moved["digests_equal"], true, "{moved}");
        // The source can report the end before the destination has changed its state.
        to.wait_for("received");
        assert_eq!(status(name, &to)["state"], "running");
    }
    let (code, last) = from.ended();
    assert_eq!((code, &last["state"]), (0, &"moved".into()));
}

#[test]
fn i2_i7_a_vm_beyond_the_maximum_is_refused_and_stays() {
    let hosts = Hosts::new();
    let to = hosts.receive("b", "to", "--sessions 2 --peer a.test");
    let sources = [1, 2, 3].map(|number| Source::start(&hosts, number));
    let clients = [&sources[0], &sources[1]].map(|source| {
        let client = source.begin(&hosts, &to, "--rate 2M --lanes 1");
        client.wait_for("lane-up");
        client
    });
    let refused = sources[2].begin(&hosts, &to, "");
    assert_at_source(&refused.wait_for("failed"), "busy", "configuration");
    assert_eq!(sources[2].status()["state"], "running");
    for (client, source) in clients.iter().zip(&sources) {
        ask("set --rate none", &source.name, &source.process).expect(0);
        assert_eq!(client.wait_for_any(&["moved", "failed"])["event"], "moved");
    }
    assert_eq!(sources[2].status()["state"], "running");
}

/// A failed arrival leaves room for another VM.
#[test]
fn i2_a_cancelled_vm_stays_and_may_come_again() {
    let hosts = Hosts::new();
    let to = hosts.receive("b", "to", "--sessions 2 --peer a.test");
    let sources = [1, 2].map(|number| Source::start(&hosts, number));
    let client = sources[0].begin(&hosts, &to, "--rate 2M --lanes 1");
    client.wait_for("lane-up");
    let mut cancel = words("cancel --vm");
    cancel.arg(sources[0].process.control.join("vm1.sock"));
    finish(cancel).expect(0);
    assert_at_source(&client.wait_for("failed"), "cancelled", "this side");
    let rejected = to.wait_for("rejected");
    assert_eq!(rejected["name"], "vm1");
    for source in &sources {
        let client = source.begin(&hosts, &to, "--verify");
        assert_eq!(client.wait_for_any(&["moved", "failed"])["event"], "moved");
        assert_eq!(status(&source.name, &to)["state"], "running");
    }
}

#[test]
fn a_signal_ends_a_process_that_has_one_vm_and_waits_for_another() {
    let hosts = Hosts::new();
    let to = hosts.receive("b", "to", "--sessions 2 --peer a.test");
    let source = Source::start(&hosts, 1);
    let client = source.begin(&hosts, &to, "");
    assert_eq!(client.wait_for_any(&["moved", "failed"])["event"], "moved");
    to.wait_for("received");
    to.signal("TERM");
    let (code, ended) = to.ended();
    assert_eq!((code, &ended["state"]), (0, &"ended by SIGTERM".into()));
    // No VM has arrived. The process reports the signal once, not once for each session.
    let to = hosts.receive("b", "other", "--sessions 3 --peer a.test");
    to.signal("TERM");
    let failed = to.wait_for("failed");
    assert_eq!(failed["fault"], "cancelled");
    assert_eq!(to.code(), 4);
}

#[test]
fn several_vms_need_a_control_directory_and_a_possible_number() {
    let hosts = Hosts::new();
    for (flags, code) in [
        ("--sessions 2 --control x.sock", 1),
        ("--sessions 129", 2),
        ("--sessions 0", 2),
    ] {
        let mut command = words(&format!(
            "vm receive --listen 127.0.0.1:0 --peer a.test {flags}"
        ));
        command.arg("--identity").arg(hosts.scratch.join("b"));
        finish(command).expect(code);
        let flags = flags.replace("--sessions", "--vms");
        finish(words(&format!("vm run --name vm {flags} {GUEST}"))).expect(code);
    }
}

#[test]
fn i3_the_demo_of_an_evacuation_ends_with_one_object() {
    let command =
        words("demo --evacuate 3 --guest process --memory 32M --dirty-rate 1000 --lanes 2");
    let demo = Process::follow(command, Path::new(""));
    let mut moved = BTreeSet::new();
    let mut started = Vec::new();
    while moved.len() < 3 {
        let line = demo.wait_for_any(&["moved", "failed"]);
        assert_eq!(line["event"], "moved", "{line}");
        assert!(line.get("digests").is_none());
        moved.insert(text(&line["name"]));
        started = children(demo.pid());
    }
    // One process for each host.
    assert_eq!(started.len(), 2);
    let (code, last) = demo.ended();
    assert_eq!(code, 0, "{last}");
    let keys: BTreeSet<&str> = last
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect();
    let wanted = [
        "vms",
        "moved",
        "failed",
        "total_s",
        "downtime_ms_max",
        "digests_equal",
        "pages_checked_by_guests",
    ];
    assert_eq!(keys, BTreeSet::from(wanted));
    assert_eq!([&last["vms"], &last["moved"], &last["failed"]], [3, 3, 0]);
    assert_eq!(last["digests_equal"], true);
    assert!(last["total_s"].as_f64().unwrap() < 60.0);
    assert!(last["downtime_ms_max"].as_f64().unwrap() > 0.0);
    assert!(last["pages_checked_by_guests"].as_u64().unwrap() > 0);
    for pid in started {
        assert!(!lives(pid), "{pid} is left behind");
    }
}
