//! Pages sent from one guest's memory to another's over a lane, with and without copies.
#![allow(missing_docs, clippy::unwrap_used)]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::Duration;

use crate::record::key_bytes;
use dunlin_lane::data::*;
use dunlin_lane::handshake::Secured;
use dunlin_lane::record::*;
use dunlin_test_base::pattern;
use dunlin_test_support::lane::*;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap, VolatileSlice};

const STALL: Duration = Duration::from_secs(5);
const GUEST_PAGES: usize = 256;
const UNTOUCHED: u8 = 0xee;

fn memory() -> GuestMemoryMmap {
    GuestMemoryMmap::from_ranges(&[(GuestAddress(0), GUEST_PAGES * PAGE_BYTES)]).unwrap()
}

fn slice(memory: &GuestMemoryMmap, page: usize, count: usize) -> VolatileSlice<'_> {
    let at = GuestAddress((page * PAGE_BYTES) as u64);
    memory.get_slice(at, count * PAGE_BYTES).unwrap()
}

fn bytes_of(slice: &VolatileSlice<'_>) -> Vec<u8> {
    let mut bytes = vec![0; slice.len()];
    slice.copy_to(&mut bytes);
    bytes
}

/// A source in which no two pages are equal, and a destination filled with [`UNTOUCHED`].
fn guests() -> (GuestMemoryMmap, GuestMemoryMmap) {
    let (source, target) = (memory(), memory());
    slice(&source, 0, GUEST_PAGES).copy_from(&pattern(GUEST_PAGES * PAGE_BYTES, 5));
    slice(&target, 0, GUEST_PAGES).copy_from(&vec![UNTOUCHED; GUEST_PAGES * PAGE_BYTES]);
    (source, target)
}

/// Lanes with every suite of every crypto library, and a plain lane.
fn every_lane() -> Vec<(String, DataSender, DataReceiver)> {
    let mut all: Vec<_> = combinations()
        .map(|(provider, suite)| {
            let (near, far) = secured(&crypto(provider, suite));
            (
                format!("{provider} {suite}"),
                DataSender::tls(near, STALL).unwrap(),
                DataReceiver::tls(far, STALL).unwrap(),
            )
        })
        .collect();
    let (near, far) = pair();
    let consent = PlainConsent::both(true, true).unwrap();
    all.push((
        "plain".into(),
        DataSender::plain(near, consent, STALL).unwrap(),
        DataReceiver::plain(far, consent, STALL).unwrap(),
    ));
    all
}

/// Runs of pages, as (first, count), in the order in which they are sent.
const SHAPES: [&[(usize, usize)]; 6] = [
    // A full frame without gaps, and one that ends inside a record.
    &[(0, 64)],
    &[(3, 57)],
    // One page; pages out of order; runs that record boundaries split.
    &[(9, 1)],
    &[(9, 1), (7, 1), (8, 1), (20, 1), (1, 1)],
    &[(0, 3), (10, 7), (30, 2), (40, 13), (100, 1), (102, 6)],
    // No payload.
    &[],
];

#[test]
fn i3_pages_arrive_at_their_addresses_and_change_no_other_page() {
    for (name, mut sender, mut receiver) in every_lane() {
        for runs in SHAPES {
            let (source, target) = guests();
            let mut frame = sender.frame();
            for &(first, count) in runs {
                for page in first..first + count {
                    assert_eq!(frame.guest_page(&slice(&source, page, 1)), Ok(true));
                }
            }
            frame.finish(b"head").unwrap();
            let mut header = [0; 4];
            assert!(receiver.next(&mut header, None).unwrap());
            assert_eq!(&header, b"head");
            let targets = runs
                .iter()
                .map(|&(first, count)| slice(&target, first, count));
            receiver.payload_into(targets).unwrap();
            for page in 0..GUEST_PAGES {
                let sent = runs
                    .iter()
                    .any(|&(first, count)| (first..first + count).contains(&page));
                let now = bytes_of(&slice(&target, page, 1));
                if sent {
                    assert!(
                        now == bytes_of(&slice(&source, page, 1)),
                        "{name} {runs:?} {page}"
                    );
                } else {
                    assert!(
                        now.iter().all(|&b| b == UNTOUCHED),
                        "{name} {runs:?} {page}"
                    );
                }
            }
        }
        assert_eq!(
            sender.finish().unwrap().content_bytes,
            receiver.counters().content_bytes
        );
        assert!(!receiver.next(&mut [0; 4], None).unwrap(), "{name}");
    }
}

#[test]
fn i3_zero_pages_are_left_out_and_whole_pages_follow_one_another() {
    for (name, mut sender, mut receiver) in every_lane() {
        let (source, target) = guests();
        slice(&source, 1, 1).copy_from(&[0_u8; PAGE_BYTES]);
        // This page is zero except for its last byte, so it must be sent.
        slice(&source, 2, 1).copy_from(&[0_u8; PAGE_BYTES]);
        slice(&source, 2, 1)
            .offset(PAGE_BYTES - 1)
            .unwrap()
            .copy_from(&[1_u8]);
        let mut frame = sender.frame();
        assert_eq!(frame.guest_page(&slice(&source, 0, 1)), Ok(true));
        assert_eq!(frame.guest_page(&slice(&source, 1, 1)), Ok(false));
        assert_eq!(frame.guest_page(&slice(&source, 2, 1)), Ok(true));
        assert_eq!(frame.guest_page(&slice(&source, 3, 1)), Ok(true));
        assert_eq!(frame.guest_page(&slice(&source, 4, 1)), Ok(true));
        assert!(matches!(
            frame.guest_page(&slice(&source, 5, 2)),
            Err(FrameError::Length { .. })
        ));
        frame.finish(b"h").unwrap();
        assert!(receiver.next(&mut [0], None).unwrap());
        let targets = [slice(&target, 0, 4)];
        receiver.payload_into(targets.into_iter()).unwrap();
        let mut wanted = Vec::new();
        for page in [0, 2, 3, 4] {
            wanted.extend(bytes_of(&slice(&source, page, 1)));
        }
        assert!(bytes_of(&slice(&target, 0, 4)) == wanted, "{name}");
    }
}

#[test]
fn i3_targets_and_frames_may_be_split_at_any_byte() {
    for (name, mut sender, mut receiver) in every_lane() {
        let (source, target) = guests();
        let content = bytes_of(&slice(&source, 0, 40));
        let whole = slice(&target, 0, 40);
        let mut at = 0;
        let mut targets = Vec::new();
        for length in [
            1, 5000, 0, 3, 4096, 30_000, 17, 90_000, 20, 9, 8, 7, 6, 5, 4, 3, 2, 1,
        ] {
            targets.push(whole.subslice(at, length).unwrap());
            at += length;
        }
        targets.push(whole.offset(at).unwrap());
        let mut sent = content.clone();
        let sending = thread::spawn(move || {
            for piece in sent.chunks_mut(37_000) {
                sender.send_with(b"", piece).unwrap();
            }
            sender
        });
        receiver.payload_into(targets.into_iter()).unwrap();
        assert!(bytes_of(&whole) == content, "{name}");
        drop(sending.join().unwrap());
    }
}

/// A lane over a connection that the test intercepts: the test reads the sender's bytes,
/// and writes the bytes that the receiver reads.
fn intercepted(
    provider: dunlin_lane::provider::Provider,
    suite: dunlin_lane::provider::CipherSuite,
) -> (DataSender, TcpStream, TcpStream, DataReceiver) {
    let (near, far) = secured(&crypto(provider, suite));
    let (from, tap) = pair();
    let (onward, to) = pair();
    let near = Secured {
        stream: from,
        ..near
    };
    let far = Secured { stream: to, ..far };
    (
        DataSender::tls(near, STALL).unwrap(),
        tap,
        onward,
        DataReceiver::tls(far, STALL).unwrap(),
    )
}

#[test]
fn i7_a_changed_byte_ends_the_lane_before_the_payload_counts_as_received() {
    for (provider, suite) in combinations() {
        for at in [0, PAGE_BYTES, 4 * PAGE_BYTES - 1, 4 * PAGE_BYTES + 3] {
            let (source, target) = guests();
            let (mut sender, mut tap, mut onward, mut receiver) = intercepted(provider, suite);
            let mut frame = sender.frame();
            for page in 0..8 {
                frame.guest_page(&slice(&source, page, 1)).unwrap();
            }
            frame.finish(b"head").unwrap();
            sender.finish().unwrap();
            let mut wire = Vec::new();
            tap.read_to_end(&mut wire).unwrap();
            // The content of the second payload record begins here, after the header's record and
            // the first payload record.
            let second = 4 + OVERHEAD_BYTES + RECORD_BYTES + HEADER_BYTES;
            wire[second + at] ^= 1;
            onward.write_all(&wire).unwrap();
            assert!(receiver.next(&mut [0; 4], None).unwrap());
            let error = receiver
                .payload_into(std::iter::once(slice(&target, 0, 8)))
                .unwrap_err();
            assert!(
                matches!(error, ReceiveError::Record(OpenError::Authentication)),
                "{provider} {suite} {at}: {error}"
            );
            assert!(matches!(
                receiver.next(&mut [0; 4], None),
                Err(ReceiveError::Spent)
            ));
            // The pages outside the frame are unchanged; those inside may have changed.
            assert!(
                bytes_of(&slice(&target, 8, GUEST_PAGES - 8))
                    .iter()
                    .all(|&byte| byte == UNTOUCHED)
            );
        }
    }
}

#[test]
fn i7_a_changed_byte_ends_a_read_into_private_memory() {
    for (provider, suite) in combinations() {
        for record in 0..3 {
            let (mut sender, mut tap, mut onward, mut receiver) = intercepted(provider, suite);
            let mut content = pattern(2 * CONTENT_BYTES + PAGE_BYTES, 8);
            sender.send_with(b"head", &mut content).unwrap();
            sender.finish().unwrap();
            let mut wire = Vec::new();
            tap.read_to_end(&mut wire).unwrap();
            let payload = 4 + OVERHEAD_BYTES;
            wire[payload + record * RECORD_BYTES + HEADER_BYTES + 100] ^= 1;
            onward.write_all(&wire).unwrap();
            assert!(receiver.next(&mut [0; 4], None).unwrap());
            let mut received = vec![0; content.len()];
            let error = receiver.read_exact(&mut received).unwrap_err();
            assert!(
                matches!(error, ReceiveError::Record(OpenError::Authentication)),
                "{provider} {suite} {record}: {error}"
            );
            assert!(received[..record * CONTENT_BYTES] == content[..record * CONTENT_BYTES]);
            assert!(matches!(
                receiver.read_exact(&mut [0]),
                Err(ReceiveError::Spent)
            ));
        }
    }
}

#[test]
fn i7_a_close_inside_a_read_is_an_error() {
    for (name, mut sender, mut receiver) in every_lane() {
        sender.send_with(b"", &mut pattern(PAGE_BYTES, 9)).unwrap();
        sender.finish().unwrap();
        let error = receiver.read_exact(&mut [0; 3 * PAGE_BYTES]).unwrap_err();
        match error {
            ReceiveError::ClosedInside => assert_ne!(name, "plain"),
            // A plain lane cannot tell a close from the death of the peer.
            ReceiveError::Truncated => assert_eq!(name, "plain"),
            error => panic!("{name}: {error}"),
        }
    }
}

#[test]
fn i3_a_read_may_end_at_any_byte() {
    for (name, mut sender, mut receiver) in every_lane() {
        let content = pattern(160 * 1024, 6);
        let mut sent = content.clone();
        let sending = thread::spawn(move || {
            for part in sent.chunks_mut(37_000) {
                sender.send_with(b"", part).unwrap();
            }
            sender
        });
        let mut received = vec![UNTOUCHED; content.len()];
        let mut rest = &mut received[..];
        for bytes in [1, 16_383, 1, 16_384, 0, 5000, 16_385, 40_000, 3, 2, 1] {
            let (out, behind) = rest.split_at_mut(bytes);
            receiver.read_exact(out).unwrap();
            assert!(behind.iter().all(|&byte| byte == UNTOUCHED), "{name}");
            rest = behind;
        }
        receiver.read_exact(rest).unwrap();
        assert!(received == content, "{name}");
        drop(sending.join().unwrap());
    }
}

#[test]
fn i7_a_close_inside_a_payload_is_an_error() {
    for (provider, suite) in combinations() {
        let (source, target) = guests();
        let (near, far) = secured(&crypto(provider, suite));
        let mut sender = DataSender::tls(near, STALL).unwrap();
        let mut receiver = DataReceiver::tls(far, STALL).unwrap();
        let mut frame = sender.frame();
        frame.guest_page(&slice(&source, 0, 1)).unwrap();
        frame.finish(b"head").unwrap();
        sender.finish().unwrap();
        receiver.next(&mut [0; 4], None).unwrap();
        let error = receiver
            .payload_into(std::iter::once(slice(&target, 0, 2)))
            .unwrap_err();
        assert!(matches!(error, ReceiveError::ClosedInside), "{error}");
    }
}

#[test]
fn records_sealed_from_guest_memory_equal_records_sealed_in_place() {
    let (source, target) = guests();
    for (provider, suite) in combinations() {
        let key = vec![9; key_bytes(suite)];
        let half = || SealHalf::new(provider, suite, &key, [1; 12], 77).unwrap();
        let (mut from_guest, mut in_place) = (half(), half());
        let mut open = OpenHalf::new(provider, suite, &key, [1; 12], 77).unwrap();
        for numbers in [&[0, 1, 2, 3][..], &[9, 4, 5, 30], &[200], &[]] {
            let pages: Vec<_> = numbers
                .iter()
                .map(|&page| slice(&source, page, 1))
                .collect();
            let bytes = OVERHEAD_BYTES + pages.len() * PAGE_BYTES;
            let mut one = vec![0; bytes];
            from_guest.seal_guest(&pages, &mut one).unwrap();
            let mut other = vec![0; bytes];
            for (page, slot) in pages
                .iter()
                .zip(other[HEADER_BYTES..].chunks_mut(PAGE_BYTES))
            {
                page.copy_to(slot);
            }
            in_place.seal(&mut other).unwrap();
            assert!(one == other, "{provider} {suite} {numbers:?}");
            let targets: Vec<_> = numbers
                .iter()
                .map(|&page| slice(&target, page, 1))
                .collect();
            match open.open_guest(&mut one, &targets).unwrap() {
                Landed::InGuest => assert!(open.opens_into_guest()),
                Landed::InRecord(opened) => {
                    assert_eq!(opened, Opened::Data(numbers.len() * PAGE_BYTES));
                    continue;
                }
            }
            for (from, to) in pages.iter().zip(&targets) {
                assert!(bytes_of(from) == bytes_of(to), "{provider} {suite}");
            }
        }
        assert_eq!(from_guest.records_left(), in_place.records_left());
        assert!(matches!(
            from_guest.seal_guest(&[slice(&source, 0, 1)], &mut [0; 100]),
            Err(SealError::Length { .. })
        ));
    }
}

#[test]
fn padding_and_alerts_as_long_as_pages_are_recognised() {
    let (_, target) = guests();
    for (provider, suite) in combinations() {
        let key = vec![9; key_bytes(suite)];
        // The content and the content type, followed by zeros as padding. A peer can choose the
        // padding so that the plaintext is one byte longer than a page.
        let mut padded = vec![0_u8; PAGE_BYTES + 1];
        padded[..5].copy_from_slice(b"data\x17");
        let mut alert = vec![0_u8; PAGE_BYTES + 1];
        alert[..3].copy_from_slice(&[1, 0, 21]);
        for (inner, wanted) in [(padded, Opened::Data(4)), (alert, Opened::Closed)] {
            let mut record = seal_raw(suite, &key, &inner);
            let mut open = OpenHalf::new(provider, suite, &key, [1; 12], 0).unwrap();
            let landed = open
                .open_guest(&mut record, &[slice(&target, 0, 1)])
                .unwrap();
            assert_eq!(landed, Landed::InRecord(wanted), "{provider} {suite}");
            if wanted == Opened::Data(4) {
                assert_eq!(&record[HEADER_BYTES..][..4], b"data");
            } else {
                assert_eq!(
                    open.open_guest(&mut record, &[slice(&target, 0, 1)]),
                    Err(OpenError::Spent)
                );
            }
        }
    }
}

/// A record with any inner plaintext, sealed with the crypto library that is built in.
fn seal_raw(suite: dunlin_lane::provider::CipherSuite, key: &[u8], inner: &[u8]) -> Vec<u8> {
    #[cfg(not(feature = "ring"))]
    use aws_lc_rs::aead;
    #[cfg(feature = "ring")]
    use ring::aead;

    use dunlin_lane::provider::CipherSuite;
    let algorithm = match suite {
        CipherSuite::Aes256Gcm => &aead::AES_256_GCM,
        CipherSuite::Aes128Gcm => &aead::AES_128_GCM,
        CipherSuite::ChaCha20Poly1305 => &aead::CHACHA20_POLY1305,
    };
    let sealer = aead::LessSafeKey::new(aead::UnboundKey::new(algorithm, key).unwrap());
    let body = u16::try_from(inner.len() + 16).unwrap().to_be_bytes();
    let header = [23, 3, 3, body[0], body[1]];
    let mut record = inner.to_vec();
    let nonce = aead::Nonce::assume_unique_for_key([1; 12]);
    sealer
        .seal_in_place_append_tag(nonce, aead::Aad::from(header), &mut record)
        .unwrap();
    [&header[..], &record].concat()
}
