//! `dunlin doctor` inside the guest, compared with the table of expected verdicts.

use std::process::Command;

use dunlin_test_base::expected::{Expected, of_kernel};
use serde_json::Value;

use crate::Guest;

/// The network namespace in which the command runs. `ip netns exec` mounts the /sys of this
/// namespace for the command.
const HOST: &str = "examined";

/// Compares all verdicts with those expected on this kernel, and checks that the command leaves no
/// SA.
///
/// # Panics
/// A verdict differs, or an SA is left.
pub fn check(guest: &Guest) {
    // An installed system loads this module by itself, through its alias for the CPU feature.
    guest.command("modprobe", &["aesni_intel"]);
    add_host(guest);
    let found = doctor(&["--json", "--path", "1M,1ms"], 1);
    let release = guest.output("uname", &["-r"]);
    compare(&of_kernel(release.trim()), &found);
    assert_eq!(inside(guest, &["ip", "xfrm", "state", "list"]), "");
    a_table_without_a_configuration_is_reported(guest);
    guest.command("ip", &["netns", "del", HOST]);
}

/// Checks the verdicts on TLS of a kernel that cannot load the module tls.
///
/// # Panics
/// A verdict differs.
pub fn without_tls(guest: &Guest) {
    add_host(guest);
    let unloaded = guest.without_module("tls");
    let unasked = guest.without_loader();
    let found = doctor(&["--json"], 1);
    for (check, state, value) in [
        ("tls.module", "warn", "absent"),
        ("tls.aes-256-gcm", "warn", "neither"),
        ("tls.rekey", "warn", "no"),
        ("cipher.kernel", "unknown", ""),
        ("auto.records", "ok", "process"),
        ("auto.relay", "ok", "process"),
    ] {
        let one = find(&found, check);
        assert_eq!([&one["state"], &one["value"]], [state, value], "{one}");
    }
    drop(unasked);
    drop(unloaded);
    guest.command("ip", &["netns", "del", HOST]);
}

fn add_host(guest: &Guest) {
    guest.command("ip", &["netns", "add", HOST]);
    guest.command("ip", &["-n", HOST, "link", "set", "lo", "up"]);
}

/// Returns the verdicts of `dunlin doctor`, and asserts that the command ends with this exit code.
fn doctor(flags: &[&str], code: i32) -> Vec<Value> {
    let done = Command::new("ip")
        .args(["netns", "exec", HOST, "dunlin", "doctor"])
        .args(flags)
        .output()
        .expect("ip starts");
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    println!("{text}{}", String::from_utf8_lossy(&done.stderr));
    // The machine has no KVM, so one check always fails.
    assert_eq!(done.status.code(), Some(code));
    let parse = |line| serde_json::from_str(line).expect("each line is an object");
    text.lines().map(parse).collect()
}

fn inside(guest: &Guest, words: &[&str]) -> String {
    guest.output("ip", &[&["netns", "exec", HOST], words].concat())
}

fn compare(expected: &[Expected], found: &[Value]) {
    let mut wrong = Vec::new();
    for one in expected {
        let Some(verdict) = found.iter().find(|found| found["check"] == one.check) else {
            wrong.push(format!("{} is missing", one.check));
            continue;
        };
        let state = one.state.is_none_or(|state| verdict["state"] == state);
        let value = one.value.is_none_or(|value| verdict["value"] == value);
        if !state || !value {
            wrong.push(format!("expected {one:?}, found {verdict}"));
        }
    }
    for verdict in found {
        if !expected.iter().any(|one| verdict["check"] == one.check) {
            wrong.push(format!("not in the table: {verdict}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn a_table_without_a_configuration_is_reported(guest: &Guest) {
    let _ = inside(guest, &["nft", "add", "table", "inet", "dunlin"]);
    let found = doctor(&["--json"], 1);
    let rules = find(&found, "redirect.rules");
    assert_eq!([&rules["state"], &rules["value"]], ["warn", "unexpected"]);
    let _ = inside(guest, &["nft", "delete", "table", "inet", "dunlin"]);
}

fn find<'a>(found: &'a [Value], check: &str) -> &'a Value {
    let mut found = found.iter();
    let one = found.find(|one| one["check"] == check);
    one.expect("the check is printed")
}
