//! A full file system for the journal: a tmpfs of 64 KiB.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::host::{assert_says, in_own_mounts};
use crate::support::{Hosts, Process, words};
use crate::{GUEST, failed, listening, migrate, receive, running, text};

/// Wraps the command so that its journal is on a file system of 64 KiB. A shell first runs `script`
/// there. Returns `None` without the permission to mount.
fn on_a_small_disk(hosts: &Hosts, script: &str, command: &Command) -> Option<Command> {
    let state = hosts.scratch.join("state");
    let state = state.display();
    let script = format!(
        "mkdir -m 700 -p {state} && mount -t tmpfs -o size=64k,mode=700 none {state} && cd {state} && \
         {script}"
    );
    in_own_mounts(&script, command)
}

/// A script that fills the file system.
const FILL: &str = "{ head -c 100000 /dev/zero > filler 2>&-; true; }";

/// The path of a file in the journal's directory, as seen in the process's mount namespace.
fn within(hosts: &Hosts, process: &Process, name: &str) -> PathBuf {
    let path = hosts.scratch.join("state").join(name);
    format!("/proc/{}/root{}", process.pid(), path.display()).into()
}

fn run() -> Command {
    words(&format!("vm run --name vm {GUEST}"))
}

#[test]
fn i2_a_full_disk_at_the_source_is_found_before_anything_moves() {
    let hosts = Hosts::new();
    let Some(run) = on_a_small_disk(&hosts, FILL, &run()) else {
        return;
    };
    let source = running(&hosts, run, "1");
    let destination = hosts.receive("b", "2", "");
    let done = migrate(&hosts, &source, &destination, "");
    let said = failed(&hosts, &source, done, "journal", "this side");
    assert_says(&said, &["No space left on device", "/state/"]);
    fs::remove_file(within(&hosts, &source, "filler")).unwrap();
    migrate(&hosts, &source, &destination, "--verify").expect(0);
}

#[test]
fn i2_a_full_disk_at_the_destination_is_found_before_anything_moves() {
    let hosts = Hosts::new();
    let Some(receive) = on_a_small_disk(&hosts, FILL, &receive(&hosts, "")) else {
        return;
    };
    let source = hosts.run("1", GUEST);
    let destination = listening(&hosts, receive, "2");
    let done = migrate(&hosts, &source, &destination, "");
    assert!(!done.out.contains("lane-up"), "{}", done.out);
    let said = failed(&hosts, &source, done, "journal", "peer");
    assert_says(&said, &["No space left on device"]);
    let rejected = destination.wait_for("rejected");
    let parts = ["No space left on device", "(journal, at fault: this side)"];
    assert_says(&text(&rejected), &parts);
    fs::remove_file(within(&hosts, &destination, "filler")).unwrap();
    migrate(&hosts, &source, &destination, "--verify").expect(0);
}

#[test]
fn a_disk_that_fills_up_during_a_migration_does_not_stop_it() {
    let hosts = Hosts::new();
    let receive = receive(&hosts, "");
    let (Some(run), Some(receive)) = (
        on_a_small_disk(&hosts, "true", &run()),
        on_a_small_disk(&hosts, "true", &receive),
    ) else {
        return;
    };
    let (source, destination) = (running(&hosts, run, "1"), listening(&hosts, receive, "2"));
    let client = hosts.begin(
        &source,
        &destination,
        "a",
        "--peer b.test --rate 32M --verify",
    );
    client.wait_for("lane-up");
    for process in [&source, &destination] {
        let full = fs::write(within(&hosts, process, "filler"), [1; 100_000]).unwrap_err();
        assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
    }
    let (code, moved) = client.ended();
    assert_eq!((code, &moved["event"]), (0, &"moved".into()), "{moved}");
    destination.wait_for("received");
    hosts.assert_runs(&destination);
}
