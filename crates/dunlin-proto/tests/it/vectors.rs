//! The vectors of migrations in docs/wire/: each decodes to the expected value and encodes to the
//! same bytes. There is one vector for every message.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use dunlin_proto::control::{
    Accept, CONTROL_HEADER_BYTES, ChunkSet, Describe, Envelope, Final, Header, Kind, Message,
    Position, Reached, Region, RegionKind, RegionTable, Section, Verdict,
};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::frame::{ChunkHeader, Encoding, FRAME_HEADER_BYTES, Frame, Range};
use dunlin_proto::limits::{
    MAX_ACK_SETS, MAX_CHUNK_PAYLOAD_BYTES, MAX_CONTROL_BODY_BYTES, MAX_DESCRIPTION_BYTES,
    MAX_ENDPOINT_BYTES, MAX_ENDPOINTS, MAX_LANES, MAX_MEMORY_BYTES, MAX_NAME_BYTES,
    MAX_OPENING_BODY_BYTES, MAX_RANGES_PER_CHUNK, MAX_REGIONS, MAX_SECTION_BYTES, MAX_SECTIONS,
    MAX_STATE_BYTES, MAX_TEXT_BYTES, PAGE_BYTES,
};
use dunlin_proto::negotiate::{
    Features, LaneDirection, LaneOpen, LaneSecurity, Offer, Opening, OpeningKind, PRELUDE_BYTES,
    Prelude, Refusal, Selection, SessionSecret, VersionRange,
};

use crate::document::{WIRE, assert_exact, contains, vectors_of};

const SESSION: [u8; 16] = [
    0xa0, 0xa1, 0xa2, 0xa3, 0xa4, 0xa5, 0xa6, 0xa7, 0xa8, 0xa9, 0xaa, 0xab, 0xac, 0xad, 0xae, 0xaf,
];

/// The vectors of migrations by name; the tunnel's and those of IPsec have their own modules.
fn vectors() -> BTreeMap<&'static str, Vec<u8>> {
    let mut vectors = vectors_of("");
    vectors.retain(|name, _| !name.starts_with("tunnel-") && !name.starts_with("ipsec/"));
    vectors
}

const OPENINGS: [OpeningKind; 4] = [
    OpeningKind::Offer,
    OpeningKind::Select,
    OpeningKind::Refuse,
    OpeningKind::Lane,
];

fn expected_opening(kind: OpeningKind) -> (&'static str, Opening) {
    match kind {
        OpeningKind::Offer => (
            "opening/offer",
            Opening::Offer(Offer {
                versions: VersionRange { min: 1, max: 3 },
                optional: Features::VERIFY,
                required: Features::NONE,
                security: LaneSecurity::Tls,
                session: SESSION,
                attempt: 2,
                epoch: 3,
            }),
        ),
        OpeningKind::Select => (
            "opening/select",
            Opening::Select(Selection {
                version: 1,
                features: Features::VERIFY,
                security: LaneSecurity::Tls,
            }),
        ),
        OpeningKind::Refuse => (
            "opening/refuse",
            Opening::Refuse(
                VersionRange::only(1),
                Refusal {
                    fault: FaultCode::Unauthorised,
                    text: "not on the list".to_owned(),
                },
            ),
        ),
        OpeningKind::Lane => (
            "opening/lane open",
            Opening::Lane(LaneOpen {
                version: 1,
                session: SESSION,
                lane: 5,
                direction: LaneDirection::FromDialer,
                mac: std::array::from_fn(|position| u8::try_from(position).unwrap()),
            }),
        ),
    }
}

fn regions() -> RegionTable {
    RegionTable::new(vec![
        Region {
            id: 0,
            kind: RegionKind::Ram,
            flags: 0,
            backing_page_bytes: 2 << 20,
            length: 1 << 30,
            guest_physical: 0,
            name: "ram".to_owned(),
        },
        Region {
            id: 9,
            kind: RegionKind::Rom,
            flags: 0,
            backing_page_bytes: 4096,
            length: 0x2_0000,
            guest_physical: 0xfffe_0000,
            name: "firmware".to_owned(),
        },
    ])
    .unwrap()
}

fn ranges() -> Vec<Range> {
    vec![
        Range {
            region: 0,
            encoding: Encoding::Raw,
            page_count: 1,
            offset: 0x1000,
        },
        Range {
            region: 0,
            encoding: Encoding::Zero,
            page_count: 500,
            offset: 0x1_0000,
        },
        Range {
            region: 9,
            encoding: Encoding::Raw,
            page_count: 1,
            offset: 0,
        },
    ]
}

fn sets() -> Vec<ChunkSet> {
    vec![
        ChunkSet {
            first: 0,
            count: 256,
        },
        ChunkSet {
            first: 300,
            count: 1,
        },
    ]
}

fn expected_message(kind: Kind) -> Message {
    match kind {
        Kind::Describe => Message::Describe(Describe {
            vm_uuid: 0x3b24_1101_e2bb_4255_8caf_4136_c566_a962_u128.to_be_bytes(),
            vm_name: "sandpiper".to_owned(),
            page_bytes: 4096,
            paused: false,
            description: br#"{"vcpus":2}"#.to_vec(),
            regions: regions(),
        }),
        Kind::Accept => Message::Accept(Accept {
            secret: SessionSecret([0x5e; 32]),
            lanes_max: 8,
            endpoints: vec![
                "192.0.2.7:4914".to_owned(),
                "[fe80::7%eth1]:4914".to_owned(),
            ],
        }),
        Kind::Refuse => Message::Refuse {
            fault: FaultCode::DescriptionRefused,
            text: "no TSC scaling".to_owned(),
        },
        Kind::LaneUp => Message::LaneUp { lane: 5 },
        Kind::LaneRefused => Message::LaneRefused {
            lane: 5,
            fault: FaultCode::WrongSecret,
            text: "proof differs".to_owned(),
        },
        Kind::Ack => Message::Ack {
            sets: sets(),
            reached: vec![
                Reached {
                    lane: 5,
                    position: Position::Mark(3),
                },
                Reached {
                    lane: 6,
                    position: Position::End,
                },
            ],
        },
        Kind::Section => Message::Section(Section {
            name: "serial".to_owned(),
            instance: 1,
            version: 2,
            required: true,
            bytes: vec![0xc0, 0xff, 0xee],
        }),
        Kind::Final => Message::Final(Final {
            chunks: 301,
            iteration: 4,
            sections: 12,
            pages: 300_000,
            fenced: 2,
            digest: Some([0xd1; 16]),
        }),
        Kind::Ready => Message::Ready {
            digest: Some([0xd1; 16]),
        },
        Kind::Commit => Message::Commit { run: true },
        Kind::Running => Message::Running {
            cpu_ns: 1_500_000_000,
            downtime_ns: 42_000_000,
        },
        Kind::Release => Message::Release,
        Kind::Cancel => Message::Cancel {
            fault: FaultCode::TimeLimit,
            text: "600 s have passed".to_owned(),
        },
        Kind::Ping => Message::Ping {
            token: 0x1122_3344_5566_7788,
        },
        Kind::Pong => Message::Pong {
            token: 0x1122_3344_5566_7788,
        },
        Kind::Fence => Message::Fence { lane: 5 },
        Kind::Fenced => Message::Fenced {
            lane: 5,
            acks: sets(),
        },
        Kind::Inquire => Message::Inquire { attempt: 2 },
        Kind::Answer => Message::Answer {
            attempt: 2,
            verdict: Verdict::RanThenDied,
        },
    }
}

fn decode_opening(bytes: &[u8]) -> Option<Opening> {
    let (prelude, body) = bytes.split_first_chunk::<PRELUDE_BYTES>()?;
    Opening::decode(&Prelude::decode(prelude).ok()?, body).ok()
}

fn decode_message(bytes: &[u8]) -> Option<(Envelope, Message)> {
    let (header, body) = bytes.split_first_chunk::<CONTROL_HEADER_BYTES>()?;
    let header = Header::decode(header).ok()?;
    let message = Message::decode(&header, body).ok()??;
    Some((header.envelope(), message))
}

fn decode_frame(bytes: &[u8], ranges: &mut Vec<Range>) -> Option<Frame> {
    let (header, rest) = bytes.split_first_chunk::<FRAME_HEADER_BYTES>()?;
    let frame = Frame::decode(header).ok()?;
    match frame {
        Frame::Chunk(chunk) => chunk.decode_ranges(rest, &regions(), ranges).ok()?,
        Frame::Mark { .. } | Frame::End { .. } if rest.is_empty() => ranges.clear(),
        Frame::Mark { .. } | Frame::End { .. } => return None,
    }
    Some(frame)
}

#[test]
fn every_opening_message_has_its_vector() {
    let vectors = vectors();
    for kind in OPENINGS {
        let (name, expected) = expected_opening(kind);
        let bytes = &vectors[name];
        assert_eq!(decode_opening(bytes).as_ref(), Some(&expected), "{name}");
        let mut encoded = Vec::new();
        expected.encode(&mut encoded).unwrap();
        assert_eq!(&encoded, bytes, "{name}");
    }
}

#[test]
fn the_lane_open_of_version_2_has_its_vector() {
    let (_, first) = expected_opening(OpeningKind::Lane);
    let Opening::Lane(first) = first else {
        unreachable!()
    };
    let expected = Opening::Lane(LaneOpen {
        version: 2,
        direction: LaneDirection::ToDialer,
        ..first
    });
    let bytes = &vectors()["opening/lane open 2"];
    assert_eq!(decode_opening(bytes).as_ref(), Some(&expected));
    let mut encoded = Vec::new();
    expected.encode(&mut encoded).unwrap();
    assert_eq!(&encoded, bytes);
}

#[test]
fn every_frame_has_its_vector() {
    let vectors = vectors();
    let mut chunk = Vec::new();
    let header = ChunkHeader::encode(258, 2, &ranges(), &mut chunk).unwrap();
    for frame in [
        Frame::Chunk(header),
        Frame::Mark { iteration: 2 },
        Frame::End { chunks: 1000 },
    ] {
        let (name, expected_ranges) = match frame {
            Frame::Chunk(_) => ("frame/chunk", ranges()),
            Frame::Mark { .. } => ("frame/mark", vec![]),
            Frame::End { .. } => ("frame/end", vec![]),
        };
        let bytes = &vectors[name];
        let mut decoded_ranges = Vec::new();
        assert_eq!(
            decode_frame(bytes, &mut decoded_ranges),
            Some(frame),
            "{name}"
        );
        assert_eq!(decoded_ranges, expected_ranges, "{name}");
        assert_eq!(bytes[..FRAME_HEADER_BYTES], frame.to_bytes(), "{name}");
    }
    assert_eq!(chunk, vectors["frame/chunk"]);
    assert_eq!(header.number(), 258);
    assert_eq!(header.iteration(), 2);
    assert_eq!(header.payload_bytes(), 8192);
}

#[test]
fn every_control_message_has_its_vector() {
    let vectors = vectors();
    for (position, kind) in (1..).zip(Kind::ALL) {
        let name = format!("control/{kind}");
        let bytes = vectors
            .get(name.as_str())
            .unwrap_or_else(|| panic!("docs/wire/ has no vector {name}"));
        let envelope = Envelope {
            session: SESSION,
            epoch: 3,
            sequence: position,
        };
        let expected = expected_message(*kind);
        assert_eq!(expected.kind(), *kind);
        assert_eq!(
            decode_message(bytes),
            Some((envelope, expected.clone())),
            "{name}"
        );
        let mut encoded = Vec::new();
        expected.encode(&envelope, &mut encoded).unwrap();
        assert_eq!(&encoded, bytes, "{name}");
    }
}

#[test]
fn no_vector_is_left_unread() {
    let read = OPENINGS.len() + 1 + 3 + Kind::ALL.len();
    assert_eq!(vectors().len(), read);
}

/// The side that sends a message, as docs/wire/ names it.
fn sender(kind: Kind) -> &'static str {
    match kind {
        Kind::Describe
        | Kind::Section
        | Kind::Final
        | Kind::Commit
        | Kind::Release
        | Kind::Fence
        | Kind::Inquire => "source",
        Kind::Accept
        | Kind::Refuse
        | Kind::LaneUp
        | Kind::LaneRefused
        | Kind::Ack
        | Kind::Ready
        | Kind::Running
        | Kind::Fenced
        | Kind::Answer => "destination",
        Kind::Cancel | Kind::Ping | Kind::Pong => "either",
    }
}

#[test]
fn the_document_lists_every_fault_and_message() {
    for code in FaultCode::ALL {
        let row = format!(
            "| {} | {} | {} |",
            code.to_wire(),
            code.name(),
            code.at_fault()
        );
        assert!(contains(&WIRE, &row), "docs/wire/ lacks: {row}");
    }
    for (number, kind) in (1..).zip(Kind::ALL) {
        let row = format!("| {number} | {kind} | {} |", sender(*kind));
        assert!(contains(&WIRE, &row), "docs/wire/ lacks: {row}");
    }
}

#[test]
fn the_document_names_the_limits() {
    let kib = |bytes: usize| bytes / 1024;
    for words in [
        format!("1 to {MAX_LANES}"),
        format!("regions, 1 to {MAX_REGIONS}"),
        format!("1 to {MAX_RANGES_PER_CHUNK}"),
        format!("name, at most {MAX_NAME_BYTES}"),
        format!("opaque, at most {} KiB", kib(MAX_DESCRIPTION_BYTES)),
        format!("body, at most {} MiB", kib(kib(MAX_CONTROL_BODY_BYTES))),
        format!("body, at most {MAX_OPENING_BODY_BYTES}"),
        format!("at most {MAX_ENDPOINTS}, each text16 of at most {MAX_ENDPOINT_BYTES}"),
        format!("reason text16 (≤ {MAX_TEXT_BYTES})"),
        format!("list16 of chunk set (≤ {MAX_ACK_SETS})"),
        format!("sections sent, at most {MAX_SECTIONS}"),
        format!("at most {} MiB together", kib(kib(MAX_STATE_BYTES))),
        format!("at most 2^{} bytes", MAX_MEMORY_BYTES.ilog2()),
        format!("{PAGE_BYTES} × page count if raw"),
    ] {
        assert!(contains(&WIRE, &words), "docs/wire/ lacks: {words}");
    }
    assert_eq!(MAX_SECTION_BYTES, 1024 * 1024 - 4 * 1024);
    assert_eq!(MAX_CHUNK_PAYLOAD_BYTES, 1024 * 1024);
}

#[test]
fn i7_every_truncation_of_a_vector_is_refused() {
    assert_exact(vectors(), decodes);
}

/// Sets every byte of every vector to every value. The decoder never panics, and each decoded value
/// can be encoded again.
#[test]
fn i7_every_changed_byte_of_a_vector_is_refused_or_understood() {
    for (name, bytes) in vectors() {
        for position in 0..bytes.len() {
            for value in 0..=u8::MAX {
                let mut changed = bytes.clone();
                changed[position] = value;
                reencodes(name, &changed);
            }
        }
    }
}

fn decodes(name: &str, bytes: &[u8]) -> bool {
    match name.split_once('/').unwrap().0 {
        "opening" => decode_opening(bytes).is_some(),
        "frame" => decode_frame(bytes, &mut Vec::new()).is_some(),
        _ => decode_message(bytes).is_some(),
    }
}

fn reencodes(name: &str, bytes: &[u8]) {
    let mut encoded = Vec::new();
    match name.split_once('/').unwrap().0 {
        "opening" => {
            let Some(opening) = decode_opening(bytes) else {
                return;
            };
            opening.encode(&mut encoded).unwrap();
            assert_eq!(decode_opening(&encoded), Some(opening));
        }
        "frame" => {
            let mut ranges = Vec::new();
            match decode_frame(bytes, &mut ranges) {
                Some(Frame::Chunk(chunk)) => {
                    let (number, iteration) = (chunk.number(), chunk.iteration());
                    ChunkHeader::encode(number, iteration, &ranges, &mut encoded).unwrap();
                }
                Some(frame) => frame.encode(&mut encoded),
                None => return,
            }
            assert_eq!(encoded, bytes, "the frame has two encodings");
        }
        _ => {
            let Some((envelope, message)) = decode_message(bytes) else {
                return;
            };
            message.encode(&envelope, &mut encoded).unwrap();
            assert_eq!(decode_message(&encoded), Some((envelope, message)));
        }
    }
}
