//! Kernel TLS 1.3 with installed keys carries 16 MiB between sockets; a wrong key decrypts nothing.

use std::io::{Read, Write};
use std::process::ExitCode;
use std::thread;

use dunlin_kernel_tests::tls::{Keys, connected, install, kernels, stat};
use dunlin_kernel_tests::{Guest, Needs, run};
use nix::errno::Errno;

const BYTES: usize = 16 << 20;
const CHUNK: usize = 1 << 20;

fn main() -> ExitCode {
    run(&Needs::NOTHING, |guest| {
        moves_16_mib(guest);
        a_wrong_key_opens_nothing(guest);
    })
}

fn moves_16_mib(guest: &Guest) {
    let (mut source, mut destination) = kernels();
    assert_eq!(
        stat(guest, "TlsTxSw"),
        2,
        "not both ends seal in the kernel"
    );
    assert_eq!(
        stat(guest, "TlsRxSw"),
        2,
        "not both ends open in the kernel"
    );

    let sender = thread::spawn(move || {
        for number in 0..BYTES / CHUNK {
            source.write_all(&chunk(number)).expect("the data is sent");
        }
        // Receive in the other direction too, because each direction has its own key.
        let mut answer = [0; 5];
        source.read_exact(&mut answer).expect("the peer answers");
        assert_eq!(&answer, b"there");
    });
    let mut received = vec![0; CHUNK];
    for number in 0..BYTES / CHUNK {
        destination
            .read_exact(&mut received)
            .expect("the data arrives");
        assert!(received == chunk(number), "chunk {number} differs");
    }
    destination.write_all(b"there").expect("the data is sent");
    sender.join().expect("the sender does not panic");
    assert_eq!(stat(guest, "TlsDecryptError"), 0);
}

fn a_wrong_key_opens_nothing(guest: &Guest) {
    let (mut source, mut destination) = connected();
    install(&source, &Keys::new(1), &Keys::new(2));
    install(&destination, &Keys::new(2), &Keys::new(3));
    source.write_all(b"sealed").expect("the data is sent");
    let error = destination
        .read(&mut [0; 16])
        .expect_err("nothing is opened");
    assert_eq!(error.raw_os_error(), Some(Errno::EBADMSG as i32), "{error}");
    assert_eq!(stat(guest, "TlsDecryptError"), 1);
}

fn chunk(number: usize) -> Vec<u8> {
    (0..CHUNK).map(|at| (at ^ at >> 8 ^ number) as u8).collect()
}
