//! `dunlin tunnel`: two processes, with plain sockets instead of hypervisors.
#![allow(clippy::unwrap_used)]

mod support;
#[path = "support/tunnel.rs"]
mod tunnel;

use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use dunlin_test_base::sockets::{ReadOnce as _, TIMEOUT, accepted};
use support::{Hosts, finish, words};
use tunnel::{Scene, Tunnel, connect, exchange, far_config, listen, near_config};

#[test]
fn two_processes_carry_bytes_both_ways_and_ends() {
    let scene = Scene::new();
    let (near, far) = scene.channel();
    exchange(near, far);
    scene.near.wait_for("route ram: channel 0 is closed");
}

/// One line of the log says where TLS records are sealed. With the setting `auto` the result
/// depends on the host.
#[test]
fn the_log_states_what_seals_records_and_the_configuration_applies() {
    let scene = Scene::new();
    let said = [&scene.near, &scene.far].map(|tunnel| tunnel.wait_for("TLS records are sealed"));
    let text = said.each_ref().map(|line| line.split_once(' ').unwrap().1);
    assert_eq!(text[0], text[1]);
    let in_kernel = said[0].contains("in the kernel");
    assert!(
        in_kernel || said[0].contains("in this process: "),
        "{}",
        said[0]
    );

    let of = |offload: &str| {
        let first = format!("tls_offload = {offload:?}\n");
        first + &far_config(&scene.hosts, "a.test")
    };
    let process = Tunnel::start(&scene.hosts, "process", &of("process"));
    let line = process.wait_for("TLS records are sealed");
    assert!(line.contains("in this process: as configured"), "{line}");
    let file = scene.hosts.scratch.join("kernel.toml");
    fs::write(&file, of("kernel")).unwrap();
    let mut command = words("tunnel run --config");
    command
        .arg(&file)
        .arg("--control")
        .arg(tunnel::control(&scene.hosts));
    if in_kernel {
        let kernel = Tunnel::follow(command, file);
        kernel.wait_for("TLS records are sealed in the kernel");
    } else {
        let done = finish(command).expect(1);
        assert!(done.err.contains("this kernel"), "{}", done.err);
    }
}

#[test]
fn a_peer_that_the_route_does_not_allow_is_refused_with_a_reason() {
    let hosts = Hosts::new();
    let _target = listen(hosts.scratch.join("out"));
    // The route `other` admits the peer to the tunnel. The route that the client uses does not.
    let config = far_config(&hosts, "c.test")
        + "[route.other]\ntarget = \"tcp:127.0.0.1:9\"\nallow = [\"a.test\"]\n";
    let far = Tunnel::start(&hosts, "far", &config);
    let near = Tunnel::start(
        &hosts,
        "near",
        &near_config(&hosts, &far.address, "ram", "in"),
    );
    let mut stream = connect(hosts.scratch.join("in"));
    assert_eq!(stream.read_once(&mut [0]).unwrap(), 0);
    let why = near.wait_for("was refused");
    assert!(why.contains("unauthorised") && why.contains("ram"), "{why}");
}

#[test]
fn sigterm_lets_channels_end_and_accepts_no_more() {
    let scene = Scene::new();
    let (mut near, mut far) = scene.channel();
    near.write_all(b"x").unwrap();
    far.read_exact(&mut [0]).unwrap();
    scene.near.signal("TERM");
    scene.near.wait_for("SIGTERM");
    let until = Instant::now() + TIMEOUT;
    // The socket's file shows whether connections are still accepted. Do not connect to find out:
    // a connection accepted at the last moment would be a channel that the target never ends.
    let entrance = scene.hosts.scratch.join("in");
    while entrance.exists() {
        assert!(Instant::now() < until, "connections are still accepted");
        thread::sleep(Duration::from_millis(5));
    }
    assert!(UnixStream::connect(entrance).is_err());
    near.write_all(b"last words").unwrap();
    drop(near);
    let mut last = String::new();
    far.read_to_string(&mut last).unwrap();
    assert_eq!(last, "last words");
    drop(far);
    assert_eq!(scene.near.code(), Some(0));
}

/// A stopped process is reported long before its trunk ends. The trunk's channels wait, because the
/// process may continue: a process without CPU time looks the same as a stopped one.
#[test]
fn a_stopped_peer_is_reported_and_its_channels_wait_for_it() {
    let scene = Scene::new();
    let (mut near, mut far) = scene.channel();
    near.write_all(b"x").unwrap();
    far.read_exact(&mut [0]).unwrap();
    scene.far.signal("STOP");
    let begin = Instant::now();
    let line = scene.near.wait_for(" fault=control-lost ");
    let took = begin.elapsed();
    scene.far.signal("CONT");
    println!("{took:?}: {line}");
    // The report takes 2 s. After 5 s, the line would be about the loss of the control lane.
    assert!(took < Duration::from_secs(4), "{took:?}: {line}");
    assert!(line.contains(" host_answers=true"), "{line}");
    near.write_all(b"y").unwrap();
    far.read_exact(&mut [0]).unwrap();
    exchange(near, far);
    let log = {
        scene.near.signal("TERM");
        scene.near.log.rest()
    };
    assert!(!log.iter().any(|line| line.contains("fault=")), "{log:#?}");
}

#[test]
fn a_drain_ends_at_its_deadline_with_exit_code_1() {
    let scene = Scene::new();
    let (mut near, far) = scene.channel();
    let begin = Instant::now();
    scene.far.signal("TERM");
    assert_eq!(scene.far.code(), Some(1));
    assert!(begin.elapsed() >= Duration::from_secs(2));
    // The hypervisor's connection ends too.
    assert_eq!(near.read_once(&mut [0]).unwrap(), 0);
    assert!(
        begin.elapsed() < Duration::from_secs(6),
        "{:?}",
        begin.elapsed()
    );
    drop(far);
}

/// Each of the tunnel's threads is confined, and a reload that adds a program is refused. A tunnel
/// that starts with a program is not confined.
#[test]
fn a_confined_tunnel_starts_no_programs() {
    let scene = Scene::new();
    let (mut near, mut far) = scene.channel();
    scene.near.wait_for("confined: no privileges");
    let tasks = fs::read_dir(format!("/proc/{}/task", scene.near.child.id())).unwrap();
    let mut threads = 0;
    for task in tasks {
        // A thread may have ended meanwhile.
        let Ok(status) = fs::read_to_string(task.unwrap().path().join("status")) else {
            continue;
        };
        let field = |name: &str| {
            let line = status.lines().find(|line| line.starts_with(name)).unwrap();
            line.split_whitespace().nth(1).unwrap().to_owned()
        };
        assert_eq!((&*field("NoNewPrivs:"), &*field("Seccomp:")), ("1", "2"));
        // A tunnel keeps at most CAP_DAC_OVERRIDE and CAP_NET_BIND_SERVICE.
        let left = u64::from_str_radix(&field("CapEff:"), 16).unwrap();
        assert_eq!(left & !(1 << 1 | 1 << 10), 0, "{left:x}");
        threads += 1;
    }
    assert!(threads > 1);

    let with = fs::read_to_string(&scene.near.config).unwrap()
        + "[route.program]\nexec = [\"/bin/cat\"]\nallow = [\"b.test\"]\n";
    fs::write(&scene.near.config, &with).unwrap();
    scene.near.signal("HUP");
    let why = scene.near.wait_for("everything stays as it was");
    assert!(why.contains("exec"), "{why}");
    near.write_all(b"x").unwrap();
    far.read_exact(&mut [0]).unwrap();

    let free = Tunnel::start(&scene.hosts, "free", &with.replace("/in\"", "/free\""));
    let why = free.wait_for("not confined: ");
    assert!(why.contains("exec"), "{why}");
}

/// The channels of a trunk outlive the certificate with which the trunk was dialled. New channels
/// need a renewed certificate.
#[test]
fn i6_a_certificate_that_expires_opens_no_new_channel_until_it_is_renewed() {
    let hosts = Hosts::new();
    let target = listen(hosts.scratch.join("out"));
    let far = Tunnel::start(&hosts, "far", &far_config(&hosts, "a.test"));
    let until = hosts.issue_for("short", "a.test", Duration::from_secs(4));
    let own = hosts.scratch.join("short");
    let config = near_config(&hosts, &far.address, "ram", "in");
    let config = config.replace(
        &format!("{:?}", hosts.scratch.join("a")),
        &format!("{own:?}"),
    );
    let near = Tunnel::start(&hosts, "near", &config);
    let entrance = hosts.scratch.join("in");
    let open = connect(entrance.clone());
    let open_far = accepted(&target);
    // Sleep, because no event shows that a certificate has expired.
    thread::sleep(until.saturating_duration_since(Instant::now()));
    assert_eq!(
        connect(entrance.clone()).read_once(&mut [0]).unwrap_or(0),
        0
    );
    near.wait_for("fault=certificate-date");

    for file in ["cert.pem", "key.pem"] {
        fs::copy(hosts.scratch.join("a").join(file), own.join(file)).unwrap();
    }
    near.signal("HUP");
    near.wait_for("configuration reloaded");
    let renewed = connect(entrance);
    exchange(renewed, accepted(&target));
    exchange(open, open_far);
}

#[test]
fn sighup_changes_routes_and_no_channel() {
    let scene = Scene::new();
    let (mut near, mut far) = scene.channel();
    let changed = near_config(&scene.hosts, &scene.far.address, "ram", "other");
    fs::write(&scene.near.config, "listen = 1\n").unwrap();
    scene.near.signal("HUP");
    let why = scene.near.wait_for("everything stays as it was");
    assert!(why.contains("near.toml:1:"), "{why}");
    fs::write(&scene.near.config, changed).unwrap();
    scene.near.signal("HUP");
    scene.near.wait_for("configuration reloaded");
    assert!(UnixStream::connect(scene.hosts.scratch.join("in")).is_err());
    near.write_all(b"x").unwrap();
    far.read_exact(&mut [0]).unwrap();
    let mut second = connect(scene.hosts.scratch.join("other"));
    let mut other = accepted(&scene.target);
    second.write_all(b"y").unwrap();
    other.read_exact(&mut [0]).unwrap();
}

/// While the configuration is reloaded, a route that does not change carries a gibibyte.
#[test]
fn routes_come_and_go_while_a_gibibyte_moves() {
    const PART: usize = 251 << 10;
    const PARTS: usize = (1 << 30) / PART + 1;
    let scene = Scene::new();
    let (near, far) = scene.channel();
    let part: Vec<u8> = (0..PART).map(|at| (at % 251) as u8).collect();
    let done = AtomicBool::new(false);
    let reloads = thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..PARTS {
                (&near).write_all(&part).unwrap();
            }
            near.shutdown(Shutdown::Write).unwrap();
        });
        scope.spawn(|| {
            let mut came = vec![0; PART];
            for _ in 0..PARTS {
                (&far).read_exact(&mut came).unwrap();
                assert!(came == part);
            }
            assert_eq!((&far).read_once(&mut came).unwrap(), 0);
            done.store(true, Ordering::SeqCst);
        });
        let without = fs::read_to_string(&scene.near.config).unwrap();
        let more = scene.hosts.scratch.join("more");
        let with = format!(
            "{without}[route.more]\nlisten = \"unix:{}\"\nto = {:?}\npeers = [\"b.test\"]\n",
            more.display(),
            scene.far.address,
        );
        let until = Instant::now() + TIMEOUT;
        let mut reloads = 0;
        while !done.load(Ordering::SeqCst) {
            for (config, is_there) in [(&with, true), (&without, false)] {
                fs::write(&scene.near.config, config).unwrap();
                scene.near.signal("HUP");
                scene.near.wait_for("configuration reloaded");
                assert_eq!(UnixStream::connect(&more).is_ok(), is_there);
                reloads += 1;
            }
            assert!(Instant::now() < until, "the transfer does not end");
        }
        reloads
    });
    assert!(reloads >= 4, "{reloads}");
}

#[test]
fn a_killed_tunnel_is_an_error_to_the_hypervisor_and_no_hang() {
    let scene = Scene::new();
    let (mut near, far) = scene.channel();
    let mut tunnel = scene.far;
    let begin = Instant::now();
    tunnel.child.kill().unwrap();
    tunnel.child.wait().unwrap();
    assert_eq!(near.read_once(&mut [0]).unwrap(), 0);
    assert!(
        begin.elapsed() < Duration::from_secs(12),
        "{:?}",
        begin.elapsed()
    );
    drop(far);

    // The next connection reaches the tunnel that replaces the killed one.
    let config = far_config(&scene.hosts, "a.test").replace("127.0.0.1:0", &tunnel.address);
    let _again = Tunnel::start(&scene.hosts, "again", &config);
    let mut near = connect(scene.hosts.scratch.join("in"));
    let mut far = accepted(&scene.target);
    near.write_all(b"x").unwrap();
    far.read_exact(&mut [0]).unwrap();
}

#[test]
fn a_bad_configuration_is_reported_before_anything_runs() {
    let hosts = Hosts::new();
    let file = hosts.scratch.join("bad.toml");
    fs::write(
        &file,
        "listen = \"127.0.0.1:0\"\nidentity = \"/none\"\nlanes = 4\n",
    )
    .unwrap();
    for command in ["tunnel run --config", "tunnel check --config"] {
        let mut command = words(command);
        command.arg(&file);
        let done = finish(command).expect(1);
        assert!(done.err.contains("bad.toml:3:"), "{}", done.err);
        assert!(done.err.contains("lanes"), "{}", done.err);
    }
}

#[test]
fn check_connect_sends_bytes_to_each_peer_and_back_or_reports_why_not() {
    let hosts = Hosts::new();
    let target = hosts.scratch.join("target");
    let far = format!(
        "listen = \"127.0.0.1:0\"\nidentity = {:?}\n[route.ram]\ntarget = \"unix:{}\"\nallow = [\"a.test\"]\n",
        hosts.scratch.join("b"),
        target.display(),
    );
    let far = Tunnel::start(&hosts, "far", &far);
    let check = |to: &str, peer: &str| {
        let file = hosts.scratch.join("near.toml");
        let text = format!(
            "listen = \"127.0.0.1:0\"\nidentity = {:?}\n[route.ram]\nto = \"{to}\"\npeers = [{peer:?}]\n",
            hosts.scratch.join("a"),
        );
        fs::write(&file, text).unwrap();
        let mut command = words("tunnel check --connect --size 3M --json --config");
        command.arg(&file);
        command
    };
    let done = finish(check(&far.address, "b.test")).expect(0);
    let line = &done.lines()[0];
    assert_eq!(line["event"], "checked", "{line}");
    assert_eq!(line["bytes"], 3 << 20, "{line}");
    assert_eq!(line["to"], far.address, "{line}");
    assert!(line["gib_per_s"].as_f64().unwrap() > 0.0, "{line}");
    // The peer has another name.
    let done = finish(check(&far.address, "c.test")).expect(1);
    let line = &done.lines()[0];
    assert_eq!(line["fault"], "unauthorised", "{line}");
    assert_eq!(line["at_fault"], "configuration", "{line}");
    // No tunnel runs there.
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let nowhere = free.local_addr().unwrap().to_string();
    drop(free);
    let line = &finish(check(&nowhere, "b.test")).expect(1).lines()[0];
    assert_eq!(line["fault"], "control-lost", "{line}");
}
