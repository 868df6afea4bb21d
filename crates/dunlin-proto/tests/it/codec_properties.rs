//! Properties of the codecs of migrations: values are the same after encoding and decoding,
//! truncated messages are rejected, arbitrary bytes cause no panic, and a decoder allocates in
//! proportion to its input.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use dunlin_proto::control::{
    Accept, CONTROL_HEADER_BYTES, ChunkSet, Describe, Envelope, Final, Header, Kind, Message,
    Position, Reached, Region, RegionKind, RegionTable, Section, Verdict,
};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::frame::{ChunkHeader, Encoding, FRAME_HEADER_BYTES, Frame, RANGE_BYTES, Range};
use dunlin_proto::limits::{
    MAX_LANES, MAX_NAME_BYTES, MAX_RANGES_PER_CHUNK, MAX_SECTIONS, PAGE_BYTES,
};
use dunlin_proto::negotiate::{
    Features, LaneDirection, LaneOpen, LaneSecurity, Offer, Opening, PRELUDE_BYTES, Prelude,
    Refusal, Selection, SessionSecret, VersionRange,
};
use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::*;
use proptest::strategy::Union;

/// Text of any length up to `bytes`, of characters of one to four bytes.
fn text(bytes: usize) -> impl Strategy<Value = String> {
    vec(any::<char>(), 0..=bytes / 4).prop_map(String::from_iter)
}

fn fault() -> impl Strategy<Value = FaultCode> {
    prop_oneof![0..40_u16, any::<u16>()].prop_map(FaultCode::from_wire)
}

fn region_kind() -> impl Strategy<Value = RegionKind> {
    prop_oneof![
        Just(RegionKind::Ram),
        Just(RegionKind::Rom),
        Just(RegionKind::DeviceMemory),
        Just(RegionKind::StateStream),
    ]
}

prop_compose! {
    fn region()(
        kind in region_kind(),
        flags in 0..=0xffff_u32,
        backing in 12..32_u32,
        pages in 1..1_u64 << 34,
        guest_physical in any::<u64>(),
        name in text(MAX_NAME_BYTES),
    ) -> Region {
        Region {
            id: 0,
            kind,
            flags,
            backing_page_bytes: 1 << backing,
            length: pages * PAGE_BYTES,
            guest_physical,
            name,
        }
    }
}

fn region_table() -> impl Strategy<Value = RegionTable> {
    btree_map(any::<u16>(), region(), 1..20).prop_map(|regions| {
        let numbered = |(id, region): (u16, Region)| Region { id, ..region };
        RegionTable::new(regions.into_iter().map(numbered).collect()).unwrap()
    })
}

fn chunk_sets() -> impl Strategy<Value = Vec<ChunkSet>> {
    let set = (0..u64::MAX - u64::from(u32::MAX), 1..=u32::MAX)
        .prop_map(|(first, count)| ChunkSet { first, count });
    vec(set, 0..50)
}

fn digest() -> impl Strategy<Value = Option<[u8; 16]>> {
    option::of(any::<[u8; 16]>())
}

prop_compose! {
    fn describe()(
        vm_uuid in any::<[u8; 16]>(),
        vm_name in text(MAX_NAME_BYTES),
        paused in any::<bool>(),
        description in vec(any::<u8>(), 0..2000),
        regions in region_table(),
    ) -> Describe {
        Describe { vm_uuid, vm_name, page_bytes: 4096, paused, description, regions }
    }
}

prop_compose! {
    fn accept()(
        secret in any::<[u8; 32]>(),
        lanes_max in 1..=MAX_LANES,
        endpoints in vec(text(272), 0..=16),
    ) -> Accept {
        Accept { secret: SessionSecret(secret), lanes_max, endpoints }
    }
}

prop_compose! {
    fn section()(
        name in text(MAX_NAME_BYTES),
        instance in any::<u32>(),
        version in any::<u32>(),
        required in any::<bool>(),
        bytes in vec(any::<u8>(), 0..2000),
    ) -> Section {
        Section { name, instance, version, required, bytes }
    }
}

prop_compose! {
    fn last()(
        chunks in any::<u64>(),
        iteration in any::<u32>(),
        sections in 0..=MAX_SECTIONS,
        pages in any::<u64>(),
        fenced in any::<u32>(),
        digest in digest(),
    ) -> Final {
        Final { chunks, iteration, sections, pages, fenced, digest }
    }
}

fn reached() -> impl Strategy<Value = Reached> {
    let position = prop_oneof![(0..u32::MAX).prop_map(Position::Mark), Just(Position::End),];
    (1..=u16::MAX, position).prop_map(|(lane, position)| Reached { lane, position })
}

fn verdict() -> impl Strategy<Value = Verdict> {
    prop_oneof![
        Just(Verdict::Running),
        Just(Verdict::Aborted),
        Just(Verdict::RanThenDied),
        Just(Verdict::NoRecord),
    ]
}

/// Generates any message of a kind. The exhaustive match keeps the list complete.
fn message_of(kind: Kind) -> BoxedStrategy<Message> {
    let lane = 1..=u16::MAX;
    match kind {
        Kind::Describe => describe().prop_map(Message::Describe).boxed(),
        Kind::Accept => accept().prop_map(Message::Accept).boxed(),
        Kind::Refuse => (fault(), text(1024))
            .prop_map(|(fault, text)| Message::Refuse { fault, text })
            .boxed(),
        Kind::LaneUp => lane.prop_map(|lane| Message::LaneUp { lane }).boxed(),
        Kind::LaneRefused => (lane, fault(), text(1024))
            .prop_map(|(lane, fault, text)| Message::LaneRefused { lane, fault, text })
            .boxed(),
        Kind::Ack => (chunk_sets(), vec(reached(), 0..20))
            .prop_map(|(sets, reached)| Message::Ack { sets, reached })
            .boxed(),
        Kind::Section => section().prop_map(Message::Section).boxed(),
        Kind::Final => last().prop_map(Message::Final).boxed(),
        Kind::Ready => digest()
            .prop_map(|digest| Message::Ready { digest })
            .boxed(),
        Kind::Commit => any::<bool>()
            .prop_map(|run| Message::Commit { run })
            .boxed(),
        Kind::Running => (any::<u64>(), any::<u64>())
            .prop_map(|(cpu_ns, downtime_ns)| Message::Running {
                cpu_ns,
                downtime_ns,
            })
            .boxed(),
        Kind::Release => Just(Message::Release).boxed(),
        Kind::Cancel => (fault(), text(1024))
            .prop_map(|(fault, text)| Message::Cancel { fault, text })
            .boxed(),
        Kind::Ping => any::<u64>()
            .prop_map(|token| Message::Ping { token })
            .boxed(),
        Kind::Pong => any::<u64>()
            .prop_map(|token| Message::Pong { token })
            .boxed(),
        Kind::Fence => lane.prop_map(|lane| Message::Fence { lane }).boxed(),
        Kind::Fenced => (lane, chunk_sets())
            .prop_map(|(lane, acks)| Message::Fenced { lane, acks })
            .boxed(),
        Kind::Inquire => any::<u32>()
            .prop_map(|attempt| Message::Inquire { attempt })
            .boxed(),
        Kind::Answer => (any::<u32>(), verdict())
            .prop_map(|(attempt, verdict)| Message::Answer { attempt, verdict })
            .boxed(),
    }
}

fn message() -> impl Strategy<Value = Message> {
    Union::new(Kind::ALL.iter().copied().map(message_of))
}

fn envelope() -> impl Strategy<Value = Envelope> {
    (any::<[u8; 16]>(), any::<u32>(), any::<u64>()).prop_map(|(session, epoch, sequence)| {
        Envelope {
            session,
            epoch,
            sequence,
        }
    })
}

fn versions() -> impl Strategy<Value = VersionRange> {
    (1..=u16::MAX, any::<u16>()).prop_map(|(one, other)| {
        let other = other.max(1);
        VersionRange {
            min: one.min(other),
            max: one.max(other),
        }
    })
}

fn security() -> impl Strategy<Value = LaneSecurity> {
    prop_oneof![
        Just(LaneSecurity::Tls),
        Just(LaneSecurity::Plain),
        Just(LaneSecurity::Ipsec)
    ]
}

fn features() -> impl Strategy<Value = Features> {
    any::<u64>().prop_map(Features::from_bits)
}

prop_compose! {
    fn offer()(
        versions in versions(),
        optional in features(),
        required in features(),
        security in security(),
        session in any::<[u8; 16]>(),
        attempt in any::<u32>(),
        epoch in any::<u32>(),
    ) -> Offer {
        Offer { versions, optional, required, security, session, attempt, epoch }
    }
}

fn opening() -> impl Strategy<Value = Opening> {
    let selection =
        (1..=u16::MAX, features(), security()).prop_map(|(version, features, security)| {
            Selection {
                version,
                features,
                security,
            }
        });
    let lane = (
        1..=u16::MAX,
        any::<[u8; 16]>(),
        1..=u16::MAX,
        any::<bool>(),
        any::<[u8; 32]>(),
    )
        .prop_map(|(version, session, lane, is_back, mac)| LaneOpen {
            version,
            session,
            lane,
            direction: match version {
                2.. if is_back => LaneDirection::ToDialer,
                _ => LaneDirection::FromDialer,
            },
            mac,
        });
    prop_oneof![
        offer().prop_map(Opening::Offer),
        selection.prop_map(Opening::Select),
        (versions(), fault(), text(1024))
            .prop_map(|(versions, fault, text)| Opening::Refuse(versions, Refusal { fault, text })),
        lane.prop_map(Opening::Lane),
    ]
}

/// Generates a region table, and ranges inside its regions that fit one chunk.
fn chunk() -> impl Strategy<Value = (RegionTable, Vec<Range>)> {
    region_table().prop_flat_map(|table| {
        let range = (
            any::<prop::sample::Index>(),
            any::<bool>(),
            any::<u64>(),
            1..=40_u64,
        )
            .prop_map({
                let table = table.clone();
                move |(which, raw, first, pages)| {
                    let region = which.get(table.regions());
                    let first = first % region.pages();
                    let pages = pages.min(region.pages() - first);
                    Range {
                        region: region.id,
                        encoding: if raw { Encoding::Raw } else { Encoding::Zero },
                        page_count: u32::try_from(pages).unwrap(),
                        offset: first * PAGE_BYTES,
                    }
                }
            });
        // Six ranges of at most 40 pages have at most 240 pages. A chunk's payload has room for
        // 256.
        (Just(table), vec(range, 1..=6))
    })
}

fn encode(message: &Message, envelope: &Envelope) -> Vec<u8> {
    let mut bytes = Vec::new();
    message.encode(envelope, &mut bytes).unwrap();
    bytes
}

fn decode(bytes: &[u8]) -> Option<(Envelope, Message)> {
    let (header, body) = bytes.split_first_chunk::<CONTROL_HEADER_BYTES>()?;
    let header = Header::decode(header).ok()?;
    let message = Message::decode(&header, body).ok()??;
    Some((header.envelope(), message))
}

fn decode_opening(bytes: &[u8]) -> Option<Opening> {
    let (prelude, body) = bytes.split_first_chunk::<PRELUDE_BYTES>()?;
    Opening::decode(&Prelude::decode(prelude).ok()?, body).ok()
}

/// Puts a header of this kind in front of a body.
fn with_header(kind: u16, body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; CONTROL_HEADER_BYTES];
    bytes[..4].copy_from_slice(&u32::try_from(body.len()).unwrap().to_le_bytes());
    bytes[4..6].copy_from_slice(&kind.to_le_bytes());
    bytes[6] = 1;
    bytes.extend_from_slice(body);
    bytes
}

/// Bytes on the heap that a message holds.
fn heap_bytes(message: &Message) -> usize {
    match message {
        Message::Describe(describe) => {
            let names = describe.regions.regions().iter();
            describe.vm_name.capacity()
                + describe.description.capacity()
                + size_of_val(describe.regions.regions())
                + names.map(|region| region.name.capacity()).sum::<usize>()
        }
        Message::Accept(accept) => {
            accept.endpoints.capacity() * size_of::<String>()
                + accept.endpoints.iter().map(String::capacity).sum::<usize>()
        }
        Message::Refuse { text, .. }
        | Message::LaneRefused { text, .. }
        | Message::Cancel { text, .. } => text.capacity(),
        Message::Ack { sets, reached } => {
            sets.capacity() * size_of::<ChunkSet>() + reached.capacity() * size_of::<Reached>()
        }
        Message::Fenced { acks, .. } => acks.capacity() * size_of::<ChunkSet>(),
        Message::Section(section) => section.name.capacity() + section.bytes.capacity(),
        _ => 0,
    }
}

/// The maximum number of bytes of memory that decoding may use for each byte of input: an
/// endpoint of 2 bytes becomes a `String` of 24 bytes.
const HEAP_PER_BYTE: usize = 12;

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_message_reads_back_as_it_was_written(message in message(), envelope in envelope()) {
        let bytes = encode(&message, &envelope);
        prop_assert_eq!(decode(&bytes), Some((envelope, message)));
    }

    #[test]
    fn an_opening_message_reads_back_as_it_was_written(opening in opening()) {
        let mut bytes = Vec::new();
        opening.encode(&mut bytes).unwrap();
        prop_assert_eq!(decode_opening(&bytes), Some(opening));
    }

    #[test]
    fn a_chunk_reads_back_as_it_was_written(
        (table, ranges) in chunk(),
        number in 0..u64::MAX,
        iteration in any::<u32>(),
    ) {
        let mut bytes = Vec::new();
        let written = ChunkHeader::encode(number, iteration, &ranges, &mut bytes).unwrap();
        let (header, rest) = bytes.split_first_chunk().unwrap();
        prop_assert_eq!(Frame::decode(header), Ok(Frame::Chunk(written)));
        prop_assert_eq!(rest.len(), written.ranges_bytes());
        let mut decoded = Vec::new();
        prop_assert_eq!(written.decode_ranges(rest, &table, &mut decoded), Ok(()));
        prop_assert_eq!(decoded, ranges);
    }

    #[test]
    fn i7_a_cut_message_is_refused(message in message(), cut in any::<prop::sample::Index>()) {
        let envelope = Envelope { session: [0; 16], epoch: 0, sequence: 0 };
        let bytes = encode(&message, &envelope);
        prop_assert_eq!(decode(&bytes[..cut.index(bytes.len())]), None);

        // The body is truncated, and the header announces the shorter length. Only a truncation
        // just before the extension fields leaves a valid message.
        let body = &bytes[CONTROL_HEADER_BYTES..];
        if body.is_empty() {
            return Ok(());
        }
        let kept = cut.index(body.len());
        let kind = u16::from_le_bytes([bytes[4], bytes[5]]);
        let whole = match &message {
            Message::Final(Final { digest: Some(_), .. })
            | Message::Ready { digest: Some(_) } => body.len() - kept == 24,
            _ => false,
        };
        prop_assert_eq!(decode(&with_header(kind, &body[..kept])).is_some(), whole);
    }

    #[test]
    fn i7_a_cut_opening_message_is_refused(opening in opening(), cut in any::<prop::sample::Index>()) {
        let mut bytes = Vec::new();
        opening.encode(&mut bytes).unwrap();
        bytes.truncate(cut.index(bytes.len()));
        prop_assert_eq!(decode_opening(&bytes), None);

        if let Some(body_bytes) = bytes.len().checked_sub(PRELUDE_BYTES) {
            let length = u16::try_from(body_bytes).unwrap();
            bytes[14..16].copy_from_slice(&length.to_le_bytes());
            prop_assert_eq!(decode_opening(&bytes), None);
        }
    }

    #[test]
    fn i7_a_cut_chunk_is_refused((table, ranges) in chunk(), cut in any::<prop::sample::Index>()) {
        let mut bytes = Vec::new();
        let header = ChunkHeader::encode(0, 1, &ranges, &mut bytes).unwrap();
        let rest = &bytes[FRAME_HEADER_BYTES..];
        let cut = &rest[..cut.index(rest.len())];
        prop_assert!(header.decode_ranges(cut, &table, &mut Vec::new()).is_err());
    }

    #[test]
    fn i7_any_body_is_refused_or_stays_within_its_bytes(
        kind in 0..=25_u16,
        body in vec(prop_oneof![Just(0), Just(1), any::<u8>()], 0..400),
    ) {
        let bytes = with_header(kind, &body);
        if let Some((_, message)) = decode(&bytes) {
            prop_assert!(heap_bytes(&message) <= body.len() * HEAP_PER_BYTE);
        }
    }

    #[test]
    fn i7_any_bytes_are_refused_or_understood(bytes in vec(any::<u8>(), 0..200)) {
        decode(&bytes);
        decode_opening(&bytes);
        if let Some(header) = bytes.first_chunk() {
            let _ = Frame::decode(header);
        }
    }

    #[test]
    fn i7_any_opening_body_is_refused_or_understood(
        kind in 0..6_u16,
        body in vec(prop_oneof![Just(0), Just(1), any::<u8>()], 0..120),
    ) {
        let mut bytes = b"DUNLIN\r\n".to_vec();
        for field in [kind, 1, 1, u16::try_from(body.len()).unwrap()] {
            bytes.extend_from_slice(&field.to_le_bytes());
        }
        bytes.extend_from_slice(&body);
        decode_opening(&bytes);
    }

    /// For any bytes, decoded ranges lie inside the table, and their number is bounded by
    /// the length of the input.
    #[test]
    fn i7_any_ranges_are_refused_or_lie_in_their_region(
        table in region_table(),
        bytes in vec(prop_oneof![3 => Just(0_u8), 1 => any::<u8>()], RANGE_BYTES),
        which in any::<prop::sample::Index>(),
        times in 1..=MAX_RANGES_PER_CHUNK,
        payload in 0..=1_u32 << 20,
    ) {
        let mut bytes = bytes;
        bytes[..2].copy_from_slice(&which.get(table.regions()).id.to_le_bytes());
        let mut header = [0; FRAME_HEADER_BYTES];
        header[0] = 1;
        header[2..4].copy_from_slice(&u16::try_from(times).unwrap().to_le_bytes());
        let zero = bytes[2] == 1;
        header[4..8].copy_from_slice(&(if zero { 0 } else { payload }).to_le_bytes());
        let Ok(Frame::Chunk(header)) = Frame::decode(&header) else {
            return Err(TestCaseError::fail("a valid header was rejected"));
        };
        let mut ranges = Vec::with_capacity(MAX_RANGES_PER_CHUNK);
        let result = header.decode_ranges(&bytes.repeat(times), &table, &mut ranges);
        prop_assert_eq!(ranges.capacity(), MAX_RANGES_PER_CHUNK);
        if result.is_ok() {
            prop_assert_eq!(ranges.len(), times);
        }
        for range in &ranges {
            let region = table.get(range.region).unwrap();
            prop_assert!(range.offset + range.memory_bytes() <= region.length);
            prop_assert!(range.page_count > 0 && range.offset.is_multiple_of(PAGE_BYTES));
        }
    }
}

/// Checks that the strategies above generate every kind of message. The properties are not tested
/// for a kind that no strategy generates.
#[test]
fn every_kind_of_message_is_generated() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;

    let mut runner = TestRunner::deterministic();
    let strategy = message();
    let mut seen = BTreeMap::new();
    for _ in 0..1000 {
        let message = strategy.new_tree(&mut runner).unwrap().current();
        *seen.entry(message.kind().name()).or_insert(0) += 1;
    }
    assert_eq!(seen.len(), Kind::ALL.len(), "{seen:?}");
}
