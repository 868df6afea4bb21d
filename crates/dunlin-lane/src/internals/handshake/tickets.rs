//! Consumes session tickets, which a TLS 1.3 server sends after the handshake (RFC 8446, section
//! 4.6.1).

use std::io::{self, Read};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use dunlin_linux::socket::{remaining, wait_readable};
use rustls::ConnectionTrafficSecrets;

use super::{HandshakeError, io_error, local};
use crate::internals::fastest;
use crate::internals::provider::parts;
use crate::internals::record::{Content, HEADER_BYTES, LateMessage, OpenHalf};

/// Maximum number of records with tickets. A peer that sends more is faulty or an attacker.
const RECORD_LIMIT: u64 = 16;
/// The length of a ticket with every field at its maximum (RFC 8446, section 4.6.1), with a header
/// of four bytes.
const MESSAGE_LIMIT_BYTES: usize = 4 + 8 + 1 + 255 + 2 + 0xffff + 2 + 0xfffe;

/// Consumes session tickets from a connection, and returns the number of records. Ends when the
/// peer's data begins, or when no ticket has arrived for the time `quiet`. If tickets remained in
/// the socket, a read by the socket's owner would fail with EIO.
///
/// Each record is peeked, and a copy of it is opened with a key that is dropped at the end. The
/// record is removed from the socket only if it contains tickets, or the beginning of a ticket that
/// continues in the next record.
pub(super) fn take(
    stream: &TcpStream,
    (first, secrets): (u64, &ConnectionTrafficSecrets),
    quiet: Duration,
    deadline: Instant,
) -> Result<u64, HandshakeError> {
    let (suite, key, iv) = parts(secrets).map_err(local)?;
    let provider = fastest::auto().provider;
    let mut open = OpenHalf::new(provider, suite, key, iv, first).map_err(local)?;
    let mut taken = 0;
    // The beginning of a ticket that continues in the next record.
    let mut partial = Vec::new();
    loop {
        let left = remaining(deadline).map_err(io_error)?;
        let timeout = if partial.is_empty() {
            quiet.min(left)
        } else {
            left
        };
        let until = Instant::now() + timeout;
        let Some(mut record) = peek_record(stream, until).map_err(io_error)? else {
            return done(taken, &partial);
        };
        let whole = record.len();
        // If the record has data or an alert, or cannot be opened, the socket's owner handles it.
        let Ok(Content::Late(bytes, message)) = open.open_next(&mut record) else {
            return done(taken, &partial);
        };
        if bytes == 0 || taken == RECORD_LIMIT {
            return Err(unexpected(message));
        }
        partial.extend_from_slice(&record[HEADER_BYTES..HEADER_BYTES + bytes]);
        drop_tickets(&mut partial)?;
        (&*stream)
            .read_exact(&mut record[..whole])
            .map_err(io_error)?;
        taken += 1;
    }
}

/// Returns the number of records, or an error if a ticket is incomplete.
fn done(taken: u64, partial: &[u8]) -> Result<u64, HandshakeError> {
    match partial {
        [] => Ok(taken),
        _ => Err(protocol("incomplete session ticket")),
    }
}

/// Removes complete tickets; an incomplete last message remains.
fn drop_tickets(messages: &mut Vec<u8>) -> Result<(), HandshakeError> {
    while let Some(&kind) = messages.first() {
        let message = LateMessage::of(kind);
        if message != LateMessage::NewSessionTicket {
            return Err(unexpected(message));
        }
        let [_, high, middle, low, ..] = messages[..] else {
            break;
        };
        let whole = 4 + u32::from_be_bytes([0, high, middle, low]) as usize;
        if whole > MESSAGE_LIMIT_BYTES {
            return Err(protocol("oversized session ticket"));
        }
        if messages.len() < whole {
            break;
        }
        messages.drain(..whole);
    }
    Ok(())
}

fn unexpected(message: LateMessage) -> HandshakeError {
    protocol(&format!("the peer sent {message} instead of data"))
}

fn protocol(text: &str) -> HandshakeError {
    HandshakeError::Protocol(rustls::Error::General(text.to_owned()))
}

/// Returns a copy of the next record if all of it arrives before `until`.
fn peek_record(stream: &TcpStream, until: Instant) -> io::Result<Option<Vec<u8>>> {
    let mut record = vec![0; HEADER_BYTES];
    let mut seen = 0;
    loop {
        if !wait_readable(stream, until)? {
            return Ok(None);
        }
        let count = stream.peek(&mut record)?;
        if count == 0 {
            return Ok(None);
        }
        if let Some(header) = record[..count].first_chunk::<HEADER_BYTES>() {
            let Ok(whole) = OpenHalf::record_bytes(*header) else {
                return Ok(None);
            };
            if count >= whole {
                record.truncate(whole);
                return Ok(Some(record));
            }
            record.resize(whole, 0);
        }
        if count == seen {
            // The socket is readable, but no new bytes have arrived: the rest of the record is in
            // transit.
            if Instant::now() >= until {
                return Ok(None);
            }
            thread::sleep(Duration::from_millis(1));
        }
        seen = count;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;
    use std::net::TcpListener;

    use rustls::crypto::cipher::{AeadKey, Iv};

    use super::*;
    use crate::internals::provider::CipherSuite;
    use crate::internals::record::{HANDSHAKE, SealHalf, TRAILER_BYTES};

    const KEY: [u8; 32] = [7; 32];
    const QUIET: Duration = Duration::from_millis(50);

    /// Sends records with these handshake messages, followed by a record with data. Returns the
    /// result of [`take`], and the number of handshake bytes that are left in the socket.
    fn taken(parts: &[&[u8]]) -> (Result<u64, HandshakeError>, usize) {
        let provider = fastest::auto().provider;
        let suite = CipherSuite::Aes256Gcm;
        let mut seal = SealHalf::new(provider, suite, &KEY, [9; 12], 0).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let far = listener.accept().unwrap().0;
        let room = |part: &[u8]| {
            let mut record = vec![0; HEADER_BYTES + part.len() + TRAILER_BYTES];
            record[HEADER_BYTES..][..part.len()].copy_from_slice(part);
            record
        };
        for part in parts {
            let mut record = room(part);
            seal.seal_as(HANDSHAKE, &mut record).unwrap();
            near.write_all(&record).unwrap();
        }
        let mut data = room(b"data");
        seal.seal(&mut data).unwrap();
        near.write_all(&data).unwrap();
        let secrets = ConnectionTrafficSecrets::Aes256Gcm {
            key: AeadKey::from(KEY),
            iv: Iv::new([9; 12]),
        };
        let deadline = Instant::now() + Duration::from_secs(5);
        let result = take(&far, (0, &secrets), QUIET, deadline);
        drop(near);
        let mut left = Vec::new();
        (&far).read_to_end(&mut left).unwrap();
        assert!(left.ends_with(&data));
        (result, left.len() - data.len())
    }

    fn ticket(bytes: u8) -> Vec<u8> {
        // Each byte of the body is 24, the type of a key update. If a part of the body is parsed as
        // a message by mistake, parsing fails.
        [&[4, 0, 0, bytes][..], &vec![24; bytes.into()]].concat()
    }

    #[test]
    fn k04_split_and_combined_tickets_are_consumed() {
        let one = ticket(100);
        for cut in [1, 3, 4, 50] {
            let (begin, end) = one.split_at(cut);
            let (result, left) = taken(&[begin, end]);
            assert_eq!((result.unwrap(), left), (2, 0), "cut at {cut}");
        }
        let both = [one.clone(), ticket(0)].concat();
        let (begin, end) = both.split_at(102);
        let (result, left) = taken(&[&both, begin, end]);
        assert_eq!((result.unwrap(), left), (3, 0));
    }

    #[test]
    fn k04_other_messages_and_incomplete_tickets_are_errors() {
        let update = [24, 0, 0, 1, 0];
        let behind = [&ticket(9)[..], &update].concat();
        for (parts, expected) in [
            (&[&update[..]][..], "a key update"),
            (&[&behind[..]], "a key update"),
            (&[&ticket(9)[..5]], "incomplete session ticket"),
            (&[&[4, 3, 0, 0]], "oversized"),
            (&[&[4], &[]], "handshake message 0"),
        ] {
            let error = taken(parts).0.unwrap_err();
            let error = format!("{error:?}");
            assert!(error.contains(expected), "{error}");
        }
        let many = vec![&[4, 0, 0, 0][..]; 17];
        assert!(taken(&many).0.is_err());
    }
}
