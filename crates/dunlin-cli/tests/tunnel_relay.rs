//! Relays of `dunlin tunnel` with other programs' TLS at the other end: stunnel, and OpenSSL's
//! client and server.
#![allow(clippy::unwrap_used)]

mod support;
#[path = "support/namespaces.rs"]
mod wires;

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use dunlin_test_base::need::are_here;
use dunlin_test_base::pattern;
use dunlin_test_base::sockets::{ReadOnce as _, accepted, with_timeout};
use support::process::Process;
use support::{Hosts, words};
use wires::{B, Wire};

/// One host: identities `a` and `b`, a target at `out`, an entrance at `in`.
struct Scene {
    hosts: Hosts,
    target: UnixListener,
}

impl Scene {
    fn new() -> Self {
        let hosts = Hosts::new();
        let target = UnixListener::bind(hosts.scratch.join("out")).unwrap();
        Self { hosts, target }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.hosts.scratch.join(name)
    }

    fn run(&self, identity: &str, route: &str) -> Process {
        Process::start(self.command(identity, "", route))
    }

    fn command(&self, identity: &str, limits: &str, route: &str) -> Command {
        let file = self.path(&format!("{identity}.toml"));
        let text = format!(
            "listen = \"127.0.0.1:0\"\nidentity = {:?}\n{limits}\n[route.ram]\nmode = \"relay\"\n{route}",
            self.path(identity)
        );
        fs::write(&file, text).unwrap();
        let mut command = words("tunnel run --config");
        command
            .arg(&file)
            .arg("--control")
            .arg(self.path("control"));
        command
    }

    /// Starts a relay to the TLS server at `port`, as host a.
    fn to(&self, port: u16, more: &str) -> Process {
        let process = self.run(
            "a",
            &format!(
                "listen = \"unix:{}\"\nto = \"127.0.0.1:{port}\"\n{more}\n",
                self.path("in").display()
            ),
        );
        process.wait_for("route ram listens on");
        process
    }

    /// Starts a relay that accepts TLS clients on a port, as host b; returns the port's number.
    fn from(&self, more: &str) -> (Process, u16) {
        let process = self.run(
            "b",
            &format!(
                "tls_listen = \"127.0.0.1:0\"\ntarget = \"unix:{}\"\n{more}\n",
                self.path("out").display()
            ),
        );
        let line = process.wait_for("accepts TLS clients on");
        let port = line.rsplit_once(':').unwrap().1.parse().unwrap();
        (process, port)
    }

    fn connect(&self) -> UnixStream {
        with_timeout(UnixStream::connect(self.path("in")).unwrap())
    }

    fn accept(&self) -> UnixStream {
        accepted(&self.target)
    }

    /// Starts stunnel; returns the process and its port.
    fn stunnel(&self, identity: &str, service: &str) -> (Process, u16) {
        let file = self.path(&format!("stunnel-{identity}.conf"));
        let of = |name: &str| self.path(identity).join(name).display().to_string();
        let text = format!(
            "foreground = yes\npid =\ndebug = info\n[ram]\naccept = 127.0.0.1:0\ncert = {}\nkey = {}\nCAfile = {}\n\
             verifyChain = yes\n{service}\n",
            of("cert.pem"),
            of("key.pem"),
            of("ca-cert.pem"),
        );
        fs::write(&file, text).unwrap();
        Process::stunnel(&file)
    }

    fn openssl(&self, identity: Option<&str>, words: &str) -> Process {
        let mut command = Command::new("openssl");
        command.args(words.split_whitespace());
        if let Some(identity) = identity {
            let folder = self.path(identity);
            command
                .arg("-cert")
                .arg(folder.join("cert.pem"))
                .arg("-key")
                .arg(folder.join("key.pem"));
        }
        command
            .arg("-CAfile")
            .arg(self.path("a").join("ca-cert.pem"));
        Process::start(command)
    }
}

/// Sends in both directions simultaneously, and ends both directions.
fn exchange<A, B>(near: A, far: B, end_near: fn(&A), end_far: fn(&B))
where
    A: Send + Sync,
    B: Send + Sync,
    for<'a> &'a A: Read + Write,
    for<'a> &'a B: Read + Write,
{
    let (there, back) = (pattern(6 << 20, 1), pattern(5 << 20, 2));
    thread::scope(|scope| {
        scope.spawn(|| {
            (&near).write_all(&there).unwrap();
            // A TLS 1.2 peer may close both directions when one ends, so read all bytes before
            // ending a direction.
            let mut came = vec![0; back.len()];
            (&near).read_exact(&mut came).unwrap();
            assert!(came == back);
            end_near(&near);
        });
        let mut came = vec![0; there.len()];
        scope.spawn(|| (&far).write_all(&back).unwrap());
        (&far).read_exact(&mut came).unwrap();
        assert!(came == there);
        assert_eq!(
            (&far).read_once(&mut [0]).unwrap(),
            0,
            "the near side's end of stream was not passed on"
        );
        end_far(&far);
    });
    assert_eq!(
        (&near).read_once(&mut [0]).unwrap(),
        0,
        "the far side's end of stream was not passed on"
    );
}

fn end(stream: &UnixStream) {
    stream.shutdown(Shutdown::Write).unwrap();
}

fn end_tcp(stream: &TcpStream) {
    stream.shutdown(Shutdown::Write).unwrap();
}

/// The names of the TLS versions for `dunlin`, stunnel and openssl.
const VERSIONS: [(&str, &str, &str); 2] =
    [("1.3", "TLSv1.3", "-tls1_3"), ("1.2", "TLSv1.2", "-tls1_2")];

#[test]
fn a_real_stunnel_at_the_far_side_receives_from_a_relay() {
    if !are_here(&["stunnel4"]) {
        return;
    }
    for (tls, stunnel, _) in VERSIONS {
        let scene = Scene::new();
        let service = format!(
            "connect = {}\nsslVersion = {stunnel}",
            scene.path("out").display()
        );
        let (_server, port) = scene.stunnel("b", &service);
        let more = format!("peers = [\"b.test\"]\ntls = {tls:?}");
        let near = scene.to(port, &more);
        for _ in 0..3 {
            exchange(scene.connect(), scene.accept(), end, end);
            near.wait_for("is closed");
        }
    }
}

#[test]
fn a_relay_accepts_a_real_stunnel_at_the_near_side() {
    if !are_here(&["stunnel4"]) {
        return;
    }
    for (tls, stunnel, _) in VERSIONS {
        let scene = Scene::new();
        let (far, port) = scene.from(&format!("allow = [\"a.test\"]\ntls = {tls:?}"));
        let service = format!("client = yes\nconnect = 127.0.0.1:{port}\nsslVersion = {stunnel}");
        let (_client, entrance) = scene.stunnel("a", &service);
        for _ in 0..3 {
            let near = with_timeout(TcpStream::connect(("127.0.0.1", entrance)).unwrap());
            exchange(near, scene.accept(), end_tcp, end);
            far.wait_for("is closed");
        }
    }
}

#[test]
fn openssl_s_server_speaks_with_a_relay() {
    if !are_here(&["openssl"]) {
        return;
    }
    for (tls, _, flag) in VERSIONS {
        let scene = Scene::new();
        let mut server = scene.openssl(
            Some("b"),
            &format!("s_server -accept 127.0.0.1:0 {flag} -Verify 3 -verify_return_error"),
        );
        let port = openssl_port(&server);
        let near = scene.to(port, &format!("peers = [\"b.test\"]\ntls = {tls:?}"));
        let mut stream = scene.connect();
        stream.write_all(b"from a hypervisor\n").unwrap();
        server.wait_for("from a hypervisor");
        server.say("and back\n");
        let mut said = [0; 9];
        stream.read_exact(&mut said).unwrap();
        assert_eq!(&said, b"and back\n");
        // The server dies without close_notify, so the relay reports an abort, not a clean end.
        server.child.kill().unwrap();
        let why = near.wait_for("was aborted");
        assert!(why.contains("close_notify"), "{why}");
    }
}

/// The port of an `s_server`, which prints it first.
fn openssl_port(server: &Process) -> u16 {
    let line = server.wait_for("ACCEPT");
    let port = line.rsplit_once(':').map(|(_, port)| port.trim());
    port.and_then(|port| port.parse().ok())
        .unwrap_or_else(|| panic!("{line}"))
}

#[test]
fn openssl_s_client_speaks_with_a_relay() {
    if !are_here(&["openssl"]) {
        return;
    }
    for (tls, _, flag) in VERSIONS {
        let scene = Scene::new();
        let (far, port) = scene.from(&format!("allow = [\"a.test\"]\ntls = {tls:?}"));
        let words = format!(
            "s_client -connect 127.0.0.1:{port} {flag} -verify_return_error \
             -verify_hostname b.test -quiet -no_ign_eof"
        );
        let mut client = scene.openssl(Some("a"), &words);
        let mut stream = scene.accept();
        client.say("from a client\n");
        let mut said = [0; 14];
        stream.read_exact(&mut said).unwrap();
        assert_eq!(&said, b"from a client\n");
        stream.write_all(b"and back\n").unwrap();
        client.wait_for("and back");
        // Key updates, which only TLS 1.3 has: with `k` the client updates its own key, with `K` it
        // also requests an update from the relay.
        if tls == "1.3" {
            let mut other = scene.openssl(Some("a"), &words.replace(" -quiet -no_ign_eof", ""));
            let mut stream = scene.accept();
            other.wait_for("Verify return code: 0");
            for command in ["k\n", "K\n", "K\n"] {
                other.say(command);
                other.wait_for("KEYUPDATE");
                other.say("with new keys\n");
                let mut said = [0; 14];
                stream.read_exact(&mut said).unwrap();
                assert_eq!(&said, b"with new keys\n");
                stream.write_all(b"seen\n").unwrap();
                other.wait_for("seen");
            }
        }
        // The connection ends cleanly.
        drop(client.child.stdin.take());
        assert_eq!(stream.read_once(&mut [0]).unwrap(), 0);
        drop(stream);
        far.wait_for("is closed");
    }
}

#[test]
fn a_client_without_a_certificate_or_of_another_version_is_rejected_with_a_reason() {
    if !are_here(&["openssl"]) {
        return;
    }
    let scene = Scene::new();
    let (far, port) = scene.from("allow = [\"a.test\"]");
    let words = format!("s_client -connect 127.0.0.1:{port} -quiet");
    let _rejected = scene.openssl(None, &words);
    let why = far.wait_for("was rejected");
    assert!(why.contains("presented no certificate"), "{why}");
    assert!(why.contains("fault=unauthorised"), "{why}");
    let _other = scene.openssl(Some("b"), &words);
    let why = far.wait_for("was rejected");
    assert!(why.contains("none of the allowed names"), "{why}");
    let _older = scene.openssl(Some("a"), &(words + " -tls1_2"));
    let why = far.wait_for("was rejected");
    assert!(why.contains("fault=security-not-agreed"), "{why}");
    scene.target.set_nonblocking(true).unwrap();
    let accepted = scene.target.accept().unwrap_err();
    assert_eq!(accepted.kind(), ErrorKind::WouldBlock);
}

#[test]
fn an_old_server_needs_the_routes_permission() {
    if !are_here(&["openssl"]) {
        return;
    }
    let scene = Scene::new();
    let words = "s_server -accept 127.0.0.1:0 -tls1_2 -Verify 3";
    let server = scene.openssl(Some("b"), words);
    let near = scene.to(openssl_port(&server), "peers = [\"b.test\"]");
    assert_eq!(scene.connect().read_once(&mut [0]).unwrap(), 0);
    let why = near.wait_for("was refused");
    assert!(why.contains("requires TLS 1.3"), "{why}");
    assert!(why.contains("fault=security-not-agreed"), "{why}");
}

/// Sends equal parts until `enough` is set, and then ends the stream. Returns the number of parts.
fn send_parts(mut to: &UnixStream, part: &[u8], enough: &AtomicBool) -> usize {
    let mut parts = 0;
    while !enough.load(Ordering::SeqCst) {
        to.write_all(part).unwrap();
        parts += 1;
    }
    end(to);
    parts
}

/// Receives the parts that [`send_parts`] sends, up to the end. Returns the number of parts.
fn receive_parts(mut from: &UnixStream, part: &[u8]) -> usize {
    let mut came = vec![0; part.len()];
    let mut parts = 0;
    while from.read_once(&mut came[..1]).unwrap() == 1 {
        from.read_exact(&mut came[1..]).unwrap();
        assert!(came == part);
        parts += 1;
    }
    parts
}

/// As with a stripe, the tunnel reports a stopped peer process before any timeout expires. The
/// connections stay open, because a process without CPU time looks stopped too, and continues
/// later.
#[test]
fn a_stopped_peer_is_reported_and_its_connections_wait_for_it() {
    let scene = Scene::new();
    let (far, port) = scene.from("allow = [\"a.test\"]");
    let mut near = scene.to(port, "peers = [\"b.test\"]");
    let (source, target) = (scene.connect(), scene.accept());
    let (part, enough) = (pattern(1 << 20, 3), AtomicBool::new(false));
    let (line, took) = thread::scope(|scope| {
        let sent = scope.spawn(|| send_parts(&source, &part, &enough));
        let received = scope.spawn(|| receive_parts(&target, &part));
        far.signal("STOP");
        let begin = Instant::now();
        let line = near.wait_for(" host_answers=");
        let took = begin.elapsed();
        far.signal("CONT");
        enough.store(true, Ordering::SeqCst);
        assert_eq!(received.join().unwrap(), sent.join().unwrap());
        (line, took)
    });
    println!("{took:?}: {line}");
    // The report takes 2 to 2.5 s.
    assert!(took < Duration::from_secs(4), "{took:?}: {line}");
    assert!(line.contains(" host_answers=true"), "{line}");
    assert!(line.contains(" fault=control-lost "), "{line}");
    assert!(line.contains(&format!("127.0.0.1:{port}")), "{line}");
    drop((source, target));
    near.wait_for("is closed");
    near.signal("TERM");
    assert_eq!(near.code(), Some(0));
    let log = near.rest();
    assert!(!log.iter().any(|line| line.contains("fault=")), "{log:#?}");
}

/// If every packet is lost, only the timers of the sending host can detect that. They must do so on
/// an idle and on a busy connection.
#[test]
fn a_vanished_peer_is_detected_idle_and_busy() {
    let Some(wire) = Wire::new(None) else { return };
    let scene = Scene::new();
    let limits = "[limits]\nvanished = \"2s\"";
    let far = scene.command(
        "b",
        limits,
        &format!(
            "tls_listen = \"{B}:0\"\ntarget = \"unix:{}\"\nallow = [\"a.test\"]\n",
            scene.path("out").display()
        ),
    );
    let far = Process::start(wire.at_b(&far));
    let line = far.wait_for("accepts TLS clients on");
    let port = line.rsplit_once(':').unwrap().1;
    let near = scene.command(
        "a",
        limits,
        &format!(
            "listen = \"unix:{}\"\nto = \"{B}:{port}\"\npeers = [\"b.test\"]\n",
            scene.path("in").display()
        ),
    );
    let near = Process::start(wire.at_a(&near));
    near.wait_for("route ram listens on");
    let idle = (scene.connect(), scene.accept());
    let busy = (scene.connect(), scene.accept());
    for (near, far) in [&idle, &busy] {
        let (mut near, mut far) = (near, far);
        near.write_all(b"x").unwrap();
        far.read_exact(&mut [0]).unwrap();
    }
    let mut lose = Command::new("nft");
    lose.arg(
        "add table inet lost; \
         add chain inet lost inward { type filter hook input priority 0; policy drop; }; \
         add chain inet lost outward { type filter hook output priority 0; policy drop; }",
    );
    let lost = wire.at_b(&lose).status().unwrap();
    assert!(lost.success());
    let begin = Instant::now();
    (&busy.0).write_all(&[7; 100_000]).unwrap();
    // The tunnel reports that the peer is silent before it aborts the connections.
    let line = near.wait_for(" host_answers=");
    assert!(line.contains(" host_answers=false"), "{line}");
    assert!(line.contains(" fault=control-lost "), "{line}");
    for (near, _) in [&idle, &busy] {
        let mut near = near;
        // A unix socket cannot signal an abort, so the connection just ends; the log has the
        // reason.
        assert!(!matches!(near.read_once(&mut [0]), Ok(1..)));
    }
    for process in [&near, &far] {
        for _ in 0..2 {
            let why = process.wait_for("was aborted");
            assert!(why.contains("vanished"), "{why}");
        }
    }
    // The configured limit is two seconds, and the other 13 seconds are a margin for a busy
    // machine. Keep-alive alone, or the kernel's retransmission timeout, would take minutes.
    assert!(
        begin.elapsed() < Duration::from_secs(15),
        "{:?}",
        begin.elapsed()
    );
}
