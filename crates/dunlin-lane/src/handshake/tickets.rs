//! Session tickets, which a server of TLS 1.3 sends behind the handshake (RFC 8446, section 4.6.1).

use std::io::{self, Read};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use dunlin_linux::socket::{remaining, wait_readable};
use rustls::ConnectionTrafficSecrets;

use super::{HandshakeError, io_error, local};
use crate::provider;
use crate::provider::parts;
use crate::record::{Content, HEADER_BYTES, LateMessage, OpenHalf};

/// More records with tickets are an attack or a fault.
const RECORD_LIMIT: u64 = 16;
/// A ticket with the longest of each of its fields (RFC 8446, section 4.6.1), and four bytes of
/// header.
const MESSAGE_LIMIT_BYTES: usize = 4 + 8 + 1 + 255 + 2 + 0xffff + 2 + 0xfffe;

/// Takes session tickets off a connection, which would make a read of the socket's owner fail
/// (EIO), until none has come for `quiet` or the peer's data begins. Returns how many
/// records there were.
///
/// Records are opened as copies, with a key that is then forgotten, and stay in the socket until
/// they have turned out to be tickets, or to begin one whose rest follows.
pub(super) fn take(
    stream: &TcpStream,
    (first, secrets): (u64, &ConnectionTrafficSecrets),
    quiet: Duration,
    deadline: Instant,
) -> Result<u64, HandshakeError> {
    let (suite, key, iv) = parts(secrets).map_err(local)?;
    let provider = provider::auto().provider;
    let mut open = OpenHalf::new(provider, suite, key, iv, first).map_err(local)?;
    let mut taken = 0;
    // Of a ticket that goes on in the next record.
    let mut begun = Vec::new();
    loop {
        let left = remaining(deadline).map_err(io_error)?;
        let patience = if begun.is_empty() {
            quiet.min(left)
        } else {
            left
        };
        let until = Instant::now() + patience;
        let Some(mut record) = peek_record(stream, until).map_err(io_error)? else {
            return done(taken, &begun);
        };
        let whole = record.len();
        // Data, an end: the owner's to find, and what is wrong as well.
        let Ok(Content::Late(bytes, message)) = open.open_next(&mut record) else {
            return done(taken, &begun);
        };
        if bytes == 0 || taken == RECORD_LIMIT {
            return Err(unexpected(message));
        }
        begun.extend_from_slice(&record[HEADER_BYTES..HEADER_BYTES + bytes]);
        drop_tickets(&mut begun)?;
        (&*stream)
            .read_exact(&mut record[..whole])
            .map_err(io_error)?;
        taken += 1;
    }
}

/// Nothing more comes that could be a ticket's, which must be whole.
fn done(taken: u64, begun: &[u8]) -> Result<u64, HandshakeError> {
    match begun {
        [] => Ok(taken),
        _ => Err(protocol("its session ticket has no end")),
    }
}

/// Leaves the last message if it is not whole.
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
            return Err(protocol("its session ticket is longer than any can be"));
        }
        if messages.len() < whole {
            break;
        }
        messages.drain(..whole);
    }
    Ok(())
}

fn unexpected(message: LateMessage) -> HandshakeError {
    protocol(&format!("it sent {message} where its data was to begin"))
}

fn protocol(text: &str) -> HandshakeError {
    HandshakeError::Protocol(rustls::Error::General(text.to_owned()))
}

/// A copy of the next record, if all of it comes in time.
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
            // Readable, and no more than before: the rest is on its way.
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
    use crate::provider::CipherSuite;
    use crate::record::{HANDSHAKE, SealHalf, TRAILER_BYTES};

    const KEY: [u8; 32] = [7; 32];
    const QUIET: Duration = Duration::from_millis(50);

    /// What [`take`] says of handshake messages that come in these records, with data behind, and
    /// how many bytes it leaves.
    fn taken(parts: &[&[u8]]) -> (Result<u64, HandshakeError>, usize) {
        let provider = provider::auto().provider;
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
        // Bytes that would be a key update, read as the beginning of one.
        [&[4, 0, 0, bytes][..], &vec![24; bytes.into()]].concat()
    }

    #[test]
    fn k04_a_ticket_over_several_records_is_taken_and_several_in_one() {
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
    fn k04_what_is_no_ticket_or_has_no_end_is_an_error() {
        let update = [24, 0, 0, 1, 0];
        let behind = [&ticket(9)[..], &update].concat();
        for (parts, words) in [
            (&[&update[..]][..], "a key update"),
            (&[&behind[..]], "a key update"),
            (&[&ticket(9)[..5]], "has no end"),
            (&[&[4, 3, 0, 0]], "longer than any"),
            (&[&[4], &[]], "handshake message 0"),
        ] {
            let error = taken(parts).0.unwrap_err();
            let error = format!("{error:?}");
            assert!(error.contains(words), "{error}");
        }
        let many = vec![&[4, 0, 0, 0][..]; 17];
        assert!(taken(&many).0.is_err());
    }
}
