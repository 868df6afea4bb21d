//! Any frame of a data lane: ranges lie inside their regions, and a frame has
//! one encoding.
#![no_main]

use std::sync::LazyLock;

use dunlin_proto::control::{Region, RegionKind, RegionTable};
use dunlin_proto::frame::{ChunkHeader, FRAME_HEADER_BYTES, Frame};
use libfuzzer_sys::fuzz_target;

static REGIONS: LazyLock<RegionTable> = LazyLock::new(|| {
    let region = |id, length| Region {
        id,
        kind: RegionKind::Ram,
        flags: 0,
        backing_page_bytes: 4096,
        length,
        guest_physical: 0,
        name: String::new(),
    };
    RegionTable::new(vec![
        region(0, 1 << 30),
        region(1, 4096),
        region(7, 1 << 51),
    ])
    .expect("the table is within every limit")
});

fuzz_target!(|bytes: &[u8]| {
    let Some((header, rest)) = bytes.split_first_chunk::<FRAME_HEADER_BYTES>() else {
        return;
    };
    let Ok(frame) = Frame::decode(header) else {
        return;
    };
    assert_eq!(frame.to_bytes(), *header);
    let Frame::Chunk(chunk) = frame else {
        return;
    };
    let mut ranges = Vec::new();
    if chunk.decode_ranges(rest, &REGIONS, &mut ranges).is_err() {
        return;
    }
    for range in &ranges {
        let region = REGIONS.get(range.region).expect("the region is known");
        assert!(range.offset + range.memory_bytes() <= region.length);
    }
    let mut encoded = Vec::new();
    let written = ChunkHeader::encode(chunk.number(), chunk.iteration(), &ranges, &mut encoded);
    assert_eq!(written, Ok(chunk));
    assert_eq!(encoded, bytes);
});
