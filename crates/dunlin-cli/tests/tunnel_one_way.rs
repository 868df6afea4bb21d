//! Two tunnels of which only one connects. Three tests have a firewall between the tunnels' hosts,
//! which are network namespaces. In the fourth, each tunnel has a certificate for its own role
//! only.
#![allow(clippy::unwrap_used)]

mod support;
#[path = "support/tunnel.rs"]
mod tunnel;
#[path = "support/namespaces.rs"]
mod wires;

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixListener;
use std::process::Command;
use std::time::{Duration, Instant};

use dunlin_test_base::sockets::{TIMEOUT, accepted};
use serde_json::Value;
use support::{Hosts, finish, words};
use tunnel::{Tunnel, connect, control, exchange, far_config, listen, near_config};
use wires::{B, Wire};

/// The address of the near host.
const A: &str = "192.0.2.1";

/// Matches a packet with which the other host opens a connection. The rule does not match packets
/// on loopback, because a tunnel connects to itself there, to learn what the kernel's TLS can do.
const SYN: &str = "iifname wire tcp flags & (syn | ack) == syn";

/// Loads rules for packets that arrive at a host.
fn filter(at: impl Fn(&Command) -> Command, rules: &[&str]) {
    let chain = "type filter hook input priority 0; policy accept;";
    let rules = rules.join("\n");
    let table = format!("table inet wall {{\nchain in {{\n{chain}\n{rules}\n}}\n}}\n");
    let mut nft = Command::new("nft");
    nft.arg(&table);
    let output = at(&nft).output().unwrap();
    assert!(output.status.success(), "{table}{output:?}");
}

/// The packets that the first rule with a counter has counted.
fn counted(at: impl Fn(&Command) -> Command) -> u64 {
    let mut nft = Command::new("nft");
    nft.args(["list", "table", "inet", "wall"]);
    let output = at(&nft).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let counter = text.split("counter packets ").nth(1).unwrap();
    counter.split(' ').next().unwrap().parse().unwrap()
}

/// The tunnels of the near host *a* and the far host *b*. The route of *a* leads to *b*.
struct Scene {
    hosts: Hosts,
    near: Tunnel,
    far: Tunnel,
    target: UnixListener,
}

impl Scene {
    fn new(wire: &Wire) -> Self {
        let hosts = Hosts::new();
        let at = |name: &str| hosts.scratch.join(name);
        let target = listen(at("out"));
        let run = |name: &str, config: &str| {
            let file = at(&format!("{name}.toml"));
            fs::write(&file, config).unwrap();
            let mut command = words("tunnel run --config");
            command.arg(&file).arg("--control").arg(control(&hosts));
            let command = match name {
                "near" => wire.at_a(&command),
                _ => wire.at_b(&command),
            };
            Tunnel::follow(command, file)
        };
        let far = format!(
            "listen = \"{B}:0\"\nidentity = {:?}\ndrain = \"2s\"\n\
             [route.ram]\ntarget = \"unix:{}\"\nallow = [\"a.test\"]\n",
            at("b"),
            at("out").display(),
        );
        let far = run("far", &far);
        let near = format!(
            "listen = \"{A}:0\"\nidentity = {:?}\ndrain = \"2s\"\n\
             [route.ram]\nlisten = \"unix:{}\"\nto = {:?}\npeers = [\"b.test\"]\nlanes = 2\n",
            at("a"),
            at("in").display(),
            far.address,
        );
        let near = run("near", &near);
        Self {
            hosts,
            near,
            far,
            target,
        }
    }

    /// The trunks of a tunnel, from its status.
    fn peers(&self, name: &str) -> Vec<Value> {
        let mut command = words("status --json --state-dir");
        command.arg(self.hosts.scratch.join("state"));
        command.arg("--control").arg(control(&self.hosts));
        let lines = finish(command).expect(0).lines();
        let tunnel = lines.into_iter().find(|line| line["name"] == name);
        // The status omits a tunnel that was too slow to answer.
        let peers = tunnel.and_then(|line| line["peers"].as_array().cloned());
        peers.unwrap_or_default()
    }
}

/// The near host's firewall admits no connection. Bytes still flow in both directions, and nothing
/// tries to connect to the near host.
#[test]
fn a_firewall_that_admits_no_connection_to_the_connecting_host_stops_nothing() {
    let Some(wire) = Wire::new(None) else { return };
    let reject = format!("{SYN} counter reject with tcp reset");
    filter(|command| wire.at_a(command), &[&reject]);
    let scene = Scene::new(&wire);
    // The firewall works: the far host cannot connect to the near host's port.
    let mut probe = Command::new("bash");
    let port = scene.near.address.rsplit_once(':').unwrap().1;
    probe.arg("-c").arg(format!("exec 3<>/dev/tcp/{A}/{port}"));
    let probed = wire.at_b(&probe).output().unwrap();
    assert!(!probed.status.success());
    let before = counted(|command| wire.at_a(command));
    assert!(before > 0);
    for _ in 0..3 {
        let near = connect(scene.hosts.scratch.join("in"));
        exchange(near, accepted(&scene.target));
    }
    assert_eq!(counted(|command| wire.at_a(command)), before);
}

/// The far host's firewall admits the control lane and no further connection. Both hosts report the
/// address and the reason.
#[test]
fn a_firewall_that_admits_no_lanes_is_named_on_both_hosts() {
    let Some(wire) = Wire::new(None) else { return };
    let first = format!("{SYN} limit rate 1/hour burst 1 packets accept");
    let others = format!("{SYN} reject with tcp reset");
    filter(|command| wire.at_b(command), &[&first, &others]);
    let scene = Scene::new(&wire);
    let _near = connect(scene.hosts.scratch.join("in"));
    let _far = accepted(&scene.target);
    let at = scene.far.address.clone();
    let until = Instant::now() + TIMEOUT;
    for name in ["near", "far"] {
        let has_it = |peer: &Value| {
            peer["trouble"]
                .as_str()
                .is_some_and(|why| why.contains(&at))
        };
        while !scene.peers(name).iter().any(has_it) {
            assert!(Instant::now() < until, "{:#?}", scene.peers(name));
        }
    }
    for tunnel in [&scene.near, &scene.far] {
        let line = tunnel.wait_for("cannot open lane");
        assert!(
            line.contains(&at) && line.contains("Connection refused"),
            "{line}"
        );
    }
}

/// No packet reaches the far host any more. The tunnel reports that its peer's host does not
/// answer, as quickly as it reports a stopped process.
#[test]
fn a_host_that_is_gone_is_reported_as_one_that_does_not_answer() {
    let Some(wire) = Wire::new(None) else { return };
    let scene = Scene::new(&wire);
    let mut near = connect(scene.hosts.scratch.join("in"));
    let mut far = accepted(&scene.target);
    near.write_all(b"x").unwrap();
    far.read_exact(&mut [0]).unwrap();
    filter(|command| wire.at_b(command), &["iifname wire drop"]);
    let begin = Instant::now();
    let line = scene.near.wait_for(" fault=control-lost ");
    let took = begin.elapsed();
    println!("{took:?}: {line}");
    assert!(line.contains(" host_answers=false"), "{line}");
    // The report takes 2 s. After 5 s, the line would be about the loss of the control lane.
    assert!(took < Duration::from_secs(4), "{took:?}: {line}");
}

/// Makes a directory in QEMU's layout that has a host's certificate for one role only.
fn one_role(hosts: &Hosts, host: &str, role: &str) -> String {
    let name = format!("{host}-{role}");
    let (from, to) = (hosts.scratch.join(host), hosts.scratch.join(&name));
    fs::create_dir(&to).unwrap();
    for (own, qemus) in [
        ("ca-cert.pem", "ca-cert.pem".to_owned()),
        ("cert.pem", format!("{role}-cert.pem")),
        ("key.pem", format!("{role}-key.pem")),
    ] {
        fs::copy(from.join(own), to.join(qemus)).unwrap();
    }
    name
}

#[test]
fn a_side_needs_only_the_certificate_of_its_role() {
    let hosts = Hosts::new();
    let target = listen(hosts.scratch.join("out"));
    let (client, server) = (
        one_role(&hosts, "a", "client"),
        one_role(&hosts, "b", "server"),
    );
    let with = |config: String, host: &str, directory: &str| {
        let at = |name: &str| format!("identity = {:?}", hosts.scratch.join(name));
        config.replace(&at(host), &at(directory))
    };
    let far = with(far_config(&hosts, "a.test"), "b", &server);
    let far = Tunnel::start(&hosts, "far", &far);
    let near = near_config(&hosts, &far.address, "ram", "in");
    let near = Tunnel::start(&hosts, "near", &with(near, "a", &client));
    exchange(connect(hosts.scratch.join("in")), accepted(&target));
    // The other role's certificate is not enough.
    let other = one_role(&hosts, "b", "client");
    let config = with(far_config(&hosts, "a.test"), "b", &other);
    fs::write(hosts.scratch.join("other.toml"), config).unwrap();
    let mut check = words("tunnel check --config");
    check.arg(hosts.scratch.join("other.toml"));
    let done = finish(check);
    assert_ne!(done.code, 0);
    assert!(done.err.contains("b-client/server-"), "{}", done.err);
    drop(near);
}
