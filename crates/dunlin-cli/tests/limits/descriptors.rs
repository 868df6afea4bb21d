//! Processes that may open no more files or connections.

use std::fs;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::host::{assert_says, skip};
use crate::support::{Hosts, Process, finish, words};
use crate::{GUEST, failed, migrate};

/// Lets a process have so many descriptors beyond those that it has; none where limits cannot be
/// changed from outside.
fn allow(process: &Process, more: usize) -> Option<()> {
    let open = || -> Vec<usize> {
        fs::read_dir(format!("/proc/{}/fd", process.pid()))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .map(|number| number.parse().unwrap())
            .collect()
    };
    // It may not have settled down to waiting yet, and nothing says when it has closed all that an
    // earlier attempt left open: it has if nothing changes for a while.
    let mut before = Vec::new();
    while before != open() {
        before = open();
        std::thread::sleep(Duration::from_millis(300));
    }
    // The limit is one of numbers, and the lowest that is free is taken.
    let open = before;
    let mut free = (0..).filter(|number| !open.contains(number));
    limit(process, free.nth(more).unwrap())
}

/// Lets it have so many in all.
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

/// With one descriptor more each time, until the VM moves: the process on this side comes one step
/// further before it has none. Says how often the VM was refused.
fn one_more_each_time(
    hosts: &Hosts,
    source: &Process,
    destination: &Process,
    short: &Process,
) -> Option<u32> {
    let at_fault = if short.pid() == source.pid() {
        "at fault: this side"
    } else {
        "at fault: peer"
    };
    let mut refused = 0;
    for more in 3.. {
        assert!(more < 40, "it never moves");
        allow(short, more)?;
        let began = Instant::now();
        let done = migrate(hosts, source, destination, "--lanes 2");
        if done.code == 0 {
            println!("moves with {more}");
            break;
        }
        let (text, line) = failed(hosts, source, done);
        println!("{more} more, after {:?}:", began.elapsed());
        assert_eq!(line["fault"], "descriptor-limit", "{text}");
        let parts = [
            "Too many open files",
            at_fault,
            "Raise the limit of open files there (`ulimit -n`",
            "goes on at the source",
        ];
        assert_says(&text, &parts);
        refused += 1;
    }
    destination.wait_for("received");
    hosts.assert_runs(destination);
    Some(refused)
}

#[test]
fn a_source_without_descriptors_says_so_whatever_it_needs_one_for_and_the_vm_stays() {
    let hosts = Hosts::new();
    let source = hosts.run("1", GUEST);
    let destination = hosts.receive("b", "2", "");
    if let Some(refused) = one_more_each_time(&hosts, &source, &destination, &source) {
        // Its identity, its journal, the control lane, a lane's own descriptors, the lanes.
        assert!(refused >= 5, "{refused}");
    }
}

#[test]
fn a_destination_without_descriptors_says_so_whatever_it_needs_one_for_and_the_vm_stays() {
    let hosts = Hosts::new();
    let source = hosts.run("1", GUEST);
    let destination = hosts.receive("b", "2", "");
    if let Some(refused) = one_more_each_time(&hosts, &source, &destination, &destination) {
        // With fewer it cannot accept anybody, which is the next test; with these, the journal
        // and the lanes are what it lacks one for.
        assert!(refused >= 2, "{refused}");
    }
}

#[test]
fn one_that_cannot_accept_anybody_says_so_once_and_does_not_spin() {
    let hosts = Hosts::new();
    let source = hosts.run("1", GUEST);
    let destination = hosts.receive("b", "2", "");
    if allow(&destination, 0).is_none() {
        return;
    }
    let before = cpu(&destination);
    let done = migrate(&hosts, &source, &destination, "");
    let spent = cpu(&destination) - before;
    let (text, line) = failed(&hosts, &source, done);
    assert_eq!(line["fault"], "control-lost");
    // It cannot be told more.
    assert_says(&text, &["TLS handshake timed out", "at fault: network"]);
    let rejected = destination.wait_for("rejected");
    let parts = [
        "a connection is waiting but cannot be accepted",
        "raise this process's limit of open files (`ulimit -n`)",
        "Too many open files",
    ];
    assert_says(rejected["text"].as_str().unwrap(), &parts);
    println!("waiting for ten seconds cost {spent:?}");
    assert!(spent < Duration::from_secs(1), "{spent:?}");
    limit(&destination, 1000);
    migrate(&hosts, &source, &destination, "--verify").expect(0);
    let again = destination.wait_for("received");
    assert_eq!(again["event"], "received");
}

#[test]
fn a_control_socket_without_descriptors_says_so_and_serves_again_later() {
    let hosts = Hosts::new();
    let source = hosts.run("1", GUEST);
    if allow(&source, 0).is_none() {
        return;
    }
    // The one that accept(2) had set aside.
    let mut status = words("vm status --name vm --control");
    status.arg(&source.control);
    let parts = [
        "Too many open files",
        "(descriptor-limit, at fault: this side)",
        "Raise the limit of open files there",
    ];
    assert_says(&finish(status).expect(1).err, &parts);
    // And now it is held.
    let before = cpu(&source);
    let _silent = UnixStream::connect(source.control.join("vm.sock")).unwrap();
    let warning = source.wait_for("warning");
    let parts = [
        "cannot accept requests",
        "Too many open files",
        "`ulimit -n`",
    ];
    assert_says(warning["text"].as_str().unwrap(), &parts);
    println!("{:?} of CPU time", cpu(&source) - before);
    limit(&source, 1000);
    hosts.assert_runs(&source);
}
