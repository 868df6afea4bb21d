//! Fuzz entries for the decoders. They check that a decoded value is within its bounds. Some of
//! them also check that the value uses memory in proportion to the input, and that the value is
//! unchanged after it is encoded and decoded again.

use super::as_is_and_with_its_length;
use std::sync::LazyLock;

use crate::control::{
    CONTROL_HEADER_BYTES, ChunkSet, Header, Message, Reached, Region, RegionKind, RegionTable,
};
use crate::frame::{ChunkHeader, FRAME_HEADER_BYTES, Frame};
use crate::limits::{
    MAX_ACK_SETS, MAX_CHUNK_PAYLOAD_BYTES, MAX_CONTROL_BODY_BYTES, MAX_DESCRIPTION_BYTES,
    MAX_ENDPOINTS, MAX_LANES, MAX_MEMORY_BYTES, MAX_NAME_BYTES, MAX_OPENING_BODY_BYTES,
    MAX_RANGES_PER_CHUNK, MAX_REGION_BYTES, MAX_REGIONS, MAX_SECTION_BYTES, MAX_SECTIONS,
    MAX_TEXT_BYTES, PAGE_BYTES,
};
use crate::negotiate::{Features, Opening, PRELUDE_BYTES, Prelude, Supported, VERSIONS, select};
use crate::wire::{DecodeError, Reader, Writer};

const WITHIN_LIMITS: &str = "what decodes is within every limit";

/// Decodes an opening message, unchanged and with its length corrected. If the message is an
/// offer, answers it; the selection must be within the offer.
pub fn fuzz_opening(bytes: &[u8]) {
    opening(bytes);
    let Some(body_bytes) = bytes.len().checked_sub(PRELUDE_BYTES) else {
        return;
    };
    if let Ok(length) = u16::try_from(body_bytes) {
        let mut honest = bytes.to_vec();
        honest[PRELUDE_BYTES - 2..PRELUDE_BYTES].copy_from_slice(&length.to_le_bytes());
        opening(&honest);
    }
}

fn opening(bytes: &[u8]) {
    let Some((prelude, body)) = bytes.split_first_chunk::<PRELUDE_BYTES>() else {
        return;
    };
    let Ok(prelude) = Prelude::decode(prelude) else {
        return;
    };
    assert!(prelude.body_bytes <= MAX_OPENING_BODY_BYTES);
    assert!(1 <= prelude.versions.min && prelude.versions.min <= prelude.versions.max);
    let Ok(opening) = Opening::decode(&prelude, body) else {
        return;
    };
    assert_eq!(body.len(), prelude.body_bytes);
    let mut encoded = Vec::new();
    opening.encode(&mut encoded).expect(WITHIN_LIMITS);
    let (prelude, body) = encoded
        .split_first_chunk::<PRELUDE_BYTES>()
        .expect("an opening starts with its prelude");
    let again = Prelude::decode(prelude).and_then(|prelude| Opening::decode(&prelude, body));
    assert_eq!(again.as_ref(), Ok(&opening));
    match opening {
        Opening::Offer(offer) => {
            let supported = Supported {
                versions: VERSIONS,
                features: Features::VERIFY,
                required: Features::NONE,
                plain_allowed: offer.attempt.is_multiple_of(2),
                ipsec: offer.attempt.is_multiple_of(3),
            };
            if let Ok(selection) = select(&offer, &supported) {
                assert_eq!(selection.confirm(&offer), Ok(()));
            }
        }
        Opening::Refuse(_, refusal) => assert!(refusal.text.len() <= MAX_TEXT_BYTES),
        Opening::Lane(lane) => assert_ne!(lane.lane, 0),
        Opening::Select(_) => {}
    }
}

/// Decodes a control message, unchanged and with its length corrected.
pub fn fuzz_control_message(bytes: &[u8]) {
    as_is_and_with_its_length(bytes, CONTROL_HEADER_BYTES, control_message);
}

fn control_message(bytes: &[u8]) -> Option<Message> {
    let (header, body) = bytes.split_first_chunk::<CONTROL_HEADER_BYTES>()?;
    let header = Header::decode(header).ok()?;
    assert!(header.body_bytes() <= MAX_CONTROL_BODY_BYTES);
    let message = Message::decode(&header, body).ok()??;
    assert_eq!(body.len(), header.body_bytes());
    within_limits(&message);
    // A region takes less than four times as many bytes in memory as on the wire.
    assert!(held_bytes(&message) <= 4 * body.len() + 64);
    let mut encoded = Vec::new();
    message
        .encode(&header.envelope(), &mut encoded)
        .expect(WITHIN_LIMITS);
    let (again, body) = encoded
        .split_first_chunk::<CONTROL_HEADER_BYTES>()
        .expect("a message starts with its header");
    let again = Header::decode(again).expect("the header was encoded above");
    assert_eq!(again.envelope(), header.envelope());
    assert_eq!(
        Message::decode(&again, body).as_ref(),
        Ok(&Some(message.clone()))
    );
    Some(message)
}

fn within_limits(message: &Message) {
    let sets_in_bounds = |sets: &[ChunkSet]| {
        assert!(sets.len() <= MAX_ACK_SETS);
        for set in sets {
            assert!(set.count > 0 && set.first.checked_add(u64::from(set.count)).is_some());
        }
    };
    match message {
        Message::Describe(describe) => {
            assert!(describe.vm_name.len() <= MAX_NAME_BYTES);
            assert!(describe.description.len() <= MAX_DESCRIPTION_BYTES);
            assert_eq!(u64::from(describe.page_bytes), PAGE_BYTES);
            table_in_bounds(&describe.regions);
        }
        Message::Accept(accept) => {
            assert!((1..=MAX_LANES).contains(&accept.lanes_max));
            assert!(accept.endpoints.len() <= MAX_ENDPOINTS);
        }
        Message::Refuse { text, .. }
        | Message::Cancel { text, .. }
        | Message::LaneRefused { text, .. } => assert!(text.len() <= MAX_TEXT_BYTES),
        Message::Ack { sets, reached } => {
            sets_in_bounds(sets);
            assert!(reached.len() <= usize::from(MAX_LANES));
        }
        Message::Fenced { acks, .. } => sets_in_bounds(acks),
        Message::Section(section) => {
            assert!(section.name.len() <= MAX_NAME_BYTES);
            assert!(section.bytes.len() <= MAX_SECTION_BYTES);
        }
        Message::Final(last) => assert!(last.sections <= MAX_SECTIONS),
        _ => {}
    }
}

fn table_in_bounds(table: &RegionTable) {
    let regions = table.regions();
    assert!((1..=MAX_REGIONS).contains(&regions.len()));
    assert!(regions.is_sorted_by(|one, next| one.id < next.id));
    let mut total = 0_u64;
    for region in regions {
        assert!(region.length > 0 && region.length <= MAX_REGION_BYTES);
        assert!(region.length.is_multiple_of(PAGE_BYTES));
        assert!(region.backing_page_bytes.is_power_of_two());
        assert!(region.name.len() <= MAX_NAME_BYTES);
        assert_eq!(table.get(region.id), Some(region));
        total += region.length;
    }
    assert_eq!(total, table.total_bytes());
    assert!(total <= MAX_MEMORY_BYTES);
}

/// Bytes on the heap that a message holds.
fn held_bytes(message: &Message) -> usize {
    match message {
        Message::Describe(describe) => {
            let regions = describe.regions.regions();
            describe.vm_name.capacity()
                + describe.description.capacity()
                + size_of_val(regions)
                + regions.iter().map(|r| r.name.capacity()).sum::<usize>()
        }
        Message::Accept(accept) => {
            let endpoints = accept.endpoints.iter().map(String::capacity);
            // The memory of the list is not in proportion to its bytes on the wire: an endpoint can
            // be as short as two bytes there, and is a whole `String` here. So check that the
            // number of endpoints is within its limit.
            assert!(accept.endpoints.capacity() <= MAX_ENDPOINTS);
            endpoints.sum()
        }
        Message::Refuse { text, .. }
        | Message::Cancel { text, .. }
        | Message::LaneRefused { text, .. } => text.capacity(),
        Message::Ack { sets, reached } => {
            sets.capacity() * size_of::<ChunkSet>() + reached.capacity() * size_of::<Reached>()
        }
        Message::Fenced { acks, .. } => acks.capacity() * size_of::<ChunkSet>(),
        Message::Section(section) => section.name.capacity() + section.bytes.capacity(),
        _ => 0,
    }
}

/// Decodes the region table of an otherwise valid *describe*.
pub fn fuzz_region_table(bytes: &[u8]) {
    let mut message = vec![0; CONTROL_HEADER_BYTES];
    // A VM UUID, an empty name, the page length, not paused, and an empty description.
    message.extend_from_slice(&[0; 18]);
    message.extend_from_slice(&4096_u32.to_le_bytes());
    message.extend_from_slice(&[0; 5]);
    message.extend_from_slice(bytes);
    let Ok(length) = u32::try_from(message.len() - CONTROL_HEADER_BYTES) else {
        return;
    };
    message[..4].copy_from_slice(&length.to_le_bytes());
    // The kind of *describe*.
    message[4] = 1;
    if let Some(message) = control_message(&message) {
        assert!(matches!(message, Message::Describe(_)));
    }
}

/// Offset of the region table in a complete *describe*.
#[cfg(test)]
pub(super) fn table_at(describe: &[u8]) -> usize {
    let length = |at: usize, bytes: usize| {
        let field = &describe[at..at + bytes];
        field
            .iter()
            .rev()
            .fold(0_usize, |sum, &byte| sum << 8 | usize::from(byte))
    };
    let name_at = CONTROL_HEADER_BYTES + 16;
    let description_at = name_at + 2 + length(name_at, 2) + 5;
    description_at + 4 + length(description_at, 4)
}

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
    // The regions of the test vectors, a region of one page, and a very large region.
    RegionTable::new(vec![
        region(0, 1 << 30),
        region(1, 4096),
        region(7, 1 << 51),
        region(9, 0x2_0000),
    ])
    .expect("the table is within every limit")
});

/// Decodes a frame of a data lane. Checks that the ranges lie inside their regions, and that
/// encoding the frame again gives the same bytes.
pub fn fuzz_data_frame(bytes: &[u8]) {
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
    assert!(chunk.number() < u64::MAX, "no acknowledgement can name it");
    assert!((1..=MAX_RANGES_PER_CHUNK).contains(&chunk.range_count()));
    assert!(chunk.payload_bytes() <= MAX_CHUNK_PAYLOAD_BYTES);
    let mut ranges = Vec::with_capacity(MAX_RANGES_PER_CHUNK);
    let room = ranges.capacity();
    if chunk.decode_ranges(rest, &REGIONS, &mut ranges).is_err() {
        return;
    }
    assert_eq!(ranges.capacity(), room, "decoding ranges allocates");
    let mut payload = 0;
    for range in &ranges {
        let region = REGIONS.get(range.region).expect("the region is known");
        assert!(range.page_count > 0);
        assert!(range.offset + range.memory_bytes() <= region.length);
        payload += range.payload_bytes();
    }
    assert_eq!(payload, u64::from(chunk.payload_bytes()));
    let mut encoded = Vec::new();
    let written = ChunkHeader::encode(chunk.number(), chunk.iteration(), &ranges, &mut encoded);
    assert_eq!(written, Ok(chunk));
    assert_eq!(encoded, bytes);
}

/// Reads extension fields with tags 1 to 3. Checks that the tags ascend, that the values lie within
/// the input, and that the fields, written again, have the length of the input.
pub fn fuzz_extension_fields(bytes: &[u8]) {
    let mut taken = Vec::new();
    let mut skipped = 0;
    let read = Reader::new(bytes).fields(|tag, value| -> Result<bool, DecodeError> {
        if !(1..=3).contains(&tag) {
            skipped += 1;
            return Ok(false);
        }
        let left = value.left();
        taken.push((tag, value.bytes("value", left)?));
        Ok(true)
    });
    assert!(taken.is_sorted_by(|one, next| one.0 < next.0));
    assert!(taken.iter().map(|(_, value)| value.len()).sum::<usize>() <= bytes.len());
    if read.is_err() || skipped > 0 {
        return;
    }
    let mut encoded = Vec::new();
    Writer::append(&mut encoded, |writer| {
        taken
            .iter()
            .try_for_each(|(tag, value)| writer.field(*tag, false, value))
    })
    .expect("no value is longer than the input");
    // The bytes may differ only in the bits that mark a field as required, so only the lengths are
    // compared.
    assert_eq!(encoded.len(), bytes.len());
}

#[cfg(test)]
pub(super) fn extension_seeds() -> Vec<super::driver::Seed> {
    type Field<'a> = (u16, bool, &'a [u8]);
    let fields: [(&str, &[Field<'_>]); 4] = [
        ("none", &[]),
        ("digest", &[(1, true, &[7; 16])]),
        ("skipped", &[(1, false, &[]), (9, false, &[1, 2, 3])]),
        (
            "all",
            &[(1, false, &[1]), (2, true, &[]), (3, false, &[3; 9])],
        ),
    ];
    let encoded = fields.map(|(name, fields)| {
        let mut bytes = Vec::new();
        let written = Writer::append(&mut bytes, |writer| {
            fields
                .iter()
                .try_for_each(|(tag, required, value)| writer.field(*tag, *required, value))
        });
        assert_eq!(written, Ok(()));
        (name.to_owned(), bytes)
    });
    encoded.to_vec()
}
