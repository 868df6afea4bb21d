//! The logs of VMs' processes and of tunnels, and the timeline of a migration.
#![allow(clippy::unwrap_used)]

mod support;
#[path = "support/tunnel.rs"]
mod tunnel;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{Read, Write, pipe};
use std::path::Path;
use std::thread;
use std::time::Duration;

use dunlin_test_base::sockets::accepted;
use serde_json::Value;
use support::{Done, Hosts, Process, finish, kernel_has_tls, words};
use tunnel::{Scene, Tunnel, connect, control, exchange, near_config};

const RUN: &str =
    "vm run --name vm --guest process --memory 64M --working-set 8M --dirty-rate 2000";

/// A migration, and the logs of the source and the destination.
struct Moved {
    hosts: Hosts,
    done: Done,
    logs: [String; 2],
}

/// Moves a VM over 3 lanes. `log` contains the flags that configure the logs of both processes.
fn move_with(log: &str, flags: &str) -> Moved {
    let hosts = Hosts::new();
    let path = |name: &str| hosts.scratch.join(name);
    let mut run = words(&format!("{RUN} {log}"));
    run.stderr(File::create(path("source")).unwrap());
    let source = Process::start(run, &path("1"));
    source.wait_for("started");
    let mut receive = words(&format!("vm receive --listen 127.0.0.1:0 {log}"));
    receive.arg("--identity").arg(path("b"));
    receive.stderr(File::create(path("destination")).unwrap());
    let mut destination = Process::start(receive, &path("2"));
    let listening = destination.wait_for("listening");
    destination.address = listening["address"].as_str().unwrap().to_owned();
    let flags = format!("--json --lanes 3 --peer b.test {flags}");
    let mut migrate = hosts.migrate(&source, &destination, "a", &flags);
    migrate.current_dir(path(""));
    let done = finish(migrate).expect(0);
    assert_eq!(source.ended().0, 0);
    destination.wait_for("received");
    destination.signal("TERM");
    assert_eq!(destination.code(), 0);
    let logs = ["source", "destination"].map(|name| fs::read_to_string(path(name)).unwrap());
    Moved { hosts, done, logs }
}

fn parse(log: &str) -> Vec<Value> {
    let lines = log.lines();
    lines
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// Checks the time of a line: UTC, to the microsecond.
fn check_time(time: &str) {
    let shape = time.replace(|c: char| c.is_ascii_digit(), "0");
    assert_eq!(shape, "0000-00-00T00:00:00.000000Z");
}

#[test]
fn the_json_log_tells_a_migration_in_a_dozen_lines_with_its_session_vm_and_peer() {
    let moved = move_with("--log json --confine auto", "");
    let mut sessions = BTreeSet::new();
    for log in &moved.logs {
        let lines = parse(log);
        let story = lines.iter().filter(|line| !line["role"].is_null());
        let story: Vec<_> = story.collect();
        assert!((5..=15).contains(&story.len()), "{log}");
        for line in story {
            check_time(line["time"].as_str().unwrap());
            assert_eq!(line["level"], "info", "{line}");
            assert!(!line["message"].as_str().unwrap().is_empty(), "{line}");
            assert!(!line["peer"].as_str().unwrap().is_empty(), "{line}");
            let session = line["session"].as_str().unwrap();
            assert_eq!(session.len(), 32, "{line}");
            sessions.insert(session.to_owned());
        }
        assert!(lines.iter().filter(|line| line["vm"] == "vm").count() > 3);
    }
    assert_eq!(sessions.len(), 1, "{:?}", moved.logs);
    let source = parse(&moved.logs[0]);
    assert!(source.iter().all(|line| line["vm"] == "vm"));
    let last = source.last().unwrap();
    let report = moved.done.last();
    let iterations = report["iterations"].as_array().unwrap().len();
    assert_eq!(last["iterations"], iterations);
    assert_eq!(last["wire_bytes"], report["wire_bytes"]);
}

#[test]
fn the_text_log_has_the_same_fields_and_debug_adds_lanes_and_iterations() {
    let moved = move_with("--log text --log-level debug", "");
    for log in &moved.logs {
        for line in log.lines().filter(|line| line.contains(" role=")) {
            let (time, rest) = line.split_once(' ').unwrap();
            check_time(time);
            assert!(
                rest.starts_with("info ") || rest.starts_with("debug "),
                "{line}"
            );
            assert!(
                rest.contains(" session=") && rest.contains(" peer="),
                "{line}"
            );
        }
        for lane in 1..=3 {
            assert!(log.contains(&format!(" lane={lane}")), "{log}");
        }
    }
    let iterations = moved.done.last()["iterations"].as_array().unwrap().len();
    // The last iteration is a step of the switchover, so it is not logged as an iteration.
    for iteration in 1..iterations {
        assert!(moved.logs[0].contains(&format!(" iteration={iteration}")));
    }
}

#[test]
fn a_log_of_errors_is_empty_and_without_the_flag_there_is_none() {
    for log in ["--log json --log-level error", ""] {
        assert_eq!(move_with(log, "").logs, ["", ""]);
    }
}

#[test]
fn a_json_log_ends_with_the_error_and_its_code() {
    let failed = |flags| {
        finish(words(&format!("{flags} --config missing.toml")))
            .expect(1)
            .err
    };
    let lines = parse(&failed("tunnel run --log json"));
    let last = lines.last().unwrap();
    check_time(last["time"].as_str().unwrap());
    assert_eq!(last["level"], "error");
    assert_eq!(last["fault"], "usage");
    assert_eq!(last["at_fault"], "configuration");
    assert!(last["message"].as_str().unwrap().contains("missing.toml"));
    // With a text log, the error is printed as text, not as JSON.
    let text = failed("tunnel run");
    assert!(
        text.lines().last().unwrap().starts_with("dunlin: "),
        "{text}"
    );
}

#[test]
fn the_last_line_has_the_fault_code_of_the_library_that_failed() {
    let hosts = Hosts::new();
    let path = |name: &str| hosts.scratch.join(name);
    // Without a server for other clients, the acceptor needs kernel TLS to start.
    let mut accept = words("handoff accept --listen 127.0.0.1:0 --sni a.test --log json --to");
    accept
        .arg(format!("unix:{}", path("to").display()))
        .arg("--identity")
        .arg(path("b"));
    if kernel_has_tls() {
        println!("not tested, this kernel has TLS");
        return;
    }
    let lines = parse(&finish(accept).expect(1).err);
    let last = lines.last().unwrap();
    assert_eq!(last["fault"], "kernel", "{last}");
    assert_eq!(last["at_fault"], "kernel", "{last}");
}

#[test]
fn the_last_line_of_a_json_log_waits_for_its_reader() {
    let (mut reader, mut full) = pipe().unwrap();
    full.write_all(&[b' '; 64 << 10]).unwrap();
    let mut run = words("tunnel run --log json --config missing.toml");
    let mut child = run.stderr(full).spawn().unwrap();
    drop(run);
    // Read only after this delay. The process waits this long for the reader of its last line, but
    // not for the reader of other lines.
    thread::sleep(Duration::from_millis(500));
    let mut log = String::new();
    reader.read_to_string(&mut log).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(1));
    let lines = parse(log.trim_start());
    assert_eq!(lines.last().unwrap()["fault"], "usage", "{lines:?}");
}

/// Returns the spans of a timeline, each as its thread and its path. Asserts that any two spans of
/// a thread are nested or follow each other.
fn spans(path: &Path) -> Vec<(u64, String)> {
    let events: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let mut threads = BTreeMap::<u64, Vec<(f64, f64, String)>>::new();
    for event in events.as_array().unwrap() {
        assert!(event["pid"].as_u64().unwrap() > 0);
        let name = event["name"].as_str().unwrap();
        if event["ph"] == "M" {
            assert_eq!(name, "thread_name");
            continue;
        }
        assert_eq!(event["ph"], "X", "{event}");
        let (ts, dur) = (
            event["ts"].as_f64().unwrap(),
            event["dur"].as_f64().unwrap(),
        );
        let name = match &event["args"]["iteration"] {
            Value::Number(number) => format!("{name} {number}"),
            _ => name.to_owned(),
        };
        let thread = threads.entry(event["tid"].as_u64().unwrap()).or_default();
        thread.push((ts, ts + dur, name));
    }
    let mut paths = Vec::new();
    for (thread, mut spans) in threads {
        spans.sort_by(|a, b| (a.0, -a.1).partial_cmp(&(b.0, -b.1)).unwrap());
        let mut open: Vec<(f64, String)> = Vec::new();
        for (begin, end, name) in spans {
            open.retain(|(until, _)| *until > begin);
            assert!(
                open.iter().all(|(until, _)| *until >= end),
                "{name} in {open:?}"
            );
            open.push((end, name));
            let names: Vec<_> = open.iter().map(|(_, name)| name.as_str()).collect();
            paths.push((thread, names.join("/")));
        }
    }
    paths
}

#[test]
fn a_timeline_has_every_iteration_lane_and_step_nested() {
    let moved = move_with("", "--timeline timeline.json");
    let found = spans(&moved.hosts.scratch.join("timeline.json"));
    let iterations = moved.done.last()["iterations"].as_array().unwrap().len();
    let mut expected = vec![
        (0, "session".to_owned()),
        (0, "session/connect".into()),
        (0, "session/describe".into()),
        (0, "session/open-lanes".into()),
        (0, "session/record".into()),
    ];
    expected.extend((1..iterations).map(|number| (0, format!("session/iteration {number}"))));
    let last_pages = format!("last-pages {iterations}");
    for step in [
        "",
        "/pause",
        &format!("/{last_pages}"),
        &format!("/{last_pages}/state"),
        "/ready",
        "/commit",
        "/commit/record",
        "/close",
    ] {
        expected.push((0, format!("session/switchover{step}")));
    }
    for lane in 1..=3 {
        expected.extend([(lane, "lane".to_owned()), (lane, "lane/open".into())]);
    }
    assert_eq!(
        found.iter().collect::<BTreeSet<_>>(),
        expected.iter().collect()
    );
    assert_eq!(found.len(), expected.len(), "{found:?}");
    // The output does not contain the timeline, and the processes wrote no log.
    assert!(!moved.done.out.contains("\"ph\""), "{}", moved.done.out);
    assert_eq!(moved.logs, ["", ""]);
}

/// Two VMs of one process migrate at the same time. Each timeline contains its VM's session, and
/// nothing of the other VM's session.
#[test]
fn timelines_of_simultaneous_migrations_do_not_mix() {
    let hosts = Hosts::new();
    let run = words(&format!("{RUN} --vms 2"));
    let source = Process::start(run, &hosts.scratch.join("1"));
    let destination = hosts.receive("b", "2", "--sessions 2 --peer a.test");
    let names = ["vm-1", "vm-2"];
    let path = |name: &str| hosts.scratch.join(format!("{name}.json"));
    for _ in names {
        source.wait_for("started");
    }
    let clients = names.map(|name| {
        let flags = format!("vm migrate --name {name} --peer b.test --rate 1M --lanes 1");
        let mut migrate = words(&flags);
        migrate.args(["--to", &destination.address]);
        migrate.arg("--identity").arg(hosts.scratch.join("a"));
        migrate.arg("--control").arg(&source.control);
        migrate.arg("--timeline").arg(path(name));
        let client = Process::follow(migrate, &source.control);
        client.wait_for("lane-up");
        client
    });
    for (name, client) in names.iter().zip(clients) {
        let mut set = words(&format!("vm set --name {name} --rate none --control"));
        set.arg(&source.control);
        finish(set).expect(0);
        assert_eq!(client.wait_for_any(&["moved", "failed"])["event"], "moved");
    }
    for name in names {
        let events = fs::read_to_string(path(name)).unwrap();
        let events: Vec<Value> = serde_json::from_str(&events).unwrap();
        let spans = events.iter().filter(|event| event["ph"] == "X");
        let of = |span: &'static str| spans.clone().filter(move |event| event["name"] == span);
        let vms: Vec<_> = of("session").map(|event| &event["args"]["vm"]).collect();
        assert_eq!(vms, [name]);
        for span in ["connect", "lane", "switchover"] {
            assert_eq!(of(span).count(), 1, "{span}");
        }
    }
}

#[test]
fn i2_a_log_without_a_reader_delays_no_migration() {
    let hosts = Hosts::new();
    // A pipe holds 64 KiB (pipe(7)). After these bytes it accepts no line of the log.
    let (_reader, mut full) = pipe().unwrap();
    full.write_all(&[b' '; 64 << 10]).unwrap();
    let mut run = words(&format!("{RUN} --log text"));
    run.stderr(full);
    let source = Process::start(run, &hosts.scratch.join("1"));
    source.wait_for("started");
    let destination = hosts.receive("b", "2", "");
    let done = finish(hosts.migrate(&source, &destination, "a", "--json --peer b.test"));
    let downtime = &done.expect(0).last()["downtime"]["total_ms"];
    assert!(downtime.as_f64().unwrap() < 10_000.0, "{downtime}");
    assert_eq!(source.ended().0, 0);
}

#[test]
fn a_timeline_that_cannot_be_written_starts_no_migration() {
    let hosts = Hosts::new();
    let source = hosts.run("1", "--guest process --memory 16M");
    let destination = hosts.receive("b", "2", "");
    let flags = "--peer b.test --timeline /nowhere/timeline.json";
    let done = finish(hosts.migrate(&source, &destination, "a", flags)).expect(1);
    assert!(done.err.contains("/nowhere/timeline.json"), "{done:?}");
    assert_eq!(hosts.status(&source)["migration"], Value::Null);
}

#[test]
fn a_tunnels_lines_have_route_channel_and_peer_in_both_formats() {
    let scene = Scene::new();
    let (near, far) = scene.channel();
    exchange(near, far);
    for words in ["is open", "is closed"] {
        let line = scene.near.wait_for(words);
        check_time(line.split(' ').next().unwrap());
        for field in [" info ", " channel=0 ", " route=ram", "peer=", "b.test"] {
            assert!(line.contains(field), "{field}: {line}");
        }
    }

    let hosts = &scene.hosts;
    let config = hosts.scratch.join("json.toml");
    fs::write(
        &config,
        near_config(hosts, &scene.far.address, "ram", "json"),
    )
    .unwrap();
    let mut command = words("tunnel run --log json --config");
    command.arg(&config).arg("--control").arg(control(hosts));
    let json = Tunnel::follow(command, config);
    let near = connect(hosts.scratch.join("json"));
    let far = accepted(&scene.target);
    exchange(near, far);
    let line: Value = serde_json::from_str(&json.wait_for("is closed")).unwrap();
    check_time(line["time"].as_str().unwrap());
    assert_eq!(line["level"], "info");
    assert_eq!(line["route"], "ram");
    assert_eq!(line["channel"], 0);
    assert!(line["peer"].as_str().unwrap().contains("b.test"), "{line}");
}
