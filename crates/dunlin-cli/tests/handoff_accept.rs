//! `dunlin handoff accept` in front of stunnel and other servers, with OpenSSL's clients.
#![allow(clippy::unwrap_used)]

#[path = "support/accept.rs"]
mod accept;
mod support;

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use accept::{Accept, Scene, cut};
use dunlin_test_base::need::are_here;
use dunlin_test_base::sockets::{ReadOnce as _, TIMEOUT, accepted, with_timeout};
use support::process::Process;
use support::{finish, kernel_has_tls, kill};

/// Whether to skip a test that needs a kernel without TLS; prints the reason.
fn skip_with_kernel_tls() -> bool {
    if kernel_has_tls() {
        println!("not tested, this kernel has TLS: see `cargo xtask kernel --suite tls`");
    }
    kernel_has_tls()
}

/// Copies bytes between two connections in both directions, until both directions have ended.
fn pump(one: TcpStream, other: TcpStream) {
    let copy = |mut from: TcpStream, mut to: TcpStream| {
        move || {
            let _ = std::io::copy(&mut from, &mut to);
            let _ = to.shutdown(Shutdown::Write);
        }
    };
    let back = copy(other.try_clone().unwrap(), one.try_clone().unwrap());
    thread::spawn(copy(one, other));
    thread::spawn(back);
}

/// A stunnel with one certificate for `old.test` and another for all other names. It forwards
/// clients to the service `answers`.
fn stunnel(scene: &Scene, answers: &TcpListener) -> (Process, String) {
    let of = |name: &str, file: &str| scene.path(name).join(file).display().to_string();
    let connect = answers.local_addr().unwrap();
    let text = format!(
        "foreground = yes\npid =\ndebug = info\n\
         [first]\naccept = 127.0.0.1:0\nconnect = {connect}\ncert = {}\nkey = {}\n\
         [second]\nsni = first:old.test\nconnect = {connect}\ncert = {}\nkey = {}\n",
        of("b", "cert.pem"),
        of("b", "key.pem"),
        of("old", "cert.pem"),
        of("old", "key.pem"),
    );
    let file = scene.path("stunnel.conf");
    fs::write(&file, text).unwrap();
    let (process, port) = Process::stunnel(&file);
    (process, format!("127.0.0.1:{port}"))
}

#[test]
fn in_front_of_stunnel_hand_off_names_are_handed_over_and_all_others_forwarded() {
    if !are_here(&["stunnel4", "openssl"]) {
        return;
    }
    let scene = Scene::new();
    let service = TcpListener::bind("127.0.0.1:0").unwrap();
    let (_stunnel, port) = stunnel(&scene, &service);
    let accept = scene.start("--proxy-protocol v1");
    let before = accept.held();
    thread::scope(|scope| {
        // Reads the PROXY header, which this stunnel does not expect, and forwards the remaining
        // bytes to stunnel.
        scope.spawn(|| {
            for _ in 0..3 {
                let mut client = scene.client_of_old();
                let mut line = Vec::new();
                while !line.ends_with(b"\r\n") {
                    let mut byte = [0];
                    client.read_exact(&mut byte).unwrap();
                    line.push(byte[0]);
                }
                let line = String::from_utf8(line).unwrap();
                let words: Vec<_> = line.split_whitespace().collect();
                let ["PROXY", "TCP4", "127.0.0.1", "127.0.0.1", _, own] = words[..] else {
                    panic!("{line}");
                };
                assert_eq!(accept.address, format!("127.0.0.1:{own}"));
                client.set_read_timeout(None).unwrap();
                pump(client, TcpStream::connect(&port).unwrap());
            }
        });
        for (name, more, certificate) in [
            ("old.test", "-tls1_2", "old.test"),
            ("old.test", "-tls1_3", "old.test"),
            ("", "-verify_hostname b.test", "b.test"),
        ] {
            let mut client = scene.client(&accept.address, name, more);
            let mut served = accepted(&service);
            client.say("to the old server\n");
            let mut said = [0; 18];
            served.read_exact(&mut said).unwrap();
            assert_eq!(&said, b"to the old server\n");
            served.write_all(b"and back\n").unwrap();
            client.wait_for("and back");
            drop(client.child.stdin.take());
            assert_eq!(served.read_once(&mut [0]).unwrap(), 0, "{certificate}");
            drop(served);
            assert_eq!(client.code(), Some(0));
        }
    });
    // Server names are compared without regard to case.
    let mut client = scene.client(&accept.address, "OWN.test", "-tls1_2");
    if let Some(line) = scene.delivers(&accept, &mut client) {
        assert_eq!(line["sni"], "own.test");
        assert_eq!(line["version"], "TLSv1.2");
        assert_eq!(line["offload"], "kernel");
        let cipher = line["cipher"].as_str().unwrap();
        assert!(cipher.ends_with("AES256-GCM-SHA384"), "{cipher}");
        let peer = &line["peer"];
        assert!(peer["address"].as_str().unwrap().starts_with("127.0.0.1:"));
        assert_eq!(peer["verified"], false);
        assert_eq!(line["record_limit"], 1 << 24);
    }
    drop(client.child.stdin.take());
    client.code();
    accept.settles(before);
}

/// Runs an OpenSSL client behind a proxy. `send` forwards the client's hello; the proxy forwards
/// all other bytes unchanged.
fn through(scene: &Scene, to: &str, send: impl FnOnce(&mut TcpStream, &[u8])) -> Process {
    let between = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = between.local_addr().unwrap().to_string();
    let client = scene.client(&port, "own.test", "-tls1_2");
    let mut from = accepted(&between);
    let mut header = [0; 5];
    from.read_exact(&mut header).unwrap();
    let mut hello = header.to_vec();
    hello.resize(
        5 + usize::from(u16::from_be_bytes([header[3], header[4]])),
        0,
    );
    from.read_exact(&mut hello[5..]).unwrap();
    let mut onward = with_timeout(TcpStream::connect(to).unwrap());
    send(&mut onward, &hello);
    for stream in [&from, &onward] {
        stream.set_read_timeout(None).unwrap();
    }
    pump(from, onward);
    client
}

#[test]
fn a_hello_may_arrive_byte_by_byte_and_in_one_byte_records() {
    if !are_here(&["openssl"]) {
        return;
    }
    let scene = Scene::new();
    let accept = scene.start("");
    let expect = |mut client: Process| drop(scene.delivers(&accept, &mut client));
    expect(through(&scene, &accept.address, |to, hello| {
        for byte in hello {
            to.write_all(&[*byte]).unwrap();
            thread::sleep(Duration::from_micros(200));
        }
    }));
    for size in [1, 3, 100] {
        expect(through(&scene, &accept.address, |to, hello| {
            to.write_all(&cut(hello, size)).unwrap();
        }));
    }
    expect(through(&scene, &accept.address, |to, hello| {
        for part in cut(hello, 2).chunks(3) {
            to.write_all(part).unwrap();
            thread::sleep(Duration::from_micros(200));
        }
    }));
}

#[test]
fn k01_without_kernel_tls_a_client_gets_an_alert_and_the_log_a_line() {
    if !are_here(&["openssl"]) || skip_with_kernel_tls() {
        return;
    }
    let scene = Scene::new();
    let chacha = "ECDHE-ECDSA-CHACHA20-POLY1305";
    for (tls, client) in [
        ("--tls 1.2", "-tls1_2"),
        (&*format!("--tls 1.2 --ciphers {chacha}"), "-tls1_2"),
        ("--tls 1.3", "-tls1_3"),
    ] {
        let more = format!("--else tcp:{} {tls}", scene.old.local_addr().unwrap());
        let process = Process::start(scene.command("127.0.0.1:0", &more));
        // The lines come from two outputs, in any order.
        let lines = [(); 3].map(|()| process.wait_for(""));
        let with = |words: &str| {
            let line = lines.iter().find(|line| line.contains(words));
            line.unwrap_or_else(|| panic!("no {words:?} in {lines:?}"))
        };
        let address = with("listening on ").strip_prefix("listening on ");
        let address = address.unwrap();
        let warning = with("warning: clients of hand-off names are refused");
        assert!(warning.contains("modprobe tls"), "{warning}");
        let mut accept = Accept {
            address: address.to_owned(),
            process,
        };
        let before = accept.held();
        for _ in 0..2 {
            let client = scene.client(address, "own.test", client);
            client.wait_for("alert internal error");
            let why = accept.process.wait_for("fault=kernel name=own.test");
            assert!(why.contains("modprobe tls"), "{why}");
        }
        accept.settles(before);
        // The acceptor may have connected to the receiver, but has passed it no socket.
        scene.taker.set_nonblocking(true).unwrap();
        while let Ok((mut from, _)) = scene.taker.accept() {
            let mut came = Vec::new();
            from.read_to_end(&mut came).unwrap();
            assert_eq!(came, b"");
        }
        accept.process.signal("TERM");
        assert_eq!(accept.process.code(), Some(0));
        let said = accept.process.rest();
        assert_eq!(said.len(), 1, "{said:?}");
    }
}

#[test]
fn k01_without_kernel_tls_and_without_a_server_it_does_not_start() {
    if skip_with_kernel_tls() {
        return;
    }
    let done = finish(Scene::new().command("127.0.0.1:0", "")).expect(1);
    assert_eq!(done.out, "");
    assert_eq!(done.err.lines().count(), 1, "{done:?}");
    assert_eq!(done.fault(), "kernel", "{done:?}");
    assert!(done.err.contains("modprobe tls"), "{done:?}");
}

#[test]
fn peer_names_require_client_certificates() {
    if !are_here(&["openssl"]) {
        return;
    }
    let scene = Scene::new();
    let accept = scene.start("--peer a.test");
    let certificate = |name: &str| {
        let folder = scene.path(name);
        let of = |file: &str| folder.join(file).display().to_string();
        format!("-tls1_2 -cert {} -key {}", of("cert.pem"), of("key.pem"))
    };
    let mut client = scene.client(&accept.address, "own.test", &certificate("a"));
    if let Some(line) = scene.delivers(&accept, &mut client) {
        let peer = &line["peer"];
        assert_eq!(peer["verified"], true);
        assert_eq!(peer["names"][0], "DNS a.test");
        assert_eq!(peer["fingerprint"].as_str().unwrap().len(), 64);
    }
    let _other = scene.client(&accept.address, "own.test", &certificate("b"));
    let why = accept.process.wait_for("fault=unauthorised name=own.test");
    assert!(why.contains("b.test"), "{why}");
    let _rejected = scene.client(&accept.address, "own.test", "-tls1_2");
    let why = accept.process.wait_for("fault=unauthorised name=own.test");
    assert!(
        !why.contains("b.test"),
        "the client has no certificate: {why}"
    );
    let _newer = scene.client(&accept.address, "own.test", "-tls1_3");
    accept
        .process
        .wait_for("fault=security-not-agreed name=own.test");
}

/// Claim F5 of docs/security.
#[test]
fn i7_hostile_first_bytes_are_refused_and_release_everything() {
    let scene = Scene::new();
    let accept = scene.start("");
    let before = accept.held();
    let hello = |bytes: &[u8]| [&[22, 3, 1, 0, bytes.len() as u8], bytes].concat();
    // Each hello, and the alert with which it is refused. The alert is decode_error, or none for
    // bytes that are not TLS. The unit tests of dunlin-proto's `client_hello` check the errors.
    let hostile: [(&[u8], Option<u8>); 8] = [
        (b"GET / HTTP/1.1\r\n\r\n", None),
        (b"\x16\x04\x01\x00\x01", None),
        (&hello(&[1, 0xff, 0xff, 0xff]), Some(50)),
        (&hello(&[1, 0, 0, 9]), Some(50)),
        (&hello(&[2, 0, 0, 99]), Some(50)),
        (b"\x16\x03\x01\x00\x00", Some(50)),
        (b"\x16\x03\x01\xff\xff", Some(50)),
        (&cut(&[0, 0, 0, 0, 0, 1, 0, 0, 41, 9, 9], 2), None),
    ];
    for (bytes, alert) in hostile {
        let mut client = accept.connect();
        client.write_all(bytes).unwrap();
        let mut said = Vec::new();
        client.read_to_end(&mut said).unwrap();
        let expected = alert.map(|alert| vec![21, 3, 3, 0, 2, 2, alert]);
        assert_eq!(said, expected.unwrap_or_default(), "{bytes:?}");
        let refused = format!("fault=malformed peer={}", client.local_addr().unwrap());
        drop(client);
        accept.process.wait_for(&refused);
    }
    // A disconnect and a reset in the middle of a hello.
    let mut client = accept.connect();
    client.write_all(&hello(&[1, 0, 0, 99, 3, 3])).unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    accept.process.wait_for("fault=control-lost");
    let mut client = accept.connect();
    client.write_all(&hello(&[1, 0, 0, 99, 3, 3])).unwrap();
    dunlin_linux::socket::set_reset_on_close(&client).unwrap();
    drop(client);
    accept.settles(before);
    // None of these clients reached the server.
    scene.old.set_nonblocking(true).unwrap();
    let accepted = scene.old.accept().unwrap_err();
    assert_eq!(accepted.kind(), ErrorKind::WouldBlock);
}

#[test]
fn ends_resets_and_eight_mebibytes_are_forwarded_each_way() {
    let scene = Scene::new();
    let accept = scene.start("--forward-plain");
    let before = accept.held();
    let sent: Vec<u8> = (0..8_u32 << 20).map(|at| (at ^ at >> 9) as u8).collect();
    let mut near = accept.connect();
    // The first byte shows that this client does not use TLS, so the acceptor forwards it
    // immediately. After a byte that looks like TLS, the acceptor would wait for a hello.
    near.write_all(b"not TLS").unwrap();
    let mut far = scene.client_of_old();
    far.read_exact(&mut [0; 7]).unwrap();
    thread::scope(|scope| {
        for (mut from, mut to) in [
            (near.try_clone().unwrap(), far.try_clone().unwrap()),
            (far.try_clone().unwrap(), near.try_clone().unwrap()),
        ] {
            let sent = &sent;
            scope.spawn(move || from.write_all(sent).unwrap());
            scope.spawn(move || {
                let mut came = vec![0; sent.len()];
                to.read_exact(&mut came).unwrap();
                assert!(came == *sent);
            });
        }
    });
    // End one direction; the other one stays open.
    near.shutdown(Shutdown::Write).unwrap();
    assert_eq!(far.read_once(&mut [0]).unwrap(), 0);
    far.write_all(b"after it").unwrap();
    near.read_exact(&mut [0; 8]).unwrap();
    drop(far);
    assert_eq!(near.read_once(&mut [0]).unwrap(), 0);
    drop(near);
    accept.settles(before);
    // Reset the client's or the server's connection. The acceptor detects this immediately,
    // although it has nothing to write.
    for is_server in [false, true] {
        let mut near = accept.connect();
        near.write_all(b"x").unwrap();
        let mut far = scene.client_of_old();
        far.read_exact(&mut [0]).unwrap();
        let (gone, mut left) = if is_server { (far, near) } else { (near, far) };
        dunlin_linux::socket::set_reset_on_close(&gone).unwrap();
        drop(gone);
        let error = left.read_once(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        accept.process.wait_for("fault=channel-broken");
        accept.settles(before);
    }
    // Reset the client's connection after the client has ended its direction.
    let mut near = accept.connect();
    near.write_all(b"x").unwrap();
    let mut far = scene.client_of_old();
    far.read_exact(&mut [0]).unwrap();
    near.shutdown(Shutdown::Write).unwrap();
    assert_eq!(far.read_once(&mut [0]).unwrap(), 0);
    dunlin_linux::socket::set_reset_on_close(&near).unwrap();
    far.write_all(b"unread").unwrap();
    drop(near);
    accept.settles(before);
}

#[test]
fn a_client_of_an_unreachable_server_is_logged_and_reset() {
    let scene = Scene::new();
    let accept = scene.start_alone("--forward-plain --else tcp:127.0.0.1:9");
    let mut client = accept.connect();
    client.write_all(b"x").unwrap();
    let error = client.read_once(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    accept.process.wait_for("fault=target-unreachable");
    // A server on a unix socket.
    let server = std::os::unix::net::UnixListener::bind(scene.path("server")).unwrap();
    let to = format!(
        "--forward-plain --else unix:{}",
        scene.path("server").display()
    );
    let accept = scene.start_alone(&to);
    let mut client = accept.connect();
    client.write_all(b"x").unwrap();
    let mut served = server.accept().unwrap().0;
    served.read_exact(&mut [0]).unwrap();
    served.write_all(b"y").unwrap();
    client.read_exact(&mut [0]).unwrap();
    drop(served);
    assert_eq!(client.read_once(&mut [0]).unwrap(), 0);
}

#[test]
fn after_a_signal_the_process_ends_with_its_last_client_or_at_the_limit() {
    let scene = Scene::new();
    for (limit, is_cut) in [("30s", false), ("200ms", true)] {
        let mut accept = scene.start(&format!("--forward-plain --drain {limit}"));
        let mut near = accept.connect();
        near.write_all(b"x").unwrap();
        let mut far = scene.client_of_old();
        far.read_exact(&mut [0]).unwrap();
        accept.process.signal("TERM");
        accept.process.wait_for("no new clients");
        let until = Instant::now() + TIMEOUT;
        while TcpStream::connect(&accept.address).is_ok() {
            assert!(Instant::now() < until, "the port is still open");
            thread::sleep(Duration::from_millis(5));
        }
        if is_cut {
            assert_eq!(accept.process.code(), Some(1));
            let error = near.read_once(&mut [0]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConnectionReset);
            continue;
        }
        far.write_all(b"still there").unwrap();
        near.read_exact(&mut [0; 11]).unwrap();
        drop((near, far));
        assert_eq!(accept.process.code(), Some(0));
    }
}

#[test]
fn certificates_are_reloaded_at_a_signal() {
    if !are_here(&["openssl"]) {
        return;
    }
    let scene = Scene::new();
    let accept = scene.start("");
    let mut client = scene.client(&accept.address, "own.test", "-tls1_2");
    scene.delivers(&accept, &mut client);
    for file in ["cert.pem", "key.pem"] {
        fs::copy(scene.path("b").join(file), scene.path("own").join(file)).unwrap();
    }
    accept.process.signal("HUP");
    accept.process.wait_for("certificates reloaded");
    let client = scene.client(&accept.address, "own.test", "-tls1_2");
    client.wait_for("hostname mismatch");
    fs::write(scene.path("own").join("cert.pem"), "nothing").unwrap();
    accept.process.signal("HUP");
    accept.process.wait_for("everything stays as it was");
}

#[test]
fn a_socket_of_the_service_manager_is_used() {
    let scene = Scene::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let old = scene.old.local_addr().unwrap();
    let more = format!("--forward-plain --else tcp:{old}");
    let plain = scene.command("systemd:clients", &more);
    let mut launcher = Command::new("sh");
    launcher
        .args([
            "-c",
            "exec 3<&0 0</dev/null; LISTEN_PID=$$ exec \"$@\"",
            "sh",
        ])
        .arg(plain.get_program())
        .args(plain.get_args())
        .env("LISTEN_FDS", "1")
        .env("LISTEN_FDNAMES", "clients")
        .stdin(std::os::fd::OwnedFd::from(listener));
    let mut child = launcher
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let mut near = with_timeout(TcpStream::connect(&address).unwrap());
    near.write_all(b"x").unwrap();
    let mut far = scene.client_of_old();
    far.read_exact(&mut [0]).unwrap();
    assert!(kill(child.id(), "KILL"));
    child.wait().unwrap();
}
