//! A tunnel under a service manager: passed sockets, notifications, and the units in
//! `dist/systemd`.
#![allow(clippy::unwrap_used)]

mod support;
#[path = "support/tunnel.rs"]
mod tunnel;
#[path = "support/units.rs"]
mod units;

use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;
use std::process::{Command, Stdio};

use dunlin_test_base::sockets::{TIMEOUT, accepted};
use dunlin_tunnel::Limits;
use support::process::Log;
use support::{Hosts, words};
use tunnel::{Tunnel, connect, control, far_config, listen, near_config};
use units::Units;

/// Starts a tunnel as a service manager does: the sockets are the descriptors from 3 upwards, and
/// the environment has their names. The shell execs the tunnel, so the tunnel's process ID is the
/// one in `LISTEN_PID`.
fn activated(hosts: &Hosts, config: &str, sockets: [OwnedFd; 2], names: &str) -> Tunnel {
    let file = hosts.scratch.join("near.toml");
    fs::write(&file, config).unwrap();
    let [third, fourth] = sockets;
    let mut launcher = Command::new("sh");
    launcher
        .args([
            "-c",
            "exec 3<&0 4<&1 0</dev/null 1>&2; LISTEN_PID=$$ exec \"$@\"",
            "sh",
        ])
        .arg(env!("CARGO_BIN_EXE_dunlin"))
        .args(["tunnel", "run", "--config"])
        .arg(&file)
        .arg("--control")
        .arg(control(hosts))
        .env("LISTEN_FDS", "2")
        .env("LISTEN_FDNAMES", names)
        .stdin(third)
        .stdout(fourth)
        .stderr(Stdio::piped());
    let mut child = launcher.spawn().unwrap();
    let log = Log::of([
        Box::new(child.stderr.take().unwrap()),
        Box::new(std::io::empty()),
    ]);
    Tunnel {
        child,
        address: String::new(),
        log,
        config: file,
    }
}

#[test]
fn passed_sockets_serve_peers_and_an_entrance() {
    let hosts = Hosts::new();
    let target = listen(hosts.scratch.join("out"));
    let far = Tunnel::start(&hosts, "far", &far_config(&hosts, "a.test"));
    let peers = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = peers.local_addr().unwrap();
    let entrance = listen(hosts.scratch.join("in"));
    let config = near_config(&hosts, &far.address, "ram", "in")
        .replace("127.0.0.1:0", "systemd:peers")
        .replace(
            &format!("unix:{}", hosts.scratch.join("in").display()),
            "systemd:ram",
        );
    // A client connects before the tunnel starts, and waits for it.
    let mut early = connect(hosts.scratch.join("in"));
    early.write_all(b"early").unwrap();
    let near = activated(
        &hosts,
        &config,
        [peers.into(), entrance.into()],
        "peers:ram",
    );
    let line = near.wait_for("listening on");
    assert!(line.contains(&port.to_string()), "{line}");
    near.wait_for("route ram listens on systemd:ram");
    let mut far_end = accepted(&target);
    let mut came = [0; 5];
    far_end.read_exact(&mut came).unwrap();
    assert_eq!(&came, b"early");
    // The far tunnel's lanes use the passed port.
    far_end.write_all(b"back").unwrap();
    early.read_exact(&mut came[..4]).unwrap();
    assert_eq!(&came[..4], b"back");

    // A route that is removed and added again gets its passed socket again.
    let without = config.replace("listen = \"systemd:ram\"\n", "");
    fs::write(&near.config, without).unwrap();
    near.signal("HUP");
    near.wait_for("configuration reloaded");
    let mut waits = connect(hosts.scratch.join("in"));
    waits.write_all(b"later").unwrap();
    fs::write(&near.config, &config).unwrap();
    near.signal("HUP");
    near.wait_for("configuration reloaded");
    let mut second = accepted(&target);
    second.read_exact(&mut came).unwrap();
    assert_eq!(&came, b"later");

    // The socket file remains, because it belongs to the socket unit.
    drop((early, waits, far_end, second));
    near.signal("TERM");
    assert_eq!(near.code(), Some(0));
    assert!(hosts.scratch.join("in").exists());
}

#[test]
fn i7_a_missing_or_wrong_passed_socket_is_reported() {
    let hosts = Hosts::new();
    let config = near_config(&hosts, "127.0.0.1:9", "ram", "in");
    let peers = || TcpListener::bind("127.0.0.1:0").unwrap();
    let file = || OwnedFd::from(fs::File::open("/dev/null").unwrap());
    let passed = config.replace("127.0.0.1:0", "systemd:peers");
    for (number, (config, second, names, word)) in [
        (
            &passed,
            peers().into(),
            "other:ram",
            "no socket of that name",
        ),
        (&config, file(), "peers:ram", "not a listening socket"),
        (&config, peers().into(), "one", "LISTEN_FDNAMES"),
        (
            &config,
            peers().into(),
            "one:one",
            "two sockets have this name",
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let tunnel = activated(&hosts, config, [peers().into(), second], names);
        println!("{number}");
        tunnel.wait_for(word);
        assert_eq!(tunnel.code(), Some(1));
    }
    // A passed unix socket cannot be the listener for peers.
    let entrance = listen(hosts.scratch.join("in"));
    let sockets = [entrance.into(), peers().into()];
    let tunnel = activated(&hosts, &passed, sockets, "peers:ram");
    tunnel.wait_for("peers connect over TCP");
}

/// The tunnel ignores sockets that were passed to a parent process.
#[test]
fn an_inherited_environment_is_ignored() {
    let hosts = Hosts::new();
    let config = near_config(&hosts, "127.0.0.1:9", "ram", "in");
    let file = hosts.scratch.join("near.toml");
    fs::write(&file, config).unwrap();
    let mut command = words("tunnel run --config");
    command.arg(&file).arg("--control").arg(control(&hosts));
    command.env("LISTEN_PID", "1").env("LISTEN_FDS", "9");
    let near = Tunnel::follow(command, file);
    connect(hosts.scratch.join("in"));
    near.signal("TERM");
    assert_eq!(near.code(), Some(0));
}

/// The socket on which a service manager receives notifications.
struct Manager(UnixDatagram);

impl Manager {
    fn hear(&self) -> String {
        let mut bytes = [0; 4096];
        let count = self.0.recv(&mut bytes).unwrap();
        String::from_utf8(bytes[..count].to_vec()).unwrap()
    }
}

fn assert_notifies(hosts: &Hosts, socket: UnixDatagram, name: &Path) {
    socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    let manager = Manager(socket);
    let file = hosts.scratch.join("near.toml");
    fs::write(&file, near_config(hosts, "127.0.0.1:9", "ram", "in")).unwrap();
    let mut command = words("tunnel run --config");
    command.arg(&file).arg("--control").arg(control(hosts));
    command.env("NOTIFY_SOCKET", name);
    let near = Tunnel::follow(command, file);
    let ready = manager.hear();
    assert!(ready.starts_with("READY=1\nSTATUS="), "{ready}");
    assert!(ready.contains(&near.address), "{ready}");
    // After *ready*, clients can connect.
    connect(hosts.scratch.join("in"));

    fs::write(&near.config, "listen = 1\n").unwrap();
    near.signal("HUP");
    let reloading = manager.hear();
    let (first, clock) = reloading.split_once('\n').unwrap();
    assert_eq!(first, "RELOADING=1");
    let clock = clock.strip_prefix("MONOTONIC_USEC=").unwrap();
    assert!(clock.parse::<u64>().unwrap() > 0, "{reloading}");
    let ready = manager.hear();
    assert!(
        ready.starts_with("READY=1\nSTATUS=configuration not reloaded"),
        "{ready}"
    );
    assert_eq!(ready.lines().count(), 2, "{ready}");

    near.signal("TERM");
    let stopping = manager.hear();
    assert!(stopping.starts_with("STOPPING=1\n"), "{stopping}");
    assert_eq!(near.code(), Some(0));
}

#[test]
fn the_service_manager_is_notified_of_ready_reload_and_stop() {
    let hosts = Hosts::new();
    let path = hosts.scratch.join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    assert_notifies(&hosts, socket, &path);
    // The tunnel can also notify through an abstract socket.
    let name = format!("dunlin-notify-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let socket = UnixDatagram::bind_addr(&address).unwrap();
    assert_notifies(&hosts, socket, Path::new(&format!("@{name}")));
}

#[test]
fn the_units_are_valid() {
    let units = Units::new();
    units.verify(&[
        "dunlin-tunnel.service",
        "dunlin-tunnel.socket",
        "dunlin-tunnel-ram.socket",
        "dunlin-status.service",
    ]);
}

#[test]
fn the_service_drops_what_it_does_not_need() {
    Units::new().weigh("dunlin-tunnel.service");
    Units::new().weigh("dunlin-status.service");
}

/// The group `dunlin` may read private keys, so the status page must not be in it.
#[test]
fn the_status_page_has_no_access_to_keys() {
    let units = Units::new();
    let lines = units.lines("dunlin-status.service");
    for line in [
        "DynamicUser=yes",
        "Group=dunlin-status",
        "InaccessiblePaths=-/etc/dunlin -/var/lib/dunlin",
        "CapabilityBoundingSet=",
        "PrivateNetwork=yes",
    ] {
        assert!(lines.iter().any(|one| one == line), "{line}");
    }
    assert!(
        !lines
            .iter()
            .any(|one| one.starts_with("SupplementaryGroups"))
    );
    let groups = units.lines("dunlin-sysusers.conf");
    assert!(
        groups.iter().any(|line| line == "g dunlin-status -"),
        "{groups:?}"
    );
    let directories = units.lines("dunlin-tmpfiles.conf");
    for line in [
        "d /run/dunlin/status 3770 root dunlin-status -",
        "d /run/dunlin/history 2750 root dunlin-status -",
    ] {
        assert!(directories.iter().any(|one| one == line), "{line}");
    }
}

/// Without these lines the service would run as root, and systemd-analyze would still accept it.
#[test]
fn the_services_are_no_root_and_read_certificates_by_a_group() {
    let units = Units::new();
    for service in ["dunlin-tunnel.service", "dunlin-accept.service"] {
        let lines = units.lines(service);
        for line in [
            "DynamicUser=yes",
            "SupplementaryGroups=dunlin",
            // This group has access to the status socket.
            "SupplementaryGroups=dunlin-status",
            "CapabilityBoundingSet=",
        ] {
            assert!(lines.iter().any(|one| one == line), "{service}: {line}");
        }
        // With `RuntimeDirectory=`, the service manager would make the directory of all sockets
        // inaccessible to other users.
        let is_runtime = |line: &String| line.starts_with("RuntimeDirectory");
        assert!(!lines.iter().any(is_runtime), "{service}");
    }
    let group = units.lines("dunlin-sysusers.conf");
    assert!(group.iter().any(|line| line == "g dunlin -"), "{group:?}");
    let directory = units.lines("dunlin-tmpfiles.conf");
    let wanted = "d /run/dunlin 0775 root dunlin -";
    assert!(directory.iter().any(|line| line == wanted), "{directory:?}");
}

/// The unit's `MemoryMax` must follow the formula in docs/tunnel/operation.md.
#[test]
fn i8_the_service_has_the_memory_that_the_default_limits_permit() {
    let limits = Limits::default();
    let most = 2 * limits.peer_bytes * limits.trunks as u64 + (2 << 30);
    let line = format!("MemoryMax={}G", most >> 30);
    let lines = Units::new().lines("dunlin-tunnel.service");
    assert!(lines.contains(&line), "{line}");
}

#[test]
fn the_drop_ins_of_the_pages_are_valid() {
    for (page, count) in [("tunnel/operation.md", 1), ("tunnel/ipsec.md", 1)] {
        let page = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../docs")
            .join(page);
        let text = fs::read_to_string(page).unwrap();
        let blocks = text.split("```").skip(1).step_by(2);
        let mut found = 0;
        for block in blocks.filter(|block| block.contains("[Service]")) {
            let (_, settings) = block.split_once("[Service]").unwrap();
            let settings = settings.lines().map(|line| format!("{}\n", line.trim()));
            let units = Units::new();
            let settings = settings.collect::<String>();
            units.add("dunlin-tunnel.service", &format!("[Service]\n{settings}"));
            units.verify(&["dunlin-tunnel.service"]);
            found += 1;
        }
        assert_eq!(found, count);
    }
}

/// With `ProcSubset=pid` the tunnel could not read which ciphers the kernel has. It could not find
/// out whether the kernel's TLS is fast, and would not use it.
#[test]
fn k11_the_service_may_read_which_ciphers_the_kernel_has() {
    let text = Units::new().text("dunlin-tunnel.service");
    assert!(!text.lines().any(|line| line == "ProcSubset=pid"), "{text}");
}
