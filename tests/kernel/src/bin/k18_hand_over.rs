//! After a hand-off, a TLS 1.2 socket repeats no nonce, not even that of the Finished message.

use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::ExitCode;
use std::thread;

use dunlin_kernel_tests::handoff::{CIPHERS, certificate, connect, stunnel};
use dunlin_kernel_tests::tls::{DATA, HANDSHAKE, explicit_nonce, read_record};
use dunlin_kernel_tests::{Needs, run};

const NEEDS: Needs = Needs {
    packages: &["stunnel4", "openssl"],
    dunlin: true,
    limit_seconds: 120,
    ..Needs::NOTHING
};

/// The content type of a ChangeCipherSpec message. The records after it are encrypted.
const CHANGE: u8 = 20;

const SENDS: usize = 50;

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        certificate(guest, "pool");
        certificate(guest, "other");
        let stunnel = stunnel(guest, 4443, "");
        for suite in CIPHERS.split(':') {
            let path = TcpListener::bind("127.0.0.1:0").expect("the loopback is up");
            let port = path.local_addr().expect("the listener is bound").port();
            let recorder = thread::spawn(move || recorded(&path, 4443));
            let called = connect(port, &["--no-verify", "--ciphers", suite]);
            assert_eq!(
                (called.code, called.sockets.len()),
                (Some(0), 1),
                "{called:?}"
            );
            let (mut far, _) = stunnel.target.accept().expect("stunnel connects");
            for descriptor in called.sockets {
                let mut near = TcpStream::from(descriptor);
                for _ in 0..SENDS {
                    near.write_all(b"sealed").expect("the data is sent");
                }
                let mut got = vec![0; 6 * SENDS];
                far.read_exact(&mut got).expect("stunnel decrypts the data");
                near.shutdown(Shutdown::Both).expect("the socket is open");
            }
            drop(far);
            assert_no_nonce_repeats(
                &recorder.join().expect("the recorder does not panic"),
                suite,
            );
        }
    })
}

fn assert_no_nonce_repeats(mut sent: &[u8], suite: &str) {
    let mut sealed = Vec::new();
    let mut is_sealed = false;
    while let Some(record) = read_record(&mut sent).expect("the bytes are whole records") {
        if is_sealed {
            sealed.push((record[0], u64::from_be_bytes(explicit_nonce(&record))));
        }
        is_sealed |= record[0] == CHANGE;
    }
    let [(HANDSHAKE, finished), data @ ..] = &sealed[..] else {
        panic!("{suite}: no Finished: {sealed:?}");
    };
    assert_eq!(data.len(), SENDS, "{suite}: not one record for each send");
    assert!(data.iter().all(|(kind, _)| *kind == DATA), "{sealed:?}");
    let nonces: BTreeSet<u64> = sealed.iter().map(|(_, nonce)| *nonce).collect();
    assert_eq!(nonces.len(), sealed.len(), "{suite}: a nonce was repeated");
    // Later records do not reach the nonce of the Finished message, because that nonce is further
    // away than the maximum number of records under one key.
    let first = data[0].1;
    assert!(
        finished.wrapping_sub(first) > 1 << 32,
        "{suite}: {finished:x} comes after {first:x}"
    );
}

/// Forwards one connection to `port`, and returns the bytes that were sent to `port`.
fn recorded(listener: &TcpListener, port: u16) -> Vec<u8> {
    let (near, _) = listener.accept().expect("a connection is pending");
    let far = TcpStream::connect(("127.0.0.1", port)).expect("stunnel listens");
    let mut sent = Vec::new();
    thread::scope(|scope| {
        scope.spawn(|| {
            // A reset also ends the forwarding.
            let _ = io::copy(&mut &far, &mut &near);
            let _ = near.shutdown(Shutdown::Write);
        });
        let mut part = [0; 4096];
        while let Ok(bytes @ 1..) = (&near).read(&mut part) {
            sent.extend(&part[..bytes]);
            (&far).write_all(&part[..bytes]).expect("stunnel reads");
        }
        let _ = far.shutdown(Shutdown::Write);
    });
    sent
}
