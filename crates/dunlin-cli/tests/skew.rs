//! The command of an earlier commit and today's work with each other, in both directions, and read
//! each other's journals. `make soak` builds the earlier one (`tools/previous`).
#![allow(clippy::unwrap_used)]

#[path = "support/accept.rs"]
mod accept;
mod handoff_support;
mod support;
#[path = "support/tunnel.rs"]
mod tunnel;
#[path = "support/way.rs"]
mod way;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use dunlin_test_base::kvm;
use serde_json::Value;
use support::{Done, Hosts, Process, dunlin, finish, with_binary, words};
use tunnel::{Tunnel, connect, far_config, listen, near_config, with_timeout};
use way::Way;

const GUEST: &str = "--memory 64M --working-set 8M --dirty-rate 2000";

/// The two commands in both orders, as source and destination, or as the side that connects and
/// the side that accepts.
fn pairs() -> Option<[(PathBuf, PathBuf); 2]> {
    let Some(previous) = std::env::var_os("DUNLIN_PREVIOUS") else {
        assert!(
            std::env::var_os("DUNLIN_SOAK").is_none_or(|soak| soak != "1"),
            "the soak needs the earlier command: DUNLIN_PREVIOUS=$(tools/previous)"
        );
        println!("left to the soak, which builds the earlier command");
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
            // The source has released it, so that neither side remembers the session.
            for binary in [from, to] {
                assert_eq!(ask(binary, &hosts, "status --json").expect(0).out, "");
            }
        }
    }
}

/// Asks about the sessions of a host with this command.
fn ask(binary: &Path, hosts: &Hosts, line: &str) -> Done {
    with_binary(binary, || {
        let mut command = words(line);
        command.arg("--state-dir").arg(hosts.scratch.join("state"));
        if line.starts_with("status") {
            // Not this machine's own VMs and tunnels.
            command.arg("--control").arg(hosts.scratch.join("none"));
        }
        finish(command)
    })
}

/// A VM of which the source does not know where it runs: the way there was cut at *commit*, and
/// the destination killed.
fn in_doubt(from: &Path, to: &Path) -> (Hosts, Process, Value, Way, String) {
    let hosts = Hosts::new();
    let source = with_binary(from, || hosts.run("1", GUEST));
    let mut destination = with_binary(to, || hosts.receive("b", "2", ""));
    let (way, led) = (Way::to(&destination.address), destination.address.clone());
    destination.address.clone_from(&way.address);
    let flags = "--peer b.test --doubt-limit 1s";
    let client = with_binary(from, || hosts.begin(&source, &destination, "a", flags));
    client.wait_for("paused");
    way.hold(Duration::from_millis(600));
    client.wait_for("committing");
    way.cut();
    destination.kill();
    assert_eq!(client.ended().0, 3);
    let listed = ask(to, &hosts, "status --json").expect(0);
    let session = listed
        .lines()
        .into_iter()
        .find(|line| line["role"] == "source");
    let session = session.unwrap_or_else(|| panic!("{listed:?}"));
    (hosts, source, session, way, led)
}

#[test]
fn i1_i2_either_reads_the_others_journal_and_resolves_its_doubt() {
    let Some(pairs) = pairs() else { return };
    let Some(_turn) = kvm() else { return };
    for (from, to) in &pairs {
        let (hosts, source, session, _way, _) = in_doubt(from, to);
        assert_eq!(session["phase"], "committing");
        assert_eq!(session["process"], "lives");
        assert_eq!(session["resolvable"], true);
        let session = session["session"].as_str().unwrap();
        // The other command asks the process that holds the VM.
        let line = format!("resolve {session} --run-here");
        ask(to, &hosts, &line).expect(0);
        with_binary(from, || hosts.assert_runs(&source));
    }
}

#[test]
fn i1_i2_a_restarted_destination_answers_for_the_record_of_the_other() {
    let Some(pairs) = pairs() else { return };
    let Some(_turn) = kvm() else { return };
    for (from, to) in &pairs {
        let (hosts, source, session, way, led) = in_doubt(from, to);
        source.kill();
        // It starts as the version of the source; the record is the other's.
        let again = with_binary(from, || {
            let mut command = words(&format!("vm receive --listen {led}"));
            command.arg("--identity").arg(hosts.scratch.join("b"));
            Process::start(command, &hosts.scratch.join("2"))
        });
        again.wait_for("listening");
        way.hold(Duration::ZERO);
        let session = session["session"].as_str().unwrap();
        let identity = hosts.scratch.join("a");
        let line = format!(
            "resolve {session} --doubt-limit 1s --peer b.test --identity {}",
            identity.display()
        );
        let settled = ask(to, &hosts, &line);
        // 0: it was killed before it had recorded that the VM runs there, and gave the VM back.
        // 2: after it, so that the operator decides.
        assert!([0, 2].contains(&settled.code), "{settled:?}");
        if settled.code == 2 {
            let line = format!("resolve {session} --destroy");
            ask(from, &hosts, &line).expect(0);
        }
        let left = ask(to, &hosts, "status --json").expect(0);
        let is_source = |line: &Value| line["role"] == "source";
        assert!(!left.lines().iter().any(is_source), "{left:?}");
    }
}

/// The connection at a tunnel's target; none comes where the two versions do not agree.
fn accepted(target: &UnixListener) -> UnixStream {
    target.set_nonblocking(true).unwrap();
    let (stream, _) = accept::until(|| target.accept());
    stream.set_nonblocking(false).unwrap();
    with_timeout(stream)
}

/// Sends bytes both ways and an end in each.
fn exchange(mut near: UnixStream, mut far: UnixStream) {
    let sent: Vec<u8> = (0..8_u32 << 20).map(|at| (at % 251) as u8).collect();
    let all = sent.clone();
    let mut out = near.try_clone().unwrap();
    let sender = thread::spawn(move || {
        out.write_all(&all).unwrap();
        out.shutdown(Shutdown::Write).unwrap();
    });
    let mut came = Vec::new();
    far.read_to_end(&mut came).unwrap();
    sender.join().unwrap();
    assert!(came == sent);
    far.write_all(b"thanks").unwrap();
    drop(far);
    let mut answer = String::new();
    near.read_to_string(&mut answer).unwrap();
    assert_eq!(answer, "thanks");
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

/// Without kernel TLS a hand-off completes its handshake and then fails, with one line; the earlier
/// command can still carry its end in a process.
#[test]
fn a_hand_off_connects_to_the_other() {
    let Some(pairs) = pairs() else { return };
    let has_kernel_tls = accept::kernel_has_tls();
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
        let (done, mut sockets) = handoff_support::call(command);
        if !has_kernel_tls && is_today(connecting) {
            assert_eq!((done.code, sockets.len()), (1, 0), "{done:?}");
            assert!(done.err.contains("this kernel has no TLS"), "{done:?}");
            let handed = scene.take();
            assert_eq!(handed.line["sni"], "own.test");
            continue;
        }
        assert_eq!((done.code, sockets.len()), (0, 1), "{done:?}");
        // A socket of either kind, from the earlier command.
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
