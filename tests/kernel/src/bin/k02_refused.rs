//! If the kernel refuses the key of one direction, lanes stay in user space and a hand-off fails.

use std::io::Read;
use std::net::TcpStream;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use dunlin::lane::kernel::{Refused, choose};

use dunlin::lane::offload::Offload;
use dunlin::lane::provider::CipherSuite;
use dunlin_kernel_tests::handoff::{Stunnel, certificate, connect, exchange, stunnel};
use dunlin_kernel_tests::refusing::{forbid, forbid_for};
use dunlin_kernel_tests::tls::stat;
use dunlin_kernel_tests::{Guest, Needs, run};
use dunlin_linux::ktls::Direction;
use dunlin_linux::socket::wait_readable;
use dunlin_test_base::pattern;

const NEEDS: Needs = Needs {
    packages: &["stunnel4", "openssl"],
    dunlin: true,
    limit_seconds: 120,
    ..Needs::NOTHING
};

const BYTES: usize = 1 << 20;

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        certificate(guest, "pool");
        certificate(guest, "other");
        let stunnel = stunnel(guest, 4443, "");
        // Test each direction with a cipher suite of its own, because the result of a probe is
        // cached for each suite.
        for (direction, suite) in [
            (Direction::Sending, CipherSuite::Aes256Gcm),
            (Direction::Receiving, CipherSuite::Aes128Gcm),
        ] {
            thread::scope(|scope| {
                let refused = scope.spawn(|| {
                    forbid(direction);
                    lanes_choose_the_process(direction, suite);
                    a_hand_off_fails_in_one_line(guest, &stunnel);
                });
                refused.join().expect("the thread does not panic");
            });
        }
        a_connection_with_one_key_of_two_is_not_passed(&stunnel);
    })
}

/// For the connection that the command would pass, the kernel accepts the receiving key and refuses
/// the sending key. The command must close the connection without sending a byte. The test cannot
/// predict the descriptor's number, so it tries several numbers.
fn a_connection_with_one_key_of_two_is_not_passed(stunnel: &Stunnel) {
    let mut refused = 0;
    for descriptor in 3..9 {
        let mut called = thread::scope(|scope| {
            let called = scope.spawn(|| {
                forbid_for(descriptor, Direction::Sending);
                connect(stunnel.port, &["--no-verify"])
            });
            called.join().expect("the thread does not panic")
        });
        let (mut far, _) = stunnel.target.accept().expect("stunnel connects");
        if called.code == Some(0) {
            let near: TcpStream = called.sockets.pop().expect("one socket arrived").into();
            exchange(&near, &far, &pattern(BYTES, 3), &pattern(BYTES, 4));
            continue;
        }
        refused += 1;
        assert_eq!((called.code, called.sockets.len()), (Some(1), 0));
        assert_eq!(called.err.lines().count(), 1, "{called:?}");
        assert!(called.err.ends_with(" [kernel]\n"), "{called:?}");
        let mut said = Vec::new();
        // The connection may end with a reset.
        let _ = far.read_to_end(&mut said);
        assert_eq!(said, b"");
    }
    assert_eq!(refused, 1);
}

fn lanes_choose_the_process(refused: Direction, suite: CipherSuite) {
    let error = choose(Offload::Kernel, suite).expect_err("the kernel refuses one key");
    match &error {
        Refused::Direction { direction, .. } => assert_eq!(*direction, refused, "{error}"),
        _ => panic!("no direction in {error:?}"),
    }
    let choice = choose(Offload::Auto, suite).expect("auto always chooses");
    assert!(!choice.is_kernel, "{}", choice.reason);
    assert!(
        choice.reason.contains(&error.to_string()),
        "{}",
        choice.reason
    );
}

fn a_hand_off_fails_in_one_line(guest: &Guest, stunnel: &Stunnel) {
    let called = connect(stunnel.port, &["--no-verify"]);
    assert_eq!(called.code, Some(1), "{called:?}");
    assert_eq!(called.err.lines().count(), 1, "{called:?}");
    assert_eq!(
        (called.out.as_str(), called.sockets.len()),
        ("", 0),
        "{called:?}"
    );
    assert_eq!(stat(guest, "TlsCurrTxSw"), 0, "the socket is still open");
    // The handshake was complete, so the stunnel has connected to its target. No data was sent.
    let deadline = Instant::now() + Duration::from_secs(30);
    assert!(wait_readable(&stunnel.target, deadline).expect("the socket can be polled"));
    let (mut far, _) = stunnel.target.accept().expect("a connection is pending");
    let mut said = Vec::new();
    // The connection may end with a reset.
    let _ = far.read_to_end(&mut said);
    assert_eq!(said, b"");
}
