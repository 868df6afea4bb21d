//! Interoperation with the command of an earlier commit, in both directions: migrations, tunnels,
//! hand-offs, and the journals that the other command wrote. `make soak` builds the earlier command
//! (`tools/previous`).
#![allow(clippy::unwrap_used)]

#[path = "support/accept.rs"]
mod accept;
#[path = "support/journal.rs"]
mod journal;
#[path = "support/pool.rs"]
mod pool;
#[path = "support/proxy.rs"]
mod proxy;
mod support;
#[path = "support/tunnel.rs"]
mod tunnel;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use dunlin::engine::journal::{Journal, Record, SessionJournal, State};
use dunlin_test_base::kvm;
use dunlin_test_base::sockets::{TIMEOUT, accepted};
use journal::record;
use proxy::Proxy;
use serde_json::Value;
use support::{Done, Hosts, Process, dunlin, finish, with_binary, words};
use tunnel::{Tunnel, connect, exchange, far_config, listen, near_config};

const GUEST: &str = "--memory 64M --working-set 8M --dirty-rate 2000";

/// The current and the earlier command in both orders, as source and destination, or as the side
/// that connects and the side that accepts.
fn pairs() -> Option<[(PathBuf, PathBuf); 2]> {
    let Some(previous) = std::env::var_os("DUNLIN_PREVIOUS") else {
        assert!(
            std::env::var_os("DUNLIN_SOAK").is_none_or(|soak| soak != "1"),
            "the soak needs the previous version's `dunlin`: DUNLIN_PREVIOUS=$(tools/previous)"
        );
        println!("left to the soak, which builds the previous version's `dunlin`");
        return None;
    };
    let (previous, today) = (
        PathBuf::from(previous),
        PathBuf::from(env!("CARGO_BIN_EXE_dunlin")),
    );
    Some([(previous.clone(), today.clone()), (today, previous)])
}

fn migrate(from: &Path, hosts: &Hosts, source: &Process, to: &Process, flags: &str) -> Value {
    let flags = format!("--json --verify --lanes 2 --peer b.test {flags}");
    let done = with_binary(from, || finish(hosts.migrate(source, to, "a", &flags)));
    done.expect(0).last()
}

#[test]
fn i3_a_vm_moves_over_tls_and_over_plain_lanes() {
    let Some(pairs) = pairs() else { return };
    let Some(_turn) = kvm() else { return };
    for (from, to) in &pairs {
        for (security, source_flags, destination_flags) in [
            ("tls", "", "--peer a.test"),
            ("plain", "--security plain", "--peer a.test --allow-plain"),
        ] {
            let hosts = Hosts::new();
            let source = with_binary(from, || hosts.run("1", GUEST));
            let destination = with_binary(to, || hosts.receive("b", "2", destination_flags));
            let moved = migrate(from, &hosts, &source, &destination, source_flags);
            assert_eq!(moved["event"], "moved");
            assert_eq!(moved["security"], security);
            assert_eq!(moved["digests_equal"], true);
            assert_eq!(moved["lanes"].as_array().unwrap().len(), 2);
            with_binary(to, || hosts.assert_runs(&destination));
            // The source has released the VM, so no journal has the session any more.
            for binary in [from, to] {
                assert_eq!(ask(binary, &hosts, "status --json").expect(0).out, "");
            }
        }
    }
}

#[test]
fn i6_plain_lanes_are_refused_by_a_destination_that_does_not_allow_them() {
    let Some(pairs) = pairs() else { return };
    let Some(_turn) = kvm() else { return };
    for (from, to) in &pairs {
        let hosts = Hosts::new();
        let source = with_binary(from, || hosts.run("1", GUEST));
        let destination = with_binary(to, || hosts.receive("b", "2", "--peer a.test"));
        let flags = "--json --security plain --peer b.test";
        let refused = with_binary(from, || {
            finish(hosts.migrate(&source, &destination, "a", flags))
        });
        let failed = refused.expect(1).last();
        assert_eq!(failed["fault"], "security-not-agreed");
        with_binary(from, || hosts.assert_runs(&source));
        let moved = migrate(from, &hosts, &source, &destination, "");
        assert_eq!(moved["security"], "tls");
        with_binary(to, || hosts.assert_runs(&destination));
    }
}

/// Runs the command `binary` with the arguments in `line` for the sessions of a host.
fn ask(binary: &Path, hosts: &Hosts, line: &str) -> Done {
    with_binary(binary, || {
        let mut command = words(line);
        command.arg("--state-dir").arg(hosts.scratch.join("state"));
        if line.starts_with("status") {
            // Exclude this host's own VMs and tunnels from the status.
            command.arg("--control").arg(hosts.scratch.join("none"));
        }
        finish(command)
    })
}

/// The sessions of a host that the command `binary` lists.
fn listed(binary: &Path, hosts: &Hosts) -> Vec<Value> {
    ask(binary, hosts, "status --json").expect(0).lines()
}

/// The only session in which the host has this role.
fn one(sessions: &[Value], role: &str) -> Value {
    let found = sessions.iter().find(|line| line["role"] == role);
    let found = found.unwrap_or_else(|| panic!("no {role} in {sessions:?}"));
    found.clone()
}

/// The fields of a listed session that come from its record.
fn read(session: &Value) -> [&Value; 8] {
    [
        "session",
        "role",
        "phase",
        "attempt",
        "process",
        "resolvable",
        "vm",
        "peer",
    ]
    .map(|key| &session[key])
}

/// Asserts that both commands list the same sessions of a host, and returns the list of the current
/// command.
fn same(pair: &(PathBuf, PathBuf), hosts: &Hosts) -> Vec<Value> {
    let [mut one, mut other] = [&pair.0, &pair.1].map(|binary| listed(binary, hosts));
    for sessions in [&mut one, &mut other] {
        sessions.sort_by_key(|line| format!("{} {}", line["session"], line["role"]));
    }
    let all = |sessions: &[Value]| -> Vec<Value> {
        let read = |session| Value::from_iter(read(session).map(Clone::clone));
        sessions.iter().map(read).collect()
    };
    assert_eq!(all(&one), all(&other));
    if is_today(&pair.0) { one } else { other }
}

#[test]
fn each_command_reads_the_other_ones_journals_in_pre_copy() {
    let Some(pairs) = pairs() else { return };
    let Some(_turn) = kvm() else { return };
    for pair in &pairs {
        let (from, to) = pair;
        let hosts = Hosts::new();
        let source = with_binary(from, || hosts.run("1", GUEST));
        let destination = with_binary(to, || hosts.receive("b", "2", ""));
        let flags = "--rate 1M --peer b.test";
        let client = with_binary(from, || hosts.begin(&source, &destination, "a", flags));
        client.wait_for("progress");
        let sessions = same(pair, &hosts);
        assert_eq!(one(&sessions, "source")["process"], "lives");
        source.kill();
        destination.kill();
        let sessions = same(pair, &hosts);
        assert_eq!(sessions.len(), 2);
        let [source, destination] = ["source", "destination"].map(|role| one(&sessions, role));
        assert_eq!(source["phase"], "migrating");
        assert_eq!(destination["phase"], "prepared");
        for session in [&source, &destination] {
            assert_eq!(session["process"], "died");
            assert_eq!(session["resolvable"], false);
        }
    }
}

/// Tests that the earlier command reads every kind of record that the current code writes. The
/// other tests read records that the earlier command has written.
#[test]
fn the_earlier_command_reads_every_record() {
    use dunlin::engine::journal::{DestinationRecord as Arriving, SourceRecord as Leaving};
    let Some([pair, _]) = pairs() else { return };
    let hosts = Hosts::new();
    let journal = Journal::open(&hosts.scratch.join("state")).unwrap();
    let states = [
        State::Source(Leaving::Migrating),
        State::Source(Leaving::Committing),
        State::Source(Leaving::Kept),
        State::Source(Leaving::Released),
        State::Source(Leaving::RanThenDied),
        State::Source(Leaving::RunHere),
        State::Source(Leaving::GivenUp),
        State::Destination(Arriving::Prepared),
        State::Destination(Arriving::Running),
        State::Destination(Arriving::Aborted),
        State::Destination(Arriving::MovedOn),
    ];
    for (number, state) in (1..).zip(states) {
        let record = Record {
            attempt: 2,
            epoch: 3,
            ..record(number, state)
        };
        SessionJournal::create(&journal, record)
            .unwrap()
            .write(state)
            .unwrap();
    }
    let sessions = same(&pair, &hosts);
    assert_eq!(sessions.len(), states.len());
    let phases = sessions.iter().map(|line| line["phase"].to_string());
    let different: BTreeSet<String> = phases.collect();
    assert_eq!(different.len(), states.len(), "{different:?}");
}

/// Kills a process and waits until it is gone.
fn end(process: &Process) {
    process.signal("KILL");
    while support::lives(process.pid()) {
        thread::yield_now();
    }
}

/// What the destination recorded last, when the source came to be in doubt.
#[derive(Clone, Copy)]
enum Recorded {
    /// *prepared*: *commit* was lost, and the destination's process was killed.
    Prepared,
    /// *aborted*: *commit* was lost, and the destination's process has discarded the VM.
    Aborted,
    /// *running*: the destination's answer was lost.
    Running,
}

/// A VM in doubt. The source's process is alive.
struct Doubt {
    hosts: Hosts,
    source: Process,
    destination: Process,
    session: String,
    proxy: Proxy,
    /// The destination's address, to which the proxy connects.
    direct: String,
}

impl Doubt {
    fn new(pair: &(PathBuf, PathBuf), recorded: Recorded) -> Self {
        let (from, to) = pair;
        let hosts = Hosts::new();
        let source = with_binary(from, || hosts.run("1", GUEST));
        let mut destination = with_binary(to, || hosts.receive("b", "2", ""));
        let (proxy, direct) = (Proxy::to(&destination.address), destination.address.clone());
        destination.address.clone_from(&proxy.address);
        let flags = "--peer b.test --downtime-limit 20s --doubt-limit 1s";
        let client = with_binary(from, || hosts.begin(&source, &destination, "a", flags));
        client.wait_for("paused");
        // The source commits only after it has received *ready*. Until that time, delay the answers
        // or messages by only a few seconds.
        let held = Duration::from_secs(3);
        match recorded {
            Recorded::Running => proxy.hold(held),
            _ => proxy.hold_messages(held),
        }
        client.wait_for("committing");
        if let Recorded::Running = recorded {
            // Delay the answer for longer than the test takes to read the journal.
            proxy.hold(Duration::from_secs(30));
        }
        let phase = match recorded {
            Recorded::Prepared => "prepared",
            Recorded::Aborted => "aborted",
            Recorded::Running => "running",
        };
        if phase == "prepared" {
            // Kill the destination before the delayed messages arrive.
            end(&destination);
        }
        if phase != "running" {
            proxy.cut_messages();
            proxy.cut();
        }
        let is_recorded = |line: &Value| line["phase"] == phase;
        let until = Instant::now() + TIMEOUT;
        while !listed(from, &hosts).iter().any(is_recorded) {
            assert!(Instant::now() < until, "the destination is not {phase}");
        }
        proxy.cut();
        let (code, last) = client.ended();
        assert_eq!((code, &last["vm"]), (3, &Value::from("in-doubt")));
        let sessions = same(pair, &hosts);
        let listed = one(&sessions, "source");
        assert_eq!(listed["phase"], "committing");
        assert_eq!(listed["process"], "lives");
        assert_eq!(listed["resolvable"], true);
        assert_eq!(one(&sessions, "destination")["phase"], phase);
        Self {
            session: listed["session"].as_str().unwrap().to_owned(),
            hosts,
            source,
            destination,
            proxy,
            direct,
        }
    }

    /// Runs `dunlin resolve` with the command `by`.
    fn resolve(&self, by: &Path, decision: &str) -> Done {
        let line = format!("resolve {} {decision}", self.session);
        ask(by, &self.hosts, &line)
    }

    /// Runs `resolve` with an identity and without a decision, so that it queries the destination.
    fn resolve_by_asking(&self, by: &Path) -> Done {
        let identity = self.hosts.scratch.join("a");
        let line = format!(
            "--doubt-limit 5s --peer b.test --identity {}",
            identity.display()
        );
        self.resolve(by, &line)
    }

    /// Kills the destination's process, and starts `vm receive` with the binary `by` at the same
    /// address.
    fn restart(self, by: &Path) -> Self {
        let Self {
            hosts,
            source,
            destination,
            session,
            proxy,
            direct,
        } = self;
        destination.kill();
        let destination = with_binary(by, || {
            let mut command = words(&format!("vm receive --listen {direct}"));
            command.arg("--identity").arg(hosts.scratch.join("b"));
            Process::start(command, &hosts.scratch.join("2"))
        });
        destination.wait_for("listening");
        proxy.mend();
        Self {
            hosts,
            source,
            destination,
            session,
            proxy,
            direct,
        }
    }

    /// Asserts that the source's record is removed: neither command lists it.
    fn assert_settled(&self, pair: &(PathBuf, PathBuf)) {
        let left = same(pair, &self.hosts);
        assert!(
            !left.iter().any(|line| line["role"] == "source"),
            "{left:?}"
        );
    }
}

#[test]
fn i1_i2_an_operator_resolves_a_doubt_by_the_other_command() {
    let Some(pairs) = pairs() else { return };
    let Some(_turn) = kvm() else { return };
    for pair in &pairs {
        let (from, to) = pair;
        let doubt = Doubt::new(pair, Recorded::Prepared);
        // The command passes the decision to the process that has the VM.
        doubt.resolve(to, "--run-here").expect(0);
        with_binary(from, || doubt.hosts.assert_runs(&doubt.source));
        doubt.assert_settled(pair);

        let doubt = Doubt::new(pair, Recorded::Running);
        doubt.resolve(to, "--destroy").expect(0);
        with_binary(to, || doubt.hosts.assert_runs(&doubt.destination));
        doubt.assert_settled(pair);
        doubt.source.code();
    }
}

#[test]
fn i1_i2_a_destination_answers_the_other_command() {
    let Some(pairs) = pairs() else { return };
    let Some(_turn) = kvm() else { return };
    for pair in &pairs {
        let (from, to) = pair;
        // The process at the destination, which runs the VM, answers `resolve`.
        let doubt = Doubt::new(pair, Recorded::Running);
        doubt.proxy.mend();
        doubt.resolve_by_asking(to).expect(0);
        with_binary(to, || doubt.hosts.assert_runs(&doubt.destination));
        doubt.assert_settled(pair);
        doubt.source.code();

        // The process at the destination, which has aborted, answers `resolve`.
        let doubt = Doubt::new(pair, Recorded::Aborted);
        doubt.proxy.mend();
        doubt.resolve_by_asking(to).expect(0);
        with_binary(from, || doubt.hosts.assert_runs(&doubt.source));
        doubt.assert_settled(pair);

        // A process of the version `from` replaces the destination's process, which had the version
        // `to`. It answers `resolve` from the record that the earlier process wrote.
        for recorded in [Recorded::Prepared, Recorded::Aborted] {
            let doubt = Doubt::new(pair, recorded).restart(from);
            doubt.resolve_by_asking(to).expect(0);
            with_binary(from, || doubt.hosts.assert_runs(&doubt.source));
            doubt.assert_settled(pair);
        }
        let doubt = Doubt::new(pair, Recorded::Running).restart(from);
        doubt.resolve_by_asking(to).expect(2);
        assert_eq!(
            one(&same(pair, &doubt.hosts), "source")["phase"],
            "ran, then died"
        );
        doubt.resolve(to, "--run-here").expect(0);
        with_binary(from, || doubt.hosts.assert_runs(&doubt.source));
        doubt.assert_settled(pair);
    }
}

#[test]
fn i1_i2_the_doubt_of_a_source_that_has_died_is_taken_over_by_the_other_command() {
    let Some(pairs) = pairs() else { return };
    let Some(_turn) = kvm() else { return };
    for pair in &pairs {
        let (from, to) = pair;
        for (recorded, code) in [(Recorded::Prepared, 0), (Recorded::Running, 2)] {
            let doubt = Doubt::new(pair, recorded).restart(from);
            end(&doubt.source);
            doubt.resolve_by_asking(to).expect(code);
            if code == 2 {
                let source = one(&same(pair, &doubt.hosts), "source");
                assert_eq!(source["process"], "died");
                doubt.resolve(from, "--destroy").expect(0);
            }
            doubt.assert_settled(pair);
        }
    }
}

#[test]
fn a_tunnel_stripes_channels_to_the_other() {
    let Some(pairs) = pairs() else { return };
    for (near, far) in &pairs {
        let hosts = Hosts::new();
        let target = listen(hosts.scratch.join("out"));
        let far = with_binary(far, || {
            Tunnel::start(&hosts, "far", &far_config(&hosts, "a.test"))
        });
        let config = near_config(&hosts, &far.address, "ram", "in");
        let near = with_binary(near, || Tunnel::start(&hosts, "near", &config));
        let stream = connect(hosts.scratch.join("in"));
        exchange(stream, accepted(&target));
        near.wait_for("route ram: channel 0 is closed");
    }
}

#[test]
fn a_tunnel_relays_channels_to_the_other() {
    let Some(pairs) = pairs() else { return };
    for (near, far) in &pairs {
        let hosts = Hosts::new();
        let target = listen(hosts.scratch.join("out"));
        let port = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = port.local_addr().unwrap();
        drop(port);
        let path = |name: &str| hosts.scratch.join(name).display().to_string();
        let of = |identity: &str, route: &str| {
            format!(
                "listen = \"127.0.0.1:0\"\nidentity = {:?}\n[route.ram]\nmode = \"relay\"\n{route}",
                path(identity)
            )
        };
        let config = of(
            "b",
            &format!(
                "tls_listen = \"{at}\"\ntarget = \"unix:{}\"\nallow = [\"a.test\"]\n",
                path("out")
            ),
        );
        let _far = with_binary(far, || Tunnel::start(&hosts, "far", &config));
        let config = of(
            "a",
            &format!(
                "listen = \"unix:{}\"\nto = \"{at}\"\npeers = [\"b.test\"]\n",
                path("in")
            ),
        );
        let near = with_binary(near, || Tunnel::start(&hosts, "near", &config));
        near.wait_for("route ram listens on");
        let stream = connect(hosts.scratch.join("in"));
        exchange(stream, accepted(&target));
    }
}

/// Without kernel TLS, the current command completes its handshake and then fails with one line.
/// The earlier command can instead handle TLS for its end of the connection in a process.
#[test]
fn a_hand_off_connects_to_the_other() {
    let Some(pairs) = pairs() else { return };
    let has_kernel_tls = support::kernel_has_tls();
    for (connecting, accepting) in &pairs {
        let of = |binary: &Path| match has_kernel_tls || is_today(binary) {
            true => "",
            false => "--fallback process",
        };
        let scene = accept::Scene::new();
        let accept = with_binary(accepting, || scene.start(of(accepting)));
        let (host, port) = accept.address.rsplit_once(':').unwrap();
        let command = with_binary(connecting, || {
            let mut command = dunlin(["handoff", "connect", "--host", host, "--port", port]);
            command
                .args(["--sni", "own.test", "--peer", "own.test"])
                .args(of(connecting).split_whitespace())
                .args(["--ciphers", "ECDHE-ECDSA-AES256-GCM-SHA384"])
                .args(["--curves", "P-256", "--cert-bundle-file"])
                .arg(scene.path("own").join("ca-cert.pem"));
            command
        });
        let (done, mut sockets) = pool::call(command);
        if !has_kernel_tls && is_today(connecting) {
            assert_eq!((done.code, sockets.len()), (1, 0), "{done:?}");
            assert_eq!(done.fault(), "kernel", "{done:?}");
            let handed = scene.take();
            assert_eq!(handed.line["sni"], "own.test");
            continue;
        }
        assert_eq!((done.code, sockets.len()), (0, 1), "{done:?}");
        // The connecting command has passed this socket to the test. Without kernel TLS, it is the
        // earlier command, and a process of that command handles TLS for this socket.
        let mut near = File::from(sockets.pop().unwrap());
        if !has_kernel_tls {
            let why = accept.process.wait_for("for own.test is refused");
            assert!(why.contains("this kernel has no TLS"), "{why}");
            assert_eq!(near.read(&mut [0]).unwrap(), 0);
            continue;
        }
        let handed = scene.take();
        assert_eq!(handed.line["sni"], "own.test");
        assert_eq!(handed.line["version"], "TLSv1.2");
        let mut far = handed.socket;
        near.write_all(b"there").unwrap();
        let mut said = [0; 5];
        far.read_exact(&mut said).unwrap();
        assert_eq!(&said, b"there");
        far.write_all(b"and back").unwrap();
        let mut said = [0; 8];
        near.read_exact(&mut said).unwrap();
        assert_eq!(&said, b"and back");
    }
}

fn is_today(binary: &Path) -> bool {
    binary == Path::new(env!("CARGO_BIN_EXE_dunlin"))
}

#[test]
fn the_earlier_command_is_another_one() {
    let Some([(previous, today), _]) = pairs() else {
        return;
    };
    assert_ne!(fs::read(previous).unwrap(), fs::read(today).unwrap());
}
