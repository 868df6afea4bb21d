//! A socket takes keys only while it is connected; a module that is not loaded is nowhere to be seen without CAP_NET_ADMIN.

use std::env;
use std::net::{Shutdown, TcpListener};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use dunlin::lane::kernel::{Refused, choose};

use dunlin::lane::offload::Offload;
use dunlin::lane::provider::CipherSuite;
use dunlin_kernel_tests::handoff::{self, certificate, exchange, pattern, stunnel};
use dunlin_kernel_tests::tls::{Keys, connected, errno, kernels, receive, set};
use dunlin_kernel_tests::{Guest, Needs, run};
use dunlin_linux::ktls::{Direction, attach, installed};
use nix::errno::Errno;

const BYTES: usize = 1 << 20;

/// Says that this process is the one without privileges.
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
        only_while_connected();
        once();
        keys_come_after_it();
        a_module_that_is_not_loaded(guest);
    })
}

fn only_while_connected() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("the loopback is up");
    assert_eq!(attach(&listener).map_err(errno), Err(Errno::ENOTCONN));

    // A peer that has said all it will say has closed the listener, though we could still answer.
    let (near, far) = connected();
    far.shutdown(Shutdown::Write).expect("it is open");
    assert_eq!(receive(&near, &mut [0; 8]), Ok((23, 0)));
    assert_eq!(attach(&near).map_err(errno), Err(Errno::ENOTCONN));
}

fn once() {
    let (near, _far) = kernels();
    assert_eq!(attach(&near).map_err(errno), Err(Errno::EEXIST));
    assert!(
        installed(&near, Direction::Sending)
            .expect("known")
            .is_some()
    );
}

fn keys_come_after_it() {
    let (near, _far) = connected();
    let early = set(&near, Direction::Sending, &Keys::new(1));
    assert_eq!(early, Err(Errno::ENOPROTOOPT));
    attach(&near).expect("the kernel has TLS");
    for direction in [Direction::Sending, Direction::Receiving] {
        assert_eq!(installed(&near, direction).expect("known"), None);
    }
}

/// As in a container: the module is there, and nobody inside may have it loaded.
fn a_module_that_is_not_loaded(guest: &Guest) {
    let _unloaded = guest.without_module("tls");
    unprivileged("Err(ENOENT)");
    let unasked = guest.without_loader();
    let (near, _far) = connected();
    assert_eq!(attach(&near).map_err(errno), Err(Errno::ENOENT));
    lanes_and_the_hand_off_go_on_without(guest);
    drop(unasked);
    assert_eq!(
        attach(&near).map_err(errno),
        Ok(()),
        "nothing is left of the attempt"
    );
    // Once it is loaded, everybody has it.
    unprivileged("Ok(())");
}

/// With one line that says what to do, behind a whole handshake.
fn lanes_and_the_hand_off_go_on_without(guest: &Guest) {
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
    assert!(called.err.contains("not among the trusted"), "{called:?}");
    let called = handoff::connect(stunnel.port, &["--no-verify"]);
    assert_eq!((called.code, called.sockets.len()), (Some(1), 0));
    assert_eq!(called.err.lines().count(), 1, "{called:?}");
    assert!(called.err.contains("modprobe tls"), "{called:?}");
    // Stunnel has a connection for each handshake that was whole.
    let _ = stunnel.target.accept().expect("stunnel connects");
    let more = ["--no-verify", "--fallback", "process", "--json"];
    let called = handoff::connect(stunnel.port, &more);
    assert!(called.out.contains("\"offload\":\"process\""), "{called:?}");
    let near = called.sockets.into_iter().next().expect("one came");
    let (far, _) = stunnel.target.accept().expect("stunnel connects");
    exchange(&near.into(), &far, &pattern(BYTES, 1), &pattern(BYTES, 2));
}

/// Runs this test as nobody, who expects this of a socket.
fn unprivileged(expected: &str) {
    let status = Command::new(env::current_exe().expect("proc is mounted"))
        .env(UNPRIVILEGED, expected)
        .uid(65534)
        .gid(65534)
        .status()
        .expect("it starts");
    assert!(status.success(), "as nobody: not {expected}");
}
