//! Tests false frames on a data lane: chunks, marks and ends.

use std::time::{Duration, Instant};

use dunlin::engine::vmm::FaultCode;
use dunlin::lane::data::DataSender;
use dunlin_proto::control::{Message, RegionTable};
use dunlin_proto::frame::{ChunkHeader, Encoding, Frame, Range};
use dunlin_proto::limits::MAX_RANGES_PER_CHUNK;
use dunlin_proto::negotiate::LaneSecurity;
use dunlin_test_support::engine::peer::*;
use dunlin_test_support::engine::*;
use dunlin_test_support::hostile::*;

use crate::{Changed, MALFORMED};

/// A chunk of one zero page, with `changes` applied. The header takes 24 bytes, and so does the
/// range after it.
fn changed_chunk(changes: &[(usize, &[u8])]) -> Vec<u8> {
    let mut bytes = zero_chunk(0, 0, 0);
    for (at, value) in changes {
        bytes[*at..*at + value.len()].copy_from_slice(value);
    }
    bytes
}

/// Claims P2, P4 of docs/security.
#[test]
fn i7_chunks_that_lie_end_the_session() {
    let missing = FaultCode::FeatureMissing;
    let lies: [Changed<'_>; 15] = [
        ("an unknown kind", MALFORMED, "frame kind", &[(0, &[9])]),
        ("no ranges", MALFORMED, "range count", &[(2, &[0, 0])]),
        (
            "65535 ranges",
            MALFORMED,
            "range count",
            &[(2, &[255, 255])],
        ),
        (
            "a payload of 4 GiB",
            MALFORMED,
            "payload length",
            &[(4, &[255; 4])],
        ),
        (
            "a payload that no range has",
            MALFORMED,
            "payload length",
            &[(4, &[0, 16, 0, 0])],
        ),
        (
            "the last number there is",
            MALFORMED,
            "number",
            &[(8, &[255; 8])],
        ),
        ("something reserved", missing, "reserved", &[(20, &[1])]),
        ("an unknown region", MALFORMED, "region", &[(24, &[7])]),
        ("an unknown encoding", missing, "encoding", &[(26, &[9])]),
        ("no pages", MALFORMED, "page count", &[(28, &[0])]),
        ("4 Gi pages", MALFORMED, "end of range", &[(28, &[255; 4])]),
        (
            "an offset inside a page",
            MALFORMED,
            "offset",
            &[(32, &[1])],
        ),
        (
            "an offset behind the memory",
            MALFORMED,
            "end of range",
            &[(32, &[0, 0, 64, 0])],
        ),
        (
            "an offset that overflows",
            MALFORMED,
            "end of range",
            &[(32, &[0, 240, 255, 255, 255, 255, 255, 255])],
        ),
        (
            "zeros with a payload",
            MALFORMED,
            "payload length",
            &[(4, &[0, 16]), (40, &[0, 16])],
        ),
    ];
    for (lie, fault, text, changes) in lies {
        refused_by_destination(&format!("chunk: {lie}"), fault, text, |victim| {
            let mut liar = victim.liar();
            liar.frame(&changed_chunk(changes));
            liar.into()
        });
    }
}

/// Claim P2 of docs/security.
#[test]
fn i4_marks_and_ends_that_lie_end_the_session() {
    let mark = |iteration| frame(Frame::Mark { iteration });
    let end = |chunks| frame(Frame::End { chunks });
    let lies = [
        (
            "a mark too early",
            "lane 1 carried the mark",
            vec![mark(1), mark(3)],
        ),
        (
            "a mark twice",
            "lane 1 carried the mark",
            vec![mark(1), mark(1)],
        ),
        (
            "a chunk of an iteration that has ended",
            "of iteration",
            vec![mark(1), zero_chunk(0, 0, 0)],
        ),
        (
            "a mark of iteration 0",
            "lane 1 carried the mark",
            vec![mark(1), mark(0)],
        ),
        (
            "more chunks than came",
            "announces 5 chunks, but 1 arrived",
            vec![zero_chunk(0, 0, 0), end(5)],
        ),
        (
            "fewer chunks than came",
            "announces 0 chunks, but 1 arrived",
            vec![zero_chunk(0, 0, 0), end(0)],
        ),
        (
            "a chunk behind the end",
            "after the end frame",
            vec![end(0), zero_chunk(0, 0, 0)],
        ),
    ];
    for (lie, text, frames) in lies {
        refused_by_destination(&format!("lane: {lie}"), MALFORMED, text, |victim| {
            let mut liar = victim.liar();
            for bytes in &frames {
                liar.frame(bytes);
            }
            liar.into()
        });
    }
}

/// A hostile chunk contains the same pages twice, raw and as zeros. This does no harm: the chunk
/// writes only to memory of the VM that its source sends.
#[test]
fn i7_overlapping_ranges_do_no_harm() {
    let _alone = alone();
    let range = |encoding, offset, page_count| Range {
        region: 0,
        encoding,
        page_count,
        offset,
    };
    let (result, builder) = lie_to_destination("chunk: overlapping ranges", |victim| {
        let mut liar = victim.liar();
        let ranges = [
            range(Encoding::Raw, 0, 4),
            range(Encoding::Zero, 4096, 8),
            range(Encoding::Raw, 4096, 4),
            range(Encoding::Raw, 0, 4),
        ];
        let mut pages = 0;
        for number in 0..3 {
            let mut header = Vec::new();
            ChunkHeader::encode(number, 1, &ranges, &mut header).unwrap();
            let mut payload = vec![7; 12 * 4096];
            let lane = liar.lane.as_mut().unwrap();
            lane.send_with(&header, &mut payload).unwrap();
            pages += 20;
        }
        liar.conclude(3, pages);
        liar.await_ready();
        liar.peer.send(&Message::Commit { run: false });
        assert!(matches!(liar.peer.receive(), Some(Message::Running { .. })));
        liar.peer.send(&Message::Release);
    });
    assert!(!result.unwrap());
    let vm = builder.built.unwrap();
    let mut bytes = vec![0; 6 * 4096];
    vm_memory::Bytes::read_slice(&*vm.memory, &mut bytes, vm_memory::GuestAddress(0)).unwrap();
    assert!(bytes[..5 * 4096].iter().all(|&byte| byte == 7));
    assert!(bytes[5 * 4096..].iter().all(|&byte| byte == 0));
}

/// Each range of a chunk can be a whole region of 1 TiB. The destination takes seconds to clear
/// such a region, but a cancellation does not wait for that.
#[test]
fn i7_zeros_for_a_huge_region_hold_up_no_cancellation() {
    let _alone = alone();
    const TEBIBYTE: u64 = 1 << 40;
    let (client, server) = tls();
    let receiving = Receiving::start(&server, &impatient(), TestBuilder::default());
    let (mut peer, _) = Peer::source(receiving.address, &client, LaneSecurity::Tls);
    let Message::Describe(mut described) = describe() else {
        unreachable!()
    };
    let mut region = described.regions.regions()[0].clone();
    region.length = TEBIBYTE;
    described.regions = RegionTable::new(vec![region]).unwrap();
    peer.send(&Message::Describe(described));
    let Some(Message::Accept(accept)) = peer.receive() else {
        panic!("the VM was not accepted")
    };
    let open = lane_open(SESSION, &accept.secret, 1);
    let mut lane = open_lane(receiving.address, Some(&client), &open);
    assert_eq!(peer.receive(), Some(Message::LaneUp { lane: 1 }));
    let range = Range {
        region: 0,
        encoding: Encoding::Zero,
        page_count: (TEBIBYTE / 4096) as u32,
        offset: 0,
    };
    let mut chunk = Vec::new();
    ChunkHeader::encode(0, 1, &[range; MAX_RANGES_PER_CHUNK], &mut chunk).unwrap();
    lane.send(&chunk).unwrap();
    // Wait until the process has used CPU time. Then the lane's thread has begun to clear memory,
    // because this thread uses almost none.
    let (limit, before) = (Instant::now() + Duration::from_secs(20), cpu_ticks());
    while cpu_ticks() < before + 10 {
        assert!(Instant::now() < limit, "the chunk is not being worked on");
        std::thread::sleep(Duration::from_millis(5));
    }
    let began = Instant::now();
    receiving.cancel.cancel();
    let reply = peer.await_message(|message| !matches!(message, Message::Ack { .. }));
    let answered = began.elapsed();
    assert!(matches!(reply, Some(Message::Cancel { .. })), "{reply:?}");
    drop((peer, lane));
    let error = receiving.finish(false).0.err().unwrap();
    println!(
        "answered after {answered:?}, ended after {:?}",
        began.elapsed()
    );
    assert_eq!(error.code(), FaultCode::Cancelled, "{error}");
    assert!(
        began.elapsed() < Duration::from_secs(1),
        "{:?}",
        began.elapsed()
    );
}

/// The process's CPU time in user mode and in the kernel, in hundredths of a second
/// (proc_pid_stat(5)).
fn cpu_ticks() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields = stat.rsplit(')').next().unwrap().split_whitespace();
    let times = fields.skip(11).take(2);
    times.map(|ticks| ticks.parse::<u64>().unwrap()).sum()
}

/// Sends chunks of a zero page for `time`, and then a frame of an unknown kind. Returns
/// the number of chunks.
fn flood_with_zeros(lane: &mut DataSender, time: Duration) -> u64 {
    let until = Instant::now() + time;
    let mut chunks = 0;
    let mut many = Vec::new();
    while Instant::now() < until {
        many.clear();
        for _ in 0..200 {
            many.extend(zero_chunk(chunks, 0, 4096 * (chunks % 1024)));
            chunks += 1;
        }
        if lane.send(&many).is_err() {
            return chunks;
        }
    }
    let mut unknown = [0; 24];
    unknown[0] = 9;
    let _ = lane.send(&unknown);
    chunks
}

/// Endless zero pages cost the destination only the CPU time of the lane's thread. The destination
/// still answers on the control lane.
///
/// Claim P5 of docs/security.
#[test]
fn i8_endless_zero_chunks_take_no_memory() {
    let _alone = alone();
    let (result, _) = lie_to_destination("chunk: zeros for a second", |victim| {
        let mut liar = victim.liar();
        let mut lane = liar.lane.take().unwrap();
        let flood = std::thread::spawn(move || {
            let chunks = flood_with_zeros(&mut lane, Duration::from_secs(1));
            (chunks, lane)
        });
        let reply = liar
            .peer
            .await_message(|message| matches!(message, Message::Cancel { .. }));
        assert!(reply.is_some());
        println!("{} zero chunks in a second", flood.join().unwrap().0);
    });
    assert_eq!(result.err().unwrap().code(), MALFORMED);
}

/// Sends endless zeros from a source that reads no acknowledgements.
#[test]
fn i8_a_source_that_reads_no_acknowledgements_takes_no_memory() {
    let _alone = alone();
    let (result, _) = lie_to_destination("chunk: zeros, acknowledgements unread", |victim| {
        let mut liar = victim.liar();
        let mut lane = liar.lane.take().unwrap();
        let chunks = flood_with_zeros(&mut lane, Duration::from_secs(3));
        println!("{chunks} zero chunks in three seconds");
    });
    assert!(result.is_err());
}

/// Claim P2 of docs/security.
#[test]
fn i7_numbers_that_are_not_one_after_the_other_end_the_session() {
    for (lie, step, text) in [
        ("one number twice", 0, "arrived twice"),
        ("every second number", 2, "gaps in the chunk numbers"),
    ] {
        refused_by_destination(&format!("chunk: {lie}"), MALFORMED, text, |victim| {
            let mut liar = victim.liar();
            for number in 0..200_000 {
                if !liar.frame(&zero_chunk(number * step, 0, 0)) {
                    break;
                }
            }
            liar.into()
        });
    }
}
