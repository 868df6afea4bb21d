//! Only a connected socket accepts keys; without CAP_NET_ADMIN the kernel loads no module.

use std::env;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use dunlin::lane::kernel::{Refused, choose};

use dunlin::lane::offload::Offload;
use dunlin::lane::provider::CipherSuite;
use dunlin_kernel_tests::handoff::{self, Accept, Stunnel, certificate, client, stunnel};
use dunlin_kernel_tests::tls::{Keys, connected, errno, kernels, receive, set};
use dunlin_kernel_tests::{Guest, Needs, run};
use dunlin_linux::ktls::{Direction, attach, installed};
use nix::errno::Errno;

/// The variable that is set in the environment of the unprivileged process.
const UNPRIVILEGED: &str = "RIG_UNPRIVILEGED";

const NEEDS: Needs = Needs {
    packages: &["stunnel4", "openssl"],
    dunlin: true,
    limit_seconds: 120,
    ..Needs::NOTHING
};

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        if let Ok(expected) = env::var(UNPRIVILEGED) {
            let (near, _far) = connected();
            let outcome = attach(&near).map_err(errno);
            assert_eq!(format!("{outcome:?}"), expected);
            return;
        }
        attach_needs_a_connected_socket();
        once();
        keys_need_an_attached_socket();
        an_unloaded_module_disables_kernel_tls(guest);
    })
}

fn attach_needs_a_connected_socket() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("the loopback is up");
    assert_eq!(attach(&listener).map_err(errno), Err(Errno::ENOTCONN));

    // After the peer's end of stream, the kernel accepts no keys, although the socket could still
    // send.
    let (near, far) = connected();
    far.shutdown(Shutdown::Write).expect("the socket is open");
    assert_eq!(receive(&near, &mut [0; 8]), Ok((23, 0)));
    assert_eq!(attach(&near).map_err(errno), Err(Errno::ENOTCONN));
}

fn once() {
    let (near, _far) = kernels();
    assert_eq!(attach(&near).map_err(errno), Err(Errno::EEXIST));
    assert!(
        installed(&near, Direction::Sending)
            .expect("the socket is open")
            .is_some()
    );
}

fn keys_need_an_attached_socket() {
    let (near, _far) = connected();
    let early = set(&near, Direction::Sending, &Keys::new(1));
    assert_eq!(early, Err(Errno::ENOPROTOOPT));
    attach(&near).expect("the kernel has TLS");
    for direction in [Direction::Sending, Direction::Receiving] {
        assert_eq!(
            installed(&near, direction).expect("the socket is open"),
            None
        );
    }
}

/// The module exists, but no process may load it, as in a container.
fn an_unloaded_module_disables_kernel_tls(guest: &Guest) {
    let _unloaded = guest.without_module("tls");
    unprivileged("Err(ENOENT)");
    let unasked = guest.without_loader();
    let (near, _far) = connected();
    assert_eq!(attach(&near).map_err(errno), Err(Errno::ENOENT));
    lanes_fall_back_and_the_hand_off_fails(guest);
    drop(unasked);
    assert_eq!(
        attach(&near).map_err(errno),
        Ok(()),
        "the failed attempt prevents the next one"
    );
    // After the module is loaded, it is available to every process.
    unprivileged("Ok(())");
}

/// The process itself seals the records of lanes. The hand-off command fails after a complete
/// handshake, and prints one line with advice.
fn lanes_fall_back_and_the_hand_off_fails(guest: &Guest) {
    for suite in CipherSuite::ALL {
        assert_eq!(choose(Offload::Kernel, suite).err(), Some(Refused::Absent));
        let auto = choose(Offload::Auto, suite).expect("auto always chooses");
        assert!(!auto.is_kernel && auto.reason.contains("modprobe tls"));
    }
    certificate(guest, "pool");
    certificate(guest, "other");
    let stunnel = stunnel(guest, 4443, "");
    let trusted = ["--cert-bundle-file", "other.pem"];
    let called = handoff::connect(stunnel.port, &trusted);
    assert!(called.err.ends_with(" [unauthorised]\n"), "{called:?}");
    let called = handoff::connect(stunnel.port, &["--no-verify"]);
    assert_eq!((called.code, called.sockets.len()), (Some(1), 0));
    assert_eq!(called.err.lines().count(), 1, "{called:?}");
    assert!(called.err.ends_with(" [kernel]\n"), "{called:?}");
    assert!(called.err.contains("modprobe tls"), "{called:?}");
    // The stunnel opens one connection to its target for each complete handshake. Take that of the
    // call with --no-verify.
    let _ = stunnel.target.accept().expect("stunnel connects");
    accept_forwards_and_passes_no_socket(guest, &stunnel);
    let certificate = ["--cert", "other.pem", "--key", "other.key"];
    let done = Accept::command(guest, &certificate).output();
    let done = done.expect("dunlin is in the path");
    let said = String::from_utf8_lossy(&done.stderr);
    assert_eq!(done.status.code(), Some(1), "{said}");
    assert_eq!((done.stdout.len(), said.lines().count()), (0, 1), "{said}");
    assert!(said.ends_with(" [kernel]\n"), "{said}");
    assert!(said.contains("modprobe tls"), "{said}");
}

fn accept_forwards_and_passes_no_socket(guest: &Guest, stunnel: &Stunnel) {
    let consumer = UnixListener::bind("consumer").expect("the folder is writable");
    let accept = Accept::start(guest, "1.2", &[]);
    let warning = accept.says("are refused, all others are forwarded");
    assert!(warning.contains("modprobe tls"), "{warning}");
    let mut own = client(accept.port, "own", "-tls1_2");
    let line = accept.says("fault=kernel name=own");
    assert!(line.contains("modprobe tls"), "{line}");
    let mut said = String::new();
    let errors = own.0.stderr.as_mut().expect("the stream is piped");
    errors
        .read_to_string(&mut said)
        .expect("the output is text");
    assert!(said.contains("alert internal error"), "{said}");
    let mut passed = Vec::new();
    let mut asked = consumer.accept().expect("the listener is open").0;
    asked.read_to_end(&mut passed).expect("the stream ends");
    assert_eq!(passed, b"");

    let mut other = client(accept.port, "pool", "-tls1_2");
    let (mut served, _) = stunnel.target.accept().expect("stunnel connects");
    served.write_all(b"hello\n").expect("the data is sent");
    let mut received = [0; 6];
    let out = other.0.stdout.as_mut().expect("the stream is piped");
    out.read_exact(&mut received).expect("the data arrives");
    assert_eq!(&received, b"hello\n");
}

/// Runs this program as an unprivileged user. It tries to attach kernel TLS to a socket, and must
/// get the result `expected`.
fn unprivileged(expected: &str) {
    let status = Command::new(env::current_exe().expect("proc is mounted"))
        .env(UNPRIVILEGED, expected)
        .uid(65534)
        .gid(65534)
        .status()
        .expect("the program starts");
    assert!(status.success(), "unprivileged: expected {expected}");
}
