//! Processes without free descriptors.

use std::fs;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::host::{assert_says, skip};
use crate::support::{Hosts, Process, finish, words};
use crate::{GUEST, failed, migrate, text};

/// Limits a process to `more` descriptors in addition to its present ones. Returns `None` if this
/// process lacks the permission to change the limits of another process.
fn allow(process: &Process, more: usize) -> Option<()> {
    let open = || -> Vec<usize> {
        fs::read_dir(format!("/proc/{}/fd", process.pid()))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .map(|number| number.parse().unwrap())
            .collect()
    };
    // No event shows when the process has closed all descriptors of an earlier attempt, so wait
    // until the set of open descriptors stays the same for a while.
    let mut before = Vec::new();
    while before != open() {
        before = open();
        std::thread::sleep(Duration::from_millis(300));
    }
    // The limit applies to the number of each descriptor, and a new descriptor gets the lowest free
    // number.
    let open = before;
    let mut free = (0..).filter(|number| !open.contains(number));
    limit(process, free.nth(more).unwrap())
}

/// Sets the limit of open descriptors. Returns `None` without the permission to set
/// it.
fn limit(process: &Process, count: usize) -> Option<()> {
    let mut prlimit = Command::new("prlimit");
    prlimit
        .args(["--pid", &process.pid().to_string()])
        .arg(format!("--nofile={count}:"));
    let done = finish(prlimit);
    if done.code == 0 {
        return Some(());
    }
    skip(&format!("limits of another process: {done:?}"));
    None
}

/// CPU time that a process has used.
fn cpu(process: &Process) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{}/stat", process.pid())).unwrap();
    let fields: Vec<&str> = stat
        .rsplit(')')
        .next()
        .unwrap()
        .split_whitespace()
        .collect();
    // Fields 14 and 15 of proc_pid_stat(5), in hundredths of a second.
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    Duration::from_millis(10 * ticks)
}

/// Migrates repeatedly until the VM moves. `short` is the process that lacks descriptors. At each
/// attempt it may open one descriptor more, so each attempt fails at a later use of a descriptor.
/// Returns the number of failures.
fn one_more_each_time(
    hosts: &Hosts,
    source: &Process,
    destination: &Process,
    short: &Process,
) -> Option<u32> {
    let at_fault = if short.pid() == source.pid() {
        "this side"
    } else {
        "peer"
    };
    let mut failures = 0;
    // With fewer than four free descriptors, the process cannot answer requests at all. Two of its
    // threads wait in accept(2), and each of these calls reserves a descriptor.
    for more in 4.. {
        assert!(more < 40, "the VM never moves");
        allow(short, more)?;
        let began = Instant::now();
        let done = migrate(hosts, source, destination, "--lanes 2");
        if done.code == 0 {
            println!("moves with {more}");
            break;
        }
        println!("{more} more, after {:?}:", began.elapsed());
        let said = failed(hosts, source, done, "descriptor-limit", at_fault);
        assert_says(&said, &["Too many open files", "`ulimit -n`"]);
        failures += 1;
    }
    destination.wait_for("received");
    hosts.assert_runs(destination);
    Some(failures)
}

#[test]
fn a_source_without_descriptors_reports_it_at_each_use_and_the_vm_stays() {
    let hosts = Hosts::new();
    let source = hosts.run("1", GUEST);
    let destination = hosts.receive("b", "2", "");
    if let Some(failures) = one_more_each_time(&hosts, &source, &destination, &source) {
        // At least five uses need a descriptor: the identity, the journal, the control lane, the
        // lanes, and what a lane itself opens.
        assert!(failures >= 5, "{failures}");
    }
}

#[test]
fn a_destination_without_descriptors_reports_it_at_each_use_and_the_vm_stays() {
    let hosts = Hosts::new();
    let source = hosts.run("1", GUEST);
    let destination = hosts.receive("b", "2", "");
    if let Some(failures) = one_more_each_time(&hosts, &source, &destination, &destination) {
        // The journal and the lanes each fail at least once. With even fewer descriptors, the
        // destination cannot accept a connection; the next test covers that.
        assert!(failures >= 2, "{failures}");
    }
}

#[test]
fn a_destination_that_cannot_accept_reports_it_once_and_does_not_spin() {
    let hosts = Hosts::new();
    let source = hosts.run("1", GUEST);
    let destination = hosts.receive("b", "2", "");
    if allow(&destination, 0).is_none() {
        return;
    }
    let before = cpu(&destination);
    let done = migrate(&hosts, &source, &destination, "");
    let spent = cpu(&destination) - before;
    // The source sees only that its connection is not accepted, so it reports a failure of the
    // network.
    failed(&hosts, &source, done, "control-lost", "network");
    let rejected = destination.wait_for("rejected");
    assert_says(&text(&rejected), &["Too many open files", "`ulimit -n`"]);
    println!("waiting for ten seconds cost {spent:?}");
    assert!(spent < Duration::from_secs(1), "{spent:?}");
    limit(&destination, 1000);
    migrate(&hosts, &source, &destination, "--verify").expect(0);
    let again = destination.wait_for("received");
    assert_eq!(again["event"], "received");
}

#[test]
fn a_control_socket_without_descriptors_reports_it_and_serves_again_later() {
    let hosts = Hosts::new();
    let source = hosts.run("1", GUEST);
    if allow(&source, 0).is_none() {
        return;
    }
    // The process accepts this request with the descriptor that its waiting accept(2) has reserved.
    // No other descriptor is free.
    let mut status = words("vm status --name vm --control");
    status.arg(&source.control);
    let parts = [
        "Too many open files",
        "(descriptor-limit, at fault: this side)",
        "[descriptor-limit]",
    ];
    assert_says(&finish(status).expect(1).err, &parts);
    // A client that sends nothing keeps the descriptor that accept(2) had reserved, so the next
    // accept(2) fails.
    let before = cpu(&source);
    let _silent = UnixStream::connect(source.control.join("vm.sock")).unwrap();
    let warning = source.wait_for("warning");
    assert_says(&text(&warning), &["Too many open files", "`ulimit -n`"]);
    println!("{:?} of CPU time", cpu(&source) - before);
    limit(&source, 1000);
    hosts.assert_runs(&source);
}
