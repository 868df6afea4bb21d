//! The vectors and tables of docs/journal/.

#![allow(clippy::unwrap_used)]

use dunlin_proto::journal::peer::{PEER_BLOCK_AT, Principal, RecordedPeer};
use dunlin_proto::journal::{
    DestinationRecord, JOURNAL_BYTES, RECORD_BYTES, Record, SLOT_BYTES, SourceRecord, State,
    decode, encode,
};
use dunlin_proto::limits::{
    MAX_ENDPOINT_BYTES, MAX_NAME_BYTES, MAX_PRINCIPAL_NAME_BYTES, MAX_SOCKET_PATH_BYTES,
};

use crate::document::{JOURNAL, contains};

/// A record from its vector in the document. A vector leaves out the zeros before the checksum, and
/// this function inserts them.
fn vector(name: &str) -> [u8; RECORD_BYTES] {
    let start = format!("```vector\nname: {name}\n");
    let (_, block) = JOURNAL.split_once(&start).unwrap();
    let (block, _) = block.split_once("```").unwrap();
    let bytes: Vec<u8> = block
        .lines()
        .map(|row| row.split('#').next().unwrap())
        .flat_map(str::split_whitespace)
        .map(|byte| u8::from_str_radix(byte, 16).unwrap())
        .collect();
    let (body, checksum) = bytes.split_at(bytes.len() - 8);
    let mut record = [0; RECORD_BYTES];
    record[..body.len()].copy_from_slice(body);
    record[RECORD_BYTES - 8..].copy_from_slice(checksum);
    record
}

fn record(state: State) -> Record {
    Record {
        state,
        session: std::array::from_fn(|place| 0xa0 + u8::try_from(place).unwrap()),
        attempt: 1,
        epoch: 3,
        vm_uuid: [
            0x3b, 0x24, 0x11, 0x01, 0xe2, 0xbb, 0x42, 0x55, 0x8c, 0xaf, 0x41, 0x36, 0xc5, 0x66,
            0xa9, 0x62,
        ],
        vm_name: "web".into(),
        peer: "host-a.example".into(),
        owner: String::new(),
        started_ms: 0x019b_fc52_8800,
        written_ms: 0x019b_fc52_8be8,
    }
}

#[test]
fn the_vectors_decode_to_these_records_and_back() {
    let running = record(State::Destination(DestinationRecord::Running));
    let committing = Record {
        attempt: 2,
        epoch: 4,
        peer: "host-b.example:4444".into(),
        owner: "/run/dunlin/web.sock".into(),
        ..record(State::Source(SourceRecord::Committing))
    };
    for (name, record, generation) in [
        ("destination/running", running, 2),
        ("source/committing", committing, 5),
    ] {
        let bytes = vector(name);
        assert_eq!(decode(&bytes), Ok((record.clone(), generation)), "{name}");
        assert_eq!(encode(&record, generation).unwrap(), bytes, "{name}");
    }
    let bytes = vector("peer/name");
    let session = record(State::Source(SourceRecord::Kept)).session;
    let principal = Principal::Name {
        authority: std::array::from_fn(|place| 0x10 + u8::try_from(place).unwrap()),
        name: "host-a.example".into(),
    };
    assert_eq!(
        RecordedPeer::decode(&bytes, session),
        RecordedPeer::Known(principal.clone())
    );
    assert_eq!(principal.encode(session).unwrap(), bytes);
    assert_eq!(JOURNAL.matches("```vector").count(), 3);
}

#[test]
fn the_document_lists_every_state_and_size() {
    for (role, states) in [
        (
            "source",
            SourceRecord::ALL
                .iter()
                .map(|state| state.name())
                .collect::<Vec<_>>(),
        ),
        (
            "destination",
            DestinationRecord::ALL
                .iter()
                .map(|state| state.name())
                .collect(),
        ),
    ] {
        for (number, name) in (1..).zip(states) {
            let row = format!("| {role} | {number} | {name} |");
            assert!(contains(&JOURNAL, &row), "docs/journal/ lacks: {row}");
        }
    }
    for words in [
        format!("A file has {JOURNAL_BYTES} bytes: two slots of {SLOT_BYTES}"),
        format!("first {RECORD_BYTES} bytes"),
        format!("VM name, at most {MAX_NAME_BYTES}"),
        format!("peer, at most {MAX_ENDPOINT_BYTES}"),
        format!("at most {MAX_SOCKET_PATH_BYTES}; empty"),
        format!("| {} | 8 | CRC-64/XZ", RECORD_BYTES - 8),
        format!("behind them {SLOT_BYTES} for the peer block"),
        format!("at offset {PEER_BLOCK_AT} of the file"),
        format!("the name, at most {MAX_PRINCIPAL_NAME_BYTES}"),
    ] {
        assert!(contains(&JOURNAL, &words), "docs/journal/ lacks: {words}");
    }
}
