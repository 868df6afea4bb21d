//! Kernel TLS 1.3 with installed keys moves 16 MiB between two sockets, and a wrong key opens nothing.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::ExitCode;
use std::thread;

use dunlin_kernel_tests::{Guest, Needs, run};
use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::{TcpTlsRx, TcpTlsTx, TcpUlp, TlsCryptoInfo};

const BYTES: usize = 16 << 20;
const CHUNK: usize = 1 << 20;

fn main() -> ExitCode {
    run(&Needs::NOTHING, |guest| {
        moves_16_mib(guest);
        a_wrong_key_opens_nothing(guest);
    })
}

fn moves_16_mib(guest: &Guest) {
    let (mut source, mut destination) = connected();
    install(&source, 1, 2);
    install(&destination, 2, 1);
    assert_eq!(stat(guest, "TlsTxSw"), 2, "both ends seal in the kernel");
    assert_eq!(stat(guest, "TlsRxSw"), 2, "both ends open in the kernel");

    let sender = thread::spawn(move || {
        for number in 0..BYTES / CHUNK {
            source.write_all(&chunk(number)).expect("it is sent");
        }
        // The other way, once: a key in one direction alone would show here as plaintext.
        let mut answer = [0; 5];
        source.read_exact(&mut answer).expect("it is answered");
        assert_eq!(&answer, b"there");
    });
    let mut received = vec![0; CHUNK];
    for number in 0..BYTES / CHUNK {
        destination.read_exact(&mut received).expect("it arrives");
        assert!(received == chunk(number), "chunk {number} differs");
    }
    destination.write_all(b"there").expect("it is sent");
    sender.join().expect("the sender has nothing to say");
    assert_eq!(stat(guest, "TlsDecryptError"), 0);
}

fn a_wrong_key_opens_nothing(guest: &Guest) {
    let (mut source, mut destination) = connected();
    install(&source, 1, 2);
    install(&destination, 2, 3);
    source.write_all(b"sealed").expect("it is sent");
    let error = destination
        .read(&mut [0; 16])
        .expect_err("nothing is opened");
    assert_eq!(error.raw_os_error(), Some(Errno::EBADMSG as i32), "{error}");
    assert_eq!(stat(guest, "TlsDecryptError"), 1);
}

fn connected() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("the loopback is up");
    let address = listener.local_addr().expect("it is bound");
    let source = TcpStream::connect(address).expect("somebody listens");
    let (destination, _) = listener.accept().expect("somebody has connected");
    (source, destination)
}

/// Keys for both directions, before the first byte.
fn install(socket: &TcpStream, seal: u8, open: u8) {
    setsockopt(socket, TcpUlp::default(), b"tls").expect("kernel TLS is there");
    setsockopt(socket, TcpTlsTx, &key(seal)).expect("it seals");
    setsockopt(socket, TcpTlsRx, &key(open)).expect("it opens");
}

fn key(number: u8) -> TlsCryptoInfo {
    TlsCryptoInfo::Aes256Gcm(libc::tls12_crypto_info_aes_gcm_256 {
        info: libc::tls_crypto_info {
            version: libc::TLS_1_3_VERSION,
            cipher_type: libc::TLS_CIPHER_AES_GCM_256,
        },
        iv: [number; 8],
        key: [number; 32],
        salt: [number; 4],
        rec_seq: [0; 8],
    })
}

fn chunk(number: usize) -> Vec<u8> {
    (0..CHUNK).map(|at| (at ^ at >> 8 ^ number) as u8).collect()
}

fn stat(guest: &Guest, name: &str) -> u64 {
    guest.counter("/proc/net/tls_stat", name)
}
