//! Fuzz target: the record reader in front of rustls.

use std::io::Write;
use std::net::Shutdown;
use std::time::{Duration, Instant};

use super::{FLIGHT_LIMIT_BYTES, HandshakeError, Reading, read_record};
use crate::internals::record::{HEADER_BYTES, RECEIVED_RECORD_BYTES};

/// Reads any handshake records. Each must be read completely or not at all, and memory must stay
/// within the bound.
pub fn fuzz_handshake_records(bytes: &[u8]) {
    let (mut near, far) = crate::fuzz::pair();
    near.write_all(bytes)
        .expect("the socket's buffer is larger");
    near.shutdown(Shutdown::Write)
        .expect("the connection is open");
    let deadline = Instant::now() + Duration::from_secs(10);
    let mut reading = Reading::default();
    let mut rest = bytes;
    loop {
        let result = read_record(&far, deadline, &mut reading);
        assert!(reading.record.len() <= RECEIVED_RECORD_BYTES);
        assert!(reading.received <= FLIGHT_LIMIT_BYTES);
        let whole = rest
            .first_chunk()
            .map(|&[_, _, _, high, low]: &[u8; HEADER_BYTES]| {
                HEADER_BYTES + usize::from(u16::from_be_bytes([high, low]))
            });
        match result {
            Ok(()) => {
                let whole = whole.expect("there was a header");
                assert_eq!(reading.record, rest[..whole]);
                reading.record.clear();
                assert!((20..=23).contains(&rest[0]) && rest[1] == 3);
                rest = &rest[whole..];
            }
            Err(HandshakeError::PeerClosed) => {
                assert!(whole.is_none_or(|whole| whole > rest.len()));
                return;
            }
            Err(HandshakeError::NotTls { start }) => {
                assert_eq!(start, rest[..HEADER_BYTES]);
                return;
            }
            Err(HandshakeError::TooLong) => {
                let whole = whole.expect("there was a header");
                let received = reading.received + whole;
                assert!(whole > RECEIVED_RECORD_BYTES || received > FLIGHT_LIMIT_BYTES);
                return;
            }
            Err(error) => panic!("{error}"),
        }
    }
}
