//! A KeyUpdate stops the receiver until it has the new key; Linux before 6.14 accepts no new key.

use std::io::{Read, Write};
use std::process::ExitCode;

use dunlin_kernel_tests::tls::{
    DATA, HANDSHAKE, Half, KEY_UPDATE, Keys, await_bytes, kernel_and_peer, readable, receive,
    renews_keys, set, stat,
};
use dunlin_kernel_tests::{Guest, Needs, run};
use dunlin_linux::ktls::{Direction, Version, send_record};
use nix::errno::Errno;

fn main() -> ExitCode {
    run(&Needs::NOTHING, |guest| {
        a_plain_read_fails();
        if renews_keys(guest) {
            nothing_is_read_before_the_new_key(guest);
            both_directions_continue_with_new_keys(guest);
        } else {
            the_next_record_does_not_open(guest);
            no_new_key_is_accepted();
        }
    })
}

/// A read that cannot return the type of a record fails with EIO at the KeyUpdate.
fn a_plain_read_fails() {
    let (mut kernel, mut peer) = kernel_and_peer(Keys::new(1), Keys::new(2));
    peer.send(DATA, b"before");
    peer.send(HANDSHAKE, &KEY_UPDATE);
    let mut buffer = [0; 64];
    // A read stops before a record of another type, so the data before that record is not lost.
    assert_eq!(
        kernel.read(&mut buffer).expect("the record is authentic"),
        6
    );
    let error = kernel
        .read(&mut buffer)
        .expect_err("the record is not data");
    assert_eq!(error.raw_os_error(), Some(Errno::EIO as i32), "{error}");
}

/// Up to Linux 6.13, the kernel does not parse a KeyUpdate, and cannot decrypt the record after it.
fn the_next_record_does_not_open(guest: &Guest) {
    let (kernel, mut peer) = kernel_and_peer(Keys::new(1), Keys::new(2));
    peer.send(HANDSHAKE, &KEY_UPDATE);
    peer.seals = Half::new(&Keys::new(3));
    peer.send(DATA, b"under the new key");
    let mut buffer = [0; 64];
    assert_eq!(receive(&kernel, &mut buffer), Ok((HANDSHAKE, 5)));
    assert_eq!(receive(&kernel, &mut buffer), Err(Errno::EBADMSG));
    assert_eq!(stat(guest, "TlsDecryptError"), 1);
}

fn no_new_key_is_accepted() {
    let (kernel, mut peer) = kernel_and_peer(Keys::new(1), Keys::new(2));
    peer.send(HANDSHAKE, &KEY_UPDATE);
    assert_eq!(receive(&kernel, &mut [0; 64]), Ok((HANDSHAKE, 5)));
    assert_eq!(
        set(&kernel, Direction::Receiving, &Keys::new(3)),
        Err(Errno::EBUSY)
    );
    assert_eq!(
        set(&kernel, Direction::Sending, &Keys::new(4)),
        Err(Errno::EBUSY)
    );
}

fn nothing_is_read_before_the_new_key(guest: &Guest) {
    let (mut kernel, mut peer) = kernel_and_peer(Keys::new(1), Keys::new(2));
    peer.send(HANDSHAKE, &KEY_UPDATE);
    peer.seals = Half::new(&Keys::new(3));
    let mut buffer = [0; 64];
    assert_eq!(receive(&kernel, &mut buffer), Ok((HANDSHAKE, 5)));
    peer.send(DATA, b"under the new key");
    await_bytes(&kernel, 5 + 17 + 1 + 16);
    // A thread that waits in poll() waits forever. A thread that calls read() gets the error.
    assert!(
        !readable(&kernel),
        "poll reports the record before the new key"
    );
    assert_eq!(receive(&kernel, &mut buffer), Err(Errno::EKEYEXPIRED));
    let error = kernel.read(&mut buffer).expect_err("there is no key");
    assert_eq!(error.raw_os_error(), Some(Errno::EKEYEXPIRED as i32));
    // The sending direction is not affected.
    kernel.write_all(b"still").expect("the data is sent");
    assert_eq!(peer.receive(), Some((DATA, b"still".to_vec())));

    set(&kernel, Direction::Receiving, &Keys::new(3)).expect("the kernel accepts the new key");
    assert!(readable(&kernel), "the queued record cannot be read");
    assert_eq!(receive(&kernel, &mut buffer), Ok((DATA, 17)));
    assert_eq!(&buffer[..17], b"under the new key");
    assert_eq!(
        stat(guest, "TlsRxRekeyReceived"),
        2,
        "the plain read counts too"
    );
    assert_eq!(stat(guest, "TlsRxRekeyOk"), 1);
    assert_eq!(stat(guest, "TlsDecryptError"), 0);
}

fn both_directions_continue_with_new_keys(guest: &Guest) {
    let (mut kernel, mut peer) = kernel_and_peer(Keys::new(1), Keys::new(2));
    kernel.write_all(b"old").expect("the data is sent");
    // A new key must have the same version and cipher. A key for another version is refused and has
    // no effect.
    let other = Keys {
        version: Version::V1_2,
        ..Keys::new(4)
    };
    assert_eq!(set(&kernel, Direction::Sending, &other), Err(Errno::EINVAL));
    send_record(&kernel, HANDSHAKE, &KEY_UPDATE).expect("the data is sent");
    set(&kernel, Direction::Sending, &Keys::new(4)).expect("the kernel accepts the new key");
    kernel.write_all(b"new").expect("the data is sent");
    assert_eq!(peer.receive(), Some((DATA, b"old".to_vec())));
    assert_eq!(peer.receive(), Some((HANDSHAKE, KEY_UPDATE.to_vec())));
    peer.opens = Half::new(&Keys::new(4));
    assert_eq!(peer.receive(), Some((DATA, b"new".to_vec())));
    // The kernel does not wait for the peer's KeyUpdate. A new key that is set too early breaks the
    // connection.
    peer.send(DATA, b"old");
    set(&kernel, Direction::Receiving, &Keys::new(3)).expect("the kernel accepts the new key");
    assert_eq!(receive(&kernel, &mut [0; 64]), Err(Errno::EBADMSG));
    assert_eq!(stat(guest, "TlsTxRekeyOk"), 1);
    assert_eq!(stat(guest, "TlsTxRekeyError"), 1);
}
