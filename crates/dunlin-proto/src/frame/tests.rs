#![allow(clippy::unwrap_used)]

use super::*;
use crate::control::{Region, RegionKind};

/// A table in which region 3 has 16 pages, and region 8 has the rest of the maximum total length.
fn regions() -> RegionTable {
    let region = |id, length| Region {
        id,
        kind: RegionKind::Ram,
        flags: 0,
        backing_page_bytes: 4096,
        length,
        guest_physical: 0,
        name: String::new(),
    };
    let most = crate::limits::MAX_MEMORY_BYTES - 16 * PAGE_BYTES;
    RegionTable::new(vec![region(3, 16 * PAGE_BYTES), region(8, most)]).unwrap()
}

fn raw(region: u16, first_page: u64, page_count: u32) -> Range {
    Range {
        region,
        encoding: Encoding::Raw,
        page_count,
        offset: first_page * PAGE_BYTES,
    }
}

fn zero(region: u16, first_page: u64, page_count: u32) -> Range {
    Range {
        encoding: Encoding::Zero,
        ..raw(region, first_page, page_count)
    }
}

fn chunk(ranges: &[Range]) -> Vec<u8> {
    let mut bytes = Vec::new();
    ChunkHeader::encode(5, 1, ranges, &mut bytes).unwrap();
    bytes
}

fn decode(bytes: &[u8]) -> Result<Vec<Range>, DecodeError> {
    let (header, rest) = bytes.split_first_chunk().unwrap();
    let Frame::Chunk(header) = Frame::decode(header)? else {
        panic!("not a chunk");
    };
    let mut ranges = Vec::new();
    header.decode_ranges(rest, &regions(), &mut ranges)?;
    Ok(ranges)
}

#[test]
fn a_chunk_with_the_maximum_of_ranges_fits_its_record() {
    let ranges = vec![zero(3, 0, 1); MAX_RANGES_PER_CHUNK];
    let bytes = chunk(&ranges);
    assert!(bytes.len() <= crate::limits::MAX_CHUNK_HEADER_BYTES);
    assert_eq!(decode(&bytes).unwrap(), ranges);
}

#[test]
fn i8_neither_direction_allocates_when_there_is_room() {
    let regions = regions();
    let ranges: Vec<_> = (0..16).map(|page| raw(3, page, 1)).collect();
    let mut bytes: Vec<u8> = Vec::with_capacity(crate::limits::MAX_CHUNK_HEADER_BYTES);
    let mut decoded: Vec<Range> = Vec::with_capacity(MAX_RANGES_PER_CHUNK);
    let before = (
        bytes.as_ptr(),
        bytes.capacity(),
        decoded.as_ptr(),
        decoded.capacity(),
    );
    for number in 0..3 {
        bytes.clear();
        let header = ChunkHeader::encode(number, 1, &ranges, &mut bytes).unwrap();
        header
            .decode_ranges(&bytes[FRAME_HEADER_BYTES..], &regions, &mut decoded)
            .unwrap();
        assert_eq!(decoded, ranges);
    }
    let after = (
        bytes.as_ptr(),
        bytes.capacity(),
        decoded.as_ptr(),
        decoded.capacity(),
    );
    assert_eq!(before, after);
}

/// Claim P4 of docs/security.
#[test]
fn i7_a_range_ends_within_its_region() {
    assert!(decode(&chunk(&[raw(3, 15, 1)])).is_ok());
    assert!(decode(&chunk(&[zero(8, (1 << 40) - 17, 1)])).is_ok());
    for beyond in [
        raw(3, 16, 1),
        raw(3, 15, 2),
        zero(3, 0, 17),
        zero(3, 0, u32::MAX),
        zero(8, (1 << 40) - 16, 1),
        zero(8, u64::MAX / PAGE_BYTES, u32::MAX),
    ] {
        let error = decode(&chunk(&[zero(3, 0, 1), beyond])).unwrap_err();
        assert_eq!(error.what, "end of range", "{beyond:?}");
        assert_eq!(error.offset, RANGE_BYTES + 8);
    }
}

#[test]
fn i7_an_invalid_range_is_rejected() {
    let good = chunk(&[raw(3, 1, 1), zero(3, 2, 2)]);
    assert!(decode(&good).is_ok());
    // The rejected field, an offset within the first range, and the byte that is written there.
    for (what, at, value) in [
        ("region", 0, 4_u8),
        ("encoding", 2, 2),
        ("range flags", 3, 1),
        ("page count", 4, 0),
        ("offset", 8, 1),
        ("payload length", 16, 1),
        ("payload length", 17, 0),
        ("reserved", 20, 1),
    ] {
        let mut bad = good.clone();
        bad[FRAME_HEADER_BYTES + at] = value;
        assert_eq!(decode(&bad).unwrap_err().what, what, "byte {at}");
    }
    // A zero range with a payload.
    let mut bad = good.clone();
    bad[FRAME_HEADER_BYTES + 2] = ENCODING_ZERO;
    assert_eq!(decode(&bad).unwrap_err().what, "payload length");
}

#[test]
fn i7_the_payloads_of_the_ranges_add_up_to_the_chunks() {
    // A wrong payload length in the header (8192 bytes are correct), and where the error is
    // detected: at the first range that exceeds the length, or after the last range.
    for (payload_bytes, at) in [
        (0_u32, 0),
        (4096, RANGE_BYTES),
        (8191, RANGE_BYTES),
        (8193, 2 * RANGE_BYTES),
        (12_288, 2 * RANGE_BYTES),
    ] {
        let mut bytes = chunk(&[raw(3, 1, 1), raw(3, 2, 1)]);
        bytes[4..8].copy_from_slice(&payload_bytes.to_le_bytes());
        let error = decode(&bytes).unwrap_err();
        let found = (error.what, error.offset);
        assert_eq!(found, ("payload length", at), "{payload_bytes}");
    }
}

#[test]
fn i7_an_invalid_header_is_rejected() {
    let chunk = chunk(&[raw(3, 1, 1)]);
    let mark = Frame::Mark { iteration: 1 }.to_bytes();
    let end = Frame::End { chunks: 1 }.to_bytes();
    let header = |bytes: &[u8]| *bytes.first_chunk::<FRAME_HEADER_BYTES>().unwrap();
    // The frame, an offset, the byte that is written there, and the rejected field.
    for (good, at, value, what) in [
        (header(&chunk), 0, 0_u8, "frame kind"),
        (header(&mark), 0, 4, "frame kind"),
        (header(&chunk), 2, 0, "range count"),
        (header(&chunk), 3, 2, "range count"),
        (header(&chunk), 6, 0x11, "payload length"),
        (header(&chunk), 20, 1, "reserved"),
        (header(&mark), 2, 1, "range count"),
        (header(&mark), 4, 1, "payload length"),
        (header(&mark), 8, 1, "number"),
        (header(&end), 16, 1, "iteration"),
        (header(&end), 23, 1, "reserved"),
    ] {
        assert!(Frame::decode(&good).is_ok());
        let mut bad = good;
        bad[at] = value;
        assert_eq!(Frame::decode(&bad).unwrap_err().what, what, "byte {at}");
    }
}

/// A chunk number is invalid if the end of a set that contains it would overflow.
#[test]
fn i7_a_chunk_that_cannot_be_acknowledged_is_rejected() {
    let mut header = *chunk(&[zero(3, 0, 1)])
        .first_chunk::<FRAME_HEADER_BYTES>()
        .unwrap();
    header[8..16].copy_from_slice(&(u64::MAX - 1).to_le_bytes());
    assert!(Frame::decode(&header).is_ok());
    header[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    assert_eq!(Frame::decode(&header).unwrap_err().what, "number");
    assert!(ChunkHeader::encode(u64::MAX, 1, &[zero(3, 0, 1)], &mut Vec::new()).is_err());
}

#[test]
fn invalid_values_are_not_written() {
    let refused = |ranges: &[Range]| {
        let mut bytes = vec![9];
        let result = ChunkHeader::encode(0, 1, ranges, &mut bytes);
        assert_eq!(bytes, [9]);
        result.is_err()
    };
    assert!(refused(&[]));
    assert!(refused(&vec![zero(3, 0, 1); MAX_RANGES_PER_CHUNK + 1]));
    assert!(refused(&[raw(8, 0, 257)]));
    assert!(refused(&[raw(8, 0, 200), raw(8, 0, 57)]));
    assert!(refused(&[raw(8, 0, u32::MAX)]));
    assert!(refused(&[raw(3, 0, 1), zero(3, 0, 0)]));
    let skewed = Range {
        offset: 1,
        ..raw(3, 0, 1)
    };
    assert!(refused(&[skewed]));
}
