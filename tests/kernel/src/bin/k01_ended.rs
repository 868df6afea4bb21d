//! The kernel refuses keys for a connection if the peer ends its stream right after the handshake.

use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::process::ExitCode;

use dunlin_kernel_tests::handoff::{
    Accept, Side, certificate, client, connect, end_with_handshake, stunnel, take,
};
use dunlin_kernel_tests::tls::stat;
use dunlin_kernel_tests::{Guest, Needs, run};

const NEEDS: Needs = Needs {
    packages: &["stunnel4", "openssl"],
    dunlin: true,
    limit_seconds: 120,
    ..Needs::NOTHING
};

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        certificate(guest, "pool");
        certificate(guest, "other");
        guest.command("modprobe", &["tls"]);
        connect_fails_in_one_line(guest);
        accept_sends_an_alert_and_logs_the_reason(guest);
    })
}

/// If the server ends the stream, `dunlin handoff connect` fails and prints one line.
fn connect_fails_in_one_line(guest: &Guest) {
    let stunnel = stunnel(guest, 4443, "");
    let port = end_with_handshake(Side::Server, stunnel.port);
    let called = connect(port, &["--no-verify"]);
    assert_eq!(called.code, Some(1), "{called:?}");
    assert!(called.err.ends_with(" [control-lost]\n"), "{called:?}");
    assert_eq!(called.err.lines().count(), 1, "{called:?}");
    assert_eq!((called.out.as_str(), called.sockets.len()), ("", 0));
    assert_eq!(stat(guest, "TlsTxSw"), 0, "the kernel got keys");
}

/// The client shuts down its sending direction and continues to read, so that it receives the
/// alert.
fn accept_sends_an_alert_and_logs_the_reason(guest: &Guest) {
    let consumer = UnixListener::bind("consumer").expect("the folder is writable");
    let accept = Accept::start(guest, "1.2", &[]);
    let between = end_with_handshake(Side::Client, accept.port);
    let mut ended = client(between, "own", "-tls1_2");
    let mut said = String::new();
    let errors = ended.0.stderr.as_mut().expect("the stream is piped");
    errors
        .read_to_string(&mut said)
        .expect("the output is text");
    assert!(said.contains("alert internal error"), "{said}");
    let _ = accept.says("fault=control-lost name=own");
    // `dunlin handoff accept` connected to the consumer of its sockets and sent nothing.
    let mut line = Vec::new();
    let mut asked = consumer.accept().expect("the listener is open").0;
    asked.read_to_end(&mut line).expect("the stream ends");
    assert_eq!(line, b"");

    // The next client is served as usual.
    let mut next = client(accept.port, "own", "-tls1_2");
    let (socket, _) = take(&consumer);
    (&socket).write_all(b"hello\n").expect("the data is sent");
    let mut received = [0; 6];
    let out = next.0.stdout.as_mut().expect("the stream is piped");
    out.read_exact(&mut received).expect("the data arrives");
    assert_eq!(&received, b"hello\n");
}
