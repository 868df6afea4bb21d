//! Connections to a port of the other host arrive there through the tunnels, without any setting of
//! the program that connects. Plain sockets take the place of a toolstack.
#![allow(clippy::unwrap_used)]

mod support;
#[path = "support/tunnel.rs"]
mod tunnel;

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use dunlin_linux::socket::set_reset_on_close;
use dunlin_rig::hosts::{Family, Host, Link, LinkOptions};
use dunlin_rig::need;
use dunlin_test_base::pattern;
use dunlin_test_base::sockets::{ReadOnce as _, TIMEOUT, accepted, with_timeout};
use support::{Hosts, finish, words};
use tunnel::{Tunnel, control};

/// The toolstack's ports, as for libvirt.
const PORTS: &str = "49152-49215";
const PORT: u16 = 49_160;
const REDIRECT_PORT: u16 = 18_301;
const RELAY: &str = "mode = \"relay\"\nrelay_port = 18400\n";
const RELAY_PORT: u16 = 18_400;

/// Two hosts, with a tunnel and the rules on each. Their configurations differ only in the
/// identity.
struct Scene {
    near: Tunnel,
    far: Tunnel,
    link: Link,
    a: Host,
    b: Host,
    files: Hosts,
}

impl Scene {
    fn new() -> Option<Self> {
        Self::with("")
    }

    /// Creates the scene. `more` is added to the redirects in the tunnels' configurations.
    fn with(more: &str) -> Option<Self> {
        if !need::hosts() {
            return None;
        }
        let (a, b) = (Host::new("a").unwrap(), Host::new("b").unwrap());
        let link = Link::new(&a, &b, &LinkOptions::default()).unwrap();
        let files = Hosts::new();
        let start = |host: &Host, name: &str| {
            let peers = [(&a, "a.test"), (&b, "b.test")].map(|(host, identity)| {
                let both = [Family::V4, Family::V6].map(|family| link.address(host, family));
                format!(
                    "{:?} = {identity:?}, {:?} = {identity:?}",
                    both[0].to_string(),
                    both[1].to_string()
                )
            });
            let config = format!(
                "listen = \"[::]:18300\"\nidentity = {:?}\n\
                 [redirect.libvirt]\nports = {PORTS:?}\npeers = {{ {} }}\nusers = [\"root\"]\n{more}",
                files.scratch.join(name),
                peers.join(", "),
            );
            let file = files.scratch.join(format!("{name}.toml"));
            fs::write(&file, config).unwrap();
            count(host);
            let mut apply = words("redirect apply --config");
            apply
                .arg(&file)
                .arg("--run-dir")
                .arg(files.scratch.join(format!("rules-{name}")));
            apply
                .arg("--state-dir")
                .arg(files.scratch.join(format!("state-{name}")));
            finish(host.enter(&apply)).expect(0);
            let mut command = words("tunnel run --confine no --config");
            command.arg(&file).arg("--control");
            command.arg(control(&files).join(name));
            command
                .arg("--redirect-state")
                .arg(files.scratch.join(format!("rules-{name}")));
            Tunnel::follow(host.enter(&command), file)
        };
        let (near, far) = (start(&a, "a"), start(&b, "b"));
        // Each tunnel listens on the ports of the other host's addresses after its trunk to that
        // host is up. The ports are in this order: A's IPv4, B's IPv4, A's IPv6, B's IPv6.
        for (host, ports) in [(&a, [1, 3]), (&b, [0, 2])] {
            for more in ports {
                wait_for_listener(host, REDIRECT_PORT + more, true);
            }
        }
        Some(Self {
            near,
            far,
            link,
            a,
            b,
            files,
        })
    }

    /// Connects from host A to a port of B.
    fn connect(&self, family: Family, port: u16) -> std::io::Result<TcpStream> {
        let to = SocketAddr::new(self.link.address(&self.b, family), port);
        self.a
            .run(|| TcpStream::connect_timeout(&to, TIMEOUT))
            .unwrap()
    }

    fn listen(&self, at: IpAddr) -> TcpListener {
        self.b
            .run(|| TcpListener::bind((at, PORT)))
            .unwrap()
            .unwrap()
    }

    /// The number of packets to the toolstack's ports that arrived at B over the link, so outside
    /// the tunnel.
    fn in_the_clear(&self) -> u64 {
        let mut list = self.b.command("nft");
        let listed = list.args(["-j", "list", "counter", "inet", "test", "clear"]);
        let listed = listed.output().unwrap();
        let listed: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
        let counters = listed["nftables"].as_array().unwrap().iter();
        let packets = counters.filter_map(|one| one["counter"]["packets"].as_u64());
        packets.sum()
    }
}

/// Adds rules to those of a host.
fn nft(host: &Host, rules: &str) {
    let mut nft = host
        .command("nft")
        .args(["-f", "-"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    nft.stdin
        .take()
        .unwrap()
        .write_all(rules.as_bytes())
        .unwrap();
    assert!(nft.wait().unwrap().success(), "{rules}");
}

/// Waits until a tunnel on the host listens at a port of loopback or, if `expected` is false, until
/// none does.
fn wait_for_listener(host: &Host, port: u16, expected: bool) {
    let wanted = format!("127.0.0.1:{port} ");
    let until = Instant::now() + TIMEOUT;
    loop {
        let listed = host.command("ss").args(["-Hltn"]).output().unwrap();
        let listed = String::from_utf8(listed.stdout).unwrap();
        if listed.contains(&wanted) == expected {
            return;
        }
        assert!(Instant::now() < until, "port {port}: {listed}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// Starts to count the packets to the toolstack's ports that arrive over the link.
fn count(host: &Host) {
    nft(
        host,
        &format!(
            "table inet test {{
             counter clear {{ }}
             chain in {{ type filter hook prerouting priority -300; iif lo accept;
               tcp dport {PORTS} counter name clear
             }}
             }}
"
        ),
    );
}

#[test]
fn a_connection_to_a_port_of_the_other_host_arrives_there_through_the_tunnels() {
    let Some(scene) = Scene::new() else { return };
    for (family, at) in [
        (Family::V4, IpAddr::from(Ipv4Addr::LOCALHOST)),
        // Nothing listens at 127.0.0.1, the first address that the tunnel tries, so it connects to
        // the second one.
        (Family::V6, Ipv6Addr::LOCALHOST.into()),
    ] {
        let listener = scene.listen(at);
        let mut client = with_timeout(scene.connect(family, PORT).unwrap());
        let mut server = accepted(&listener);
        let from = server.peer_addr().unwrap();
        assert!(from.ip().is_loopback(), "{from}");
        client.write_all(b"to B").unwrap();
        server.write_all(b"to A").unwrap();
        let (mut there, mut here) = ([0; 4], [0; 4]);
        server.read_exact(&mut there).unwrap();
        client.read_exact(&mut here).unwrap();
        assert_eq!((&there, &here), (b"to B", b"to A"));
    }
    // Now from B to A, with the same configuration.
    let listener = scene
        .a
        .run(|| TcpListener::bind((Ipv4Addr::LOCALHOST, PORT)));
    let to = SocketAddr::new(scene.link.address(&scene.a, Family::V4), PORT);
    let client = scene.b.run(|| TcpStream::connect_timeout(&to, TIMEOUT));
    let mut client = with_timeout(client.unwrap().unwrap());
    let mut server = accepted(&listener.unwrap().unwrap());
    server.write_all(b"back").unwrap();
    let mut back = [0; 4];
    client.read_exact(&mut back).unwrap();
    assert_eq!(scene.in_the_clear(), 0);
}

/// In the mode *relay*, each redirected connection has its own TLS connection to the peer's second
/// port.
#[test]
fn i6_a_relay_carries_redirected_connections_over_tls_of_their_own() {
    let Some(scene) = Scene::with(RELAY) else {
        return;
    };
    let mut bytes = pattern(1 << 20, 11);
    let words = bytes.chunks_exact(512);
    let words = words.filter_map(|block| block.first_chunk().copied().map(u64::from_le_bytes));
    let wire = scene.link.count(&scene.a, words.collect()).unwrap();
    for (family, from, to) in [
        (Family::V4, &scene.a, &scene.b),
        (Family::V6, &scene.b, &scene.a),
    ] {
        let listener = to.run(|| TcpListener::bind((Ipv4Addr::LOCALHOST, PORT)));
        let at = SocketAddr::new(scene.link.address(to, family), PORT);
        let client = from.run(|| TcpStream::connect_timeout(&at, TIMEOUT));
        let client = with_timeout(client.unwrap().unwrap());
        let mut server = accepted(&listener.unwrap().unwrap());
        thread::scope(|scope| {
            scope.spawn(|| {
                (&client).write_all(&bytes).unwrap();
                client.shutdown(Shutdown::Write).unwrap();
            });
            let mut read = Vec::new();
            server.read_to_end(&mut read).unwrap();
            assert!(read == bytes, "{} bytes arrived", read.len());
        });
        bytes.reverse();
    }
    let traffic = wire.stop().unwrap();
    assert!(traffic.found.is_empty(), "{traffic:?}");
    assert_eq!(traffic.tried.get(&RELAY_PORT), Some(&2), "{traffic:?}");
    assert!(traffic.bytes[&RELAY_PORT] > 2 << 20, "{traffic:?}");
    assert_eq!(scene.in_the_clear(), 0);
}

/// If the peer's tunnel does not run, the listener of a redirect in mode *relay* is closed, as in
/// mode *stripe*.
#[test]
fn i6_without_the_peers_tunnel_a_relay_refuses() {
    let Some(scene) = Scene::with(RELAY) else {
        return;
    };
    let _listener = scene.listen(scene.link.address(&scene.b, Family::V4));
    scene.far.signal("KILL");
    wait_for_listener(&scene.a, REDIRECT_PORT + 1, false);
    let refused = scene.connect(Family::V4, PORT).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    assert_eq!(scene.in_the_clear(), 0);
}

/// QEMU with its own TLS relies on the order of its connections.
#[test]
fn connections_to_one_peer_arrive_in_their_order() {
    for more in ["", RELAY] {
        let Some(scene) = Scene::with(more) else {
            return;
        };
        arrive_in_order(&scene);
    }
}

fn arrive_in_order(scene: &Scene) {
    let listener = scene.listen(Ipv4Addr::LOCALHOST.into());
    let mut clients = Vec::new();
    for number in 0..16_u8 {
        let mut client = with_timeout(scene.connect(Family::V4, PORT).unwrap());
        client.write_all(&[number]).unwrap();
        clients.push(client);
    }
    for expected in 0..16 {
        let mut server = accepted(&listener);
        let mut number = [0];
        server.read_exact(&mut number).unwrap();
        assert_eq!(number, [expected]);
    }
}

/// Claim H13 of docs/security.
#[test]
fn a_connection_that_was_not_redirected_is_refused_and_shown_by_status() {
    let Some(scene) = Scene::new() else { return };
    let at = SocketAddr::from((Ipv4Addr::LOCALHOST, REDIRECT_PORT + 1));
    let stray = scene
        .a
        .run(|| TcpStream::connect_timeout(&at, TIMEOUT))
        .unwrap();
    assert!(!matches!(
        with_timeout(stray.unwrap()).read_once(&mut [0]),
        Ok(1..)
    ));
    scene.near.wait_for("unknown-route");
    let mut status = words("status --json --control");
    status.arg(control(&scene.files).join("a"));
    let status = finish(scene.a.enter(&status)).expect(0).lines();
    let tunnel = status.iter().find(|one| one["event"] == "tunnel").unwrap();
    assert_eq!(tunnel["redirect"]["refused"], 1, "{tunnel}");
    assert_eq!(tunnel["redirect"]["rules"]["state"], "applied", "{tunnel}");
}

/// While the tunnel is stopped, the rules stay, and nothing leaves the host in the clear.
///
/// Claim N15 of docs/security.
#[test]
fn a_stopped_tunnel_refuses_and_leaks_nothing() {
    let Some(mut scene) = Scene::new() else {
        return;
    };
    let _listener = scene.listen(scene.link.address(&scene.b, Family::V4));
    scene.near.signal("KILL");
    scene.near.child.wait().unwrap();
    let refused = scene.connect(Family::V4, PORT).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    // After B's tunnel has died, A's tunnel closes its listener.
    let scene = Scene::new().unwrap();
    scene.far.signal("KILL");
    wait_for_listener(&scene.a, REDIRECT_PORT + 1, false);
    let refused = scene.connect(Family::V4, PORT).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    assert_eq!(scene.in_the_clear(), 0);
}

/// While the tunnel is stopped, another user's program listens on the tunnel's port.
///
/// Claim H15 of docs/security.
#[test]
fn i6_another_users_listener_gets_no_redirected_connection() {
    let Some(mut scene) = Scene::new() else {
        return;
    };
    scene.near.signal("KILL");
    scene.near.child.wait().unwrap();
    let at = (Ipv4Addr::LOCALHOST, REDIRECT_PORT + 1);
    for (user, gets) in [("daemon", false), ("root", true)] {
        let mut listen = scene.a.command("setpriv");
        listen.args([
            "--reuid",
            user,
            "--clear-groups",
            "/usr/bin/perl",
            "-MIO::Socket::INET",
            "-e",
        ]);
        let script = format!(
            "$s = IO::Socket::INET->new(LocalAddr => '{}', LocalPort => {}, Listen => 5, \
             ReuseAddr => 1) or die; $| = 1; print \"listening\\n\"; $c = $s->accept; \
             sysread $c, $x, 6; print $x",
            at.0, at.1
        );
        let mut program = listen.arg(script).stdout(Stdio::piped()).spawn().unwrap();
        let mut output = program.stdout.take().unwrap();
        let mut said = [0; 10];
        output.read_exact(&mut said).unwrap();
        let to = SocketAddr::new(scene.link.address(&scene.b, Family::V4), PORT);
        let limit = Duration::from_secs(2);
        let connected = scene
            .a
            .run(|| TcpStream::connect_timeout(&to, limit))
            .unwrap();
        assert_eq!(connected.is_ok(), gets, "{user}: {connected:?}");
        if let Ok(mut stream) = connected {
            stream.write_all(b"memory").unwrap();
            output.read_exact(&mut said[..6]).unwrap();
            assert_eq!(&said[..6], b"memory");
        }
        program.kill().unwrap();
        program.wait().unwrap();
    }
}

/// Starts a program on host A as the given user. The program connects from the port `from`, prints
/// `connected` and reads.
fn dialler(scene: &Scene, user: &str, from: u16, to: SocketAddr) -> Child {
    let mut command = scene.a.command("setpriv");
    command.args([
        "--reuid",
        user,
        "--clear-groups",
        "/usr/bin/perl",
        "-MIO::Socket::INET",
        "-e",
    ]);
    let script = format!(
        "$s = IO::Socket::INET->new(LocalPort => {from}, ReuseAddr => 1, PeerAddr => '{}', \
         PeerPort => {}, Timeout => 3) or exit 3; $| = 1; print \"connected\\n\"; sysread $s, $x, 1",
        to.ip(),
        to.port()
    );
    command.arg(script).stdout(Stdio::piped()).spawn().unwrap()
}

/// For some seconds the kernel remembers the translation of a connection that was reset, and
/// applies it to a connection of any user from the same port.
///
/// Claim H12 of docs/security.
#[test]
fn i6_the_port_of_a_redirected_connection_gives_no_other_user_a_redirect() {
    let Some(scene) = Scene::new() else { return };
    let listener = scene.listen(Ipv4Addr::LOCALHOST.into());
    let to = SocketAddr::new(scene.link.address(&scene.b, Family::V4), PORT);
    const FROM: u16 = 41_000;
    for (user, connects) in [("root", true), ("daemon", false), ("root", true)] {
        let mut program = dialler(&scene, user, FROM, to);
        if connects {
            let server = accepted(&listener);
            // A reset before the program has noticed the connection would look like a refusal.
            let mut connected = [0; 10];
            let output = program.stdout.as_mut().unwrap();
            output.read_exact(&mut connected).unwrap();
            set_reset_on_close(&server).unwrap();
        }
        let status = program.wait().unwrap();
        assert_eq!(status.code() == Some(3), !connects, "{user}: {status}");
    }
}

/// TCP's simultaneous open needs no listener: with a SYN from the tunnel's port, a program could
/// connect to a client that waits for the tunnel's answer.
///
/// Claim H15 of docs/security.
#[test]
fn i6_another_user_sends_no_syn_from_the_tunnels_port() {
    let Some(mut scene) = Scene::new() else {
        return;
    };
    scene.near.signal("KILL");
    scene.near.child.wait().unwrap();
    let server = scene.a.run(|| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)));
    let server = server.unwrap().unwrap();
    let to = server.local_addr().unwrap();
    for (user, connects) in [("daemon", false), ("root", true)] {
        let mut program = dialler(&scene, user, REDIRECT_PORT + 1, to);
        if connects {
            drop(accepted(&server));
        }
        let status = program.wait().unwrap();
        assert_eq!(status.code() == Some(3), !connects, "{user}: {status}");
    }
}
