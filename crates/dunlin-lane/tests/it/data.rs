//! Frames over TLS and plain lanes, and the ways in which a data lane ends.
#![allow(missing_docs, clippy::unwrap_used)]

use std::io::{Read, Write};
use std::net::Shutdown;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use dunlin_lane::data::*;
use dunlin_lane::handshake::{self, HandshakeError, Records};
use dunlin_lane::offload::Offload;
use dunlin_lane::peers::PeerRefused;
use dunlin_lane::provider::{Crypto, Provider};
use dunlin_lane::record::{Alert, OpenError};
use dunlin_linux::socket::unread_bytes;
use dunlin_test_base::pattern;
use dunlin_test_support::lane::*;
use vm_memory::VolatileSlice;

const STALL: Duration = Duration::from_millis(400);

fn tls(provider: Provider) -> (DataSender, DataReceiver) {
    tls_within(provider, STALL)
}

fn tls_within(provider: Provider, stall: Duration) -> (DataSender, DataReceiver) {
    let (near, far) = secured(&Crypto::with(provider));
    (
        DataSender::tls(near, stall).unwrap(),
        DataReceiver::tls(far, stall).unwrap(),
    )
}

fn plain() -> (DataSender, DataReceiver) {
    let (near, far) = pair();
    let consent = PlainConsent::both(true, true).unwrap();
    (
        DataSender::plain(near, consent, STALL).unwrap(),
        DataReceiver::plain(far, consent, STALL).unwrap(),
    )
}

fn every_security() -> Vec<(DataSender, DataReceiver)> {
    let mut all: Vec<_> = Provider::built_in()
        .iter()
        .map(|&provider| tls(provider))
        .collect();
    all.push(plain());
    all
}

fn page(seed: u64) -> [u8; PAGE_BYTES] {
    pattern(PAGE_BYTES, seed).try_into().unwrap()
}

/// The content of the pages `numbers`, without every fifth page.
fn pages(numbers: std::ops::Range<u64>) -> Vec<u8> {
    numbers
        .filter(|number| number % 5 != 4)
        .flat_map(page)
        .collect()
}

fn fill<'a>(frame: &mut Frame<'a>, payload: &'a mut [u8]) {
    for page in payload.chunks_mut(PAGE_BYTES) {
        assert_eq!(frame.guest_page(&VolatileSlice::from(page)), Ok(true));
    }
}

fn receive(receiver: &mut DataReceiver) -> Option<(Vec<u8>, Vec<u8>)> {
    let mut lengths = [0; 8];
    if !receiver.next(&mut lengths, None).unwrap() {
        return None;
    }
    let header_bytes = u32::from_le_bytes(lengths[..4].try_into().unwrap()) as usize;
    let payload_bytes = u32::from_le_bytes(lengths[4..].try_into().unwrap());
    let mut header = vec![0; header_bytes - 8];
    receiver.read_exact(&mut header).unwrap();
    let mut payload = Vec::new();
    receiver
        .payload(payload_bytes.into(), |part| payload.extend_from_slice(part))
        .unwrap();
    Some((header, payload))
}

fn header(bytes: usize, payload: usize) -> Vec<u8> {
    let mut header = (bytes as u32).to_le_bytes().to_vec();
    header.extend_from_slice(&(payload as u32).to_le_bytes());
    header.extend_from_slice(&pattern(bytes - 8, bytes as u64));
    header
}

#[test]
fn frames_of_every_shape_arrive_whole_and_in_order() {
    for (mut sender, mut receiver) in every_security() {
        // A range of this many page numbers fills a frame: `pages` leaves out every fifth number.
        let full = PAGES_PER_FRAME as u64 * 5 / 4 - 1;
        let shapes = [
            (8, 1),
            (8, 0),
            (9, 4),
            (HEADER_LIMIT_BYTES, full),
            (100, 7),
            (5000, full - 3),
        ];
        let sending = thread::spawn(move || {
            let mut sent = Vec::new();
            for (header_bytes, last) in shapes {
                let mut payload = pages(0..last);
                let header = header(header_bytes, payload.len());
                let bytes = payload.len();
                let mut frame = sender.frame();
                fill(&mut frame, &mut payload);
                assert_eq!(frame.payload_bytes(), bytes);
                frame.finish(&header).unwrap();
                sent.push((header[8..].to_vec(), payload));
            }
            // A frame that is not finished must not be sent.
            fill(&mut sender.frame(), &mut pages(0..3));
            sender.send(&header(40, 0)).unwrap();
            sent.push((header(40, 0)[8..].to_vec(), Vec::new()));
            (sent, sender.finish().unwrap())
        });
        let mut got = Vec::new();
        while let Some(frame) = receive(&mut receiver) {
            got.push(frame);
        }
        let (sent, of_sender) = sending.join().unwrap();
        assert!(sent == got);
        let of_receiver = receiver.counters();
        assert_eq!(of_sender.content_bytes, of_receiver.content_bytes);
        assert_eq!(of_sender.wire_bytes, of_receiver.wire_bytes);
        assert_eq!(of_sender.records, of_receiver.records);
        let content: usize = sent
            .iter()
            .map(|(header, payload)| 8 + header.len() + payload.len())
            .sum();
        assert_eq!(of_sender.content_bytes, content as u64);
        receiver.close().unwrap();
    }
}

#[test]
fn a_frame_takes_at_most_its_pages_or_one_payload_of_that_length() {
    let (mut sender, mut receiver) = tls(Provider::built_in()[0]);
    let mut memory = pattern(BATCH_BYTES + 1, 1);
    let guest = VolatileSlice::from(&mut memory[..PAGE_BYTES]);
    let mut frame = sender.frame();
    for _ in 0..PAGES_PER_FRAME {
        assert_eq!(frame.guest_page(&guest), Ok(true));
    }
    assert_eq!(frame.guest_page(&guest), Err(FrameError::Full));

    let error = sender.send_with(b"", &mut memory).unwrap_err();
    assert!(matches!(error, SendError::PayloadTooLong { bytes } if bytes == BATCH_BYTES + 1));
    let payload = &mut memory[..BATCH_BYTES];
    sender.send_with(&header(8, BATCH_BYTES), payload).unwrap();
    assert!(receive(&mut receiver).unwrap().1 == pattern(BATCH_BYTES + 1, 1)[..BATCH_BYTES]);
}

#[test]
fn memory_of_every_length_arrives() {
    for (mut sender, mut receiver) in every_security() {
        let content = pattern(BATCH_BYTES, 4);
        let lengths = [
            1,
            PAGE_BYTES - 1,
            PAGE_BYTES + 1,
            16384,
            16385,
            5 * 16384 - 1,
            5 * 16384 + PAGE_BYTES + 1,
            BATCH_BYTES - 1,
            BATCH_BYTES,
        ];
        let mut memory = content.clone();
        let sending = thread::spawn(move || {
            for bytes in lengths {
                let payload = &mut memory[..bytes];
                sender.send_with(&header(8, bytes), payload).unwrap();
                assert!(memory[..bytes] == pattern(BATCH_BYTES, 4)[..bytes]);
            }
            sender.finish().unwrap();
        });
        for bytes in lengths {
            assert!(receive(&mut receiver).unwrap().1 == content[..bytes]);
        }
        assert!(receive(&mut receiver).is_none());
        sending.join().unwrap();
    }
}

#[test]
fn a_plain_lane_reads_a_payload_and_the_next_header_in_one_call() {
    let (near, far) = pair();
    let arrived = far.try_clone().unwrap();
    let consent = PlainConsent::both(true, true).unwrap();
    let mut sender = DataSender::plain(near, consent, STALL).unwrap();
    let mut receiver = DataReceiver::plain(far, consent, STALL).unwrap();
    let contents: Vec<Vec<u8>> = (0..3).map(|seed| pattern(3 * PAGE_BYTES, seed)).collect();
    for content in &contents {
        let header = header(30, content.len());
        sender.send_with(&header, &mut content.clone()).unwrap();
    }
    let counters = sender.finish().unwrap();
    while unread_bytes(&arrived).unwrap() < counters.wire_bytes {
        thread::yield_now();
    }
    for content in &contents {
        let mut lengths = [0; 30];
        assert!(receiver.next(&mut lengths, None).unwrap());
        assert!(lengths == header(30, content.len())[..]);
        let mut came = vec![0; content.len()];
        receiver.read_exact(&mut came).unwrap();
        assert!(came == *content);
    }
    // One call for the first header, and one for each payload.
    assert_eq!(receiver.counters().calls, 4);
    assert!(!receiver.next(&mut [0; 30], None).unwrap());
    assert_eq!(receiver.counters().wire_bytes, counters.wire_bytes);
}

#[test]
fn a_header_that_is_too_long_is_refused_and_the_lane_stays_open() {
    let (mut sender, mut receiver) = plain();
    let error = sender.send(&[0; HEADER_LIMIT_BYTES + 1]).unwrap_err();
    assert!(matches!(error, SendError::HeaderTooLong { .. }));
    sender.send(&header(8, 0)).unwrap();
    assert!(receive(&mut receiver).is_some());
}

/// Claim N4 of docs/security.
#[test]
fn i7_a_lost_connection_is_an_error() {
    let (sender, mut receiver) = tls(Provider::built_in()[0]);
    drop(sender);
    assert!(matches!(
        receiver.next(&mut [0; 8], None),
        Err(ReceiveError::Truncated)
    ));
    assert!(matches!(
        receiver.next(&mut [0; 8], None),
        Err(ReceiveError::Spent)
    ));

    // A payload of 100 bytes goes through the receiver's buffer on each lane. On a plain lane, the
    // kernel writes a longer one to its target.
    type Way = fn(&mut DataReceiver, usize) -> Result<(), ReceiveError>;
    let ways: [Way; 3] = [
        |receiver, bytes| receiver.payload(bytes as u64, |_| ()),
        |receiver, bytes| receiver.read_exact(&mut vec![0; bytes]),
        |receiver, bytes| {
            let mut target = vec![0; bytes];
            receiver.payload_into(std::iter::once(VolatileSlice::from(&mut target[..])))
        },
    ];
    for (way, (bytes, arrived)) in ways
        .into_iter()
        .flat_map(|way| [(100, 0), (2 * PAGE_BYTES, 0), (2 * PAGE_BYTES, 5000)].map(|it| (way, it)))
    {
        let tls_lanes = Provider::built_in().len();
        for (number, (mut sender, mut receiver)) in every_security().into_iter().enumerate() {
            let is_tls = number < tls_lanes;
            sender
                .send_with(&header(8, bytes), &mut pattern(arrived, 1))
                .unwrap();
            sender.finish().unwrap();
            assert!(receiver.next(&mut [0; 8], None).unwrap());
            // A plain lane cannot tell a close from the death of the peer.
            let error = way(&mut receiver, bytes).unwrap_err();
            match error {
                ReceiveError::ClosedInside => assert!(is_tls),
                ReceiveError::Truncated => assert!(!is_tls),
                error => panic!("{error}"),
            }
            assert!(matches!(
                receiver.next(&mut [0; 8], None),
                Err(ReceiveError::Spent)
            ));
        }
    }
}

#[test]
fn i7_a_changed_byte_on_the_wire_ends_the_lane_before_any_byte_is_delivered() {
    for &provider in Provider::built_in() {
        let (near, far) = secured(&Crypto {
            offload: Offload::Process,
            ..Crypto::with(provider)
        });
        let mut wire = near.stream.try_clone().unwrap();
        let mut receiver = DataReceiver::tls(far, STALL).unwrap();
        let Records::Process { mut seal, .. } = near.records else {
            panic!("the kernel has the keys");
        };
        let mut record = vec![7; 4096];
        seal.seal(&mut record).unwrap();
        record[2000] ^= 4;
        wire.write_all(&record).unwrap();
        let mut seen = 0;
        let error = receiver.payload(10, |part| seen += part.len()).unwrap_err();
        assert!(
            matches!(error, ReceiveError::Record(OpenError::Authentication)),
            "{error}"
        );
        assert_eq!(seen, 0);
    }
}

/// Claim N6 of docs/security.
#[test]
fn i6_plain_needs_the_consent_of_both_sides_and_is_never_taken_as_tls() {
    assert!(PlainConsent::both(true, false).is_none());
    assert!(PlainConsent::both(false, true).is_none());
    // A plain sender with a receiver that requires TLS.
    let (_, far) = secured(&Crypto::auto());
    let (near, other) = pair();
    let far = handshake::Secured {
        stream: other,
        ..far
    };
    let mut receiver = DataReceiver::tls(far, STALL).unwrap();
    let consent = PlainConsent::both(true, true).unwrap();
    let mut sender = DataSender::plain(near, consent, STALL).unwrap();
    sender.send(&header(100, 0)).unwrap();
    let error = receiver.next(&mut [0; 8], None).unwrap_err();
    assert!(
        matches!(error, ReceiveError::Record(OpenError::Unprotected { .. })),
        "{error}"
    );
}

/// Claim N1 of docs/security.
#[test]
fn i6_a_tls_sender_puts_no_plaintext_on_the_wire() {
    let (mut near, mut far) = pair();
    let (secured, _) = secured(&Crypto::auto());
    std::mem::swap(&mut near, &mut far);
    let mut sender = DataSender::tls(
        handshake::Secured {
            stream: near,
            ..secured
        },
        STALL,
    )
    .unwrap();
    let mut payload = [b'#'; PAGE_BYTES];
    let mut frame = sender.frame();
    fill(&mut frame, &mut payload);
    frame.finish(&[b'#'; 64]).unwrap();
    sender.finish().unwrap();
    let mut wire = Vec::new();
    far.read_to_end(&mut wire).unwrap();
    assert!(wire.len() > PAGE_BYTES + 64);
    assert!(!wire.windows(4).any(|window| window == b"####"));
}

#[test]
fn a_peer_that_does_not_read_or_sends_half_a_payload_times_out() {
    for (mut sender, receiver) in every_security() {
        let begin = Instant::now();
        let error = loop {
            let mut payload = pages(0..60);
            let mut frame = sender.frame();
            fill(&mut frame, &mut payload);
            if let Err(error) = frame.finish(b"") {
                break error;
            }
        };
        assert!(
            matches!(error, SendError::Stalled { limit: STALL }),
            "{error}"
        );
        assert!(begin.elapsed() < Duration::from_secs(5));
        assert!(matches!(sender.send(b"x"), Err(SendError::Spent)));
        drop(receiver);
    }
    for (mut sender, mut receiver) in every_security() {
        sender.send(&header(8, 10)).unwrap();
        receiver.next(&mut [0; 8], None).unwrap();
        let begin = Instant::now();
        let error = receiver.payload(10, |_| ()).unwrap_err();
        assert!(matches!(error, ReceiveError::Stalled { .. }), "{error}");
        assert!(begin.elapsed() >= STALL - Duration::from_millis(50));
    }
}

#[test]
fn an_idle_lane_stays_open_and_an_idle_timeout_loses_nothing() {
    let stall = Duration::from_millis(50);
    let (mut sender, mut receiver) = tls_within(Provider::built_in()[0], stall);
    let error = receiver.next(&mut [0; 8], Some(stall)).unwrap_err();
    assert!(matches!(error, ReceiveError::Idle { .. }), "{error}");
    let late = thread::spawn(move || {
        // Wait longer than the stall limit, which does not apply between frames.
        thread::sleep(2 * stall);
        sender.send(&header(8, 0)).unwrap();
        sender
    });
    assert!(receiver.next(&mut [0; 8], None).unwrap());
    drop(late.join().unwrap());
}

#[test]
fn a_blocked_lane_is_woken_by_its_canceller() {
    for (mut sender, mut receiver) in every_security() {
        let wake_receiver = receiver.canceller();
        let waiting = thread::spawn(move || {
            let error = receiver.next(&mut [0; 8], None).unwrap_err();
            (receiver, error)
        });
        thread::sleep(Duration::from_millis(50));
        wake_receiver.shutdown();
        let (_receiver, error) = waiting.join().unwrap();
        assert!(matches!(error, ReceiveError::Cancelled), "{error}");

        let wake_sender = sender.canceller();
        wake_sender.shutdown();
        let error = sender.send(b"x").unwrap_err();
        assert!(matches!(error, SendError::Cancelled), "{error}");
    }
}

#[test]
fn a_source_gets_the_alert_when_its_certificate_is_refused() {
    let authority = Authority::new();
    let client = authority.identity(&["stranger.test"]);
    let client = client
        .client(&Crypto::auto(), names(&[DESTINATION]))
        .unwrap();
    let server = authority.identity(&[DESTINATION]);
    let server = server.server(&Crypto::auto(), names(&[SOURCE])).unwrap();
    let (near, far) = pair();
    let accept = thread::spawn(move || handshake::server(far, &server, soon()).unwrap_err());
    let near = handshake::client(near, &client, soon()).unwrap();
    let mut sender = DataSender::tls(near, Duration::from_secs(5)).unwrap();
    let refused = accept.join().unwrap();
    assert!(
        matches!(refused, HandshakeError::Peer(PeerRefused::Name { .. })),
        "{refused}"
    );
    let error = loop {
        let mut payload = pages(0..60);
        let mut frame = sender.frame();
        fill(&mut frame, &mut payload);
        if let Err(error) = frame.finish(b"") {
            break error;
        }
    };
    // The alerts for a certificate that is not allowed.
    assert!(
        matches!(error, SendError::PeerAlert(Alert(42 | 46 | 49))),
        "{error}"
    );
}

#[test]
fn a_send_gives_notice_once_and_only_if_it_has_to_wait() {
    for (mut sender, mut receiver) in every_security() {
        let (full, waits) = channel();
        let drain = thread::spawn(move || {
            waits.recv().unwrap();
            let frames = std::iter::repeat_with(|| receiver.payload(BATCH_BYTES as u64, |_| ()));
            frames.take_while(Result::is_ok).count()
        });
        let mut payload = vec![7; BATCH_BYTES];
        let (mut sent, mut notices) = (0, 0);
        while notices == 0 {
            let mut would_block = || {
                notices += 1;
                full.send(()).unwrap();
            };
            sender
                .send_with_notice(b"", &mut payload, &mut would_block)
                .unwrap();
            sent += 1;
        }
        assert_eq!(notices, 1);
        assert!(sent > 1, "the first frame had to wait");
        sender.finish().unwrap();
        assert_eq!(drain.join().unwrap(), sent);
    }
}

#[test]
fn a_rate_limit_is_kept() {
    let (mut sender, mut receiver) = plain();
    sender.set_rate(Some(4 << 20)).unwrap();
    let begin = Instant::now();
    let drain = thread::spawn(move || receiver.payload(2 << 20, |_| ()).unwrap());
    let mut payload = vec![0; BATCH_BYTES];
    for _ in 0..(2 << 20) / BATCH_BYTES {
        sender.send_with(b"", &mut payload).unwrap();
    }
    drain.join().unwrap();
    assert!(
        begin.elapsed() > Duration::from_millis(250),
        "{:?}",
        begin.elapsed()
    );
    sender.socket().shutdown(Shutdown::Both).unwrap();
}

/// At first the end that dialled has the sender, and the end that accepted has the receiver.
#[test]
fn a_lane_that_turns_round_carries_frames_to_the_side_that_dialled() {
    for (dialled, accepted) in every_security() {
        let mut sender = accepted.into_sender().unwrap();
        let mut receiver = dialled.into_receiver().unwrap();
        let sent = [header(100, 0), header(9, 0)];
        for header in &sent {
            sender.send(header).unwrap();
        }
        sender.finish().unwrap();
        for header in &sent {
            assert_eq!(receive(&mut receiver), Some((header[8..].to_vec(), vec![])));
        }
        assert_eq!(receive(&mut receiver), None);
        receiver.close().unwrap();
    }
}

#[test]
fn a_lane_does_not_turn_round_after_its_first_frame() {
    for (mut sender, mut receiver) in every_security() {
        sender.send(&header(100, 0)).unwrap();
        assert!(receive(&mut receiver).is_some());
        let turned = receiver.into_sender().map(drop);
        assert!(matches!(turned, Err(SendError::Spent)), "{turned:?}");
    }
}
