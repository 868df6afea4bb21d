//! `dunlin handoff connect` with a stunnel configured like xapi's, on a kernel with or without TLS:
//! every failure is one line. `tests/kernel` tests the delivery of sockets.
#![allow(clippy::unwrap_used)]

#[path = "support/host.rs"]
mod host;
#[path = "support/namespaces.rs"]
mod namespaces;
#[path = "support/pool.rs"]
mod pool;
mod support;

use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use dunlin_test_base::need::are_here;
use dunlin_test_base::sockets::ClosedPort;
use pool::{CIPHERS, CURVES, Pool, call};
use support::{dunlin, kernel_has_tls};

/// Asserts that the command fails with one line that contains all of `words`, and passes no socket.
fn assert_refused(command: Command, words: &[&str]) {
    let begin = Instant::now();
    let (done, sockets) = call(command);
    assert_eq!(done.code, 1, "{done:?}");
    assert_eq!(sockets.len(), 0, "{done:?}");
    assert_eq!(done.out, "", "{done:?}");
    assert_eq!(done.err.lines().count(), 1, "{done:?}");
    assert!(done.err.starts_with("dunlin: "), "{done:?}");
    for words in words {
        assert!(done.err.contains(words), "{words:?}: {done:?}");
    }
    assert!(begin.elapsed() < Duration::from_secs(20), "{done:?}");
}

/// Asserts that the handshake completes and the certificate is accepted. Then either one socket
/// arrives, or the error says that this kernel lacks TLS: the command checks the kernel only after
/// the handshake and the certificate.
fn assert_accepted(command: Command) {
    match kernel_has_tls() {
        true => {
            let (done, sockets) = call(command);
            assert_eq!((done.code, sockets.len()), (0, 1), "{done:?}");
        }
        false => assert_refused(command, &["[kernel]", "modprobe tls"]),
    }
}

/// Claim F1 of docs/security.
#[test]
fn k01_without_kernel_tls_it_fails_in_one_line_after_a_full_handshake() {
    if !are_here(&["stunnel4", "openssl"]) || kernel_has_tls() {
        return;
    }
    let pool = Pool::new();
    let stunnel = pool.stunnel("pool", "");
    for suite in CIPHERS.split(':') {
        let mut command = pool.connect(stunnel.port, "pool");
        command.args(["--ciphers", suite]);
        assert_refused(command, &["[kernel]", "modprobe tls"]);
        stunnel
            .process
            .wait_for(&format!("TLSv1.2 ciphersuite: {suite}"));
    }
}

/// Claim F4 of docs/security.
#[test]
fn k14_a_certificate_is_checked_before_the_kernel() {
    if !are_here(&["stunnel4", "openssl", "faketime"]) {
        return;
    }
    let pool = Pool::new();
    // OpenSSL's default configuration marks every certificate as that of an authority. This
    // configuration does not.
    let config = pool.path("leaf.cnf");
    let text = "[req]\ndistinguished_name = name\n[name]\n[leaf]\nbasicConstraints = CA:FALSE\n";
    fs::write(&config, text).unwrap();
    let config = config.to_str().unwrap();
    let no_authority = ["-config", config, "-extensions", "leaf"];
    pool.self_signed("leaf", &no_authority, "openssl");
    pool.issued("by-leaf", "leaf");
    pool.issued("by-other", "other");
    pool.self_signed("past", &[], "faketime -f -90d openssl");
    pool.self_signed("future", &[], "faketime -f +90d openssl");

    let refused = |shown: &str, trusted: &str, words: &[&str]| {
        let stunnel = pool.stunnel(shown, "");
        assert_refused(pool.connect(stunnel.port, trusted), words);
    };
    refused("pool", "other", &["[unauthorised]", "sha256:"]);
    refused("by-other", "pool", &["[unauthorised]", "CN=0b5d2c1e-other"]);
    // The bundle contains the certificate of a host, which must not be accepted as an authority for
    // other certificates.
    refused("by-leaf", "leaf", &["[unauthorised]"]);
    refused("past", "past", &["[certificate-date]"]);
    refused("future", "future", &["[certificate-date]"]);

    let accepted = |shown: &str, trusted: &str| {
        let stunnel = pool.stunnel(shown, "");
        assert_accepted(pool.connect(stunnel.port, trusted));
    };
    accepted("pool", "pool");
    accepted("leaf", "leaf");
    accepted("by-other", "other");
    let stunnel = pool.stunnel("past", "");
    let mut command = dunlin(["handoff", "connect", "--host", "localhost", "--no-verify"]);
    command
        .args(["--port", &stunnel.port.to_string(), "--sni", "pool"])
        .args(["--ciphers", CIPHERS, "--curves", CURVES]);
    assert_accepted(command);

    // A required name must be in the certificate.
    let stunnel = pool.stunnel("pool", "");
    let mut command = pool.connect(stunnel.port, "pool");
    command.args(["--peer", "host2.example"]);
    assert_refused(command, &["[unauthorised]", "host2.example"]);
}

#[test]
fn invalid_arguments_are_refused_in_one_line() {
    if !are_here(&["stunnel4", "openssl"]) {
        return;
    }
    let pool = Pool::new();
    let stunnel = pool.stunnel("pool", "");
    let with = |more: &[&str]| {
        let mut command = pool.connect(stunnel.port, "pool");
        command.args(more);
        command
    };
    for (more, words) in [
        (&["--ciphers", ""][..], "list of ciphers"),
        (&["--curves", ""], "list of curves"),
        (
            &["--ciphers", "AES256-SHA"],
            "\"AES256-SHA\" is not one of the ciphers",
        ),
        (
            &["--curves", "secp521r1"],
            "\"secp521r1\" is not one of the curves",
        ),
        (
            &["--ciphers", "ECDHE-ECDSA-AES256-GCM-SHA384"],
            "[security-not-agreed]",
        ),
        (&["--curves", "X25519"], "[security-not-agreed]"),
        (
            &["--tls", "1.3", "--ciphers", "TLS_AES_256_GCM_SHA384"],
            "[security-not-agreed]",
        ),
        (&["--cert-bundle-file", "/nowhere"], "/nowhere"),
        (&["--cert-bundle-file", "/dev/null"], "/dev/null"),
        (&["--no-verify"], "cannot be used with"),
        (&["--port", "0x1"], "invalid value '0x1'"),
        (&["--surprise"], "--surprise"),
        (&["--host", "no-such-host.invalid"], "no-such-host.invalid"),
        (&["--host", "::1"], "::1"),
        (&["--sni", "not a name"], "invalid server name"),
        (&["--timeout", "0s"], "limit 0"),
        (&["--fallback", "process"], "--fallback"),
    ] {
        assert_refused(with(more), &[words]);
    }
    let closed = ClosedPort::new();
    let command = pool.connect(closed.number(), "pool");
    assert_refused(command, &[&closed.number().to_string(), "[control-lost]"]);

    for (number, words) in [("77", "not an open descriptor"), ("1", "not a unix socket")] {
        let command = with(&["--send-fd", number]);
        let done = support::finish(command).expect(1);
        assert!(done.err.contains(words), "{done:?}");
    }
}

/// Starts a server that does not speak TLS, and handles its one connection with `behave`; returns
/// its port.
fn server(behave: fn(&mut std::net::TcpStream)) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        behave(&mut stream);
    });
    port
}

#[test]
fn k13_a_peer_that_is_silent_disconnects_or_does_not_speak_tls_is_given_up_in_time() {
    if !are_here(&["openssl"]) {
        return;
    }
    let pool = Pool::new();
    let silent = server(|stream| {
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let mut command = pool.connect(silent, "pool");
    command.args(["--timeout", "700ms"]);
    assert_refused(command, &["TLS handshake timed out"]);

    let gone = server(|stream| {
        stream.read_exact(&mut [0; 64]).unwrap();
    });
    assert_refused(pool.connect(gone, "pool"), &["closed the connection"]);

    let half = server(|stream| {
        stream.read_exact(&mut [0; 64]).unwrap();
        // A truncated record.
        stream.write_all(&[22, 3, 3, 0, 200, 2, 0]).unwrap();
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let mut command = pool.connect(half, "pool");
    command.args(["--timeout", "700ms"]);
    assert_refused(command, &["TLS handshake timed out"]);

    let other = server(|stream| {
        stream.write_all(b"SSH-2.0-OpenSSH_9.2\r\n").unwrap();
        let _ = stream.read_to_end(&mut Vec::new());
    });
    assert_refused(pool.connect(other, "pool"), &["as an SSH server does"]);
}

/// The resolver gets no answers and has a long timeout. The command must end at its deadline,
/// although a name lookup cannot be interrupted.
#[test]
fn k13_a_silent_resolver_delays_only_until_the_deadline() {
    let Some(wire) = namespaces::Wire::new(None) else {
        return;
    };
    let scratch = support::Scratch::new();
    let mount = |name: &str, text: &str| {
        let file = scratch.join(name);
        fs::write(&file, text).unwrap();
        format!("mount --bind {} /etc/{name}", file.display())
    };
    let mounts = [
        mount(
            "resolv.conf",
            "nameserver 192.0.2.9\noptions timeout:30 attempts:5\n",
        ),
        mount("nsswitch.conf", "hosts: dns\n"),
    ]
    .join(" && ");
    let mut command = dunlin([
        "handoff",
        "connect",
        "--host",
        "host.example",
        "--no-verify",
    ]);
    command
        .args(["--port", "443", "--sni", "pool", "--timeout", "1s"])
        .args(["--ciphers", CIPHERS, "--curves", CURVES]);
    let Some(command) = host::in_own_mounts(&mounts, &command) else {
        return;
    };
    // The name server does not exist. With a permanent neighbour entry the kernel sends the queries
    // without neighbour discovery, which would fail.
    let mut neighbour = Command::new("ip");
    neighbour
        .args("neighbour add 192.0.2.9 lladdr 02:00:00:00:00:09 dev wire nud permanent".split(' '));
    support::finish(wire.at_a(&neighbour)).expect(0);
    assert_refused(
        wire.at_a(&command),
        &["cannot resolve host.example", "did not answer in time"],
    );
}

#[test]
fn k04_tls_1_3_and_a_client_certificate() {
    if !are_here(&["stunnel4", "openssl"]) {
        return;
    }
    let pool = Pool::new();
    let asks = format!(
        "verifyPeer = yes\nCAfile = {}\nrequireCert = yes",
        pool.path("other.pem").display()
    );
    let stunnel = pool.stunnel("pool", &asks);
    // A TLS 1.2 server sends an alert to a client without a certificate.
    assert_refused(pool.connect(stunnel.port, "pool"), &["alert"]);

    let identity = pool.path("identity");
    fs::create_dir(&identity).unwrap();
    fs::copy(pool.path("other.pem"), identity.join("cert.pem")).unwrap();
    fs::copy(pool.path("other.key"), identity.join("key.pem")).unwrap();
    fs::copy(pool.path("pool.pem"), identity.join("ca-cert.pem")).unwrap();
    let mut command = pool.connect(stunnel.port, "pool");
    command.arg("--identity").arg(&identity);
    assert_accepted(command);

    let stunnel = pool.stunnel("pool", "sslVersion = TLSv1.3");
    let mut command = pool.connect(stunnel.port, "pool");
    command.args("--tls 1.3 --ciphers TLS_AES_256_GCM_SHA384".split(' '));
    assert_accepted(command);
}

#[test]
fn the_command_runs_under_the_name_of_xapis_helper() {
    if !are_here(&["openssl"]) {
        return;
    }
    let pool = Pool::new();
    let helper = pool.path("ktls-helper");
    symlink(env!("CARGO_BIN_EXE_dunlin"), &helper).unwrap();
    let done = support::finish(Command::new(&helper)).expect(1);
    assert_eq!(done.err.lines().count(), 1, "{done:?}");
    assert!(done.err.contains("--cert-bundle-file"), "{done:?}");
    let closed = ClosedPort::new();
    let mut command = Command::new(&helper);
    command
        .args([
            "--host",
            "127.0.0.1",
            "--port",
            &closed.number().to_string(),
        ])
        .args(["--sni", "pool", "--no-verify", "--ciphers", CIPHERS])
        .args(["--curves", CURVES]);
    assert_refused(command, &["cannot reach"]);
}
