//! Where the kernel refuses one direction's keys, nothing goes through it: the choice is the process, and the hand-off fails or is carried.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use dunlin::lane::kernel::{Refused, choose};

use dunlin::lane::offload::Offload;
use dunlin::lane::provider::CipherSuite;
use dunlin_kernel_tests::handoff::{
    Stunnel, certificate, connect, connected, exchange, pattern, stunnel,
};
use dunlin_kernel_tests::refusing::{forbid, forbid_for};
use dunlin_kernel_tests::tls::stat;
use dunlin_kernel_tests::{Guest, Needs, run};
use dunlin_linux::ktls::Direction;
use dunlin_linux::socket::wait_readable;

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
        // A suite each: what was found out about one is remembered.
        for (direction, suite) in [
            (Direction::Sending, CipherSuite::Aes256Gcm),
            (Direction::Receiving, CipherSuite::Aes128Gcm),
        ] {
            thread::scope(|scope| {
                let refused = scope.spawn(|| {
                    forbid(direction);
                    lanes_choose_the_process(direction, suite);
                    a_hand_off_fails_in_one_line(guest, &stunnel);
                    or_is_carried(&stunnel);
                });
                refused.join().expect("nothing goes through the kernel");
            });
        }
        behind_a_good_probe_another_connection_is_carried(&stunnel);
    })
}

/// The kernel takes the probe's keys and not the second of the connection that is to be passed: that
/// one is spent, and a process carries another. Which number the command's connection has is not
/// known here, so each is refused once; where it is the probe's, the first connection is carried.
fn behind_a_good_probe_another_connection_is_carried(stunnel: &Stunnel) {
    let mut spent = 0;
    for descriptor in 3..9 {
        thread::scope(|scope| {
            let refused = scope.spawn(|| {
                forbid_for(descriptor, Direction::Sending);
                connect(stunnel.port, &["--no-verify", "--fallback", "process"])
            });
            let mut called = refused.join().expect("it does not panic");
            assert_eq!((called.code, called.err.as_str()), (Some(0), ""));
            print!("{descriptor}: {}", called.out);
            let mut near = TcpStream::from(called.sockets.pop().expect("one came"));
            near.write_all(b"x").expect("it is sent");
            let far = loop {
                let (mut far, _) = stunnel.target.accept().expect("stunnel connects");
                match far.read(&mut [0]) {
                    Ok(1) => break far,
                    // Nothing was said on it, with whatever key or without.
                    _ => spent += 1,
                }
            };
            exchange(&near, &far, &pattern(BYTES, 3), &pattern(BYTES, 4));
        });
    }
    assert_eq!(spent, 1);
}

fn lanes_choose_the_process(refused: Direction, suite: CipherSuite) {
    let error = choose(Offload::Kernel, suite).expect_err("it had to be the kernel");
    match &error {
        Refused::Direction { direction, .. } => assert_eq!(*direction, refused, "{error}"),
        _ => panic!("the direction is not told: {error:?}"),
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
    assert_eq!(stat(guest, "TlsCurrTxSw"), 0, "nobody holds the socket");
    // The handshake was whole, so stunnel has connected; nothing was said.
    let deadline = Instant::now() + Duration::from_secs(30);
    assert!(wait_readable(&stunnel.target, deadline).expect("it listens"));
    let (mut far, _) = stunnel.target.accept().expect("somebody connects");
    let mut said = Vec::new();
    // It may end with a reset.
    let _ = far.read_to_end(&mut said);
    assert_eq!(said, b"");
}

fn or_is_carried(stunnel: &Stunnel) {
    let (near, far) = connected(stunnel, &["--no-verify", "--fallback", "process"]);
    exchange(&near, &far, &pattern(BYTES, 1), &pattern(BYTES, 2));
}
