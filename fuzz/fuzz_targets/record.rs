//! Operations on a pair of record halves: whatever is done to the records on
//! their way, only what was sealed comes out, in order, and nothing after the
//! first record that was touched.
#![no_main]

use dunlin::lane::provider::{CipherSuite, Provider};
use dunlin::lane::record::{OVERHEAD_BYTES, OpenHalf, Opened, SealHalf};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let (suite, iv, key) = (CipherSuite::Aes256Gcm, [3; 12], [7; 32]);
    let mut seal = SealHalf::new(Provider::Ring, suite, &key, iv, 0).expect("ring is built in");
    let mut open = OpenHalf::new(Provider::Ring, suite, &key, iv, 0).expect("ring is built in");
    let mut touched = false;
    let mut empty = 0;
    for operation in bytes.chunks_exact(4) {
        let [kind, low, high, value] = operation.try_into().expect("chunks of four");
        let content = usize::from(u16::from_le_bytes([low, high])) % 2048;
        let mut record = vec![value; content + OVERHEAD_BYTES];
        seal.seal(&mut record).expect("far below the record limit");
        let at = usize::from(value) * 31 % record.len();
        match kind % 8 {
            // Dropped: the next one has the wrong number.
            0 => {
                touched = true;
                continue;
            }
            1 => {
                record[at] ^= 1 << (value % 8);
                touched = true;
            }
            2 => {
                record.truncate(at);
                touched = true;
            }
            3 => {
                record.push(value);
                touched = true;
            }
            _ => {}
        }
        empty = if content == 0 { empty + 1 } else { 0 };
        match open.open(&mut record) {
            Ok(Opened::Data(count)) => {
                assert!(!touched);
                assert_eq!(count, content);
                assert!(record[5..5 + count].iter().all(|&byte| byte == value));
            }
            Ok(Opened::Closed) => unreachable!("no close was sealed"),
            Err(_) => {
                assert!(touched || empty > 32);
                touched = true;
            }
        }
    }
});
