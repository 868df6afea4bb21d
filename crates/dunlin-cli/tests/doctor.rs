//! `dunlin doctor` on this host: each verdict is compared with what this test reads or tries
//! itself. If the table of expected verdicts has a column for this kernel, the verdict is also
//! compared with that column.
#![allow(clippy::unwrap_used)]

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use dunlin_test_base::expected::{names_kernel, of_kernel};
use serde_json::{Value, json};
use support::{Done, Hosts, Scratch, dunlin, finish, words};

fn doctor(flags: &str) -> Command {
    words(&format!("doctor --json {flags}"))
}

fn find<'a>(verdicts: &'a [Value], check: &str) -> &'a Value {
    let mut all = verdicts.iter().filter(|one| one["check"] == check);
    let one = all.next().unwrap_or_else(|| panic!("no {check}"));
    assert_eq!(all.next(), None, "{check} is printed twice");
    one
}

/// The state and value of a check.
fn found<'a>(verdicts: &'a [Value], check: &str) -> (&'a str, &'a str) {
    let one = find(verdicts, check);
    (
        one["state"].as_str().unwrap(),
        one["value"].as_str().unwrap(),
    )
}

fn read(path: &str) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim_end().to_owned())
}

fn printed(program: &str, arguments: &[&str]) -> Option<String> {
    let mut command = Command::new(program);
    let done = command.args(arguments).output().ok()?;
    let text = String::from_utf8(done.stdout).unwrap();
    done.status.success().then(|| text.trim_end().to_owned())
}

fn is_root() -> bool {
    printed("id", &["-u"]).as_deref() == Some("0")
}

#[test]
fn this_kernels_column_of_the_table_is_found() {
    let release = read("/proc/sys/kernel/osrelease").unwrap();
    if !names_kernel(&release) || !is_root() {
        return println!("not compared: the table has no column for root under {release}");
    }
    let verdicts = finish(doctor("--path 1M,1ms")).expect(0).lines();
    let expected = of_kernel(&release);
    for one in &expected {
        let (state, value) = found(&verdicts, one.check);
        assert_eq!(Some(state), one.state.or(Some(state)), "{}", one.check);
        assert_eq!(Some(value), one.value.or(Some(value)), "{}", one.check);
    }
    let printed: BTreeSet<_> = verdicts.iter().map(|one| one["check"].as_str()).collect();
    let listed: BTreeSet<_> = expected.iter().map(|one| Some(one.check)).collect();
    assert_eq!(printed, listed);
}

#[test]
fn each_line_has_the_fields_and_a_remedy_unless_it_is_ok() {
    let lines = finish(doctor("")).lines();
    assert!(lines.len() > 30, "{lines:?}");
    for line in lines {
        let keys: Vec<_> = line
            .as_object()
            .unwrap()
            .keys()
            .map(String::as_str)
            .collect();
        let fields = ["check", "fix", "host", "means", "schema", "state", "value"];
        assert_eq!(keys, fields, "{line}");
        assert_eq!(line["schema"], 1);
        assert_eq!(line["host"], read("/proc/sys/kernel/hostname").unwrap());
        let is_ok = line["state"] == "ok";
        assert_eq!(line["fix"] == "", is_ok, "{line}");
        assert!(!line["means"].as_str().unwrap().is_empty(), "{line}");
    }
}

#[test]
fn the_verdicts_are_those_of_proc_and_sys() {
    let verdicts = finish(doctor("")).lines();
    let of = |check| found(&verdicts, check);
    let release = printed("uname", &["-r"]).unwrap();
    assert!(of("host.kernel").1.starts_with(&release));
    // The kernel lists a protocol only while its module is loaded. The doctor's probe has loaded
    // the module tls, if there is one.
    let protocols = read("/proc/sys/net/ipv4/tcp_available_ulp").unwrap();
    let has_tls = protocols.split(' ').any(|one| one == "tls");
    assert_eq!(of("tls.module").0 == "ok", has_tls, "{protocols}");
    assert_eq!(of("tls.aes-256-gcm").0 == "ok", has_tls);
    let has_driver = read("/proc/crypto").is_some_and(|list| {
        let mut lines = list.lines().map(|line| line.replace(' ', ""));
        lines.any(|line| line == "name:gcm(aes)")
    });
    assert_eq!(of("tls.driver").0 != "unknown", has_driver);
    let bracketed = |path: &str| {
        let text = read(path)?;
        let word = text.split(' ').find(|word| word.starts_with('['))?;
        Some(word.trim_matches(['[', ']']).to_owned())
    };
    for (check, file) in [
        ("memory.transparent", "enabled"),
        ("memory.shmem", "shmem_enabled"),
    ] {
        let path = format!("/sys/kernel/mm/transparent_hugepage/{file}");
        assert_eq!(of(check).1, bracketed(&path).unwrap_or("absent".to_owned()));
    }
    let access = match read("/proc/sys/vm/unprivileged_userfaultfd").as_deref() {
        None => "no",
        Some("1") => "every user",
        Some(_) => match fs::metadata("/dev/userfaultfd") {
            Ok(device) if device.permissions().mode() & 0o066 != 0 => "device",
            _ => "root only",
        },
    };
    assert_eq!(of("userfaultfd.post-copy").1, access);
    let kvm = fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/kvm");
    assert_eq!(of("kvm.usable").0 == "ok", kvm.is_ok());
    assert_eq!(of("kvm.dirty-ring").0 == "unknown", kvm.is_err());
    let nft = printed("/usr/sbin/nft", &["--version"]).or(printed("nft", &["--version"]));
    assert_eq!(of("redirect.nft").0 == "ok", nft.is_some());
}

/// The doctor reads /sys. `ip`, with which the test compares, asks the kernel by netlink.
#[test]
fn the_mtu_is_that_of_each_device_that_is_up() {
    let Some(links) = printed("ip", &["-o", "link", "show", "up"]) else {
        return println!("not compared: no program ip");
    };
    let mut expected: Vec<String> = links
        .lines()
        .filter(|line| !line.contains("LOOPBACK") && !line.contains(" master "))
        .filter(|line| line.contains("state UP") || line.contains("state UNKNOWN"))
        .map(|line| {
            let words: Vec<_> = line.split_whitespace().collect();
            let name = words[1].trim_end_matches(':').split('@').next().unwrap();
            let at = words.iter().position(|word| *word == "mtu").unwrap();
            format!("{name} {}", words[at + 1])
        })
        .collect();
    expected.sort();
    let verdicts = finish(doctor("")).lines();
    let expected = match expected.is_empty() {
        true => "none".to_owned(),
        false => expected.join(", "),
    };
    assert_eq!(found(&verdicts, "net.mtu").1, expected);
}

#[test]
fn buffers_are_compared_with_the_path_that_is_given() {
    let last = |file: &str| -> u64 {
        let text = read(&format!("/proc/sys/net/ipv4/{file}")).unwrap();
        text.split_whitespace().last().unwrap().parse().unwrap()
    };
    let lane = last("tcp_rmem").min(last("tcp_wmem"));
    let judge = |bytes: u64| {
        let verdicts = finish(doctor(&format!("--path {bytes},1s"))).lines();
        let one = find(&verdicts, "net.buffers");
        (one["state"].clone(), one["fix"].clone())
    };
    assert_eq!(judge(lane).0, "ok");
    let (state, fix) = judge(lane * 7 / 2);
    assert_eq!(state, "warn");
    assert!(fix.as_str().unwrap().starts_with("use 4 lanes"), "{fix}");
    let verdicts = finish(doctor("")).lines();
    assert_eq!(found(&verdicts, "net.buffers").0, "unknown");
}

#[test]
fn a_certificate_is_judged_by_its_days() {
    let hosts = Hosts::new();
    hosts.issue("ca", "long", "long.test", 90);
    hosts.issue_expired("past", "past.test");
    let judge = |directory: &str, code| {
        let mut command = doctor("--identity");
        command.arg(hosts.scratch.join(directory));
        let verdicts = finish(command).expect(code).lines();
        let (state, value) = found(&verdicts, "identity.certificate");
        (state.to_owned(), value.to_owned())
    };
    // A check that fails makes the exit code 1. Without /dev/kvm, kvm.usable always fails.
    let usual = i32::from(!Path::new("/dev/kvm").exists());
    let (state, value) = judge("long", usual);
    assert_eq!((&*state, &*value), ("ok", "DNS long.test, 89 days"));
    let (state, value) = judge("a", usual);
    assert_eq!((&*state, &*value), ("warn", "DNS a.test, 0 days"));
    assert_eq!(judge("past", 1).0, "fail");
    assert_eq!(judge("no-such-directory", 1).0, "fail");
}

#[test]
fn a_configuration_with_a_redirect_needs_its_rules() {
    let hosts = Hosts::new();
    let file = hosts.scratch.join("tunnel.toml");
    let text = format!(
        "listen = \"127.0.0.1:0\"\nidentity = {:?}\n[redirect.libvirt]\nports = \"49152-49215\"\n\
         peers = {{ \"192.0.2.9\" = \"b.test\" }}\nusers = [\"root\"]\n",
        hosts.scratch.join("a")
    );
    fs::write(&file, text).unwrap();
    let conf = hosts.scratch.join("qemu.conf");
    let verdicts = |settings: &str| {
        fs::write(&conf, settings).unwrap();
        let mut command = doctor("--config");
        command.arg(&file).arg("--qemu-conf").arg(&conf);
        finish(command).lines()
    };
    let all = verdicts("migration_address = \"127.0.0.1\"\nmigration_port_max = 49200\n");
    assert_eq!(found(&all, "tunnel.config"), ("ok", "valid"));
    let value = "ports 49152-49200, address 127.0.0.1, host none";
    assert_eq!(found(&all, "libvirt.migration"), ("ok", value));
    // The verdict is about the certificate that the configuration names.
    assert!(
        found(&all, "identity.certificate")
            .1
            .starts_with("DNS a.test")
    );
    match is_root() && found(&all, "redirect.nft").0 == "ok" {
        true => assert_eq!(found(&all, "redirect.rules"), ("fail", "different")),
        false => assert_ne!(found(&all, "redirect.rules").0, "ok"),
    }
    let reserved = read("/proc/sys/net/ipv4/ip_local_reserved_ports").unwrap();
    if reserved.is_empty() {
        assert_eq!(found(&all, "libvirt.ports").0, "warn");
    }
    let all = verdicts("");
    assert_eq!(found(&all, "libvirt.migration").0, "warn");
    assert_eq!(
        found(&verdicts("migration_port_min = x\n"), "libvirt.migration").0,
        "unknown"
    );

    fs::write(&file, "listen = 1\n").unwrap();
    let mut command = doctor("--config");
    command.arg(&file);
    let all = finish(command).expect(1).lines();
    assert_eq!(found(&all, "tunnel.config"), ("fail", "invalid"));
}

#[test]
fn without_root_what_needs_it_is_unknown() {
    if !is_root() {
        return println!("not compared: this test drops root's privileges");
    }
    let mut command = Command::new("setpriv");
    command
        .args(["--reuid", "65534", "--regid", "65534", "--clear-groups"])
        .arg(env!("CARGO_BIN_EXE_dunlin"))
        .args(["doctor", "--json"]);
    let verdicts = finish(command).lines();
    for check in ["ipsec.esp", "ipsec.per-cpu", "redirect.rules"] {
        let one = find(&verdicts, check);
        assert_eq!(
            [&one["state"], &one["fix"]],
            ["unknown", "run as root"],
            "{one}"
        );
    }
    let failures = verdicts.iter().filter(|one| one["state"] == "fail");
    let failures: Vec<_> = failures.map(|one| &one["check"]).collect();
    let has_kvm = Path::new("/dev/kvm").exists();
    assert_eq!(failures, vec![&json!("kvm.usable"); usize::from(!has_kvm)]);
}

#[test]
fn the_exit_code_depends_on_the_states() {
    let states: BTreeSet<String> = finish(doctor(""))
        .lines()
        .iter()
        .map(|one| one["state"].as_str().unwrap().to_owned())
        .collect();
    let code = |bad: &[&str]| i32::from(bad.iter().any(|state| states.contains(*state)));
    finish(doctor("")).expect(code(&["fail"]));
    finish(doctor("--strict")).expect(code(&["fail", "warn"]));
    finish(doctor("--path 1G")).expect(2);
    finish(doctor("--path 1G,1")).expect(2);
    finish(doctor("--compare one")).expect(2);
    finish(doctor("--compare one other --strict")).expect(2);
}

#[test]
fn the_table_for_people_has_every_check_and_remedy() {
    let done: Done = finish(words("doctor"));
    for line in finish(doctor("")).lines() {
        let check = line["check"].as_str().unwrap();
        assert!(
            done.out.contains(&format!(" {check} ")),
            "{check}: {}",
            done.out
        );
    }
    let remedies = done.out.matches("          fix: ").count();
    let bad = finish(doctor("")).lines();
    let bad = bad.iter().filter(|one| one["state"] != "ok").count();
    assert_eq!(remedies, bad, "{}", done.out);
}

#[test]
fn two_hosts_are_compared() {
    let scratch = Scratch::new();
    let (a, b) = (scratch.join("a.json"), scratch.join("b.json"));
    let text = finish(doctor("")).out;
    fs::write(&a, &text).unwrap();
    let compare = |b: &Path| {
        let mut command = doctor("--compare");
        command.arg(&a).arg(b);
        finish(command)
    };
    assert_eq!(compare(&a).expect(0).out, "");

    let mut changed = String::new();
    for line in text.lines() {
        let mut line: Value = serde_json::from_str(line).unwrap();
        match line["check"].as_str().unwrap() {
            "net.mtu" => line["value"] = "eth9 9000".into(),
            "kvm.usable" => line["state"] = "unknown".into(),
            "ipsec.esp" => continue,
            "identity.certificate" => line["value"] = "\u{1b}[2J".into(),
            _ => {}
        }
        changed.push_str(&format!("{line}\n"));
    }
    fs::write(&b, &changed).unwrap();
    let lines = compare(&b).expect(1).lines();
    let checks: Vec<_> = lines
        .iter()
        .map(|one| one["check"].as_str().unwrap())
        .collect();
    assert_eq!(checks, ["ipsec.esp", "kvm.usable", "net.mtu"]);
    assert_eq!(lines[0]["b"], Value::Null);
    assert_eq!(lines[1]["b"]["state"], "unknown");
    assert_eq!(lines[2]["b"]["value"], "eth9 9000");
    let mut people = dunlin(["doctor", "--compare"]);
    people.arg(&a).arg(&b);
    let people = finish(people).expect(1).out;
    assert!(people.contains("3 differences"), "{people}");

    // A file of another host is untrusted: an invalid file is refused, and its values are escaped in
    // the output.
    let schema = text.replace("\"schema\":1", "\"schema\":2");
    let escape = changed.replace("eth9 9000", "\\u001b[2J");
    for (bad, code) in [
        ("", 1),
        ("{}\n", 1),
        ("nonsense", 1),
        (&*schema, 1),
        (&*escape, 1),
    ] {
        fs::write(&b, bad).unwrap();
        let done = compare(&b).expect(code);
        assert!(
            !done.out.contains('\u{1b}') && !done.err.contains('\u{1b}'),
            "{done:?}"
        );
        assert_eq!(bad == escape, done.err.is_empty(), "{done:?}");
    }
    // Each line is valid, but the file is longer than 1 MiB, which is more than `doctor` ever prints.
    fs::write(&b, text.repeat((1 << 20) / text.len() + 1)).unwrap();
    let done = compare(&b).expect(1);
    assert_eq!(done.last()["fault"], "usage");
}

/// The first cells of the tables in docs/reference/doctor.md name the checks.
#[test]
fn the_page_lists_every_check() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/doctor.md");
    let page = fs::read_to_string(page).unwrap();
    let cells = page
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once("` |"));
    let listed: BTreeSet<_> = cells
        .map(|(check, _)| check.to_owned())
        .filter(|check| check.contains('.') && !check.starts_with("peer."))
        .collect();
    let lines = finish(doctor("")).lines();
    let printed = lines
        .iter()
        .map(|one| one["check"].as_str().unwrap().to_owned());
    assert_eq!(listed, printed.collect());
}
