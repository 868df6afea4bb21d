//! `dunlin evacuate` while VMs and hosts change: VMs that end or arrive at other times than planned,
//! requests that libvirt answers late, and an earlier command that was killed. A script takes the place
//! of virsh, because libvirt cannot be made to do these things at a given time.
#![allow(clippy::unwrap_used)]

mod support;
#[path = "support/virsh.rs"]
mod virsh;

use std::fs;

use serde_json::{Value, json};
use support::{Done, Process, finish};
use virsh::{Virsh, uuid};

fn run(virsh: &Virsh, flags: &str) -> Done {
    finish(virsh.evacuate(&format!("--json {flags}")))
}

fn begin(virsh: &Virsh, flags: &str) -> Process {
    Process::follow(virsh.evacuate(flags), &virsh.state())
}

/// The numbers `vms`, `moved`, `failed` and `doubt` of a report.
fn counts(report: &Value) -> [u64; 4] {
    ["vms", "moved", "failed", "doubt"].map(|field| report[field].as_u64().unwrap())
}

fn result(report: &Value, number: usize) -> &Value {
    let results = report["results"].as_array().unwrap();
    let found = results.iter().find(|one| one["uuid"] == uuid(number));
    &found.unwrap()["result"]
}

#[test]
fn i2_vms_that_power_off_before_their_turn_or_while_they_copy_do_not_stop_the_others() {
    let virsh = Virsh::new(4);
    for number in [0, 2] {
        virsh.hold(number);
    }
    let run = begin(&virsh, "");
    run.wait_for("started");
    virsh.put(1, "off");
    virsh.release(0);
    assert_eq!(run.wait_for("ended")["result"], "moved");
    assert_eq!(run.wait_for("ended")["result"], "off");
    virsh.wait_for(&format!("migrating-{}", uuid(2)));
    virsh.put(2, "off");
    virsh.release(2);
    let (code, report) = run.ended();
    assert_eq!((code, counts(&report)), (0, [4, 2, 0, 0]), "{report}");
    for number in [1, 2] {
        assert_eq!(result(&report, number), "off", "{report}");
    }
}

#[test]
fn i1_a_vm_that_arrives_while_the_hosts_are_asked_is_not_in_doubt() {
    let virsh = Virsh::new(2);
    virsh.mark(0, "lands");
    let done = run(&virsh, "").expect(0);
    assert_eq!(counts(&done.last()), [2, 2, 0, 0], "{}", done.out);
    // A VM that both hosts run is in doubt, also for a dry run.
    let virsh = Virsh::new(1);
    virsh.mark(0, "b");
    run(&virsh, "--dry-run").expect(3);
    let done = run(&virsh, "").expect(3);
    assert_eq!(counts(&done.last()), [1, 0, 0, 1], "{}", done.out);
}

/// An earlier command was killed while it migrated two VMs at the same time. Their migrations
/// continue, and the VMs have not arrived at the destination yet.
#[test]
fn i2_all_migrations_of_a_killed_command_are_awaited_whatever_the_number_that_may_copy() {
    let virsh = Virsh::new(3);
    let entries = [0, 1].map(|number| {
        virsh.mark(number, "leaving");
        json!({
            "uuid": uuid(number),
            "name": format!("vm{number}"),
            "to": "qemu+tcp://b/system",
            "result": "moving",
            "reason": "",
        })
    });
    let folder = virsh.state().join("evacuate");
    fs::create_dir_all(&folder).unwrap();
    let file = folder.join("qemu%3a%2f%2f%2fsystem.json");
    fs::write(&file, json!(entries).to_string()).unwrap();
    let run = begin(&virsh, "--parallel 1");
    for number in [0, 1] {
        let started = run.wait_for("started");
        assert_eq!(started["uuid"], uuid(number), "{started}");
        assert_eq!(started["under_way"], true, "{started}");
    }
    for number in [0, 1] {
        virsh.put(number, "b");
        virsh.unmark(number, "leaving");
    }
    let (code, report) = run.ended();
    assert_eq!((code, counts(&report)), (0, [3, 3, 0, 0]), "{report}");
}

/// The request to pause a guest at its time limit takes effect only after the migration has failed.
#[test]
fn i2_a_guest_that_is_paused_too_late_runs_on() {
    let virsh = Virsh::new(1);
    virsh.hold(0);
    virsh.mark(0, "fail");
    let run = begin(&virsh, "--time-limit 100ms --on-time-limit pause");
    virsh.wait_for("suspending");
    virsh.release(0);
    let (code, report) = run.ended();
    assert_eq!((code, counts(&report)), (1, [1, 0, 1, 0]), "{report}");
    virsh.wait_for("suspended");
    assert!(!virsh.is_in(0, "paused"));
}

#[test]
fn the_report_does_not_depend_on_the_state_file() {
    let virsh = Virsh::new(2);
    virsh.hold(0);
    let run = begin(&virsh, "");
    run.wait_for("started");
    let folder = virsh.state().join("evacuate");
    fs::rename(&folder, virsh.state().join("elsewhere")).unwrap();
    fs::write(&folder, "").unwrap();
    run.signal("INT");
    let (code, report) = run.ended();
    assert_eq!((code, counts(&report)), (4, [2, 0, 2, 0]), "{report}");
    assert_eq!(result(&report, 1), "not-started", "{report}");
}

#[test]
fn a_host_is_named_once_whatever_its_uri() {
    let virsh = Virsh::new(1);
    for to in ["qemu+ssh://a/system", "qemu+ssh://b/system"] {
        run(&virsh, &format!("--to {to}")).expect(1);
        assert_eq!(virsh.count("a"), 1);
    }
    run(&virsh, "").expect(0);
}
