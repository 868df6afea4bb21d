//! The unix sockets of a tunnel's routes: their owners and modes, and what happens if their files
//! are removed or replaced.
#![allow(clippy::unwrap_used)]

mod support;
#[path = "support/tunnel.rs"]
mod tunnel;

use std::fs::{self, Metadata};
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use dunlin_linux::socket::own_user;
use dunlin_test_base::need::or_skip;
use dunlin_test_base::sockets::{ReadOnce as _, TIMEOUT, accepted};
use serde_json::Value;
use support::{Done, Hosts, finish, words};
use tunnel::{Tunnel, connect, control, exchange, far_config, listen, near_config};

/// Numbers of a user and a group that own nothing on this host.
const USER: u32 = 12_345;
const GROUP: u32 = 54_321;

/// Whether this process may change the owners of files.
fn is_root() -> bool {
    let found = match own_user() {
        0 => Ok(()),
        _ => Err(io::Error::other("this test does not run as root")),
    };
    or_skip("the privilege to change owners", found).is_some()
}

fn found(path: &Path) -> Metadata {
    fs::symlink_metadata(path).unwrap()
}

fn owner_and_mode(path: &Path) -> (u32, u32, u32) {
    let found = found(path);
    (found.uid(), found.gid(), found.mode() & 0o7777)
}

/// Two hosts with one route, `in` to `out`. The near end's configuration has further keys.
struct Scene {
    hosts: Hosts,
    near: Tunnel,
    far: Tunnel,
}

impl Scene {
    fn new(keys: &str) -> Self {
        let hosts = Hosts::new();
        let far = Tunnel::start(&hosts, "far", &far_config(&hosts, "a.test"));
        let config = near_config(&hosts, &far.address, "ram", "in") + keys;
        let near = Tunnel::start(&hosts, "near", &config);
        let confined = near.wait_for("confined");
        assert!(confined.contains("seccomp"), "{confined}");
        Self { hosts, near, far }
    }

    fn ask(&self, line: &str) -> Command {
        let mut command = words(&format!("tunnel {line}"));
        command.arg("--config").arg(&self.near.config);
        command.arg("--control").arg(control(&self.hosts));
        command
    }

    /// Runs `tunnel open ram` with these flags for a listener in the hosts' directory.
    fn open(&self, name: &str, flags: &str) -> Done {
        let mut open = self.ask(&format!("open ram {flags}"));
        let path = self.hosts.scratch.join(name);
        open.arg("--listen").arg(format!("unix:{}", path.display()));
        finish(open)
    }

    /// Appends `keys` to the near tunnel's configuration, and reloads the configuration.
    fn reload(&self, keys: &str) {
        let config = fs::read_to_string(&self.near.config).unwrap();
        fs::write(&self.near.config, config + keys).unwrap();
        self.near.signal("HUP");
    }
}

#[test]
fn a_route_and_a_listener_on_demand_set_the_owner_and_mode_of_their_sockets() {
    if !is_root() {
        return;
    }
    let keys =
        format!("socket_owner = \"{USER}\"\nsocket_group = \"{GROUP}\"\nsocket_mode = \"0660\"\n");
    let scene = Scene::new(&keys);
    let at = |name: &str| scene.hosts.scratch.join(name);
    assert_eq!(owner_and_mode(&at("in")), (USER, GROUP, 0o660));
    scene.open("inherits", "").expect(0);
    assert_eq!(owner_and_mode(&at("inherits")), (USER, GROUP, 0o660));
    let flags = format!("--owner {USER} --group {GROUP} --mode 0600");
    scene.open("differs", &flags).expect(0);
    assert_eq!(owner_and_mode(&at("differs")), (USER, GROUP, 0o600));

    let target = listen(at("out"));
    for name in ["in", "differs"] {
        let near = connect(at(name));
        exchange(near, accepted(&target));
    }

    // The confined tunnel can set only the owners that its configuration named when it started.
    let refused = scene.open("foreign", "--owner 1").expect(1);
    assert!(
        refused.err.contains("at fault: configuration"),
        "{refused:?}"
    );
    assert!(!at("foreign").exists());
    let mut tcp = scene.ask("open ram --mode 0600 --listen tcp:127.0.0.1:0");
    tcp.stdin(std::process::Stdio::null());
    finish(tcp).expect(1);
}

#[test]
fn a_mode_needs_no_privilege_and_a_confined_tunnel_refuses_a_later_owner() {
    let scene = Scene::new("socket_mode = \"0606\"\n");
    let at = |name: &str| scene.hosts.scratch.join(name);
    let own = found(&scene.hosts.scratch.join("a"));
    let is_own = |name: &str, mode: u32| {
        assert_eq!(owner_and_mode(&at(name)), (own.uid(), own.gid(), mode));
    };
    is_own("in", 0o606);
    scene.open("other", "--mode 0640").expect(0);
    is_own("other", 0o640);
    scene.open("foreign", &format!("--owner {USER}")).expect(1);
    assert!(!at("foreign").exists());
    scene.reload(&format!("socket_owner = \"{USER}\"\n"));
    let refused = scene.near.wait_for("gives sockets only to");
    assert!(refused.contains("at fault: configuration"), "{refused}");
    is_own("in", 0o606);
}

#[test]
fn a_tunnel_without_the_privilege_reports_that_it_cannot_change_the_owner() {
    if !is_root() {
        return;
    }
    let hosts = Hosts::new();
    let config = near_config(&hosts, "127.0.0.1:9", "ram", "in")
        + &format!("socket_owner = \"{USER}\"\nsocket_mode = \"0600\"\n");
    let file = hosts.scratch.join("near.toml");
    fs::write(&file, config).unwrap();
    // Root without CAP_CHOWN.
    let mut run = Command::new("setpriv");
    run.args(["--bounding-set", "-chown", "--inh-caps", "-chown"]);
    let tunnel = words("tunnel run --config");
    run.arg(tunnel.get_program()).args(tunnel.get_args());
    run.arg(&file).arg("--control").arg(control(&hosts));
    let refused = finish(run).expect(1);
    assert!(refused.err.contains("CAP_CHOWN"), "{refused:?}");
    assert!(!hosts.scratch.join("in").exists());
}

/// Reads the near tunnel's status until `is_so`; returns the line of route `ram`.
fn route_when(scene: &Scene, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
    let until = Instant::now() + TIMEOUT;
    loop {
        let mut command = words("status --json --state-dir");
        command.arg(scene.hosts.scratch.join("state"));
        command.arg("--control").arg(control(&scene.hosts));
        let lines = finish(command).expect(0).lines();
        let near = lines.into_iter().find(|line| line["name"] == "near");
        let route = near.map(|near| near["routes"][0].clone());
        if let Some(route) = route.filter(|route| is_so(route)) {
            return route;
        }
        assert!(Instant::now() < until, "{what}");
    }
}

#[test]
fn a_route_and_a_listener_on_demand_listen_again_after_their_sockets_were_removed() {
    let scene = Scene::new("");
    let at = |name: &str| scene.hosts.scratch.join(name);
    let target = listen(at("out"));
    scene.open("vm", "").expect(0);
    let early = connect(at("in"));
    let early = (early, accepted(&target));
    for name in ["in", "vm"] {
        fs::remove_file(at(name)).unwrap();
        let again = format!("route ram listens on unix:{} again", at(name).display());
        scene.near.wait_for(&again);
        let near = connect(at(name));
        exchange(near, accepted(&target));
    }
    // Open channels are not affected.
    exchange(early.0, early.1);
}

/// A hypervisor that waits for a VM at the same path removes the tunnel's socket.
#[test]
fn a_socket_of_another_process_is_not_stolen_and_the_route_listens_again_after_it() {
    let scene = Scene::new("");
    let at = |name: &str| scene.hosts.scratch.join(name);
    let target = listen(at("out"));
    fs::remove_file(at("in")).unwrap();
    let other = listen(at("in"));
    let said = scene.near.wait_for("listener-lost");
    assert!(said.contains("at fault: this side"), "{said}");
    let lost = |route: &Value| route["lost"].is_string();
    let route = route_when(&scene, "the status shows no lost listener", lost);
    let why = route["lost"].as_str().unwrap();
    assert!(why.contains("listener-lost"), "{route}");
    let theirs = connect(at("in"));
    drop((accepted(&other), theirs));
    // The other process ends, and leaves its file.
    drop(other);
    scene.near.wait_for("again");
    let near = connect(at("in"));
    exchange(near, accepted(&target));
    route_when(&scene, "the route stays lost", |route| !lost(route));
    // A second loss for the same reason is reported too.
    fs::remove_file(at("in")).unwrap();
    let _other = listen(at("in"));
    route_when(&scene, "the second loss is not shown", lost);
}

#[test]
fn a_reload_changes_the_mode_of_a_socket() {
    let scene = Scene::new("");
    let at = |name: &str| scene.hosts.scratch.join(name);
    let target = listen(at("out"));
    let early = connect(at("in"));
    let early = (early, accepted(&target));
    scene.reload("socket_mode = \"0604\"\n");
    scene.near.wait_for("again");
    assert_eq!(owner_and_mode(&at("in")).2, 0o604);
    let near = connect(at("in"));
    exchange(near, accepted(&target));
    exchange(early.0, early.1);
}

/// Simulates a VM that leaves this host for the second time: the first listener, and the hypervisor
/// that waited for the VM's return, have left sockets at the path.
#[test]
fn a_confined_tunnel_replaces_dead_sockets_beneath_its_control_directory() {
    let hosts = Hosts::new();
    let config = near_config(&hosts, "127.0.0.1:9", "ram", "in");
    let listen_at = format!("listen = \"unix:{}\"\n", hosts.scratch.join("in").display());
    let near = Tunnel::start(&hosts, "near", &config.replace(&listen_at, ""));
    let confined = near.wait_for("confined");
    assert!(confined.contains("Landlock"), "{confined}");
    let directory = control(&hosts).join("vm");
    fs::create_dir(&directory).unwrap();
    let path = directory.join("web.ram");
    let ask = |line: &str| {
        let mut command = words(&format!("tunnel {line}"));
        command.arg("--config").arg(&near.config);
        command.arg("--control").arg(control(&hosts));
        finish(command).expect(0);
    };
    let address = format!("unix:{}", path.display());
    for _ in 0..2 {
        ask(&format!("open ram --listen {address}"));
        ask(&format!("close {address}"));
        let until = Instant::now() + TIMEOUT;
        while path.exists() {
            assert!(Instant::now() < until, "the socket of the listener stays");
        }
        // The hypervisor ends, and leaves its socket.
        drop(listen(path.clone()));
    }
    ask(&format!("open ram --listen {address}"));
}

/// Returns the ends of a channel that carries bytes. After it has connected, the far tunnel checks
/// once more that its target was not replaced, so a target may be replaced only after this.
fn connected(entrance: &Path, target: &UnixListener) -> (UnixStream, UnixStream) {
    let mut near = connect(entrance.to_owned());
    let mut far = accepted(target);
    near.write_all(b"a").unwrap();
    far.read_exact(&mut [0]).unwrap();
    (near, far)
}

/// Two VMs share the path of a target: the hypervisor that waits for the second one replaces the
/// socket of the first one.
#[test]
fn i3_a_channel_never_reaches_the_hypervisor_that_replaced_the_one_of_open_channels() {
    let scene = Scene::new("");
    let at = |name: &str| scene.hosts.scratch.join(name);
    let web = listen(at("out"));
    let first = connected(&at("in"), &web);
    // Another connection of the same migration.
    let second = connect(at("in"));
    exchange(second, accepted(&web));

    fs::remove_file(at("out")).unwrap();
    let db = listen(at("out"));
    let mut late = connect(at("in"));
    assert_eq!(late.read_once(&mut [0]).unwrap(), 0);
    for tunnel in [&scene.near, &scene.far] {
        let said = tunnel.wait_for("target-replaced");
        assert!(said.contains("{vm}"), "{said}");
        assert!(said.contains("at fault: configuration"), "{said}");
    }
    db.set_nonblocking(true).unwrap();
    let came = db.accept().unwrap_err();
    assert_eq!(came.kind(), io::ErrorKind::WouldBlock);
    db.set_nonblocking(false).unwrap();

    exchange(first.0, first.1);
    scene.far.wait_for("channel 0 is closed");
    let next = connect(at("in"));
    exchange(next, accepted(&db));
}

#[test]
fn i3_a_relay_does_not_reach_a_hypervisor_that_replaced_another_one_either() {
    let hosts = Hosts::new();
    let at = |name: &str| hosts.scratch.join(name);
    let web = listen(at("out"));
    let relay = |name: &str, more: &str| {
        let config = format!(
            "listen = \"127.0.0.1:0\"\nidentity = {:?}\n[route.ram]\nmode = \"relay\"\n{more}",
            at(name)
        );
        Tunnel::start(&hosts, name, &config)
    };
    let target = at("out").display().to_string();
    let far = relay(
        "b",
        &format!(
            "tls_listen = \"127.0.0.1:0\"\ntarget = \"unix:{target}\"\nallow = [\"a.test\"]\n"
        ),
    );
    let line = far.wait_for("accepts TLS clients on");
    let (_, to) = line.rsplit_once(' ').unwrap();
    let entrance = at("in").display().to_string();
    let _near = relay(
        "a",
        &format!("listen = \"unix:{entrance}\"\nto = {to:?}\npeers = [\"b.test\"]\n"),
    );
    let first = connected(&at("in"), &web);
    fs::remove_file(at("out")).unwrap();
    let db = listen(at("out"));
    let _late = connect(at("in"));
    let said = far.wait_for("target-replaced");
    assert!(said.contains("at fault: configuration"), "{said}");
    exchange(first.0, first.1);
    far.wait_for("is closed");
    let next = connect(at("in"));
    exchange(next, accepted(&db));
}
