//! What goes wrong because something is used up, silent, contradictory or late: the message says
//! what, whose fault it is and what to do, and the VM stays.
//!
//! One program, so that tests which wait do it side by side.
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
use support::{Done, Hosts, Process, finish, words};

/// A guest that runs everywhere, 64 MiB in size.
const GUEST: &str = "--guest process --memory 64M --working-set 8M --dirty-rate 500";

/// `dunlin vm receive` of the host b, not started.
fn receive(hosts: &Hosts, flags: &str) -> std::process::Command {
    let mut command = words(&format!(
        "vm receive --listen 127.0.0.1:0 {flags} --identity"
    ));
    command.arg(hosts.scratch.join("b"));
    command
}

/// Starts such a command, however it has been wrapped up.
fn listening(hosts: &Hosts, command: std::process::Command, control: &str) -> Process {
    let mut process = Process::start(command, &hosts.scratch.join(control));
    let listening = process.wait_for("listening");
    process.address = listening["address"].as_str().unwrap().to_owned();
    process
}

/// Starts `dunlin vm run`, however it has been wrapped up.
fn running(hosts: &Hosts, command: std::process::Command, control: &str) -> Process {
    let process = Process::start(command, &hosts.scratch.join(control));
    process.wait_for("started");
    process
}

/// Migrates from a to b to the end.
fn migrate(hosts: &Hosts, from: &Process, to: &Process, flags: &str) -> Done {
    finish(hosts.migrate(from, to, "a", &format!("--json --peer b.test {flags}")))
}

/// The text of a migration that failed with the VM at the source, where it runs.
fn failed(hosts: &Hosts, from: &Process, done: Done) -> (String, Value) {
    let failed = done.expect(1).last();
    assert_eq!(failed["vm"], "at-source", "{failed}");
    hosts.assert_runs(from);
    (failed["text"].as_str().unwrap().to_owned(), failed)
}
