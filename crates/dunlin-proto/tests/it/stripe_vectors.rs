//! The vectors of the tunnel in docs/wire/: each decodes to the value that the test names and
//! encodes back to the same bytes. There is one vector for every message.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use dunlin_proto::fault::FaultCode;
use dunlin_proto::limits::{
    MAX_CHANNEL_CHUNKS, MAX_CHANNEL_OFFSET, MAX_CHANNELS, MAX_CREDITS, MAX_LANES, MAX_NAME_BYTES,
    MAX_STRIPE_CHUNK_BYTES, MAX_TEXT_BYTES, MAX_TUNNEL_BODY_BYTES,
};
use dunlin_proto::negotiate::SessionSecret;
use dunlin_proto::stripe::frame::{Data, FRAME_HEADER_BYTES, Frame};
use dunlin_proto::stripe::message::{
    Credit, Header, Kind, LaneAck, MESSAGE_HEADER_BYTES, Mark, Message, Open,
};

use crate::document::{WIRE, assert_exact, contains, vectors_of};

/// Every vector of the tunnel by its name.
fn vectors() -> BTreeMap<&'static str, Vec<u8>> {
    vectors_of("tunnel-")
}

fn expected(kind: Kind) -> Message {
    let channel = 4;
    match kind {
        Kind::Accept => Message::Accept {
            secret: SessionSecret(std::array::from_fn(|at| 0x60 + at as u8)),
            lanes_max: 16,
            port: 18_300,
        },
        Kind::Open => Message::Open(Open {
            channel,
            limit: 1 << 20,
            route: "ram".to_owned(),
            parameter: "web".to_owned(),
            barrier: vec![
                Mark {
                    channel: 0,
                    offset: 70_000,
                },
                Mark {
                    channel: 2,
                    offset: 0,
                },
            ],
        }),
        Kind::Opened => Message::Opened {
            channel,
            limit: 1 << 20,
        },
        Kind::Refused => Message::Refused {
            channel,
            fault: FaultCode::Unauthorised,
            text: "no such route".to_owned(),
        },
        Kind::Credit => Message::Credit(vec![
            Credit {
                channel,
                delivered: 300_000,
                limit: 1_600_000,
            },
            Credit {
                channel: 7,
                delivered: 0,
                limit: 262_144,
            },
        ]),
        Kind::Ack => Message::Ack(vec![
            LaneAck {
                lane: 1,
                frames: 16,
            },
            LaneAck {
                lane: 5,
                frames: 300,
            },
        ]),
        Kind::LaneRefused => Message::LaneRefused {
            lane: 5,
            fault: FaultCode::LaneLimit,
            text: "4 lanes are open".to_owned(),
        },
        Kind::LaneLost => Message::LaneLost(LaneAck {
            lane: 5,
            frames: 301,
        }),
        Kind::Eof => Message::Eof(Mark {
            channel,
            offset: 1_234_567,
        }),
        Kind::Closed => Message::Closed { channel },
        Kind::Reset => Message::Reset {
            channel,
            fault: FaultCode::Cancelled,
        },
        Kind::Gone => Message::Gone { channel },
        Kind::Ping => Message::Ping {
            token: 0x1122_3344_5566_7788,
        },
        Kind::Pong => Message::Pong {
            token: 0x1122_3344_5566_7788,
        },
        Kind::Drain => Message::Drain,
        Kind::LaneWanted => Message::LaneWanted { lane: 5 },
        Kind::LaneFailed => Message::LaneFailed {
            lane: 5,
            fault: FaultCode::LaneLost,
            text: "cannot reach b.example.".to_owned(),
        },
    }
}

fn decode_message(bytes: &[u8]) -> Option<(u32, Message)> {
    let (header, body) = bytes.split_first_chunk::<MESSAGE_HEADER_BYTES>()?;
    let header = Header::decode(header).ok()?;
    Some((header.epoch(), Message::decode(&header, body).ok()??))
}

fn decode_frame(bytes: &[u8]) -> Option<Frame> {
    let header: &[u8; FRAME_HEADER_BYTES] = bytes.try_into().ok()?;
    Frame::decode(header).ok()
}

#[test]
fn every_message_and_frame_has_its_vector() {
    let mut vectors = vectors();
    for kind in Kind::ALL {
        let name = format!("control/{kind}").replace(' ', "-");
        let bytes = vectors
            .remove(name.as_str())
            .unwrap_or_else(|| panic!("docs/wire/ has no vector {name}"));
        assert_eq!(expected(*kind).kind(), *kind);
        assert_eq!(decode_message(&bytes), Some((3, expected(*kind))), "{name}");
        let mut encoded = Vec::new();
        expected(*kind).encode(3, &mut encoded).unwrap();
        assert_eq!(encoded, bytes, "{name}");
    }
    let data = Frame::Data(Data::new(4, 0x50_0000, 65_536).unwrap());
    for (name, frame) in [
        ("frame/data", data),
        ("frame/end", Frame::End { frames: 1000 }),
    ] {
        let bytes = vectors.remove(name).unwrap();
        assert_eq!(decode_frame(&bytes), Some(frame), "{name}");
        assert_eq!(bytes, frame.to_bytes(), "{name}");
    }
    assert!(vectors.is_empty(), "left unread: {:?}", vectors.keys());
}

#[test]
fn the_document_lists_every_message_and_limit() {
    for kind in Kind::ALL {
        let row = format!("| {} | {kind} | ", kind.to_wire());
        assert!(contains(&WIRE, &row), "docs/wire/ lacks: {row}");
    }
    for words in [
        format!("| 1 to {MAX_STRIPE_CHUNK_BYTES} | 0 |"),
        format!("body, at most {} KiB", MAX_TUNNEL_BODY_BYTES / 1024),
        format!("(1 to {MAX_LANES})"),
        format!("route text16 (≤ {MAX_NAME_BYTES}), parameter text16 (≤ {MAX_NAME_BYTES})"),
        format!("list16 of mark (≤ {MAX_CHANNELS})"),
        format!("channel 4, fault 2, reason text16 (≤ {MAX_TEXT_BYTES})"),
        format!("delivered 8, limit 8 (≤ {MAX_CREDITS})"),
        format!("lane 2 (not 0), frames 8 (≤ {MAX_LANES})"),
        format!("at most {MAX_CHANNEL_CHUNKS} frames of a channel under way"),
        format!("that is the {}th of", MAX_CHANNEL_CHUNKS + 1),
        format!("at most 2^{}", MAX_CHANNEL_OFFSET.ilog2()),
    ] {
        assert!(contains(&WIRE, &words), "docs/wire/ lacks: {words}");
    }
}

#[test]
fn i7_every_truncation_of_a_vector_is_refused() {
    let decodes = |name: &str, bytes: &[u8]| match name.starts_with("frame/") {
        true => decode_frame(bytes).is_some(),
        false => decode_message(bytes).is_some(),
    };
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
                if name.starts_with("frame/") {
                    if let Some(frame) = decode_frame(&changed) {
                        assert_eq!(frame.to_bytes(), *changed, "the frame has two encodings");
                    }
                } else if let Some((epoch, message)) = decode_message(&changed) {
                    let mut encoded = Vec::new();
                    message.encode(epoch, &mut encoded).unwrap();
                    assert_eq!(decode_message(&encoded), Some((epoch, message)));
                }
            }
        }
    }
}

/// The encoder refuses to write what a peer would reject.
#[test]
fn i7_nothing_over_its_limit_is_written() {
    let mark = Mark {
        channel: 0,
        offset: MAX_CHANNEL_OFFSET + 1,
    };
    let long = "a".repeat(MAX_TEXT_BYTES + 1);
    let ack = |lane| LaneAck { lane, frames: 0 };
    for message in [
        Message::Eof(mark),
        Message::Accept {
            secret: SessionSecret([0; 32]),
            lanes_max: 0,
            port: 0,
        },
        Message::LaneLost(ack(0)),
        Message::LaneWanted { lane: 0 },
        Message::LaneFailed {
            lane: 1,
            fault: FaultCode::LaneLost,
            text: long.clone(),
        },
        Message::Ack(vec![ack(1); usize::from(MAX_LANES) + 1]),
        Message::Refused {
            channel: 0,
            fault: FaultCode::Busy,
            text: long,
        },
    ] {
        let mut out = vec![1];
        assert!(message.encode(1, &mut out).is_err(), "{message:?}");
        assert_eq!(out, [1]);
    }
    assert_eq!(Data::new(0, 0, 0), None);
    assert_eq!(Data::new(0, 0, MAX_STRIPE_CHUNK_BYTES + 1), None);
    assert_eq!(Data::new(0, MAX_CHANNEL_OFFSET, 1), None);
    assert_eq!(Data::new(0, u64::MAX, 1), None);
}
