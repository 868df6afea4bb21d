//! The vectors of keying sessions in docs/wire/: each decodes to the value that the test names and
//! encodes back to the same bytes. There is one vector for every message.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use dunlin_proto::fault::FaultCode;
use dunlin_proto::ipsec::key::{CONTEXT_BYTES, EXPORTER_LABEL, KEY_BYTES};
use dunlin_proto::ipsec::message::{Header, Kind, MESSAGE_HEADER_BYTES, Message, Terms};
use dunlin_proto::ipsec::plan::{UDP_SOURCE_PORTS, Udp};
use dunlin_proto::ipsec::ports::PortRange;
use dunlin_proto::ipsec::{LEAST_SPI, Mode, Sender, Slot};
use dunlin_proto::limits::{MAX_IPSEC_BODY_BYTES, MAX_SAS, MAX_SLOTS, MAX_TEXT_BYTES};

use crate::document::{WIRE, assert_exact, contains, vectors_of};

/// Every vector of a keying session by its name.
fn vectors() -> BTreeMap<&'static str, Vec<u8>> {
    vectors_of("ipsec/")
}

fn expected(kind: Kind) -> Message {
    let slot = |index, sender| Slot { index, sender };
    match kind {
        Kind::Terms => Message::Terms(Terms {
            mode: Mode::Cpu,
            ports: PortRange::new(49_152, 49_215).unwrap(),
            own: [192, 0, 2, 1].into(),
            other: [192, 0, 2, 2].into(),
            sas_max: 64,
            udp: Some(Udp {
                listener: 4500,
                first_source: 50_000,
            }),
        }),
        Kind::Want => Message::Want {
            epoch: 1,
            slots: vec![
                slot(0, Sender::Fallback),
                slot(1, Sender::Cpu(3)),
                slot(
                    2,
                    Sender::Connection {
                        from: 50_000,
                        to: 49_152,
                    },
                ),
            ],
        },
        Kind::Granted => Message::Granted {
            epoch: 1,
            spis: vec![(0, 0x1234), (1, 0xdead_beef)],
        },
        Kind::Ready => Message::Ready,
        Kind::Retire => Message::Retire { epoch: 1 },
        Kind::Release => Message::Release {
            indices: vec![5, 9],
        },
        Kind::End => Message::End {
            fault: FaultCode::Cancelled,
            text: "the operator ended it".to_owned(),
        },
    }
}

fn decode(bytes: &[u8]) -> Option<Message> {
    let (header, body) = bytes.split_first_chunk::<MESSAGE_HEADER_BYTES>()?;
    let header = Header::decode(header).ok()?;
    Message::decode(&header, body).ok()?
}

fn encode(message: &Message) -> Vec<u8> {
    let mut bytes = Vec::new();
    message.encode(&mut bytes).unwrap();
    bytes
}

#[test]
fn every_message_has_its_vector() {
    let mut vectors = vectors();
    for kind in Kind::ALL {
        let name = kind.name();
        let bytes = vectors
            .remove(name)
            .unwrap_or_else(|| panic!("docs/wire/ has no vector ipsec/{name}"));
        assert_eq!(expected(*kind).kind(), *kind);
        assert_eq!(decode(&bytes), Some(expected(*kind)), "{name}");
        assert_eq!(encode(&expected(*kind)), bytes, "{name}");
    }
    assert!(vectors.is_empty(), "left unread: {:?}", vectors.keys());
}

#[test]
fn terms_of_ipv6_without_udp_are_what_was_written() {
    let terms = Message::Terms(Terms {
        mode: Mode::Connection,
        ports: PortRange::new(1, 65_535).unwrap(),
        own: "2001:db8::1".parse().unwrap(),
        other: "2001:db8::2".parse().unwrap(),
        sas_max: MAX_SAS,
        udp: None,
    });
    assert_eq!(decode(&encode(&terms)), Some(terms));
}

#[test]
fn the_document_lists_every_message_and_limit() {
    for kind in Kind::ALL {
        let (number, name) = (kind.to_wire(), kind.name());
        let row = format!("| {number} | {name} | ");
        assert!(contains(&WIRE, &row), "docs/wire/ lacks: {row}");
    }
    for words in [
        format!("body, at most {} KiB", MAX_IPSEC_BODY_BYTES / 1024),
        format!("list16 of SA (≤ {MAX_SLOTS})"),
        format!("index 4, SPI 4 (≥ {LEAST_SPI}) (≤ {MAX_SLOTS})"),
        format!("in one epoch: 1 to {MAX_SAS}"),
        format!("fault 2, reason text16 (≤ {MAX_TEXT_BYTES})"),
        format!("the first of {UDP_SOURCE_PORTS} UDP ports"),
        format!(
            "{} bytes for AES-256-GCM and 4 bytes of salt",
            KEY_BYTES - 4
        ),
        format!("with {CONTEXT_BYTES} bytes of context"),
        format!("`{}`", String::from_utf8_lossy(EXPORTER_LABEL)),
    ] {
        assert!(contains(&WIRE, &words), "docs/wire/ lacks: {words}");
    }
}

#[test]
fn i7_every_truncation_of_a_vector_is_refused() {
    assert_exact(vectors(), |_, bytes| decode(bytes).is_some());
}

/// Sets every byte of every vector to every value. The decoder never panics, and each decoded value
/// can be encoded again.
#[test]
fn i7_every_changed_byte_of_a_vector_is_refused_or_understood() {
    for (_, bytes) in vectors() {
        for position in 0..bytes.len() {
            for value in 0..=u8::MAX {
                let mut changed = bytes.clone();
                changed[position] = value;
                if let Some(message) = decode(&changed) {
                    assert_eq!(decode(&encode(&message)), Some(message));
                }
            }
        }
    }
}

/// The decoder rejects what the encoder would refuse to write.
#[test]
fn i7_what_a_message_may_not_say_is_refused() {
    let change = |name, at: usize, value: u8| {
        let mut bytes = vectors()[name].clone();
        bytes[at] = value;
        decode(&bytes)
    };
    let body = MESSAGE_HEADER_BYTES;
    for (name, at, value, what) in [
        ("terms", body, 0, "no mode"),
        ("terms", body, 3, "an unknown mode"),
        ("terms", body + 1, 5, "an unknown family"),
        ("terms", body + 3, 5, "more SAs than there may be"),
        ("terms", body + 7, 1, "ports that go backwards"),
        ("terms", body + 11, 255, "UDP ports beyond the last"),
        ("terms", body + 16, 1, "a byte after an IPv4 address"),
        ("want", body, 0, "epoch 0"),
        ("want", body + 6, 1, "an index twice"),
        ("want", body + 10, 4, "an unknown kind of SA"),
        ("want", body + 11, 1, "a fallback with a CPU"),
        ("granted", body + 11, 0, "a reserved SPI"),
        ("release", body + 6, 5, "an index twice"),
        ("release", body, 0, "nothing to release"),
    ] {
        assert_eq!(change(name, at, value), None, "{name}: {what}");
    }
}
