#![allow(clippy::unwrap_used)]

use super::*;
use crate::limits::{
    MAX_ACK_SETS, MAX_DESCRIPTION_BYTES, MAX_ENDPOINT_BYTES, MAX_ENDPOINTS, MAX_LANES,
    MAX_NAME_BYTES, MAX_REGIONS, MAX_SECTION_BYTES, MAX_SECTIONS, MAX_TEXT_BYTES,
};
use crate::wire::DecodeReason;

const ENVELOPE: Envelope = Envelope {
    session: [4; SESSION_ID_BYTES],
    epoch: 2,
    sequence: 9,
};

fn encode(message: &Message) -> Vec<u8> {
    let mut bytes = Vec::new();
    message.encode(&ENVELOPE, &mut bytes).unwrap();
    bytes
}

fn decode(bytes: &[u8]) -> Result<Option<Message>, DecodeError> {
    let (header, body) = bytes.split_first_chunk().unwrap();
    Message::decode(&Header::decode(header)?, body)
}

/// Encodes the message with `field` appended to its body, and corrects the length of the body.
fn extended(message: &Message, field: &[u8]) -> Vec<u8> {
    let mut bytes = encode(message);
    bytes.extend_from_slice(field);
    let length = u32::try_from(bytes.len() - CONTROL_HEADER_BYTES).unwrap();
    bytes[..4].copy_from_slice(&length.to_le_bytes());
    bytes
}

fn describe(regions: usize, description: usize, name: usize) -> Message {
    let region = |id| Region {
        id: u16::try_from(id).unwrap(),
        kind: RegionKind::Ram,
        flags: 0,
        backing_page_bytes: 4096,
        length: 4096,
        guest_physical: u64::MAX,
        name: "n".repeat(name),
    };
    Message::Describe(Describe {
        vm_uuid: [1; 16],
        vm_name: "v".repeat(name),
        page_bytes: 4096,
        paused: true,
        description: vec![7; description],
        regions: RegionTable::new((0..regions).map(region).collect()).unwrap(),
    })
}

fn section(bytes: usize) -> Message {
    Message::Section(Section {
        name: "s".repeat(MAX_NAME_BYTES),
        instance: 0,
        version: 0,
        required: false,
        bytes: vec![3; bytes],
    })
}

fn reached(count: usize) -> Vec<Reached> {
    (1..=count)
        .map(|lane| Reached {
            lane: lane as u16,
            position: Position::Mark(1),
        })
        .collect()
}

fn sets(count: usize) -> Vec<ChunkSet> {
    let one = ChunkSet {
        first: u64::MAX - 1,
        count: 1,
    };
    vec![one; count]
}

fn accept(lanes_max: u16, endpoints: usize, endpoint: usize) -> Message {
    Message::Accept(Accept {
        secret: SessionSecret([0xab; 32]),
        lanes_max,
        endpoints: vec!["e".repeat(endpoint); endpoints],
    })
}

#[test]
fn the_largest_of_each_message_fits() {
    for message in [
        describe(MAX_REGIONS, MAX_DESCRIPTION_BYTES, MAX_NAME_BYTES),
        section(MAX_SECTION_BYTES),
        Message::Ack {
            sets: sets(MAX_ACK_SETS),
            reached: reached(usize::from(MAX_LANES)),
        },
        accept(MAX_LANES, MAX_ENDPOINTS, MAX_ENDPOINT_BYTES),
        Message::Cancel {
            fault: FaultCode::Internal,
            text: "t".repeat(MAX_TEXT_BYTES),
        },
    ] {
        let bytes = encode(&message);
        assert!(decode(&bytes).unwrap().unwrap() == message);
    }
}

#[test]
fn invalid_values_are_not_written() {
    let empty_set = ChunkSet { first: 0, count: 0 };
    let last = Final {
        chunks: 0,
        iteration: 0,
        sections: MAX_SECTIONS + 1,
        pages: 0,
        fenced: 0,
        digest: None,
    };
    let over = ChunkSet {
        first: u64::MAX,
        count: 1,
    };
    for message in [
        describe(1, MAX_DESCRIPTION_BYTES + 1, 1),
        section(MAX_SECTION_BYTES + 1),
        Message::Ack {
            sets: sets(MAX_ACK_SETS + 1),
            reached: Vec::new(),
        },
        Message::Ack {
            sets: vec![empty_set],
            reached: Vec::new(),
        },
        Message::Ack {
            sets: sets(1),
            reached: reached(usize::from(MAX_LANES) + 1),
        },
        Message::Ack {
            sets: sets(1),
            reached: vec![Reached {
                lane: 1,
                position: Position::Mark(u32::MAX),
            }],
        },
        Message::Fenced {
            lane: 1,
            acks: vec![over],
        },
        accept(0, 0, 0),
        accept(MAX_LANES + 1, 0, 0),
        accept(1, MAX_ENDPOINTS + 1, 0),
        accept(1, 1, MAX_ENDPOINT_BYTES + 1),
        Message::Refuse {
            fault: FaultCode::Internal,
            text: "t".repeat(MAX_TEXT_BYTES + 1),
        },
        Message::Final(last),
        Message::LaneUp { lane: 0 },
        Message::Fence { lane: 0 },
    ] {
        let mut bytes = vec![1, 2];
        assert!(
            message.encode(&ENVELOPE, &mut bytes).is_err(),
            "{message:?}"
        );
        assert_eq!(bytes, [1, 2]);
    }
}

#[test]
fn i7_a_body_over_the_limit_is_refused_by_its_header() {
    let mut header = [0; CONTROL_HEADER_BYTES];
    let limit = u32::try_from(MAX_CONTROL_BODY_BYTES).unwrap();
    header[..4].copy_from_slice(&limit.to_le_bytes());
    let decoded = Header::decode(&header).unwrap();
    assert_eq!(decoded.body_bytes(), MAX_CONTROL_BODY_BYTES);
    header[..4].copy_from_slice(&(limit + 1).to_le_bytes());
    assert_eq!(
        Header::decode(&header).unwrap_err().why,
        DecodeReason::OverLimit {
            value: u64::from(limit) + 1,
            limit: u64::from(limit)
        }
    );
}

#[test]
fn i7_reserved_bits_of_the_header_are_checked() {
    let good = encode(&Message::Release);
    for at in [6, 7, 12, 13, 14, 15] {
        let mut bad = good.clone();
        bad[at] |= 2;
        assert!(decode(&bad).is_err(), "byte {at}");
    }
}

#[test]
fn a_kind_of_a_later_release_is_skipped_unless_it_is_required() {
    let mut bytes = encode(&Message::Ping { token: 1 });
    bytes[4..6].copy_from_slice(&500_u16.to_le_bytes());
    assert_eq!(
        decode(&bytes).unwrap_err().why,
        DecodeReason::UnknownRequiredMessage { kind: 500 }
    );
    bytes[6] = 0;
    assert_eq!(decode(&bytes), Ok(None));
}

#[test]
fn a_field_of_a_later_release_is_skipped_unless_it_is_required() {
    let message = Message::Commit { run: true };
    let optional = [9, 0, 0, 0, 1, 0, 0, 0, 0xff];
    assert_eq!(
        decode(&extended(&message, &optional)),
        Ok(Some(message.clone()))
    );
    let required = [9, 0, 1, 0, 1, 0, 0, 0, 0xff];
    assert_eq!(
        decode(&extended(&message, &required)).unwrap_err().why,
        DecodeReason::UnknownRequiredField { tag: 9 }
    );
    // A repeated tag, a reserved flag, a truncated value, and a truncated header of a field.
    let twice = [optional, optional].concat();
    let flagged = [9, 0, 2, 0, 1, 0, 0, 0, 0xff];
    let cut = [9, 0, 0, 0, 2, 0, 0, 0, 0xff];
    for bad in [&twice[..], &flagged, &cut, &optional[..7]] {
        assert!(decode(&extended(&message, bad)).is_err(), "{bad:?}");
    }
}

#[test]
fn i7_a_digest_has_one_length() {
    let ready = Message::Ready { digest: None };
    assert_eq!(decode(&encode(&ready)), Ok(Some(ready.clone())));
    for length in [0_u8, 15, 17] {
        let mut field = vec![1, 0, 1, 0, length, 0, 0, 0];
        field.resize(8 + usize::from(length), 0xd1);
        assert!(decode(&extended(&ready, &field)).is_err(), "{length}");
    }
}

#[test]
fn i7_a_count_is_compared_with_the_bytes_that_are_left() {
    // The message announces 4096 sets and contains one.
    let mut bytes = encode(&Message::Fenced {
        lane: 1,
        acks: sets(1),
    });
    bytes[CONTROL_HEADER_BYTES + 2..][..2].copy_from_slice(&4096_u16.to_le_bytes());
    let error = decode(&bytes).unwrap_err();
    assert_eq!(
        error.why,
        DecodeReason::Truncated {
            needed: 4096 * 12,
            left: 12
        }
    );
}

#[test]
fn i7_text_that_is_not_utf8_is_refused() {
    let mut bytes = encode(&Message::Cancel {
        fault: FaultCode::Cancelled,
        text: "stop".to_owned(),
    });
    let last = bytes.len() - 1;
    bytes[last] = 0xff;
    assert_eq!(decode(&bytes).unwrap_err().why, DecodeReason::BadText);
}

#[test]
fn i7_an_unsorted_region_table_is_refused() {
    let good = encode(&describe(2, 0, 0));
    // Regions without names take 30 bytes each, starting with the identifier.
    let (first, second) = (good.len() - 60, good.len() - 30);
    assert_eq!((good[first], good[second]), (0, 1));
    for (at, id) in [(second, 0), (first, 1), (first, 2)] {
        let mut bad = good.clone();
        bad[at] = id;
        assert_eq!(decode(&bad).unwrap_err().what, "region id");
    }
}

#[test]
fn i7_a_set_beyond_the_last_chunk_number_is_refused() {
    let mut bytes = encode(&Message::Fenced {
        lane: 1,
        acks: sets(1),
    });
    let count = bytes.len() - 4;
    for (value, good) in [(0_u32, false), (1, true), (2, false), (u32::MAX, false)] {
        bytes[count..].copy_from_slice(&value.to_le_bytes());
        assert_eq!(decode(&bytes).is_ok(), good, "{value}");
    }
}

#[test]
fn a_page_size_of_a_later_version_is_a_missing_feature() {
    let mut bytes = encode(&describe(1, 0, 0));
    // The page length is at byte 18 of the body, after the UUID and an empty name. Change the
    // second of its four bytes.
    bytes[CONTROL_HEADER_BYTES + 18 + 1] = 0x40;
    let error = decode(&bytes).unwrap_err();
    assert_eq!(error.what, "page length");
    assert_eq!(error.fault(), FaultCode::FeatureMissing);
}

#[test]
fn secrets_and_state_do_not_print() {
    let printed = format!("{:?} {:?}", accept(1, 0, 0), section(5));
    assert!(printed.contains("SessionSecret(..)"), "{printed}");
    assert!(!printed.contains("171"), "{printed}");
    assert!(printed.contains("bytes: 5"), "{printed}");
}
