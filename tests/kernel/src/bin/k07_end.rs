//! A plain read returns end of file after an end without close_notify, and fails at a close_notify.
//! It fails once at a wrong record header.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::process::ExitCode;

use dunlin_kernel_tests::tls::{
    ALERT, CLOSE_NOTIFY, DATA, Keys, errno, kernel_and_peer, pipe, receive, stat,
};
use dunlin_kernel_tests::{Guest, Needs, run};
use dunlin_linux::ktls::Version;
use nix::errno::Errno;
use nix::fcntl::{SpliceFFlags, splice};

fn main() -> ExitCode {
    run(&Needs::NOTHING, |guest| {
        a_cut_connection_reads_as_an_end(guest);
        a_close_notify_differs_from_an_end();
        a_plain_reader_fails_at_a_close_notify();
        a_wrong_header_is_reported_once();
    })
}

/// A plain read does not detect a truncated stream, so the application protocol must mark its own
/// end.
fn a_cut_connection_reads_as_an_end(guest: &Guest) {
    for of_record in [0, 4, 20] {
        let (mut kernel, mut peer) = kernel_and_peer(Keys::new(1), Keys::new(2));
        peer.send(DATA, b"all of it?");
        let cut = peer.seals.seal(DATA, b"no, this too");
        peer.socket
            .write_all(&cut[..of_record])
            .expect("the data is sent");
        peer.socket
            .shutdown(Shutdown::Write)
            .expect("the socket is open");
        let mut got = Vec::new();
        kernel.read_to_end(&mut got).expect("no error");
        assert_eq!(got, b"all of it?", "cut after {of_record} bytes");
    }
    assert_eq!(stat(guest, "TlsDecryptError"), 0);
}

fn a_close_notify_differs_from_an_end() {
    let (kernel, mut peer) = kernel_and_peer(Keys::new(1), Keys::new(2));
    peer.send(DATA, b"all of it");
    peer.send(ALERT, &CLOSE_NOTIFY);
    peer.socket
        .shutdown(Shutdown::Write)
        .expect("the socket is open");
    let mut buffer = [0; 64];
    assert_eq!(receive(&kernel, &mut buffer), Ok((DATA, 9)));
    assert_eq!(receive(&kernel, &mut buffer), Ok((ALERT, 2)));
    assert_eq!(buffer[..2], CLOSE_NOTIFY);
    assert_eq!(receive(&kernel, &mut buffer), Ok((DATA, 0)));
}

fn a_plain_reader_fails_at_a_close_notify() {
    let (mut kernel, mut peer) = kernel_and_peer(Keys::new(1), Keys::new(2));
    peer.send(ALERT, &CLOSE_NOTIFY);
    // splice(2) fails and leaves the record in the socket. A receive call that can return the
    // record's type gets the record later.
    let (_from, to) = pipe();
    let spliced = splice(&kernel, None, &to, None, 64, SpliceFFlags::empty());
    assert_eq!(spliced, Err(Errno::EINVAL));
    assert_eq!(receive(&kernel, &mut [0; 64]), Ok((ALERT, 2)));

    peer.send(ALERT, &CLOSE_NOTIFY);
    let error = kernel
        .read(&mut [0; 64])
        .expect_err("the record is not data");
    assert_eq!(error.raw_os_error(), Some(Errno::EIO as i32), "{error}");
}

/// After the error, the next read waits, and writes are still sent.
fn a_wrong_header_is_reported_once() {
    for version in [Version::V1_2, Version::V1_3] {
        for (header, error) in [
            // Unencrypted text. Its fourth and fifth byte are a valid length.
            (b"GET /", Errno::EINVAL),
            // A record without content, and one that is too long.
            (&[DATA, 3, 3, 0, 0], Errno::EBADMSG),
            (&[DATA, 3, 3, 255, 255], Errno::EMSGSIZE),
        ] {
            let [seals, opens] = [1, 2].map(|number| Keys {
                version,
                ..Keys::new(number)
            });
            let (mut kernel, mut peer) = kernel_and_peer(seals, opens);
            // The kernel checks a header only after all bytes that precede the content have
            // arrived, including an explicit nonce.
            let bytes = [&header[..], &[b' '; 32]].concat();
            peer.socket.write_all(&bytes).expect("the data is sent");
            let mut buffer = [0; 64];
            let first = kernel.read(&mut buffer).map_err(errno);
            assert_eq!(first, Err(error), "{version:?} {header:?}");
            kernel
                .set_nonblocking(true)
                .expect("the descriptor is a socket");
            let second = kernel.read(&mut buffer).map_err(|error| error.kind());
            assert_eq!(second, Err(ErrorKind::WouldBlock), "{version:?} {header:?}");
            kernel.write_all(b"more").expect("the data is sent");
            assert_eq!(peer.receive(), Some((DATA, b"more".to_vec())));
        }
    }
}
