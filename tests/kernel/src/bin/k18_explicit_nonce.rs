//! In TLS 1.2 the kernel counts explicit nonces up from the IV, regardless of the sequence number.

use std::io::Write;
use std::process::ExitCode;

use dunlin_kernel_tests::tls::{DATA, Half, Keys, connected, explicit_nonce, install, read_record};
use dunlin_kernel_tests::{Needs, run};
use dunlin_linux::ktls::Version;

fn main() -> ExitCode {
    run(&Needs::NOTHING, |_| {
        counts_from_the_iv(0x0102_0304_0506_0708);
        // The nonce is a number of eight bytes, which wraps to zero.
        counts_from_the_iv(u64::MAX - 1);
    })
}

/// A process may have sealed its Finished message under this key with a nonce of its choice. If so,
/// it must pass an IV from which the kernel does not count up to that nonce.
fn counts_from_the_iv(first: u64) {
    let (mut kernel, mut far) = connected();
    let seals = Keys {
        version: Version::V1_2,
        sequence: 1,
        iv: first.to_be_bytes(),
        ..Keys::new(1)
    };
    let opens = Keys {
        version: Version::V1_2,
        ..Keys::new(2)
    };
    install(&kernel, &seals, &opens);
    let mut half = Half::new(&seals);
    for number in 0..4 {
        kernel.write_all(b"sealed").expect("the data is sent");
        let record = read_record(&mut far)
            .expect("the data arrives")
            .expect("the stream has not ended");
        let nonce = u64::from_be_bytes(explicit_nonce(&record));
        assert_eq!(nonce, first.wrapping_add(number));
        assert_eq!(half.open(&record), Some((DATA, b"sealed".to_vec())));
    }
}
