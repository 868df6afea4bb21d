//! The confinement of processes that own a VM or wait for one, as the kernel reports it, and what
//! these processes can still do: load identities, and find holes in a guest's memory.
//!
//! `src/confine/tests.rs` tests what each part of the confinement denies.
#![allow(clippy::unwrap_used)]

mod support;

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::PathBuf;

use dunlin_test_base::kvm;
use serde_json::Value;
use support::{Hosts, Process, finish, words};

const GUEST: &str = "--guest process --memory 64M --fill-size 8M";

/// A field of /proc/PID/task/TID/status for each thread of a process.
fn of_each_thread(process: &Process, field: &str) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{}/task", process.pid())).unwrap();
    let mut found = Vec::new();
    for task in tasks {
        // A thread may have ended meanwhile.
        let Ok(status) = fs::read_to_string(task.unwrap().path().join("status")) else {
            continue;
        };
        let line = status.lines().find(|line| line.starts_with(field));
        found.push(line.unwrap().split_whitespace().nth(1).unwrap().to_owned());
    }
    assert!(found.len() > 1, "{found:?}");
    found
}

fn assert_each_thread(process: &Process, field: &str, value: &str) {
    let found = of_each_thread(process, field);
    assert!(
        found.iter().all(|one| one == value),
        "{field} {found:?}, not {value}"
    );
}

fn assert_confined(process: &Process) {
    assert_each_thread(process, "NoNewPrivs:", "1");
    assert_each_thread(process, "Seccomp:", "2");
    for set in ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"] {
        assert_each_thread(process, set, "0000000000000000");
    }
    // Only a process with CAP_SETPCAP can empty the bounding set.
    let own = u64::from_str_radix(&of_this_test("CapEff:"), 16).unwrap();
    if own & 1 << 8 != 0 {
        assert_each_thread(process, "CapBnd:", "0000000000000000");
    }
}

fn by(line: &Value) -> String {
    assert_eq!(line["lacks"].as_array().unwrap().len(), 0, "{line}");
    line["by"].to_string()
}

fn moves(guest: &str) {
    let hosts = Hosts::new();
    let mut receive = words("vm receive --listen 127.0.0.1:0 --confine yes --identity");
    receive.arg(hosts.scratch.join("b"));
    let mut destination = Process::start(receive, &hosts.scratch.join("to"));
    let said = by(&destination.wait_for("confined"));
    assert!(
        said.contains("Landlock") && said.contains("reading identities"),
        "{said}"
    );
    destination.address = destination.wait_for("listening")["address"]
        .as_str()
        .unwrap()
        .to_owned();
    assert_confined(&destination);

    let mut run = words(&format!(
        "vm run --name vm --confine yes {guest} --identities"
    ));
    run.arg(hosts.scratch.join("a"));
    let source = Process::start(run, &hosts.scratch.join("from"));
    let said = by(&source.wait_for("confined"));
    for part in ["no privileges", "Landlock", "reading identities", "seccomp"] {
        assert!(said.contains(part), "{said}");
    }
    source.wait_for("started");
    assert_confined(&source);
    hosts.assert_runs(&source);

    let flags = "--json --peer b.test --verify";
    finish(hosts.migrate(&source, &destination, "a", flags)).expect(0);
    destination.wait_for("received");
    // The process serves its socket. A second filter, set after the socket was created, forbids
    // further local sockets.
    hosts.assert_runs(&destination);
    assert_confined(&destination);
    assert_each_thread(&destination, "Seccomp_filters:", "2");

    // The VM migrates again with the identity that its process may read.
    let third = hosts.receive("a", "third", "--peer b.test");
    let flags = "--json --peer a.test";
    finish(hosts.migrate(&destination, &third, "b", flags)).expect(0);
    third.wait_for("received");
    hosts.assert_runs(&third);
}

/// Claim H9 of docs/security.
#[test]
fn processes_with_a_vm_are_confined_before_and_after_it_moves() {
    moves(GUEST);
}

/// Claim H9 of docs/security.
#[test]
fn processes_with_a_kvm_guest_are_confined_too() {
    let Some(_turn) = kvm() else {
        return;
    };
    moves("--memory 64M");
}

/// Bytes of guest memory that the process's memfds occupy, mapped or not.
fn guest_bytes(process: &Process) -> u64 {
    let files = fs::read_dir(format!("/proc/{}/fd", process.pid())).unwrap();
    let paths = files.map(|file| file.unwrap().path());
    let is_guest = |path: &PathBuf| {
        fs::read_link(path).is_ok_and(|to| to.to_string_lossy().contains("memfd:dunlin-guest"))
    };
    let bytes = |path: PathBuf| fs::metadata(path).unwrap().blocks() * 512;
    paths.filter(is_guest).map(bytes).sum()
}

/// Checks that a confined process finds the holes in the guest's memory when it digests the memory.
/// If the process could not read its page map or the guest's file, it would read all of the guest's
/// memory, and so populate it.
#[test]
fn i8_a_confined_process_finds_holes_when_it_compares_memory() {
    const MIB: u64 = 1 << 20;
    let hosts = Hosts::new();
    let guest = "--guest process --memory 256M --fill-size 8M --workload idle --backing memfd";
    let identities = hosts.scratch.join("a").display().to_string();
    let confined = format!("{guest} --confine yes --identities {identities}");
    let source = hosts.run("from", &confined);
    let destination = hosts.receive("b", "to", "--confine yes");
    assert_each_thread(&destination, "Seccomp:", "2");
    let flags = "--json --peer b.test --verify";
    finish(hosts.migrate(&source, &destination, "a", flags)).expect(0);
    destination.wait_for("received");
    let bytes = guest_bytes(&destination);
    assert!((4 * MIB..32 * MIB).contains(&bytes), "{bytes}");
}

/// Without `--identities`, the confined process of `vm run` could read every file of its user.
#[test]
fn a_process_that_may_read_every_file_is_not_called_confined_completely() {
    let hosts = Hosts::new();
    let run = |flags: &str| {
        let mut command = words(&format!("vm run --name vm {GUEST} {flags} --control"));
        command
            .arg(hosts.scratch.join("from"))
            .arg("--state-dir")
            .arg(hosts.scratch.join("state"));
        command
    };
    let refused = finish(run("--confine yes --json")).expect(1);
    let text = refused.last()["text"].as_str().unwrap().to_owned();
    for part in ["at fault: configuration", "--identities"] {
        assert!(text.contains(part), "{text}");
    }
    let warnings = |flags: &str| {
        let process = Process::follow(run(flags), &hosts.scratch.join("from"));
        let line = process.wait_for_any(&["warning", "started"]);
        line["event"] == "warning" && line["text"].as_str().unwrap().contains("--identities")
    };
    assert!(warnings("--confine auto"));
    assert!(!warnings("--confine no"));
    let identities = hosts.scratch.join("a").display().to_string();
    assert!(!warnings(&format!(
        "--confine yes --identities {identities}"
    )));
}

#[test]
fn an_identity_from_elsewhere_is_refused_with_a_remedy() {
    let hosts = Hosts::new();
    let third = hosts.receive("b", "third", "");
    let allowed = hosts.scratch.join("b");
    let run = format!("vm run --name vm {GUEST} --identities");
    let mut run = words(&run);
    run.arg(&allowed);
    let source = Process::start(run, &hosts.scratch.join("from"));
    source.wait_for("started");

    let refused = finish(hosts.migrate(&source, &third, "a", "--json --peer b.test")).expect(1);
    let text = refused.last()["text"].as_str().unwrap().to_owned();
    println!("{text}");
    for part in ["confined", "at fault: configuration", "--identities"] {
        assert!(text.contains(part), "{text}");
    }
    // The links are in an allowed directory, but lead to files outside it. The kernel denies access
    // to these files.
    for file in ["ca-cert.pem", "cert.pem", "key.pem"] {
        fs::create_dir_all(allowed.join("sub")).unwrap();
        symlink(
            hosts.scratch.join("a").join(file),
            allowed.join("sub").join(file),
        )
        .unwrap();
    }
    let refused = finish(hosts.migrate(&source, &third, "b/sub", "--json --peer b.test")).expect(1);
    let text = refused.last()["text"].as_str().unwrap().to_owned();
    assert!(text.contains("Permission denied"), "{text}");
    hosts.assert_runs(&source);
    finish(hosts.migrate(&source, &third, "b", "--json --peer b.test")).expect(0);
    third.wait_for("received");
}

#[test]
fn certificates_behind_links_are_renewed() {
    let hosts = Hosts::new();
    let at = |name: &str| hosts.scratch.join(name);
    // As with certbot, the files are links. A renewal changes the targets of the links, not their
    // names.
    fs::create_dir_all(at("live")).unwrap();
    fs::create_dir_all(at("archive")).unwrap();
    let put = |from: &str, round: u32| {
        for file in ["ca-cert.pem", "cert.pem", "key.pem"] {
            let target = at("archive").join(format!("{round}-{file}"));
            fs::copy(at(from).join(file), &target).unwrap();
            let link = at("live").join(file);
            let _ = fs::remove_file(&link);
            symlink(&target, &link).unwrap();
        }
    };
    put("b", 1);
    let destination = hosts.receive("live", "to", "");
    hosts.issue("ca", "next", "b.test", 1);
    put("next", 2);
    destination.signal("HUP");
    destination.wait_for("identity-read");
}

/// The list of denied keys may be a link too, and a changed list applies from the next
/// load.
#[test]
fn i6_denied_keys_behind_a_link_are_reloaded() {
    let hosts = Hosts::new();
    let list = hosts.scratch.join("site").join("denied-keys");
    fs::create_dir(list.parent().unwrap()).unwrap();
    fs::write(&list, "# none yet\n").unwrap();
    symlink(&list, hosts.scratch.join("b").join("denied")).unwrap();
    let destination = hosts.receive("b", "to", "--confine yes");
    let mut show = words("pki show --json");
    show.arg(hosts.scratch.join("a"));
    let shown = finish(show).expect(0).last();
    let key = shown["key_pin"].as_str().unwrap();
    fs::write(&list, format!("{key}\n")).unwrap();
    destination.signal("HUP");
    destination.wait_for("identity-read");
    let source = hosts.run("from", GUEST);
    let flags = "--json --peer b.test";
    finish(hosts.migrate(&source, &destination, "a", flags)).expect(1);
    let refused = destination.wait_for("rejected");
    assert!(refused.to_string().contains(key), "{refused}");
    hosts.assert_runs(&source);
}

#[test]
fn confinement_can_be_switched_off() {
    let hosts = Hosts::new();
    let source = hosts.run("from", &format!("{GUEST} --confine no"));
    assert_each_thread(&source, "Seccomp:", &of_this_test("Seccomp:"));
    assert_each_thread(&source, "CapEff:", &of_this_test("CapEff:"));
    let bad = finish(words("vm run --name vm --confine maybe")).expect(2);
    assert!(bad.err.contains("auto, yes, no"), "{bad:?}");
}

fn of_this_test(field: &str) -> String {
    let own = fs::read_to_string("/proc/self/status").unwrap();
    let line = own.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().to_owned()
}
