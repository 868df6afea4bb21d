//! A source that lies, at each step of a session (I7): the destination ends it
//! with an error that names the lie and who is at fault, keeps nothing, never runs
//! the VM without *commit*, and receives the next one.
//!
//! What each lie costs is printed as a table: `--nocapture` shows it.
#![allow(clippy::unwrap_used)]

use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dunlin::engine::destination::DestinationEvent;
use dunlin::engine::vmm::FaultCode;
use dunlin::lane::control;
use dunlin::lane::data::DataSender;
use dunlin_proto::control::{
    Accept, CONTROL_HEADER_BYTES, ChunkSet, Final, Message, Region, RegionKind, RegionTable,
    Section, Verdict,
};
use dunlin_proto::frame::{ChunkHeader, Encoding, Frame, Range};
use dunlin_proto::limits::MAX_RANGES_PER_CHUNK;
use dunlin_proto::negotiate::{
    Features, LaneSecurity, Offer, Opening, Selection, SessionSecret, VERSIONS, VersionRange,
};
use dunlin_test_support::engine::peer::*;
use dunlin_test_support::engine::*;
use dunlin_test_support::hostile::*;
use dunlin_test_support::lane::{Authority, SOURCE, soon};

const MALFORMED: FaultCode = FaultCode::Malformed;

/// What is wrong with some bytes, the fault and words that must come of it, and
/// what is put where.
type Changed<'a> = (&'a str, FaultCode, &'a str, &'a [(usize, &'a [u8])]);

/// A source that has been selected and has described nothing yet.
fn selected(victim: &Victim<'_>) -> Peer {
    let (peer, answer) = Peer::source(victim.to, victim.tls, LaneSecurity::Tls);
    assert!(matches!(answer, Opening::Select(_)), "{answer:?}");
    peer
}

/// The words of the other role, and some of this one at the wrong time.
fn out_of_turn() -> Vec<Message> {
    let sets = vec![ChunkSet { first: 0, count: 1 }];
    vec![
        Message::Commit { run: true },
        Message::Release,
        Message::Ack {
            sets: sets.clone(),
            reached: Vec::new(),
        },
        Message::LaneUp { lane: 1 },
        Message::Ready { digest: None },
        Message::Running {
            cpu_ns: 0,
            downtime_ns: 0,
        },
        Message::Accept(Accept {
            secret: SessionSecret([1; 32]),
            lanes_max: 1,
            endpoints: Vec::new(),
        }),
        Message::Answer {
            attempt: 1,
            verdict: Verdict::Running,
        },
        Message::Fenced {
            lane: 1,
            acks: sets,
        },
    ]
}

#[test]
fn i7_openings_that_lie_begin_no_session_and_the_next_one_does() {
    let _alone = alone();
    let (client, server) = tls();
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let before = Before::now();
    let options = impatient();
    let receiving = Receiving::on(listener, &server, &options, TestBuilder::default());
    let to = receiving.address;
    let honest = Offer {
        versions: VERSIONS,
        optional: Features::NONE,
        required: Features::NONE,
        security: LaneSecurity::Tls,
        session: SESSION,
        attempt: 1,
        epoch: 1,
    };
    let selection = Selection {
        version: 1,
        features: Features::NONE,
        security: LaneSecurity::Tls,
    };
    // What is said, the fault that it is refused for, and words that only this
    // reason has.
    let lies = [
        (
            Opening::Offer(Offer {
                versions: VersionRange { min: 9, max: 9 },
                ..honest.clone()
            }),
            FaultCode::VersionMismatch,
            "the source speaks versions 9",
        ),
        (
            Opening::Offer(Offer {
                required: Features::from_bits(1 << 60),
                ..honest.clone()
            }),
            FaultCode::FeatureMissing,
            "the source requires",
        ),
        (
            Opening::Offer(Offer {
                security: LaneSecurity::Plain,
                ..honest.clone()
            }),
            FaultCode::SecurityNotAgreed,
            "plain lanes",
        ),
        (
            Opening::Select(selection),
            FaultCode::Malformed,
            "expected an offer as the first message",
        ),
    ];
    for (opening, fault, text) in lies {
        let stream = std::net::TcpStream::connect(to).unwrap();
        let stream = control::client(stream, &client, soon()).unwrap();
        let mut bytes = Vec::new();
        opening.encode(&mut bytes).unwrap();
        stream.send(&bytes).unwrap();
        let answer = read_opening(&stream);
        let Opening::Refuse(versions, refusal) = answer else {
            panic!("{opening:?} was answered by {answer:?}")
        };
        assert_eq!((versions, refusal.fault), (VERSIONS, fault), "{refusal}");
        assert!(refusal.text.contains(text), "{refusal}");
        // The local event has the same text, and the peer's name.
        receiving.await_event(|event| {
            matches!(event, DestinationEvent::Rejected { reason }
                if reason.contains(SOURCE) && reason.contains(text))
        });
    }
    let vm = TestVm::new(4 << 20);
    vm.fill(1 << 20);
    let (report, _) = send(
        &vm,
        &to.to_string(),
        &client,
        &verified(2),
        &dunlin::engine::Cancel::new(),
    );
    assert_eq!(report.unwrap().digests_equal, Some(true));
    receiving.finish(false).0.unwrap();
    before.settled("offer: newer, with more, plain, or none at all");
}

#[test]
fn i7_lies_before_the_vm_is_described_end_it() {
    for message in out_of_turn() {
        let name = message.kind().name();
        let (row, text) = (
            format!("describe: {name} instead"),
            format!("unexpected {name}"),
        );
        refused_by_destination(&row, MALFORMED, &text, |victim| {
            let mut peer = selected(victim);
            peer.send(&message);
            peer.into()
        });
    }
    refused_by_destination(
        "describe: twice",
        MALFORMED,
        "unexpected describe",
        |victim| {
            let (mut peer, _) = Peer::accepted(victim.to, victim.tls);
            peer.send(&describe());
            peer.into()
        },
    );
}

/// A *describe* of two regions, for changing bytes of it: with the
/// offset of the table's count. The regions of 30 bytes without names follow it.
fn two_regions(peer: &mut Peer) -> (Vec<u8>, usize) {
    let Message::Describe(mut described) = describe() else {
        unreachable!()
    };
    let region = |id| Region {
        id,
        kind: RegionKind::Ram,
        flags: 0,
        backing_page_bytes: 4096,
        length: 1 << 20,
        guest_physical: u64::from(id) << 32,
        name: String::new(),
    };
    described.regions = RegionTable::new(vec![region(0), region(1)]).unwrap();
    let bytes = peer.encode(&Message::Describe(described));
    let count_at = bytes.len() - 2 * 30 - 2;
    assert_eq!(bytes[count_at..count_at + 2], [2, 0]);
    (bytes, count_at)
}

#[test]
fn i7_a_vm_that_cannot_be_is_refused() {
    // Where behind the table's count, what is put there, and what is refused.
    let lies: [(&str, usize, &[u8], &str); 7] = [
        ("no region", 0, &[0, 0], "region count"),
        ("65535 regions", 0, &[255, 255], "region count"),
        ("two regions of one number", 2 + 30, &[0, 0], "region id"),
        ("half a page", 2 + 12, &[0, 8, 0, 0], "region length"),
        (
            "a region of 2^63 bytes",
            2 + 12,
            &[0, 0, 0, 0, 0, 0, 0, 128],
            "region length",
        ),
        (
            "regions of 2^52 bytes each",
            2 + 12,
            &[0, 0, 0, 0, 0, 0, 16, 0],
            "memory length",
        ),
        (
            "backing pages of 3 bytes",
            2 + 8,
            &[3, 0, 0, 0],
            "backing page length",
        ),
    ];
    for (lie, at, value, text) in lies {
        refused_by_destination(&format!("describe: {lie}"), MALFORMED, text, |victim| {
            let mut peer = selected(victim);
            let (mut bytes, count_at) = two_regions(&mut peer);
            bytes[count_at + at..][..value.len()].copy_from_slice(value);
            peer.stream.send(&bytes).unwrap();
            peer.into()
        });
    }
    // The second region is read as a field that has to be understood.
    let missing = FaultCode::FeatureMissing;
    refused_by_destination(
        "describe: fewer regions than follow",
        missing,
        "extension field",
        |victim| {
            let mut peer = selected(victim);
            let (mut bytes, count_at) = two_regions(&mut peer);
            bytes[count_at] = 1;
            peer.stream.send(&bytes).unwrap();
            peer.into()
        },
    );
}

#[test]
fn i7_control_messages_that_lie_end_the_session() {
    for message in out_of_turn() {
        let name = message.kind().name();
        let (row, text) = (
            format!("pre-copy: {name} out of turn"),
            format!("unexpected {name}"),
        );
        refused_by_destination(&row, MALFORMED, &text, |victim| {
            let mut liar = victim.liar();
            liar.peer.send(&message);
            liar.into()
        });
    }
    let another = "another session or epoch";
    for (row, session, epoch) in [
        ("pre-copy: another session's message", [1; 16], 1),
        ("pre-copy: a stale epoch", SESSION, 0),
        ("pre-copy: an epoch to come", SESSION, 2),
    ] {
        refused_by_destination(row, MALFORMED, another, |victim| {
            let mut liar = victim.liar();
            let honest = liar.peer.envelope;
            liar.peer.envelope.session = session;
            liar.peer.envelope.epoch = epoch;
            liar.peer.send(&Message::Ping { token: 1 });
            liar.peer.envelope = honest;
            liar.into()
        });
    }
    let release = |peer: &mut Peer| peer.encode(&Message::Release);
    let raw: [Changed<'_>; 4] = [
        ("garbage", MALFORMED, "body length", &[(3, &[255])]),
        (
            "a body of 4 GiB",
            MALFORMED,
            "body length",
            &[(0, &[255]), (1, &[255]), (2, &[255]), (3, &[255])],
        ),
        (
            "a kind that must be known",
            FaultCode::FeatureMissing,
            "message kind",
            &[(4, &[200])],
        ),
        (
            "a reserved flag",
            FaultCode::FeatureMissing,
            "message flags",
            &[(6, &[3])],
        ),
    ];
    for (lie, fault, text, changes) in raw {
        refused_by_destination(&format!("pre-copy: {lie}"), fault, text, |victim| {
            let mut liar = victim.liar();
            let mut bytes = release(&mut liar.peer);
            for (at, value) in changes {
                bytes[*at..*at + value.len()].copy_from_slice(value);
            }
            liar.peer.stream.send(&bytes).unwrap();
            liar.into()
        });
    }
}

/// A chunk of one zero page with bytes changed: the header has 24, the range
/// behind it as many.
fn changed_chunk(changes: &[(usize, &[u8])]) -> Vec<u8> {
    let mut bytes = zero_chunk(0, 0, 0);
    for (at, value) in changes {
        bytes[*at..*at + value.len()].copy_from_slice(value);
    }
    bytes
}

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
            "announced 5 chunks at its end but carried 1",
            vec![zero_chunk(0, 0, 0), end(5)],
        ),
        (
            "fewer chunks than came",
            "announced 0 chunks at its end but carried 1",
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

/// A lost lane is not a lie: the destination reports it as fenced.
#[test]
fn i4_a_lane_that_is_cut_is_fenced_and_the_session_goes_on() {
    refused_by_destination("lane: cut", MALFORMED, "unexpected release", |victim| {
        let mut liar = victim.liar();
        liar.lane.take().unwrap().canceller().shutdown();
        let fenced = |message: &Message| matches!(message, Message::Fenced { lane: 1, .. });
        assert!(liar.peer.await_message(fenced).is_some());
        liar.peer.send(&Message::Release);
        liar.into()
    });
}

/// The VM that a destination has built, before its session has ended.
static BUILT: Mutex<Option<Arc<TestVm>>> = Mutex::new(None);

/// A lane dies within a chunk of pages. What of it has arrived is older than what
/// comes in its place, be that only that the pages are zero.
#[test]
fn i4_pages_of_a_chunk_that_broke_off_are_cleared_by_zeros() {
    const PAGES: u32 = 12;
    const ARRIVED: usize = 4;
    let _alone = alone();
    let (client, server) = tls();
    let builder = TestBuilder {
        planted: Some(Box::new(|vm| *BUILT.lock().unwrap() = Some(Arc::clone(vm)))),
        ..TestBuilder::default()
    };
    let receiving = Receiving::start(&server, &impatient(), builder);
    let to = receiving.address;
    let victim = Victim { to, tls: &client };
    let mut liar = victim.liar();
    let vm = BUILT.lock().unwrap().take().unwrap();
    let content = || {
        let mut bytes = vec![0; PAGES as usize * 4096];
        vm_memory::Bytes::read_slice(&*vm.memory, &mut bytes, vm_memory::GuestAddress(0)).unwrap();
        bytes
    };
    let chunk = |number, encoding| {
        let range = Range {
            region: 0,
            encoding,
            page_count: PAGES,
            offset: 0,
        };
        let mut header = Vec::new();
        ChunkHeader::encode(number, 1, &[range], &mut header).unwrap();
        header
    };
    let mut lane = liar.lane.take().unwrap();
    let mut broken_off = lane.frame();
    assert_eq!(broken_off.bytes(&[7; ARRIVED * 4096]), ARRIVED * 4096);
    broken_off.finish(&chunk(0, Encoding::Raw)).unwrap();
    lane.canceller().shutdown();
    let fenced = |message: &Message| matches!(message, Message::Fenced { lane: 1, .. });
    assert!(liar.peer.await_message(fenced).is_some());
    let (arrived, rest) = (content(), ARRIVED * 4096);
    assert!(arrived[..rest].iter().all(|&byte| byte == 7));
    assert!(arrived[rest..].iter().all(|&byte| byte == 0));
    // The pages have become zero since, and go out again on another lane.
    let open = lane_open(SESSION, &liar.accept.secret, 2);
    liar.lane = Some(open_lane(to, Some(&client), &open));
    assert_eq!(liar.peer.receive(), Some(Message::LaneUp { lane: 2 }));
    liar.frame(&chunk(1, Encoding::Zero));
    liar.end_lane(1);
    let Message::Final(honest) = last(1, u64::from(PAGES), 0) else {
        unreachable!()
    };
    liar.peer.send(&Message::Final(Final {
        fenced: 1,
        ..honest
    }));
    liar.await_ready();
    assert!(content().iter().all(|&byte| byte == 0), "stale bytes");
    drop(liar);
    receiving.finish(false).0.err().unwrap();
}

#[test]
fn i7_counts_that_lie_end_the_session() {
    let text = "memory or state is missing";
    for (lie, wrong) in [
        ("more chunks than came", last(2, 1, 0)),
        ("fewer chunks than came", last(0, 1, 0)),
        ("as many chunks as there are numbers", last(u64::MAX, 1, 0)),
        ("more pages than came", last(1, 2, 0)),
        ("fewer pages than came", last(1, 0, 0)),
    ] {
        refused_by_destination(&format!("final: {lie}"), MALFORMED, text, |victim| {
            let mut liar = victim.liar();
            liar.frame(&zero_chunk(0, 0, 0));
            liar.end_lane(1);
            liar.peer.send(&wrong);
            liar.into()
        });
    }
    let text = "but the source counts";
    refused_by_destination(
        "final: a section that never came",
        MALFORMED,
        text,
        |victim| {
            let mut liar = victim.liar();
            liar.end_lane(0);
            liar.peer.send(&last(0, 0, 1));
            liar.into()
        },
    );
    let section = || {
        Message::Section(Section {
            name: "s".into(),
            instance: 0,
            version: 1,
            required: false,
            bytes: Vec::new(),
        })
    };
    refused_by_destination(
        "section: more than are counted",
        MALFORMED,
        text,
        |victim| {
            let mut liar = victim.liar();
            liar.peer.send(&section());
            liar.conclude(0, 0);
            liar.into()
        },
    );
    refused_by_destination(
        "section: 4097 of them",
        MALFORMED,
        "state over the limit",
        |victim| {
            let mut liar = victim.liar();
            for _ in 0..=4096 {
                liar.peer.send(&section());
            }
            liar.into()
        },
    );
}

#[test]
fn i1_a_commit_before_its_time_runs_nothing() {
    let commit = Message::Commit { run: true };
    refused_by_destination(
        "commit: before a page has come",
        MALFORMED,
        "unexpected commit",
        |victim| {
            let mut liar = victim.liar();
            liar.peer.send(&commit);
            liar.into()
        },
    );
    refused_by_destination(
        "commit: behind final, the lane still open",
        MALFORMED,
        "unexpected commit",
        |victim| {
            let mut liar = victim.liar();
            liar.peer.send(&last(0, 0, 0));
            liar.peer.send(&commit);
            liar.into()
        },
    );
    for (lie, message) in [
        ("release instead", Message::Release),
        ("the VM again", describe()),
        ("ready back", Message::Ready { digest: None }),
    ] {
        refused_by_destination(
            &format!("commit: {lie}"),
            MALFORMED,
            "unexpected",
            |victim| {
                let mut liar = victim.liar();
                liar.conclude(0, 0);
                liar.await_ready();
                liar.peer.send(&message);
                liar.into()
            },
        );
    }
    refused_by_destination(
        "commit: closed instead",
        FaultCode::ControlLost,
        "closed the control lane",
        |victim| {
            let mut liar = victim.liar();
            liar.conclude(0, 0);
            liar.await_ready();
            liar.peer.stream.close().unwrap();
            liar.into()
        },
    );
}

/// After *running* the VM lives at the destination, whatever the source says.
#[test]
fn i1_i2_lies_after_running_change_nothing() {
    type Lie = (&'static str, fn(&mut Peer));
    let _alone = alone();
    let lies: [Lie; 5] = [
        ("commit again", |peer| {
            peer.send(&Message::Commit { run: true });
        }),
        ("cancel", |peer| {
            peer.send(&Message::Cancel {
                fault: FaultCode::Cancelled,
                text: "too late".into(),
            });
        }),
        ("final again", |peer| {
            peer.send(&last(0, 0, 0));
        }),
        ("garbage", |peer| {
            let _ = peer.stream.send(&[255; CONTROL_HEADER_BYTES]);
        }),
        ("closed instead", |peer| {
            let _ = peer.stream.close();
        }),
    ];
    for (lie, tell) in lies {
        let (result, builder) = lie_to_destination(&format!("release: {lie}"), |victim| {
            let mut liar = victim.liar();
            liar.conclude(0, 0);
            liar.await_ready();
            liar.peer.send(&Message::Commit { run: true });
            assert!(matches!(liar.peer.receive(), Some(Message::Running { .. })));
            tell(&mut liar.peer);
            while liar.peer.receive().is_some() {}
        });
        assert!(result.unwrap(), "{lie}");
        assert_eq!(runs(&builder.built.unwrap()), 1, "{lie}");
    }
}

/// Pages named twice in a chunk, raw and as zeros: the source writes over its own
/// pages, and nothing else happens.
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
            let mut frame = liar.lane.as_mut().unwrap().frame();
            assert_eq!(frame.bytes(&vec![7; 12 * 4096]), 12 * 4096);
            frame.finish(&header).unwrap();
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

/// One chunk can name all of a region of 1 TiB, as often as it has ranges: that is
/// seconds of work for the destination, and a cancellation does not wait for it.
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
        panic!("it was not accepted")
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
    // So that it is in the midst of it.
    std::thread::sleep(Duration::from_millis(200));
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
    assert_eq!(error.fault, FaultCode::Cancelled, "{error}");
    assert!(
        began.elapsed() < Duration::from_secs(1),
        "{:?}",
        began.elapsed()
    );
}

/// Sends chunks of a zero page for `time`, and then a kind of frame that there is
/// not. Returns how many.
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

/// Zeros without end cost the destination nothing but its lane's time, and its
/// control lane still answers.
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
    assert_eq!(result.err().unwrap().fault, MALFORMED);
}

/// The same from a source that reads no acknowledgements.
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

/// Lanes that come and go, far more than may be open at once.
#[test]
fn i8_lane_after_lane_takes_no_memory() {
    refused_by_destination(
        "lanes: 300 come and go",
        MALFORMED,
        "unexpected release",
        |victim| {
            let mut liar = victim.liar();
            let files = open_files();
            for number in 2..302 {
                let open = lane_open(SESSION, &liar.accept.secret, number);
                let mut lane = open_lane(liar.to, Some(liar.tls), &open);
                let reply = |message: &Message| !matches!(message, Message::Ack { .. });
                let up = liar.peer.await_message(reply);
                assert_eq!(up, Some(Message::LaneUp { lane: number }));
                lane.send(&frame(Frame::End { chunks: 0 })).unwrap();
                lane.finish().unwrap();
                assert!(open_files() < files + 20, "lane {number}");
            }
            assert!(stack_kib() < 100 << 10, "{} KiB of stacks", stack_kib());
            liar.peer.send(&Message::Release);
            liar.into()
        },
    );
}

/// Address space, in KiB, that is mapped in pieces of a thread's stack.
fn stack_kib() -> u64 {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let sizes = maps.lines().filter_map(|line| line.strip_prefix("Size:"));
    let kib = sizes.map(|size| size.trim().trim_end_matches(" kB").parse().unwrap());
    kib.filter(|kib: &u64| (2000..2100).contains(kib)).sum()
}

/// A second control lane with the same session's name, from the same host and
/// from one of the same name that another authority issued: the first session
/// goes on.
#[test]
fn i1_a_second_session_of_the_same_name_is_turned_away() {
    let _alone = alone();
    let (authority, other) = (Authority::named("one"), Authority::named("two"));
    let (client, server) = trusting(&authority, &other);
    let (twin, _) = trusting(&other, &authority);
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let before = Before::now();
    let options = impatient();
    let receiving = Receiving::on(listener, &server, &options, TestBuilder::default());
    let victim = Victim {
        to: receiving.address,
        tls: &client,
    };
    let mut liar = victim.liar();
    for (who, epoch) in [(&client, 0), (&client, 1), (&twin, 1), (&twin, 2)] {
        let stream = std::net::TcpStream::connect(victim.to).unwrap();
        let stream = control::client(stream, who, soon()).unwrap();
        let offer = Offer {
            versions: VERSIONS,
            optional: Features::NONE,
            required: Features::NONE,
            security: LaneSecurity::Tls,
            session: SESSION,
            attempt: 1,
            epoch,
        };
        let mut bytes = Vec::new();
        offer.encode(&mut bytes).unwrap();
        stream.send(&bytes).unwrap();
        let mut answer = [0; 16];
        stream.receive_exact(&mut answer, soon()).unwrap();
        assert_eq!(answer[8], 3, "epoch {epoch} was let in");
    }
    liar.frame(&zero_chunk(0, 0, 0));
    liar.conclude(1, 1);
    liar.await_ready();
    liar.peer.send(&Message::Commit { run: false });
    assert!(matches!(liar.peer.receive(), Some(Message::Running { .. })));
    liar.peer.send(&Message::Release);
    let (result, builder, events) = receiving.finish(false);
    assert!(!result.unwrap().runs);
    drop(liar);
    assert_eq!(runs(&builder.built.unwrap()), 0);
    let turned_away = |event: &&DestinationEvent| matches!(event, DestinationEvent::Rejected { reason } if reason.contains(SOURCE));
    assert_eq!(events.iter().filter(turned_away).count(), 4);
    before.settled("offer: a second session of the same name");
}

#[test]
fn i7_lanes_that_do_not_belong_are_turned_away_and_the_session_goes_on() {
    let _alone = alone();
    let (authority, other) = (Authority::named("one"), Authority::named("two"));
    let (client, server) = trusting(&authority, &other);
    // The same name, from another authority.
    let (twin, _) = trusting(&other, &authority);
    let options = impatient()
        .to_builder()
        .lanes_max(2)
        .allow_plain(true)
        .build()
        .unwrap();
    let receiving = Receiving::start(&server, &options, TestBuilder::default());
    let to = receiving.address;
    let (mut peer, accept) = Peer::accepted(to, &client);
    let good = |number| lane_open(SESSION, &accept.secret, number);
    let refused = |peer: &mut Peer, number, wanted| match peer.receive() {
        Some(Message::LaneRefused { lane, fault, .. }) => {
            assert_eq!((lane, fault), (number, wanted))
        }
        other => panic!("{other:?}"),
    };

    let _wrong = open_lane(
        to,
        Some(&client),
        &lane_open(SESSION, &SessionSecret([3; 32]), 1),
    );
    receiving.await_rejection("does not match the session's secret");
    let _foreign = open_lane(
        to,
        Some(&client),
        &lane_open([4; 16], &SessionSecret([3; 32]), 1),
    );
    receiving.await_rejection("belongs to another session");
    let _other = open_lane(to, Some(&client), &lane_open([4; 16], &accept.secret, 1));
    refused(&mut peer, 1, FaultCode::UnknownSession);
    let _twin = open_lane(to, Some(&twin), &good(1));
    refused(&mut peer, 1, FaultCode::WrongIdentity);
    let _plain = open_lane(to, None, &good(1));
    refused(&mut peer, 1, FaultCode::SecurityNotAgreed);
    let mut newer = good(1);
    newer.version = 9;
    let _newer = open_lane(to, Some(&client), &newer);
    refused(&mut peer, 1, FaultCode::VersionMismatch);

    let mut first = open_lane(to, Some(&client), &good(1));
    assert_eq!(peer.receive(), Some(Message::LaneUp { lane: 1 }));
    let _again = open_lane(to, Some(&client), &good(1));
    refused(&mut peer, 1, FaultCode::DuplicateLane);
    let mut second = open_lane(to, Some(&client), &good(2));
    assert_eq!(peer.receive(), Some(Message::LaneUp { lane: 2 }));
    let _surplus = open_lane(to, Some(&client), &good(3));
    refused(&mut peer, 3, FaultCode::LaneLimit);

    first.send(&zero_chunk(0, 0, 0)).unwrap();
    for (lane, chunks) in [(&mut first, 1), (&mut second, 0)] {
        lane.send(&frame(Frame::Mark { iteration: 1 })).unwrap();
        lane.send(&frame(Frame::End { chunks })).unwrap();
    }
    first.finish().unwrap();
    second.finish().unwrap();
    peer.send(&last(1, 1, 0));
    let ready = peer.await_message(|message| !matches!(message, Message::Ack { .. }));
    assert_eq!(ready, Some(Message::Ready { digest: None }));
    peer.send(&Message::Commit { run: false });
    assert!(matches!(peer.receive(), Some(Message::Running { .. })));
    peer.send(&Message::Release);
    let (result, ..) = receiving.finish(false);
    assert!(!result.unwrap().runs);
}

#[test]
fn i7_a_second_source_is_refused_as_busy() {
    let _alone = alone();
    let (client, server) = tls();
    let options = impatient();
    let receiving = Receiving::start(&server, &options, TestBuilder::default());
    let to = receiving.address.to_string();
    let vm = TestVm::new(4 << 20);
    vm.fill(4 << 20);
    let (held, release) = (
        std::sync::mpsc::channel::<()>(),
        std::sync::mpsc::channel::<()>(),
    );
    let (began, go_on) = (held.0, release.1);
    *vm.hook.lock().unwrap() = Some(Box::new(move |step| {
        if step == "hold" {
            began.send(()).unwrap();
            go_on.recv().unwrap();
        }
    }));
    std::thread::scope(|scope| {
        let first = scope.spawn(|| {
            send(
                &vm,
                &to,
                &client,
                &verified(2),
                &dunlin::engine::Cancel::new(),
            )
        });
        held.1.recv().unwrap();
        let second = TestVm::new(4 << 20);
        second.start(16, Duration::from_micros(100));
        let (result, _) = send(
            &second,
            &to,
            &client,
            &verified(2),
            &dunlin::engine::Cancel::new(),
        );
        let error = result.unwrap_err();
        assert_eq!(
            (error.fault, error.vm),
            (FaultCode::Busy, dunlin::engine::VmIs::AtSource),
            "{error}"
        );
        assert!(second.goes_on());
        release.0.send(()).unwrap();
        assert_eq!(first.join().unwrap().0.unwrap().digests_equal, Some(true));
    });
    let (result, _, events) = receiving.finish(false);
    result.unwrap();
    let turned_away = |event: &DestinationEvent| matches!(event, DestinationEvent::Rejected { reason } if reason.contains(SOURCE));
    assert!(events.iter().any(turned_away), "{events:?}");
}

#[test]
fn i7_i8_more_state_than_the_bound_ends_it() {
    refused_by_destination(
        "section: more than 32 MiB",
        MALFORMED,
        "state over the limit",
        |victim| {
            let mut liar = victim.liar();
            let section = Message::Section(Section {
                name: "much".into(),
                instance: 0,
                version: 1,
                required: false,
                bytes: vec![1; 1_000_000],
            });
            // The destination may close while its window is shut, and TCP tells us
            // nothing then.
            let limit = Some(Duration::from_millis(300));
            let socket = liar.peer.stream.socket();
            socket.set_write_timeout(limit).unwrap();
            socket.set_read_timeout(limit).unwrap();
            while liar.peer.send(&section) {}
            liar.into()
        },
    );
}

#[test]
fn i7_endless_pings_do_not_keep_a_session_from_its_error() {
    refused_by_destination(
        "pre-copy: 20,000 pings",
        MALFORMED,
        "unexpected release",
        |victim| {
            let mut liar = victim.liar();
            for token in 0..20_000 {
                let bytes = liar.peer.encode(&Message::Ping { token });
                liar.peer.stream.send(&bytes).unwrap();
                if token % 64 == 63 {
                    for _ in 0..64 {
                        let mut pong = [0; 48];
                        liar.peer.stream.receive_exact(&mut pong, soon()).unwrap();
                    }
                }
            }
            liar.peer.send(&Message::Release);
            liar.into()
        },
    );
}
