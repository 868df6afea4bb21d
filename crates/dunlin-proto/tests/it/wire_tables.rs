//! The tables of docs/wire.md and docs/wire/, field by field: offsets follow from widths, and
//! lengths match the code. `vectors.rs` checks the bytes.
#![allow(clippy::unwrap_used)]

use dunlin_proto::control::CONTROL_HEADER_BYTES;
use dunlin_proto::frame::{FRAME_HEADER_BYTES, RANGE_BYTES};
use dunlin_proto::ipsec;
use dunlin_proto::limits::{LANE_MAC_BYTES, SESSION_ID_BYTES};
use dunlin_proto::negotiate::{LANE_OPEN_BYTES, MAGIC, PRELUDE_BYTES, TUNNEL_VERSIONS, VERSIONS};
use dunlin_proto::stripe;

use crate::document::WIRE;

/// Returns the tables with offsets: for each table, the text before it and its rows.
fn tables() -> Vec<(&'static str, Vec<Vec<&'static str>>)> {
    let mut tables = Vec::new();
    let parts: Vec<&str> = WIRE.split("| offset | bytes | field |").collect();
    for pair in parts.windows(2) {
        let title = pair[0].trim_end().rsplit("\n\n").next().unwrap();
        let rows = pair[1]
            .lines()
            .skip(1)
            .skip_while(|line| line.starts_with("| ---"))
            .take_while(|line| line.starts_with('|'))
            .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
            .collect();
        tables.push((title, rows));
    }
    tables
}

/// The rows of the table after the text `words`.
fn table(words: &str) -> Vec<Vec<&'static str>> {
    let found = tables()
        .into_iter()
        .find(|(title, _)| title.contains(words));
    found
        .unwrap_or_else(|| panic!("no table after {words:?}"))
        .1
}

/// The end of a table's fixed-width fields; each field must start where the previous field ends.
fn end(words: &str) -> usize {
    let mut at = 0;
    for row in table(words) {
        let (Ok(offset), Ok(bytes)) = (row[0].parse::<usize>(), row[1].parse::<usize>()) else {
            // The first variable-width field has an offset too.
            if let Ok(offset) = row[0].parse::<usize>() {
                assert_eq!(offset, at, "{words}: {row:?}");
            }
            break;
        };
        assert_eq!(offset, at, "{words}: {row:?}");
        at += bytes;
    }
    at
}

#[test]
fn every_table_with_offsets_is_as_long_as_the_code_says() {
    for (words, bytes) in [
        ("**extension field**", 8),
        ("**prelude**", PRELUDE_BYTES),
        ("**Offer**", 8 + 8 + SESSION_ID_BYTES + 4 + 4 + 1),
        ("**Select**", 8 + 1),
        ("**Refuse**", 2),
        ("**Lane open**", SESSION_ID_BYTES + 2 + LANE_MAC_BYTES),
        (
            "**Lane open of version 2**",
            SESSION_ID_BYTES + 2 + 1 + LANE_MAC_BYTES,
        ),
        ("Each begins with this **header**", FRAME_HEADER_BYTES),
        ("followed by its **ranges**", RANGE_BYTES),
        (
            "both sides send messages with this **header**",
            CONTROL_HEADER_BYTES,
        ),
        (
            "A frame begins with this",
            stripe::frame::FRAME_HEADER_BYTES,
        ),
        (
            "carries messages with this **header**",
            stripe::message::MESSAGE_HEADER_BYTES,
        ),
        (
            "**header** of a keying session",
            ipsec::message::MESSAGE_HEADER_BYTES,
        ),
        ("**Terms**", 4 + 2 * 2 + 2 * 2 + 2 * 16),
    ] {
        assert_eq!(end(words), bytes, "{words}");
    }
    assert_eq!(
        tables().len(),
        14,
        "the document has a table that this test does not cover"
    );
    let whole = PRELUDE_BYTES + end("**Lane open**");
    assert_eq!(whole, LANE_OPEN_BYTES);
    assert!(WIRE.contains(&format!("{whole} bytes in all")), "{whole}");
    let newer = PRELUDE_BYTES + end("**Lane open of version 2**");
    assert!(WIRE.contains(&format!("It has {newer} bytes.")), "{newer}");
}

#[test]
fn the_prelude_says_what_the_code_sends() {
    assert_eq!(&MAGIC, b"DUNLIN\r\n");
    let rows = table("**prelude**");
    assert_eq!(rows[0][1], MAGIC.len().to_string());
    assert_eq!(rows[1][2], "kind: 1 offer, 2 select, 3 refuse, 4 lane open");
    let (oldest, newest) = (VERSIONS.min, TUNNEL_VERSIONS.max);
    let title = format!("# The wire format, versions {oldest} to {newest}\n");
    assert!(WIRE.starts_with(&title), "{title}");
}
