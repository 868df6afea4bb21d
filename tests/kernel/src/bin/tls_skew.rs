//! Hand-off and tunnel work between an earlier and the current version of `dunlin` over kernel TLS.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixListener;
use std::process::{ChildStdout, Command, ExitCode, Stdio};

use dunlin_kernel_tests::handoff::{Accept, Background, call, exchange, take};
use dunlin_kernel_tests::sessions::until;
use dunlin_kernel_tests::tls::{renews_keys, stat};
use dunlin_kernel_tests::{Guest, Needs, run};
use dunlin_linux::ktls::{self, Cipher, Direction, Version};
use dunlin_test_base::pattern;

const NEEDS: Needs = Needs {
    dunlin: true,
    previous: true,
    limit_seconds: 240,
    ..Needs::NOTHING
};

/// The name of the certificate that `handoff accept` presents.
const NAME: &str = "own";
/// The number of bytes that are sent. It is not a multiple of a record's size.
const BYTES: usize = (4 << 20) + 777;
const LANES: u64 = 2;

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        let versions = guest.versions();
        // With these modules, the setting `auto` chooses kernel TLS for lanes.
        guest.command("modprobe", &["-a", "aesni-intel", "tls"]);
        guest.command("dunlin", &["pki", "init", "ca"]);
        for (name, folder) in [("a.test", "a"), ("b.test", "b"), (NAME, NAME)] {
            let issue = ["pki", "issue", "--ca", "ca", "--name", name, folder];
            guest.command("dunlin", &issue);
        }
        let consumer = UnixListener::bind("consumer").expect("the folder is writable");
        let mut port = 18_300;
        for [near, far] in versions {
            for version in [Version::V1_2, Version::V1_3] {
                println!("{near} connects a hand-off to {far}, {version:?}");
                a_hand_off_connects_to_the_other_version(guest, [near, far], version, &consumer);
            }
            for (mode, offload) in [("stripe", "auto"), ("relay", "auto"), ("relay", "kernel")] {
                println!("{near} has a tunnel's {mode} to {far}, {offload}");
                a_tunnel_carries_a_channel_to_the_other_version(
                    guest,
                    [near, far],
                    mode,
                    offload,
                    port,
                );
                port += 10;
            }
        }
        assert_eq!(stat(guest, "TlsDecryptError"), 0);
    })
}

fn a_hand_off_connects_to_the_other_version(
    guest: &Guest,
    [near, far]: [&str; 2],
    version: Version,
    consumer: &UnixListener,
) {
    let (tls, suite) = match version {
        Version::V1_2 => ("1.2", "ECDHE-ECDSA-AES256-GCM-SHA384"),
        Version::V1_3 => ("1.3", "TLS_AES_256_GCM_SHA384"),
    };
    let more = ["--identity", NAME, "--tls", tls];
    let accept = Accept::begin(Accept::command_of(far, guest, &more));
    let mut command = Command::new(near);
    command
        .args(["handoff", "connect", "--host", "127.0.0.1", "--sni", NAME])
        .args(["--port", &accept.port.to_string(), "--peer", NAME])
        .args(["--cert-bundle-file", "own/ca-cert.pem", "--tls", tls])
        .args(["--ciphers", suite, "--curves", "P-256"]);
    let mut called = call(command);
    assert_eq!(called.code, Some(0), "{called:?}");
    let words = format!("kTLS active: TLSv{tls} {suite}\n");
    assert_eq!(called.out, words, "{called:?}");
    let near: TcpStream = called.sockets.pop().expect("one socket arrived").into();
    let (far, line) = take(consumer);
    assert_eq!(line["offload"], "kernel");
    assert_eq!(line["version"], format!("TLSv{tls}"));
    assert_eq!(line["cipher"], suite);
    assert_eq!(line["sni"], NAME);
    for socket in [&near, &far] {
        for direction in [Direction::Sending, Direction::Receiving] {
            let installed = ktls::installed(socket, direction).expect("the descriptor is a socket");
            let installed = installed.unwrap_or_else(|| panic!("{direction:?} has no key"));
            assert!(installed.is(version, Cipher::Aes256Gcm), "{installed:?}");
        }
    }
    exchange(&near, &far, &pattern(BYTES, 1), &pattern(BYTES / 2, 2));
}

fn a_tunnel_carries_a_channel_to_the_other_version(
    guest: &Guest,
    [near, far]: [&str; 2],
    mode: &str,
    offload: &str,
    port: u16,
) {
    let at = |further: u16| format!("127.0.0.1:{}", port + further);
    let [near_port, far_port, relay_port, entrance, target] = [at(0), at(1), at(2), at(3), at(4)];
    let (to, lanes, tls_listen) = match mode {
        "relay" => (
            &relay_port,
            String::new(),
            format!("tls_listen = {relay_port:?}"),
        ),
        _ => (&far_port, format!("lanes = {LANES}"), String::new()),
    };
    let of = |identity: &str, listen: &str, route: &str| {
        format!(
            "listen = {listen:?}\nidentity = {identity:?}\ntls_offload = {offload:?}\n\
             [limits]\nlanes = {LANES}\n[route.ram]\nmode = {mode:?}\n{route}\n"
        )
    };
    let target_route = format!("target = \"tcp:{target}\"\nallow = [\"a.test\"]\n{tls_listen}");
    let entrance_route =
        format!("listen = \"tcp:{entrance}\"\nto = {to:?}\npeers = [\"b.test\"]\n{lanes}");
    let target = TcpListener::bind(target).expect("the loopback is up");
    let far = tunnel(far, "far", &of("b", &far_port, &target_route));
    let near = tunnel(near, "near", &of("a", &near_port, &entrance_route));

    let stream = TcpStream::connect(entrance).expect("the listener is open");
    let (served, _) = target.accept().expect("the listener is open");
    exchange(&stream, &served, &pattern(BYTES, 3), &pattern(BYTES / 2, 4));
    // Count both ends of each connection. Each side sends on `LANES` lanes of a stripe. If the
    // kernel cannot renew keys, `auto` leaves a relay in user space.
    let expected = match (mode, offload) {
        ("stripe", _) => 2 * 2 * LANES,
        (_, "auto") if !renews_keys(guest) => 0,
        _ => 2,
    };
    until("sockets have keys for sending and for receiving", || {
        ["TlsCurrTxSw", "TlsCurrRxSw"].map(|counter| stat(guest, counter)) == [expected; 2]
    });
    for (ends, mut receiver) in [(&stream, &served), (&served, &stream)] {
        ends.shutdown(Shutdown::Write)
            .expect("the socket is connected");
        assert_eq!(
            receiver
                .read(&mut [0])
                .expect("the stream ends without an error"),
            0
        );
    }
    drop((near, far));
}

/// Starts `tunnel run` with its log in a file, and waits until the tunnel listens.
fn tunnel(dunlin: &str, name: &str, config: &str) -> (Background, BufReader<ChildStdout>) {
    let file = format!("{name}.toml");
    fs::write(&file, config).expect("the folder is writable");
    let log = File::create(format!("{name}.log")).expect("the folder is writable");
    let mut child = Command::new(dunlin)
        .args(["tunnel", "run", "--config", &file])
        .args(["--control", "run", "--state-dir", "state"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .expect("dunlin is in the path");
    let out = child.stdout.take().expect("the stream is piped");
    let process = Background(child);
    let (mut out, mut line) = (BufReader::new(out), String::new());
    out.read_line(&mut line).expect("the output is text");
    assert!(line.starts_with("listening on "), "{name}: {line:?}");
    (process, out)
}
