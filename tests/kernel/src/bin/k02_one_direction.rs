//! With a key for only one direction, a socket uses the other direction in the clear.
//! Callers must therefore install both keys.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::ExitCode;
use std::thread;

use dunlin_kernel_tests::refusing::forbid;
use dunlin_kernel_tests::tls::{self, DATA, Half, Keys, connected, set, stat};
use dunlin_kernel_tests::{Guest, Needs, run};
use dunlin_linux::ktls::{self, Direction};
use nix::errno::Errno;

fn main() -> ExitCode {
    run(&Needs::NOTHING, |guest| {
        without_a_sending_key_data_leaves_in_the_clear(guest);
        without_a_receiving_key_data_is_not_authenticated(guest);
    })
}

/// Returns a socket for which the kernel refused the key of one direction. A sandbox can have the
/// same effect.
fn without(direction: Direction, socket: TcpStream) -> TcpStream {
    // A seccomp filter stays with its thread, so use a separate thread.
    thread::spawn(move || {
        ktls::attach(&socket).expect("the kernel has TLS");
        forbid(direction);
        let (sealing, opening) = (
            set(&socket, Direction::Sending, &Keys::new(1)),
            set(&socket, Direction::Receiving, &Keys::new(2)),
        );
        let expected = if direction == Direction::Sending {
            (Err(Errno::EPERM), Ok(()))
        } else {
            (Ok(()), Err(Errno::EPERM))
        };
        assert_eq!((sealing, opening), expected);
        socket
    })
    .join()
    .expect("one direction is refused")
}

fn without_a_sending_key_data_leaves_in_the_clear(guest: &Guest) {
    let (near, mut far) = connected();
    let mut near = without(Direction::Sending, near);
    assert_eq!(stat(guest, "TlsCurrTxSw"), 0);
    assert_eq!(stat(guest, "TlsCurrRxSw"), 1);
    // The socket decrypts records, so a test that only receives would not detect the missing
    // sending key.
    let mut seals = Half::new(&Keys::new(2));
    far.write_all(&seals.seal(DATA, b"sealed"))
        .expect("the data is sent");
    let mut got = [0; 6];
    near.read_exact(&mut got).expect("the record is authentic");
    assert_eq!(&got, b"sealed");

    near.write_all(b"a guest's memory")
        .expect("the kernel accepts it in the clear");
    let mut seen = [0; 16];
    far.read_exact(&mut seen).expect("the data arrives");
    assert_eq!(
        &seen, b"a guest's memory",
        "the data was not in the clear on the wire"
    );
}

fn without_a_receiving_key_data_is_not_authenticated(guest: &Guest) {
    let (near, mut far) = connected();
    let mut near = without(Direction::Receiving, near);
    assert_eq!(stat(guest, "TlsCurrTxSw"), 1);
    near.write_all(b"sealed").expect("the data is sent");
    let record = tls::read_record(&mut far).expect("the data arrives");
    let record = record.expect("the stream has not ended");
    let opened = Half::new(&Keys::new(1)).open(&record);
    assert_eq!(opened, Some((DATA, b"sealed".to_vec())));

    far.write_all(b"forged by a thief")
        .expect("the data is sent");
    let mut got = [0; 17];
    near.read_exact(&mut got)
        .expect("the kernel accepts it in the clear");
    assert_eq!(
        &got, b"forged by a thief",
        "the kernel changed the unauthenticated data"
    );
    assert_eq!(stat(guest, "TlsDecryptError"), 0);
}
