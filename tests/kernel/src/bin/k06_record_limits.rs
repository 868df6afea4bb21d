//! The kernel does not enforce the record limit of AES-GCM.
//!
//! It seals records after number 2^24, and stops only when the sequence number wraps at 2^64.

use std::io::{Read, Write};
use std::process::ExitCode;

use dunlin_kernel_tests::tls::{DATA, Keys, kernel_and_peer};
use dunlin_kernel_tests::{Needs, run};
use dunlin_linux::ktls::Version;
use nix::errno::Errno;

/// Dunlin's limit of records that AES-GCM protects under one key. RFC 8446, section 5.5, allows
/// about 2^24.5.
const LIMIT: u64 = 1 << 24;

fn main() -> ExitCode {
    run(&Needs::NOTHING, |_| {
        for version in [Version::V1_2, Version::V1_3] {
            seals_beyond_the_limit_of_the_cipher(version);
            stops_when_the_sequence_number_wraps(version);
        }
    })
}

fn keys(version: Version, number: u8, sequence: u64) -> Keys {
    Keys {
        version,
        sequence,
        ..Keys::new(number)
    }
}

/// The kernel does not enforce the limit, so the application has to count records.
fn seals_beyond_the_limit_of_the_cipher(version: Version) {
    let at = LIMIT - 2;
    let (mut kernel, mut peer) = kernel_and_peer(keys(version, 1, at), keys(version, 2, at));
    for _ in 0..4 {
        kernel
            .write_all(b"sealed")
            .expect("the kernel has no limit");
        assert_eq!(peer.receive(), Some((DATA, b"sealed".to_vec())));
        peer.send(DATA, b"opened");
        let mut got = [0; 6];
        kernel
            .read_exact(&mut got)
            .expect("the kernel has no limit");
        assert_eq!(&got, b"opened");
    }
}

fn stops_when_the_sequence_number_wraps(version: Version) {
    let last = u64::MAX;
    let (mut kernel, mut peer) = kernel_and_peer(keys(version, 1, last - 1), keys(version, 2, 0));
    kernel
        .write_all(b"one")
        .expect("one sequence number is left after it");
    assert_eq!(peer.receive(), Some((DATA, b"one".to_vec())));
    let outcome = (0..2).find_map(|_| kernel.write_all(b"last").err());
    let error = outcome.expect("the sequence numbers are used up");
    assert_eq!(error.raw_os_error(), Some(Errno::EBADMSG as i32), "{error}");

    let (mut kernel, mut peer) = kernel_and_peer(keys(version, 1, 0), keys(version, 2, last - 1));
    peer.send(DATA, b"one");
    assert_eq!(
        kernel.read(&mut [0; 16]).expect("the record is authentic"),
        3
    );
    peer.send(DATA, b"last");
    peer.send(DATA, b"anew");
    let outcome = (0..3).find_map(|_| kernel.read(&mut [0; 16]).err());
    let error = outcome.expect("the sequence numbers are used up");
    assert_eq!(error.raw_os_error(), Some(Errno::EBADMSG as i32), "{error}");
}
