//! `dunlin handoff connect` connects to a stunnel like xapi's and passes a kernel-TLS socket.

use std::io::Read;
use std::path::Path;
use std::process::ExitCode;

use dunlin_kernel_tests::handoff::{
    CIPHERS, CURVE, Stunnel, certificate, connect, connect_without_receiver, connected, exchange,
    stunnel,
};
use dunlin_kernel_tests::{Guest, Needs, run};
use dunlin_linux::ktls::{self, Cipher, Direction, Version};
use dunlin_test_base::pattern;
use serde_json::Value;

const NEEDS: Needs = Needs {
    packages: &["stunnel4", "openssl"],
    dunlin: true,
    limit_seconds: 300,
    ..Needs::NOTHING
};

const BYTES: usize = 64 << 20;
const ANSWER: usize = 4 << 20;

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        certificate(guest, "pool");
        certificate(guest, "other");
        let stunnel = stunnel(guest, 4443, "");
        let trusted = ["--cert-bundle-file", "pool.pem"];

        // An error that occurs before the command probes kernel TLS leaves the kernel's counters
        // unchanged.
        let refused = connect(stunnel.port, &["--cert-bundle-file", "other.pem"]);
        assert_eq!(refused.code, Some(1), "{refused:?}");
        assert!(refused.sockets.is_empty());
        assert_eq!(refused.err.lines().count(), 1, "{refused:?}");
        assert!(refused.err.ends_with(" [unauthorised]\n"), "{refused:?}");
        assert_eq!(stat(guest, "TlsTxSw"), 0);

        for (number, suite) in CIPHERS.split(':').enumerate() {
            let more = [&trusted[..], &["--ciphers", suite]].concat();
            let (near, far) = connected(&stunnel, &more);
            // Only the passed sockets are counted: the test's own sockets do not use TLS, and
            // stunnel's OpenSSL does not use kernel TLS.
            assert_eq!(stat(guest, "TlsTxSw"), number as u64 + 1);
            assert_eq!(stat(guest, "TlsRxSw"), number as u64 + 1);
            assert_eq!(stat(guest, "TlsCurrTxSw"), 1);
            assert_eq!(stat(guest, "TlsCurrRxSw"), 1);
            let cipher = if suite.contains("AES256") {
                Cipher::Aes256Gcm
            } else {
                Cipher::Aes128Gcm
            };
            for direction in [Direction::Sending, Direction::Receiving] {
                let installed =
                    ktls::installed(&near, direction).expect("the descriptor is a socket");
                let installed = installed.expect("the kernel has a key");
                assert!(installed.is(Version::V1_2, cipher), "{installed:?}");
            }
            exchange(&near, &far, &pattern(BYTES, 3), &pattern(ANSWER, 5));
            assert_eq!(stat(guest, "TlsDecryptError"), 0);
        }
        assert_eq!(stat(guest, "TlsCurrTxSw"), 0, "a socket is still open");

        prints_each_connection(&stunnel);
        a_caller_with_a_closed_socket_gets_one_line(guest, &stunnel);
        the_third_cipher_of_tls_1_2(guest);
    })
}

/// Tests ChaCha20-Poly1305, which xapi does not request. Its nonces are formed as in TLS 1.3.
fn the_third_cipher_of_tls_1_2(guest: &Guest) {
    const SUITE: &str = "ECDHE-RSA-CHACHA20-POLY1305";
    let stunnel = stunnel(guest, 4444, &format!("ciphers = {SUITE}"));
    let (near, far) = connected(&stunnel, &["--no-verify", "--ciphers", SUITE]);
    for direction in [Direction::Sending, Direction::Receiving] {
        let installed = ktls::installed(&near, direction).expect("the descriptor is a socket");
        let installed = installed.expect("the kernel has a key");
        assert!(
            installed.is(Version::V1_2, Cipher::ChaCha20Poly1305),
            "{installed:?}"
        );
    }
    exchange(&near, &far, &pattern(ANSWER, 6), &pattern(ANSWER, 7));
    assert_eq!(stat(guest, "TlsDecryptError"), 0);
}

fn prints_each_connection(stunnel: &Stunnel) {
    let called = connect(stunnel.port, &["--cert-bundle-file", "pool.pem"]);
    let suite = CIPHERS.split(':').next().expect("there are two");
    assert_eq!(called.out, format!("kTLS active: TLSv1.2 {suite}\n"));
    drop(called);
    let _ = stunnel.target.accept().expect("stunnel connects");

    let more = "--cert-bundle-file pool.pem --json --connections 3";
    let words: Vec<_> = more.split(' ').collect();
    let called = connect(stunnel.port, &words);
    assert_eq!(
        (called.code, called.sockets.len()),
        (Some(0), 3),
        "{called:?}"
    );
    assert_eq!(called.out.lines().count(), 3);
    for (line, socket) in called.out.lines().zip(called.sockets) {
        let line: Value = serde_json::from_str(line).expect("a JSON object");
        assert_eq!(line["offload"], "kernel", "{line}");
        assert_eq!(line["version"], "TLSv1.2", "{line}");
        assert_eq!(line["curve"], CURVE, "{line}");
        let address = format!("127.0.0.1:{}", stunnel.port);
        assert_eq!(line["peer"]["address"], *address, "{line}");
        assert_eq!(line["record_limit"], 1 << 24, "{line}");
        assert_eq!(line["cipher"], suite, "{line}");
        assert_eq!(line["peer"]["verified"], true, "{line}");
        let driver = line["driver"]["name"]
            .as_str()
            .expect("the kernel reports it");
        assert!(driver.contains("gcm"), "{line}");
        println!("{line}");
        let (far, _) = stunnel.target.accept().expect("stunnel connects");
        exchange(&socket.into(), &far, b"plain", b"and back");
    }
}

/// The command closes a socket that it cannot pass to the caller.
fn a_caller_with_a_closed_socket_gets_one_line(guest: &Guest, stunnel: &Stunnel) {
    let called = connect_without_receiver(stunnel.port, &["--no-verify"]);
    assert_eq!(called.code, Some(1), "{called:?}");
    assert!(called.err.contains("--send-fd 0"), "{called:?}");
    let (mut far, _) = stunnel.target.accept().expect("stunnel connects");
    let mut said = Vec::new();
    // The connection may end with a reset.
    let _ = far.read_to_end(&mut said);
    assert_eq!(said, b"");
    assert_eq!(stat(guest, "TlsCurrTxSw"), 0, "the socket is still open");
}

fn stat(guest: &Guest, name: &str) -> u64 {
    // The kernel loads the module on first use.
    if !Path::new("/proc/net/tls_stat").exists() {
        return 0;
    }
    guest.counter("/proc/net/tls_stat", name)
}
