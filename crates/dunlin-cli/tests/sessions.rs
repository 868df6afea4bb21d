//! `dunlin status`, `cancel` and `resolve`: a host's journal, and the operator's actions.
#![allow(clippy::unwrap_used)]

#[path = "support/journal.rs"]
mod journal;
#[path = "support/proxy.rs"]
mod proxy;
mod support;

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use dunlin::engine::journal::{
    DestinationRecord, Journal, Record, SessionJournal, SourceRecord, State,
};
use dunlin_test_base::kvm;
use proxy::Proxy;
use serde_json::Value;
use support::{Done, Hosts, Process, Scratch, finish, words};

const GUEST: &str = "--memory 64M --working-set 8M --dirty-rate 2000";

/// The directories of a host's journal and of its control sockets.
struct Memory {
    directory: PathBuf,
    control: PathBuf,
}

impl Memory {
    fn of(scratch: &Scratch) -> Self {
        Self {
            directory: scratch.join("state"),
            control: scratch.join("control"),
        }
    }

    /// Creates a session in `state`. The test keeps the session's journal open, as a live process
    /// would.
    fn hold(&self, number: u8, state: State, change: impl FnOnce(&mut Record)) -> SessionJournal {
        let mut made = journal::record(number, state);
        change(&mut made);
        let journal = Journal::open(&self.directory).unwrap();
        let mut session = SessionJournal::create(&journal, made).unwrap();
        session.write(state).unwrap();
        session
    }

    /// Creates a session in `state`, of a process that has died.
    fn leave(&self, number: u8, state: State) {
        drop(self.hold(number, state, |_| {}));
    }

    fn ask(&self, line: &str) -> Done {
        let mut command = words(line);
        command.arg("--state-dir").arg(&self.directory);
        if line.starts_with("status") {
            // Exclude this host's own VMs and tunnels from the status.
            command.arg("--control").arg(&self.control);
        }
        finish(command)
    }

    /// The sessions with this host as the source.
    fn sources(&self) -> Vec<String> {
        fs::read_dir(&self.directory)
            .unwrap()
            .filter_map(|entry| {
                let name = entry.unwrap().file_name().into_string().unwrap();
                name.strip_suffix(".source").map(str::to_owned)
            })
            .collect()
    }

    fn remembers(&self, number: u8) -> bool {
        let name = format!("{}.source", format!("{number:02x}").repeat(16));
        self.directory.join(name).exists()
    }
}

fn source(state: SourceRecord) -> State {
    State::Source(state)
}

#[test]
fn status_without_sessions_is_empty_and_creates_nothing() {
    let scratch = Scratch::new();
    let state = Memory::of(&scratch);
    let done = state.ask("status").expect(0);
    assert_eq!(done.out.lines().count(), 1, "{done:?}");
    let directory = state.directory.display().to_string();
    assert!(done.out.contains(&directory), "{done:?}");
    assert_eq!(state.ask("status --json").expect(0).out, "");
    assert!(!state.directory.exists());
}

#[test]
fn status_lists_both_sides_and_which_process_is_alive() {
    let scratch = Scratch::new();
    let state = Memory::of(&scratch);
    state.leave(1, source(SourceRecord::Committing));
    state.leave(2, State::Destination(DestinationRecord::Running));
    let _held = state.hold(3, source(SourceRecord::Migrating), |_| {});
    let done = state.ask("status --json").expect(0);
    let lines = done.lines();
    let of = |at: usize, key: &str| lines[at][key].clone();
    assert_eq!(lines.len(), 3);
    for (at, (role, phase, process, resolvable)) in [
        ("source", "committing", "died", true),
        ("destination", "running", "died", false),
        ("source", "migrating", "lives", false),
    ]
    .into_iter()
    .enumerate()
    {
        assert_eq!(of(at, "event"), "session");
        assert_eq!(of(at, "role"), role);
        assert_eq!(of(at, "phase"), phase);
        assert_eq!(of(at, "process"), process);
        assert_eq!(of(at, "resolvable"), resolvable);
        assert_eq!(of(at, "vm"), "web");
        assert_eq!(of(at, "peer"), "host-b.example:4444");
        assert_eq!(of(at, "live"), Value::Null);
    }
    assert_eq!(of(0, "session"), "01".repeat(16));
    let said = state.ask("status").expect(0).out;
    for part in [
        "VM web to host-b.example:4444",
        "VM web from host-b.example:4444",
        "committing",
        "migrating",
        "running",
        "may run at the destination",
        "`dunlin resolve 01010101`",
        "ran here until it died",
    ] {
        assert!(said.contains(part), "no {part:?} in {said}");
    }
    // A damaged journal is an error, but does not hide the other journals.
    let damaged = state.directory.join(format!("{}.source", "04".repeat(16)));
    fs::write(damaged, [0x5a; 8192]).unwrap();
    let done = state.ask("status --json").expect(1);
    assert_eq!(done.lines().len(), 4);
    let failed = done.last();
    assert_eq!(failed["event"], "failed");
    assert_eq!(failed["fault"], "journal");
    assert_eq!(failed["code"], 1);
    let done = state.ask("resolve 0404 --destroy --json").expect(1);
    assert_eq!(done.last()["fault"], "journal");
}

#[test]
fn starting_a_vm_that_may_run_elsewhere_warns() {
    let hosts = Hosts::new();
    let state = Memory::of(&hosts.scratch);
    for (number, record, resolvable) in [
        (1, SourceRecord::Kept, false),
        (2, SourceRecord::Committing, true),
    ] {
        state.leave(number, source(record));
        // Turn off the confinement: a confined process without --identities prints another warning.
        let run = words("vm run --name web --guest process --memory 64M --confine no");
        let process = Process::start(run, &hosts.scratch.join("1"));
        let mut said = process.wait_for_any(&["warning", "started"]);
        if resolvable {
            let text = said["text"].as_str().unwrap();
            for part in ["VM web to host-b.example:4444", "`dunlin resolve 02020202`"] {
                assert!(text.contains(part), "no {part:?} in {text}");
            }
            // The warning is about another VM with the same name, so this VM still starts.
            said = process.wait_for("started");
        }
        assert_eq!(said["event"], "started");
    }
}

#[test]
fn a_running_session_is_shown_live_and_cancelled_by_its_name() {
    let Some(_turn) = kvm() else { return };
    let hosts = Hosts::new();
    let state = Memory::of(&hosts.scratch);
    let from = hosts.run("1", GUEST);
    let to = hosts.receive("b", "2", "");
    let client = hosts.begin(&from, &to, "a", "--rate 1M --peer b.test");
    client.wait_for("progress");
    let socket = from.control.join("vm.sock").display().to_string();
    let record = |record: &mut Record| record.owner = socket;
    let held = state.hold(0xab, source(SourceRecord::Migrating), record);
    let line = session(&state, 0xab);
    assert_eq!(line["process"], "lives");
    assert_eq!(line["live"]["name"], "vm");
    assert_eq!(line["live"]["migration"]["phase"], "pre-copy");
    assert!(line["live"]["migration"]["progress"]["bytes_per_s"].is_u64());
    let said = state.ask("status").expect(0).out;
    assert!(said.contains(&to.address), "{said}");

    // A stopped process delays `status` only briefly.
    from.signal("STOP");
    assert_eq!(session(&state, 0xab)["live"], Value::Null);
    from.signal("CONT");

    let unknown = state.ask("cancel cdcd").expect(1);
    assert!(unknown.err.contains("cdcd"), "{unknown:?}");
    state.ask("cancel ABAB").expect(0);
    assert_eq!(client.ended().0, 4);
    hosts.assert_runs(&from);
    drop(held);
    let dead = state.ask("cancel abab").expect(1);
    assert!(dead.err.contains("has died"), "{dead:?}");
}

/// The line of `dunlin status` for one session.
fn session(state: &Memory, number: u8) -> Value {
    listed(state, &format!("{number:02x}").repeat(16))
}

fn listed(state: &Memory, name: &str) -> Value {
    let done = state.ask("status --json").expect(0);
    let found = done
        .lines()
        .into_iter()
        .find(|line| line["session"] == name);
    found.unwrap_or_else(|| panic!("no {name} in {}", done.out))
}

#[test]
fn resolve_refuses_if_nothing_is_in_doubt() {
    let scratch = Scratch::new();
    let state = Memory::of(&scratch);
    let all = [
        (source(SourceRecord::Migrating), "before commit"),
        (source(SourceRecord::Kept), "is here"),
        (source(SourceRecord::RunHere), "is here"),
        (source(SourceRecord::Released), "confirmed that it has"),
        (source(SourceRecord::GivenUp), "has given up its copy"),
        (
            State::Destination(DestinationRecord::Prepared),
            "`dunlin resolve` there",
        ),
        (
            State::Destination(DestinationRecord::Running),
            "`dunlin resolve` there",
        ),
        (
            State::Destination(DestinationRecord::Aborted),
            "`dunlin resolve` there",
        ),
    ];
    for (number, (record, says)) in (0x10..).zip(all) {
        state.leave(number, record);
        for decision in ["", "--run-here", "--destroy"] {
            let name = format!("{number:02x}").repeat(4);
            let done = state.ask(&format!("resolve {name} {decision}")).expect(1);
            assert!(done.err.contains(says), "{record:?}: {done:?}");
        }
    }
    let _held = state.hold(0x20, source(SourceRecord::Migrating), |_| {});
    let done = state.ask("resolve 2020 --run-here").expect(1);
    assert!(done.err.contains("dunlin cancel"), "{done:?}");
}

#[test]
fn i2_a_doubt_without_a_copy_can_only_be_settled() {
    let scratch = Scratch::new();
    let state = Memory::of(&scratch);
    state.leave(1, source(SourceRecord::Committing));
    state.leave(2, source(SourceRecord::RanThenDied));
    // Without a terminal the command prints the question and decides nothing.
    let asked = state.ask("resolve 0101").expect(2).err;
    for part in [
        "the destination host-b.example:4444 the command to run VM web",
        "never answered",
        "Does the VM run there?",
        "copy here died with its process",
        "--run-here or --destroy",
    ] {
        assert!(asked.contains(part), "no {part:?} in {asked}");
    }
    let asked = state.ask("resolve 0202").expect(2).err;
    assert!(asked.contains("it has died there"), "{asked}");
    assert!(asked.contains("What it did since then is lost"), "{asked}");
    let done = state.ask("resolve 0101 --run-here").expect(1);
    assert!(done.err.contains("died with the process"), "{done:?}");
    assert!(state.remembers(1));
    for number in [1, 2] {
        let line = format!(
            "resolve {} --destroy --json",
            format!("{number:02x}").repeat(16)
        );
        assert_eq!(state.ask(&line).expect(0).last()["event"], "done");
        assert!(!state.remembers(number));
    }
    state.ask("resolve 01 --destroy").expect(2);
    state.ask("resolve 0101 --destroy --run-here").expect(2);
}

/// Returns the source's process of a VM in doubt, and the name of its session. The VM is in doubt
/// because its destination was killed after *commit*.
fn in_doubt(hosts: &Hosts, state: &Memory) -> (Process, String) {
    let (from, doubted, _) = in_doubt_behind_a_proxy(hosts, state);
    (from, doubted)
}

/// Like [`in_doubt`], but also returns the proxy and the destination's address.
fn in_doubt_behind_a_proxy(hosts: &Hosts, state: &Memory) -> (Process, String, (Proxy, String)) {
    in_doubt_with(hosts, state, GUEST)
}

fn in_doubt_with(hosts: &Hosts, state: &Memory, guest: &str) -> (Process, String, (Proxy, String)) {
    let (from, proxy) = in_doubt_after(hosts, guest, |_| {});
    let sources: Vec<String> = state.sources();
    assert_eq!(sources.len(), 1, "{sources:?}");
    (from, sources[0].clone(), proxy)
}

/// Like [`in_doubt_with`], but calls `meanwhile` after the source has recorded its session.
fn in_doubt_after(
    hosts: &Hosts,
    guest: &str,
    meanwhile: impl FnOnce(&Process),
) -> (Process, (Proxy, String)) {
    let from = hosts.run("1", guest);
    let mut to = hosts.receive("b", "2", "");
    let (proxy, direct) = (Proxy::to(&to.address), to.address.clone());
    to.address.clone_from(&proxy.address);
    let client = hosts.begin(&from, &to, "a", "--peer b.test --doubt-limit 1s");
    client.wait_for("paused");
    proxy.hold(Duration::from_millis(600));
    meanwhile(&from);
    client.wait_for("committing");
    proxy.cut();
    to.kill();
    let (code, last) = client.ended();
    assert_eq!((code, &last["vm"]), (3, &Value::from("in-doubt")));
    assert_eq!(hosts.status(&from)["state"], "in-doubt");
    (from, (proxy, direct))
}

/// Two processes each have a VM in doubt, with the same UUID. When the migration of the second
/// process ends, that process briefly releases its own record, and then takes a record. It must not
/// take the record of the first process.
#[test]
fn i1_a_process_takes_no_record_of_another_process_with_the_same_uuid() {
    const OTHER: u8 = 7;
    let hosts = Hosts::new();
    let state = Memory::of(&hosts.scratch);
    let guest = format!("--guest process {GUEST}");
    let (from, _) = in_doubt_after(&hosts, &guest, |from| {
        let status = hosts.status(from);
        let uuid = u128::from_str_radix(status["uuid"].as_str().unwrap(), 16).unwrap();
        let other = source(SourceRecord::Committing);
        drop(state.hold(OTHER, other, |record| {
            record.vm_uuid = uuid.to_be_bytes();
            record.owner = hosts.scratch.join("elsewhere.sock").display().to_string();
            // This makes the session the newest one. A process looks at the newest sessions first.
            record.started_ms = u64::MAX;
        }));
    });
    let other = format!("{OTHER:02x}").repeat(16);
    assert_eq!(listed(&state, &other)["process"], "died");
    let own = state.sources().into_iter().find(|one| *one != other);
    let own = own.unwrap();
    assert_eq!(listed(&state, &own)["process"], "lives");
    state.ask(&format!("resolve {own} --run-here")).expect(0);
    assert_eq!(state.sources(), [other]);
    hosts.assert_runs(&from);
}

#[test]
fn a_refused_request_states_where_the_vm_is() {
    let hosts = Hosts::new();
    let state = Memory::of(&hosts.scratch);
    let guest = format!("--guest process {GUEST}");
    let other = hosts.run("3", &guest);
    let refused = |process: &Process, line: &str| {
        let mut command = words(&format!("{line} --json --control"));
        command.arg(&process.control);
        finish(command).expect(1).last()["vm"].clone()
    };
    assert_eq!(refused(&other, "vm set --name vm --rate none"), "at-source");
    let (from, _, _) = in_doubt_with(&hosts, &state, &guest);
    for line in ["vm ask --name vm resume", "cancel --vm vm"] {
        assert_eq!(refused(&from, line), "in-doubt", "{line}");
    }
}

#[test]
fn i2_a_restarted_destination_is_queried_before_the_operator() {
    let Some(_turn) = kvm() else { return };
    // `lives` is whether the source's process, which has a copy of the VM, is alive.
    for lives in [true, false] {
        let hosts = Hosts::new();
        let state = Memory::of(&hosts.scratch);
        let (from, doubted, (proxy, direct)) = in_doubt_behind_a_proxy(&hosts, &state);
        let resolve = |limit: &str| {
            let identity = hosts.scratch.join("a");
            let line = format!("resolve {doubted} --doubt-limit {limit} --peer b.test --identity");
            let mut command = words(&line);
            command
                .arg(identity)
                .arg("--state-dir")
                .arg(&state.directory);
            finish(command)
        };
        if !lives {
            from.signal("KILL");
            while support::lives(from.pid()) {
                std::thread::yield_now();
            }
        }
        // The destination does not answer yet, so the operator must decide.
        let asked = resolve("1s").expect(2);
        assert!(asked.err.contains("was asked again"), "{asked:?}");
        assert_eq!(state.sources().len(), 1);

        let mut again = words(&format!("vm receive --listen {direct}"));
        again.arg("--identity").arg(hosts.scratch.join("b"));
        let again = Process::start(again, &hosts.scratch.join("2"));
        again.wait_for("listening");
        proxy.hold(Duration::ZERO);
        let settled = resolve("1m");
        // The expected result depends on whether the destination was killed before or after it
        // recorded that it runs the VM.
        let (code, says) = match (state.sources().is_empty(), lives) {
            (true, true) => (0, "stays here"),
            (true, false) => (0, "died here with its process"),
            (false, _) => (2, "it has died there"),
        };
        let settled = settled.expect(code);
        let said = format!("{}{}", settled.out, settled.err);
        assert!(said.contains(says), "{said}");
        if code == 0 && lives {
            hosts.assert_runs(&from);
        }
    }
}

#[test]
fn a_session_is_cancelled_by_its_name_at_the_destination() {
    let Some(_turn) = kvm() else { return };
    let hosts = Hosts::new();
    // Use separate journals, as on two hosts.
    let there = Memory {
        directory: hosts.scratch.join("there"),
        control: hosts.scratch.join("2"),
    };
    let from = hosts.run("1", GUEST);
    let mut receive = words("vm receive --listen 127.0.0.1:0");
    receive.arg("--identity").arg(hosts.scratch.join("b"));
    receive.arg("--control").arg(hosts.scratch.join("2"));
    receive.arg("--state-dir").arg(&there.directory);
    let mut to = Process::follow(receive, &hosts.scratch.join("2"));
    let listening = to.wait_for("listening");
    to.address = listening["address"].as_str().unwrap().to_owned();
    let client = hosts.begin(&from, &to, "a", "--rate 1M --peer b.test");
    client.wait_for("progress");
    let listed = there.ask("status --json").expect(0).last();
    let socket = hosts.scratch.join("2").join("vm.sock");
    assert_eq!(listed["owner"], socket.display().to_string());
    assert_eq!(listed["live"]["state"], "arriving");
    let session = listed["session"].as_str().unwrap();
    there.ask(&format!("cancel {session}")).expect(0);
    assert_eq!(client.ended().0, 4);
    hosts.assert_runs(&from);
    to.wait_for("rejected");
}

#[test]
fn i1_i2_a_vm_in_doubt_is_kept_paused_until_the_operator_runs_it_here() {
    let Some(_turn) = kvm() else { return };
    let hosts = Hosts::new();
    let state = Memory::of(&hosts.scratch);
    let (from, doubted) = in_doubt(&hosts, &state);
    let listed = listed(&state, &doubted);
    assert_eq!(listed["process"], "lives");
    assert_eq!(listed["live"]["state"], "in-doubt");
    // Commands that would change the VM are rejected, and the first signal does not end the
    // process.
    for what in ["resume", "pause", "power-off"] {
        hosts.ask(&from, what).expect(1);
        assert_eq!(hosts.status(&from)["state"], "in-doubt", "{what}");
    }
    let next = hosts.receive("b", "3", "");
    finish(hosts.migrate(&from, &next, "a", "--peer b.test")).expect(1);
    hosts.cancel(&from).expect(1);
    assert_eq!(hosts.status(&from)["state"], "in-doubt");
    from.signal("TERM");
    let warning = from.wait_for("warning");
    let text = warning["text"].as_str().unwrap();
    assert!(text.contains("`dunlin resolve`"), "{text}");

    let asked = state.ask(&format!("resolve {doubted}")).expect(2).err;
    assert!(asked.contains("A paused copy is here"), "{asked}");
    let line = format!("resolve {doubted} --run-here");
    state.ask(&line).expect(0);
    assert!(state.sources().is_empty());
    hosts.assert_runs(&from);
    let flags = "--json --verify --peer b.test";
    let done = finish(hosts.migrate(&from, &next, "a", flags)).expect(0);
    assert_eq!(done.last()["digests_equal"], true);
    hosts.assert_runs(&next);
}

#[test]
fn the_process_of_a_vm_in_doubt_ends_when_the_operator_destroys_the_vm() {
    let Some(_turn) = kvm() else { return };
    let hosts = Hosts::new();
    let state = Memory::of(&hosts.scratch);
    let (from, doubted) = in_doubt(&hosts, &state);
    // The operator answers the question at a terminal, which script(1) provides.
    let mut resolve = words(&format!("resolve {doubted} --state-dir"));
    resolve.arg(&state.directory);
    let line = std::iter::once(resolve.get_program())
        .chain(resolve.get_args())
        .map(|word| word.to_str().unwrap())
        .collect::<Vec<_>>()
        .join(" ");
    let at_terminal = |answer: &str| {
        let mut script = Command::new("sh");
        let say = format!("echo {answer} | script -q -e -c '{line}' /dev/null");
        script.args(["-c", &say]);
        finish(script)
    };
    at_terminal("yes").expect(1);
    assert_eq!(state.sources().len(), 1);
    let done = at_terminal("destroy").expect(0);
    assert!(done.out.contains("Does the VM run there?"), "{done:?}");
    let (code, last) = from.ended();
    assert_eq!((code, &last["state"]), (0, &Value::from("moved")));
    assert!(state.sources().is_empty());
}
