//! Lanes with OpenSSL's s_client and s_server as the peer, with certificates on both sides.
#![allow(missing_docs, clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use dunlin_lane::data::*;
use dunlin_lane::handshake;
use dunlin_lane::provider::CipherSuite;
use dunlin_test_base::need::are_here;
use dunlin_test_base::pattern;
use dunlin_test_support::lane::*;
use sha2::{Digest, Sha256};

const BYTES: usize = (3 << 20) + 12_345;
const STALL: Duration = Duration::from_secs(10);

struct Peer(Child);

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn openssl(command: &str, directory: &Path, suite: CipherSuite, more: &[&str]) -> Peer {
    let suite = match suite {
        CipherSuite::Aes256Gcm => "TLS_AES_256_GCM_SHA384",
        CipherSuite::Aes128Gcm => "TLS_AES_128_GCM_SHA256",
        CipherSuite::ChaCha20Poly1305 => "TLS_CHACHA20_POLY1305_SHA256",
    };
    let child = Command::new("openssl")
        .current_dir(directory)
        .args([command, "-tls1_3", "-ciphersuites", suite])
        .args(["-alpn", "dunlin"])
        .args([
            "-cert",
            "cert.pem",
            "-key",
            "key.pem",
            "-CAfile",
            "ca-cert.pem",
        ])
        .args(more)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    Peer(child)
}

fn send(mut sender: DataSender, content: &[u8]) {
    let mut content = content.to_vec();
    for part in content.chunks_mut(BATCH_BYTES) {
        sender.send_with(b"", part).unwrap();
    }
    sender.finish().unwrap();
}

#[test]
fn openssl_reads_what_a_lane_sends() {
    if !are_here(&["openssl"]) {
        return;
    }
    for (provider, suite) in combinations() {
        let authority = Authority::new();
        let directory = authority.host(&[DESTINATION]);
        let more = [
            "-accept",
            "127.0.0.1:0",
            "-num_tickets",
            "0",
            "-Verify",
            "3",
            "-verify_return_error",
            "-naccept",
            "1",
        ];
        let mut peer = openssl("s_server", &directory, suite, &more);
        let mut output = BufReader::new(peer.0.stdout.take().unwrap());
        let mut line = String::new();
        // s_server prints "ACCEPT 127.0.0.1:PORT" when it listens.
        while !line.starts_with("ACCEPT ") {
            line.clear();
            assert_ne!(output.read_line(&mut line).unwrap(), 0, "s_server ended");
        }
        let address = line.trim_start_matches("ACCEPT ").trim();
        let stream = TcpStream::connect(address).unwrap();
        let source = authority.identity(&[SOURCE]);
        let tls = source
            .client(&crypto(provider, suite), names(&[DESTINATION]))
            .unwrap();
        let secured = handshake::client(stream, &tls, soon()).unwrap();
        assert_eq!(secured.parameters.suite, suite);

        // The text is between markers, because s_server prints its own lines around it.
        let content: String = pattern(BYTES / 2, 8)
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        let content = format!("<<{content}>>\n");
        let expected = Sha256::digest(&content);
        let sending = thread::spawn(move || {
            send(DataSender::tls(secured, STALL).unwrap(), content.as_bytes());
        });
        let mut printed = String::new();
        output.read_to_string(&mut printed).unwrap();
        sending.join().unwrap();
        let start = printed.find("<<").unwrap();
        let end = printed.find(">>\n").unwrap() + 3;
        assert_eq!(
            Sha256::digest(&printed[start..end]),
            expected,
            "{provider} {suite}"
        );
        assert!(peer.0.wait().unwrap().success());
    }
}

#[test]
fn a_lane_reads_what_openssl_sends() {
    if !are_here(&["openssl"]) {
        return;
    }
    for (provider, suite) in combinations() {
        let authority = Authority::new();
        let directory = authority.host(&[SOURCE]);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let more = [
            "-connect",
            &address,
            "-quiet",
            "-verify_return_error",
            "-nocommands",
        ];
        let mut peer = openssl("s_client", &directory, suite, &more);
        let stream = accept(&listener);
        let destination = authority.identity(&[DESTINATION]);
        let tls = destination
            .server(&crypto(provider, suite), names(&[SOURCE]))
            .unwrap();
        let secured = handshake::server(stream, &tls, soon()).unwrap();
        let mut receiver = DataReceiver::tls(secured, STALL).unwrap();

        let content = pattern(BYTES, 3);
        let expected = Sha256::digest(&content);
        let mut input = peer.0.stdin.take().unwrap();
        let feeding = thread::spawn(move || {
            input.write_all(&content).unwrap();
            input
        });
        let mut digest = Sha256::new();
        receiver
            .payload(BYTES as u64, |part| digest.update(part))
            .unwrap();
        assert_eq!(digest.finalize(), expected, "{provider} {suite}");
        // Keep the input of s_client open until s_client has ended. With -quiet it runs until the
        // peer closes.
        let input = feeding.join().unwrap();
        receiver.close().unwrap();
        let mut rest = Vec::new();
        peer.0
            .stdout
            .take()
            .unwrap()
            .read_to_end(&mut rest)
            .unwrap();
        assert!(rest.is_empty());
        drop(input);
        assert!(
            peer.0.wait().unwrap().success(),
            "s_client treated close_notify as an error"
        );
    }
}

/// Accepts a connection within 10 s, so that a peer that fails to start does not block the test.
fn accept(listener: &TcpListener) -> TcpStream {
    let deadline = Instant::now() + Duration::from_secs(10);
    assert!(
        dunlin_linux::socket::wait_readable(listener, deadline).unwrap(),
        "no connection within 10 s"
    );
    listener.accept().unwrap().0
}
