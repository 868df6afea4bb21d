//! Exhausted resources, silent peers, contradictory descriptions and wrong clocks. The tests check
//! that migrations succeed nevertheless, or that the failure is reported and the VM stays at the
//! source.
//!
//! These modules are one test program, so that its tests can wait in parallel.
#![allow(clippy::unwrap_used)]

mod clock;
mod descriptors;
mod disk;
#[path = "../support/host.rs"]
mod host;
mod layout;
mod memory;
mod silence;
#[path = "../support/mod.rs"]
mod support;

use serde_json::Value;
use support::{Done, Hosts, Process, assert_at_source, finish, words};

/// The flags of a guest of 64 MiB that needs no KVM, so it runs on every host.
const GUEST: &str = "--guest process --memory 64M --working-set 8M --dirty-rate 500";

/// The command `dunlin vm receive` for host b, not started yet.
fn receive(hosts: &Hosts, flags: &str) -> std::process::Command {
    let mut command = words(&format!(
        "vm receive --listen 127.0.0.1:0 {flags} --identity"
    ));
    command.arg(hosts.scratch.join("b"));
    command
}

/// Starts a command from [`receive`], which may be wrapped in another command.
fn listening(hosts: &Hosts, command: std::process::Command, control: &str) -> Process {
    let mut process = Process::start(command, &hosts.scratch.join(control));
    let listening = process.wait_for("listening");
    process.address = listening["address"].as_str().unwrap().to_owned();
    process
}

/// Starts `dunlin vm run`, which another command may wrap.
fn running(hosts: &Hosts, command: std::process::Command, control: &str) -> Process {
    let process = Process::start(command, &hosts.scratch.join(control));
    process.wait_for("started");
    process
}

/// Migrates from a to b, and waits for the end.
fn migrate(hosts: &Hosts, from: &Process, to: &Process, flags: &str) -> Done {
    finish(hosts.migrate(from, to, "a", &format!("--json --peer b.test {flags}")))
}

/// Asserts that a migration failed with this fault code and party at fault, and that the VM runs at
/// the source. Returns the text of the error.
fn failed(hosts: &Hosts, from: &Process, done: Done, fault: &str, at_fault: &str) -> String {
    let failed = done.expect(1).last();
    assert_at_source(&failed, fault, at_fault);
    hosts.assert_runs(from);
    text(&failed)
}

/// The text of an event.
fn text(event: &Value) -> String {
    event["text"].as_str().unwrap().to_owned()
}
