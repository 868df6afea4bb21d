//! A hand-off consumes the tickets of a TLS 1.3 server; a later key update ends the connection.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, ExitCode, Stdio};

use dunlin_kernel_tests::handoff::{
    Background, certificate, connect, connected, exchange, stunnel, wait_for_listener,
};
use dunlin_kernel_tests::{Guest, Needs, run};
use dunlin_test_base::pattern;

const NEEDS: Needs = Needs {
    packages: &["stunnel4", "openssl"],
    dunlin: true,
    limit_seconds: 180,
    ..Needs::NOTHING
};
const FLAGS: &str = "--cert-bundle-file pool.pem --tls 1.3 \
                     --ciphers TLS_AES_256_GCM_SHA384:TLS_AES_128_GCM_SHA256";

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        certificate(guest, "pool");
        certificate(guest, "other");
        session_tickets_are_consumed(guest);
        a_key_update_ends_the_connection();
    })
}

/// The stunnel sends two tickets. If a ticket were left in the socket, a plain read would fail with
/// EIO.
fn session_tickets_are_consumed(guest: &Guest) {
    let flags: Vec<_> = FLAGS.split_whitespace().collect();
    let stunnel = stunnel(guest, 4443, "sslVersion = TLSv1.3");
    for _ in 0..3 {
        let (near, far) = connected(&stunnel, &flags);
        // The peer sends first, so the socket is read after the tickets have arrived.
        exchange(&far, &near, &pattern(100_000, 1), &pattern(200_000, 2));
    }
}

fn a_key_update_ends_the_connection() {
    let flags: Vec<_> = FLAGS.split_whitespace().collect();
    let line = "s_server -accept 127.0.0.1:4444 -tls1_3 -cert pool.pem -key pool.key";
    let server = Command::new("openssl")
        .args(line.split(" "))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("openssl starts");
    let mut server = Background(server);
    wait_for_listener(4444);
    let mut called = connect(4444, &flags);
    assert_eq!(called.out, "kTLS active: TLSv1.3 TLS_AES_256_GCM_SHA384\n");
    let mut socket: TcpStream = called.sockets.pop().expect("the socket is passed").into();
    let stdin = server.0.stdin.as_mut().expect("the descriptor is a pipe");
    stdin.write_all(b"before\n").expect("the data is written");
    let mut before = [0; 7];
    socket.read_exact(&mut before).expect("the data arrives");
    assert_eq!(&before, b"before\n");
    // The command "k" makes s_server update its sending key.
    stdin.write_all(b"k\n").expect("the data is written");
    stdin.write_all(b"after\n").expect("the data is written");
    let error = socket
        .read(&mut [0; 16])
        .expect_err("no process can change the socket's key");
    println!("the owner's read: {error}");
    assert_eq!(error.raw_os_error(), Some(nix::libc::EIO), "{error}");
}
