//! Records: the trace of RFC 8448, rustls as the peer, damaged records, padding, alerts, and
//! limits.
#![allow(missing_docs, clippy::unwrap_used)]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::ops::DerefMut;
use std::thread;

use dunlin_lane::handshake::{self, Records, Secured};
use dunlin_lane::provider::{CipherSuite, Provider};
use dunlin_lane::record::*;
use dunlin_test_base::pattern;
use dunlin_test_support::lane::*;
use rustls::{ClientConnection, ConnectionCommon, ServerConnection, SideData};

/// Sizes around the boundaries of AES blocks, pages and records.
const SIZES: [usize; 12] = [
    1,
    0,
    15,
    16,
    17,
    4095,
    4096,
    4097,
    8192,
    CONTENT_BYTES - 1,
    CONTENT_BYTES,
    33,
];

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    digits
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

pub(crate) fn key_bytes(suite: CipherSuite) -> usize {
    match suite {
        CipherSuite::Aes128Gcm => 16,
        CipherSuite::Aes256Gcm | CipherSuite::ChaCha20Poly1305 => 32,
    }
}

fn halves(provider: Provider, suite: CipherSuite, sequence: u64) -> (SealHalf, OpenHalf) {
    let key = pattern(key_bytes(suite), 5);
    let iv = [9; 12];
    (
        SealHalf::new(provider, suite, &key, iv, sequence).unwrap(),
        OpenHalf::new(provider, suite, &key, iv, sequence).unwrap(),
    )
}

fn sealed(seal: &mut SealHalf, content: &[u8]) -> Vec<u8> {
    let mut record = vec![0xee; content.len() + OVERHEAD_BYTES];
    record[HEADER_BYTES..][..content.len()].copy_from_slice(content);
    seal.seal(&mut record).unwrap();
    record
}

/// A record with any content type and padding, sealed with the crypto library directly.
#[cfg(feature = "ring")]
fn handmade(content_type: u8, content: &[u8], padding: usize, sequence: u64) -> Vec<u8> {
    use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
    let key = LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &pattern(32, 5)).unwrap());
    let mut nonce = [9; 12];
    for (byte, other) in nonce[4..].iter_mut().zip(sequence.to_be_bytes()) {
        *byte ^= other;
    }
    let mut inner = content.to_vec();
    inner.push(content_type);
    inner.resize(inner.len() + padding, 0);
    let [high, low] = u16::try_from(inner.len() + 16).unwrap().to_be_bytes();
    let header = [23, 3, 3, high, low];
    let nonce = Nonce::assume_unique_for_key(nonce);
    let tag = key
        .seal_in_place_separate_tag(nonce, Aad::from(header), &mut inner)
        .unwrap();
    [&header[..], &inner, tag.as_ref()].concat()
}

#[cfg(feature = "ring")]
fn open_handmade(records: &[Vec<u8>]) -> Vec<Result<Opened, OpenError>> {
    let (_, mut open) = halves(Provider::Ring, CipherSuite::Aes256Gcm, 0);
    records
        .iter()
        .map(|record| open.open(&mut record.clone()))
        .collect()
}

#[test]
fn the_trace_of_rfc_8448_is_sealed_and_opened_bit_for_bit() {
    let key = hex("17 42 2d da 59 6e d5 d9 ac d8 90 e3 c6 3f 50 51");
    let iv = hex("5b 78 92 3d ee 08 57 90 33 e5 23 d9")
        .try_into()
        .unwrap();
    let data = hex(
        "17 03 03 00 43 a2 3f 70 54 b6 2c 94 d0 af fa fe 82 28 ba 55 cb ef ac ea 42 f9 14 aa 66 bc
         ab 3f 2b 98 19 a8 a5 b4 6b 39 5b d5 4a 9a 20 44 1e 2b 62 97 4e 1f 5a 62 92 a2 97 70 14 bd
         1e 3d ea e6 3a ee bb 21 69 49 15 e4",
    );
    let close = hex("17 03 03 00 13 c9 87 27 60 65 56 66 b7 4d 7f f1 15 3e fd 6d b6 d0 b0 e3");
    let content: Vec<u8> = (0..50).collect();
    for &provider in Provider::built_in() {
        let suite = CipherSuite::Aes128Gcm;
        let mut seal = SealHalf::new(provider, suite, &key, iv, 0).unwrap();
        assert_eq!(sealed(&mut seal, &content), data);
        assert_eq!(seal.close_notify().unwrap()[..], close);
        let mut open = OpenHalf::new(provider, suite, &key, iv, 0).unwrap();
        let mut record = data.clone();
        assert_eq!(open.open(&mut record), Ok(Opened::Data(50)));
        assert_eq!(record[HEADER_BYTES..][..50], content);
        assert_eq!(open.open(&mut close.clone()), Ok(Opened::Closed));
    }
}

#[test]
fn rustls_opens_our_records_and_we_open_its_records() {
    for (provider, suite) in combinations() {
        for we_connect in [true, false] {
            let authority = Authority::new();
            let crypto = crypto(provider, suite);
            let client = authority.identity(&[SOURCE]);
            let client = client.client(&crypto, names(&[DESTINATION])).unwrap();
            let server = authority.identity(&[DESTINATION]);
            let server = server.server(&crypto, names(&[SOURCE])).unwrap();
            let (near, far) = pair();
            let theirs = thread::spawn({
                let (client, server) = (client.clone(), server.clone());
                move || {
                    if we_connect {
                        let connection = ServerConnection::new(server.config().clone());
                        converse_by_rustls(connection.unwrap(), far);
                    } else {
                        let name = DESTINATION.try_into().unwrap();
                        let connection = ClientConnection::new(client.config().clone(), name);
                        converse_by_rustls(connection.unwrap(), far);
                    }
                }
            });
            let ours = if we_connect {
                handshake::client(near, &client, soon()).unwrap()
            } else {
                handshake::server(near, &server, soon()).unwrap()
            };
            assert_eq!(ours.parameters.suite, suite);
            converse(ours);
            theirs.join().unwrap();
        }
    }
}

fn converse(ours: Secured) {
    let Records::Process { mut seal, mut open } = ours.records else {
        panic!("the kernel has the keys");
    };
    let mut stream = ours.stream;
    for (position, size) in SIZES.into_iter().enumerate() {
        let record = sealed(&mut seal, &pattern(size, position as u64));
        stream.write_all(&record).unwrap();
    }
    stream.write_all(&seal.close_notify().unwrap()).unwrap();
    assert_eq!(RECORD_LIMIT - seal.records_left(), SIZES.len() as u64 + 1);

    let mut got = Vec::new();
    loop {
        let mut header = [0; HEADER_BYTES];
        stream.read_exact(&mut header).unwrap();
        let mut record = header.to_vec();
        record.resize(OpenHalf::record_bytes(header).unwrap(), 0);
        stream.read_exact(&mut record[HEADER_BYTES..]).unwrap();
        match open.open(&mut record).unwrap() {
            Opened::Data(count) => got.extend_from_slice(&record[HEADER_BYTES..][..count]),
            Opened::Closed => break,
        }
    }
    assert_eq!(got, expected());
}

fn converse_by_rustls<C, S>(mut connection: C, mut socket: TcpStream)
where
    C: DerefMut<Target = ConnectionCommon<S>>,
    S: SideData,
{
    let mut stream = rustls::Stream::new(&mut connection, &mut socket);
    let mut got = Vec::new();
    // rustls returns an error here if close_notify is missing.
    stream.read_to_end(&mut got).unwrap();
    assert_eq!(got, expected());
    for (position, size) in SIZES.into_iter().enumerate() {
        stream.write_all(&pattern(size, position as u64)).unwrap();
        stream.flush().unwrap();
    }
    connection.send_close_notify();
    while connection.wants_write() {
        connection.write_tls(&mut socket).unwrap();
    }
}

fn expected() -> Vec<u8> {
    let parts = SIZES.into_iter().enumerate();
    parts
        .flat_map(|(position, size)| pattern(size, position as u64))
        .collect()
}

/// Claim N3 of docs/security.
#[test]
fn i7_a_changed_byte_anywhere_in_a_record_is_refused() {
    for (provider, suite) in combinations() {
        let content = pattern(67, 3);
        let (mut seal, _) = halves(provider, suite, 0);
        let record = sealed(&mut seal, &content);
        for position in 0..record.len() {
            let (_, mut open) = halves(provider, suite, 0);
            let mut damaged = record.clone();
            damaged[position] ^= 1;
            let error = open.open(&mut damaged).unwrap_err();
            if position >= HEADER_BYTES {
                assert_eq!(error, OpenError::Authentication);
            }
            // After a bad record, even a valid record is not opened.
            assert_eq!(open.open(&mut record.clone()), Err(OpenError::Spent));
            let (_, mut open) = halves(provider, suite, 0);
            let mut damaged = record.clone();
            damaged[position] ^= 1;
            let mut inner = vec![0; content.len() + 1];
            assert_eq!(open.open_into(&mut damaged, &mut inner), Err(error));
            let again = open.open_into(&mut record.clone(), &mut inner);
            assert_eq!(again, Err(OpenError::Spent));
        }
    }
}

#[test]
fn records_of_separate_memory_equal_records_in_place() {
    for (provider, suite) in combinations() {
        let (mut seal, mut open) = halves(provider, suite, 7);
        let (mut in_place, _) = halves(provider, suite, 7);
        for bytes in [0, 1, 15, 16, 17, 4096, CONTENT_BYTES] {
            let content = pattern(bytes, 1);
            let mut record = vec![0xee; bytes + OVERHEAD_BYTES];
            seal.seal_from(&content, &mut record).unwrap();
            assert!(record == sealed(&mut in_place, &content), "{suite} {bytes}");
            let mut inner = vec![0xee; bytes + 1];
            let opened = open.open_into(&mut record, &mut inner);
            assert_eq!(opened, Ok(Opened::Data(bytes)));
            assert!(inner[..bytes] == content, "{suite} {bytes}");
        }
        assert_eq!(seal.records_left(), in_place.records_left());
    }
}

#[test]
fn separate_memory_of_the_wrong_length_is_refused() {
    for (provider, suite) in combinations() {
        let (mut seal, _) = halves(provider, suite, 0);
        for (bytes, content) in [(0, 1), (121, 100), (123, 100), (RECORD_BYTES + 1, 16_385)] {
            assert_eq!(
                seal.seal_from(&vec![1; content], &mut vec![0; bytes]),
                Err(SealError::Length { bytes })
            );
        }
        assert_eq!(seal.records_left(), RECORD_LIMIT);
        let record = sealed(&mut seal, &[1; 100]);
        for bytes in [0, 100, 102] {
            let (_, mut open) = halves(provider, suite, 0);
            assert_eq!(
                open.open_into(&mut record.clone(), &mut vec![0; bytes]),
                Err(OpenError::Length { bytes })
            );
        }
    }
}

/// Claim N3 of docs/security.
#[test]
fn i7_reordered_repeated_dropped_and_shortened_records_are_refused() {
    for (provider, suite) in combinations() {
        let (mut seal, _) = halves(provider, suite, 0);
        let first = sealed(&mut seal, &pattern(100, 1));
        let second = sealed(&mut seal, &pattern(100, 2));
        let refused = |records: &[&Vec<u8>]| {
            let (_, mut open) = halves(provider, suite, 0);
            let (last, before) = records.split_last().unwrap();
            for record in before {
                open.open(&mut record.to_vec()).unwrap();
            }
            open.open(&mut last.to_vec()).unwrap_err()
        };
        assert_eq!(
            refused(&[&second]),
            OpenError::Authentication,
            "dropped or reordered"
        );
        assert_eq!(
            refused(&[&first, &first]),
            OpenError::Authentication,
            "repeated"
        );
        let mut shorter = first[..first.len() - 1].to_vec();
        assert!(matches!(refused(&[&shorter]), OpenError::Length { .. }));
        let body = shorter.len() - HEADER_BYTES;
        shorter[3..5].copy_from_slice(&u16::try_from(body).unwrap().to_be_bytes());
        assert_eq!(refused(&[&shorter]), OpenError::Authentication, "shortened");
    }
}

#[test]
fn i7_a_length_is_checked_before_the_record_is_read() {
    let header = |length: u16| {
        let [high, low] = length.to_be_bytes();
        [23, 3, 3, high, low]
    };
    assert_eq!(
        OpenHalf::record_bytes(header(16_640)),
        Ok(RECEIVED_RECORD_BYTES)
    );
    assert_eq!(OpenHalf::record_bytes(header(17)), Ok(22));
    for length in [0, 16, 16_641, u16::MAX] {
        let bytes = usize::from(length);
        assert_eq!(
            OpenHalf::record_bytes(header(length)),
            Err(OpenError::Length { bytes })
        );
    }
    for bad in [
        [21, 3, 3, 0, 2],
        [22, 3, 3, 0, 40],
        [23, 3, 1, 0, 40],
        *b"GET /",
    ] {
        assert!(matches!(
            OpenHalf::record_bytes(bad),
            Err(OpenError::Unprotected { .. })
        ));
    }
}

#[cfg(feature = "ring")]
#[test]
fn padding_is_removed_and_only_content_counts() {
    let records = [handmade(23, b"abc\0\0", 200, 0), handmade(23, b"", 50, 1)];
    assert_eq!(
        open_handmade(&records),
        [Ok(Opened::Data(5)), Ok(Opened::Data(0))]
    );
    assert_eq!(
        open_handmade(&[handmade(0, b"", 9, 0)]),
        [Err(OpenError::NoContentType)]
    );
    // Within the limit for a record, but longer than the limit for an inner plaintext.
    let long = handmade(23, &[1; CONTENT_BYTES], 1, 0);
    assert!(matches!(
        open_handmade(&[long])[..],
        [Err(OpenError::Length { .. })]
    ));
}

#[cfg(feature = "ring")]
#[test]
fn alerts_and_late_handshake_messages_are_reported() {
    let one = |content_type, content: &[u8]| {
        open_handmade(&[handmade(content_type, content, 0, 0)]).remove(0)
    };
    assert_eq!(one(21, &[1, 0]), Ok(Opened::Closed));
    let alert = Alert(48);
    assert_eq!(one(21, &[2, 48]), Err(OpenError::Alert { alert }));
    assert!(alert.to_string().starts_with("UnknownCA (48)"), "{alert}");
    assert_eq!(one(21, &[2]), Err(OpenError::MalformedAlert));
    for (kind, message) in [
        (4, LateMessage::NewSessionTicket),
        (24, LateMessage::KeyUpdate),
        (1, LateMessage::Other(1)),
    ] {
        let opened = one(22, &[kind, 0, 0, 1, 0]);
        assert_eq!(opened, Err(OpenError::Handshake { message }));
    }
    assert_eq!(
        one(20, &[1]),
        Err(OpenError::ContentType { content_type: 20 })
    );
}

#[cfg(feature = "ring")]
#[test]
fn i7_empty_records_are_bounded() {
    let empty: Vec<_> = (0..40)
        .map(|sequence| handmade(23, b"", 0, sequence))
        .collect();
    let opened = open_handmade(&empty);
    assert!(
        opened[..32]
            .iter()
            .all(|result| *result == Ok(Opened::Data(0)))
    );
    assert_eq!(opened[32], Err(OpenError::EmptyRun));
    let mut mixed = empty[..32].to_vec();
    mixed.push(handmade(23, b"x", 0, 32));
    mixed.push(handmade(23, b"", 0, 33));
    assert_eq!(
        open_handmade(&mixed)[33],
        Ok(Opened::Data(0)),
        "the byte did not end the run of empty records"
    );
}

#[test]
fn a_key_is_not_used_beyond_its_limit_but_can_still_seal_a_close_notify() {
    for (provider, suite) in combinations() {
        let (mut seal, mut open) = halves(provider, suite, RECORD_LIMIT - 1);
        assert_eq!(seal.records_left(), 1);
        let mut last = sealed(&mut seal, b"last");
        assert_eq!(open.open(&mut last), Ok(Opened::Data(4)));
        assert_eq!(seal.seal(&mut [0; 40]), Err(SealError::Limit));
        assert_eq!(seal.records_left(), 0);
        assert_eq!(
            open.open(&mut seal.close_notify().unwrap()),
            Ok(Opened::Closed)
        );
    }
}

#[cfg(feature = "ring")]
#[test]
fn i7_records_from_a_peer_beyond_the_key_limit_are_refused() {
    let (_, mut open) = halves(Provider::Ring, CipherSuite::Aes256Gcm, RECORD_LIMIT);
    let mut record = handmade(23, b"more", 0, RECORD_LIMIT);
    assert_eq!(open.open(&mut record), Err(OpenError::Limit));
}

#[test]
fn a_record_of_invalid_length_is_not_sealed() {
    let (mut seal, _) = halves(Provider::built_in()[0], CipherSuite::Aes256Gcm, 0);
    for bytes in [0, OVERHEAD_BYTES - 1, RECORD_BYTES + 1] {
        assert_eq!(
            seal.seal(&mut vec![0; bytes]),
            Err(SealError::Length { bytes })
        );
    }
    assert_eq!(seal.records_left(), RECORD_LIMIT);
}
