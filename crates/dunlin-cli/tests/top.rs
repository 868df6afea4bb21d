//! `dunlin top` in a pseudo-terminal, with tunnels that carry bytes and VMs that migrate; progress
//! of other commands on a terminal.
#![allow(clippy::unwrap_used)]

#[path = "support/journal.rs"]
mod journal;
mod support;
#[path = "support/terminal.rs"]
mod terminal;
#[path = "support/tunnel.rs"]
mod tunnel;

use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use dunlin::engine::journal::{Journal, SessionJournal, SourceRecord, State};
use dunlin_test_base::sockets::accepted;
use serde_json::Value;
use support::{Hosts, Process, finish, kill, process::exit_code, words};
use terminal::Terminal;
use tunnel::{Tunnel, connect, control, far_config, listen, near_config};

const MIB: u64 = 1 << 20;

/// `dunlin top` for the processes of these hosts.
fn top(hosts: &Hosts, control: &std::path::Path) -> Command {
    let mut command = words("top --interval 200ms --control");
    command.arg(control);
    command.arg("--state-dir").arg(hosts.scratch.join("state"));
    command
}

/// Waits until `dunlin top` ends, and asserts that a shell could use the terminal after that.
fn assert_restored(mut terminal: Terminal, code: i32) {
    assert_eq!(exit_code(&mut terminal.child), Some(code));
    let shown = |screen: &terminal::Screen| !screen.alternate && !screen.hides_cursor;
    terminal.wait_until("restored screen", shown);
    assert!(terminal.is_restored());
}

/// Two tunnels in one control directory, and a channel that has bytes to send until the test ends.
fn tunnels(hosts: &Hosts) -> [Tunnel; 2] {
    let target = listen(hosts.scratch.join("out"));
    let far = Tunnel::start(hosts, "far", &far_config(hosts, "a.test"));
    let near = Tunnel::start(
        hosts,
        "near",
        &near_config(hosts, &far.address, "ram", "in"),
    );
    let mut stream = connect(hosts.scratch.join("in"));
    let mut arriving = accepted(&target);
    // Both threads end with the tunnels.
    thread::spawn(move || while stream.write_all(&[7; 1 << 16]).is_ok() {});
    thread::spawn(move || {
        let mut bytes = vec![0; 1 << 20];
        while matches!(arriving.read(&mut bytes), Ok(1..)) {}
    });
    [near, far]
}

/// The status of a tunnel.
fn status(hosts: &Hosts, name: &str) -> Value {
    let mut command = words("status --json --state-dir");
    command.arg(hosts.scratch.join("state"));
    command.arg("--control").arg(control(hosts));
    let lines = finish(command).expect(0).lines();
    lines.into_iter().find(|line| line["name"] == name).unwrap()
}

#[test]
fn rates_of_a_route_and_a_peer_are_changed_from_the_screen() {
    let hosts = Hosts::new();
    let _tunnels = tunnels(&hosts);
    let mut top = Terminal::start(&top(&hosts, &control(&hosts)), 24, 80);
    top.select("near: route ram");
    top.press("r");
    top.wait_for("Limit of near: route ram");
    top.press("1x\r");
    top.wait_for("invalid size");
    top.press("\x7f\x7f8M\r");
    wait_for_limit(&top, "near: route ram");
    let limited = status(&hosts, "near");
    assert_eq!(limited["routes"][0]["limit_bytes_per_s"], 8 * MIB);
    // The tunnel reads at most 8 MiB/s now, and the screen shows the limit and the rate.
    top.wait_until("limited rate", |screen| {
        let row = screen
            .lines
            .iter()
            .find(|line| line.contains("near: route ram"));
        let mut cells = row.into_iter().flat_map(|row| row.split_whitespace().rev());
        cells.next() == Some("8.0M") && cells.nth(1).is_some_and(|rate| rate.ends_with('M'))
    });
    top.select("near: peer b.test");
    top.press("r2M\r");
    wait_for_limit(&top, "near: peer b.test");
    assert_eq!(
        status(&hosts, "near")["peers"][0]["limit_bytes_per_s"],
        2 * MIB
    );
    top.press("\r");
    top.wait_for("unacknowledged bytes");
    top.press("\x1b");
    top.wait_for("near: route ram");
    for (rows, columns) in [(8, 40), (24, 80)] {
        top.resize(rows, columns);
        top.wait_for("dunlin top");
    }
    top.wait_for("near: route ram");
    top.press("q");
    assert_restored(top, 0);
}

/// Changes the limit of the route from another terminal.
fn set_limit(hosts: &Hosts, near: &Tunnel, rate: &str) {
    let mut set = words(&format!("tunnel set ram --rate {rate} --config"));
    set.arg(&near.config).arg("--control").arg(control(hosts));
    finish(set).expect(0);
}

#[test]
fn readings_go_on_by_themselves_unless_they_are_paused() {
    let hosts = Hosts::new();
    let [near, _far] = tunnels(&hosts);
    let mut top = Terminal::start(&top(&hosts, &control(&hosts)), 24, 80);
    top.wait_for("near: route ram");
    let shows = |limit: &'static str| {
        move |screen: &terminal::Screen| {
            let mut rows = screen.lines.iter();
            let row = rows.find(|line| line.contains("near: route ram"));
            row.is_some_and(|row| row.split_whitespace().any(|cell| cell == limit))
        }
    };
    set_limit(&hosts, &near, "8M");
    top.wait_until("limit without a key", shows("8.0M"));
    top.press("p");
    top.wait_for("PAUSED");
    set_limit(&hosts, &near, "4M");
    // Five times the interval.
    thread::sleep(Duration::from_secs(1));
    top.wait_until("old limit", shows("8.0M"));
    top.press("p");
    top.wait_until("new limit", shows("4.0M"));
    top.press("q");
    assert_restored(top, 0);
}

#[test]
fn the_terminal_is_restored_after_each_way_to_end() {
    let hosts = Hosts::new();
    for end in ["key", "INT", "TERM", "HUP"] {
        let mut top = Terminal::start(&top(&hosts, &control(&hosts)), 24, 80);
        top.wait_for("no sessions and no tunnels here");
        assert!(!top.is_restored());
        match end {
            "key" => top.press("\x03"),
            signal => assert!(kill(top.child.id(), signal)),
        }
        assert_restored(top, 0);
    }
}

#[test]
fn a_session_in_doubt_is_first_and_says_how_to_settle_it() {
    let hosts = Hosts::new();
    let _tunnels = tunnels(&hosts);
    let state = State::Source(SourceRecord::Committing);
    let journal = Journal::open(&hosts.scratch.join("state")).unwrap();
    let mut session = SessionJournal::create(&journal, journal::record(1, state)).unwrap();
    session.write(state).unwrap();
    drop(session);
    let mut top = Terminal::start(&top(&hosts, &control(&hosts)), 24, 80);
    let screen = top.wait_for("`dunlin resolve 01010101`");
    assert!(
        screen.lines[2].starts_with(">! VM web to host-b.example"),
        "{screen:?}"
    );
    assert!(screen.lines[2].contains("in doubt"), "{screen:?}");
    top.press("c");
    top.wait_for("too late to cancel");
    top.press("q");
    assert_restored(top, 0);
}

/// Waits until the screen shows that the limit of this row has changed, not only that it is changing.
fn wait_for_limit(top: &Terminal, row: &str) {
    let text = format!("limit of {row}");
    top.wait_until(&text, |screen| {
        screen.has(&text) && !screen.has("changing the limit")
    });
}

#[test]
fn i2_a_migration_cancelled_from_the_screen_leaves_the_vm_at_the_source() {
    let hosts = Hosts::new();
    let guest = "--guest process --memory 64M --working-set 16M --dirty-rate 2000";
    let here = hosts.run("1", guest);
    let there = hosts.receive("b", "2", "");
    let migrate = hosts.begin(&here, &there, "a", "--rate 1M --peer b.test");
    migrate.wait_for("progress");
    let mut top = Terminal::start(&top(&hosts, &here.control), 24, 80);
    top.select("VM vm to ");
    top.wait_for("pre-copy 1");
    top.press("r2M\r");
    wait_for_limit(&top, "VM vm to ");
    assert_eq!(hosts.status(&here)["migration"]["rate"], 2 * MIB);
    top.press("\r");
    // A lane's rate is computed from two readings, so it appears after the second one.
    top.wait_until("rate of a lane", |screen| {
        let lanes = screen
            .lines
            .iter()
            .map(|line| line.split_whitespace().collect());
        let mut lanes = lanes.filter(|words: &Vec<&str>| words.get(1) == Some(&"sent"));
        // Number, direction, bar, share, %, rate and bytes.
        lanes.any(|words| words.len() == 7)
    });
    top.press("c");
    top.wait_for("keeps running here, at the source");
    top.press("n");
    top.wait_for("nothing was cancelled");
    assert_eq!(hosts.status(&here)["migration"]["phase"], "pre-copy");
    top.press("c");
    top.wait_for("Cancel the migration");
    top.press("y");
    top.wait_for("cancelled. VM vm keeps running here");
    let (code, last) = migrate.ended();
    support::assert_at_source(&last, "cancelled", last["at_fault"].as_str().unwrap());
    assert_eq!(code, 4);
    hosts.assert_runs(&here);
    assert!(kill(top.child.id(), "TERM"));
    assert_restored(top, 0);
}

#[test]
fn without_a_terminal_top_fails_and_names_status() {
    let hosts = Hosts::new();
    let done = finish(top(&hosts, &control(&hosts))).expect(2);
    assert!(done.err.contains("`dunlin status --json`"), "{done:?}");
    assert_eq!(done.out, "");
    // Standard input and standard error are a terminal here, but standard output is not.
    let command = top(&hosts, &control(&hosts));
    let mut terminal = Terminal::start_with(&command, 24, 80, |command| {
        command.stdout(Stdio::null());
    });
    assert_eq!(exit_code(&mut terminal.child), Some(2));
    assert!(terminal.is_restored());
}

/// The command `dunlin cancel` for the process `here`. The command waits for the process's answer,
/// and fails after that, because the process migrates no VM.
fn slow_cancel(hosts: &Hosts, here: &Process) -> Command {
    let mut command = words("cancel --vm");
    command.arg(here.control.join("vm.sock"));
    command.arg("--state-dir").arg(hosts.scratch.join("state"));
    command
}

#[test]
fn a_command_that_waits_shows_it_on_a_terminal_only() {
    let hosts = Hosts::new();
    let here = hosts.run("1", "--guest process --memory 64M --dirty-rate 2000");
    // A stopped process does not answer.
    here.signal("STOP");
    let command = slow_cancel(&hosts, &here);
    let mut json = slow_cancel(&hosts, &here);
    json.arg("--json");
    let shown = Terminal::start(&command, 24, 80);
    let silent = Terminal::start(&json, 24, 80);
    let piped = Terminal::start_with(&command, 24, 80, |command| {
        command.stderr(Stdio::null());
    });
    shown.wait_for("cancelling (3 s)");
    here.signal("CONT");
    for (mut terminal, shows) in [(shown, true), (silent, false), (piped, false)] {
        assert_eq!(exit_code(&mut terminal.child), Some(1));
        // The line is cleared at the end.
        let cleared = |screen: &terminal::Screen| !screen.has("cancelling");
        let screen = terminal.wait_until("cleared line", cleared);
        assert_eq!(screen.output.contains("cancelling"), shows, "{screen:?}");
    }
}

/// A peer that never answers delays `dunlin doctor`.
#[test]
fn doctor_shows_what_it_waits_for() {
    let hosts = Hosts::new();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = silent.local_addr().unwrap().to_string();
    let config = hosts.scratch.join("asking.toml");
    fs::write(&config, near_config(&hosts, &to, "ram", "in")).unwrap();
    let mut command = words(&format!("doctor --peer {to} --config"));
    command.arg(&config);
    let mut terminal = Terminal::start(&command, 200, 100);
    terminal.wait_for(&format!("examining this host, {to} (2 s)"));
    // When the listener is closed, the kernel resets the connection of `dunlin doctor`.
    drop(silent);
    assert_eq!(exit_code(&mut terminal.child), Some(1));
    let cleared = |screen: &terminal::Screen| screen.has("peer.path") && !screen.has("examining");
    terminal.wait_until("the verdicts alone", cleared);
}
