//! Tests lanes that are disconnected, open and close repeatedly, or do not belong to the session.

use std::sync::{Arc, Mutex};

use dunlin::engine::vmm::FaultCode;
use dunlin_proto::control::{Final, Message};
use dunlin_proto::frame::{ChunkHeader, Encoding, Frame, Range};
use dunlin_proto::negotiate::SessionSecret;
use dunlin_test_support::engine::peer::*;
use dunlin_test_support::engine::*;
use dunlin_test_support::hostile::*;
use dunlin_test_support::lane::Authority;

use crate::MALFORMED;

/// A lost lane is not an error of the source: the destination fences the lane and continues the
/// session. To show that, the test sends *release* too early on the control lane, and the
/// destination refuses it.
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

/// The VM that a destination has built. A test can read the VM's memory before the session has
/// ended.
static BUILT: Mutex<Option<Arc<TestVm>>> = Mutex::new(None);

/// A lane fails in the middle of a chunk. The chunk's pages then become zero and are sent again.
/// The destination must clear the bytes that arrived before the failure.
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
    let mut payload = [7; ARRIVED * 4096];
    lane.send_with(&chunk(0, Encoding::Raw), &mut payload)
        .unwrap();
    lane.canceller().shutdown();
    let fenced = |message: &Message| matches!(message, Message::Fenced { lane: 1, .. });
    assert!(liar.peer.await_message(fenced).is_some());
    let (arrived, rest) = (content(), ARRIVED * 4096);
    assert!(arrived[..rest].iter().all(|&byte| byte == 7));
    assert!(arrived[rest..].iter().all(|&byte| byte == 0));
    // The pages have become zero in the meantime, and are sent again on another lane.
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

/// Opens and closes lanes one after the other. Their total number far exceeds the number of lanes
/// that may be open at the same time.
///
/// Claim P6 of docs/security.
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

/// Address space, in KiB, of the mappings that have the size of a thread's stack.
fn stack_kib() -> u64 {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let sizes = maps.lines().filter_map(|line| line.strip_prefix("Size:"));
    let kib = sizes.map(|size| size.trim().trim_end_matches(" kB").parse().unwrap());
    kib.filter(|kib: &u64| (2000..2100).contains(kib)).sum()
}

/// Claims A7, P6 of docs/security.
#[test]
fn i7_lanes_that_do_not_belong_are_turned_away_and_the_session_goes_on() {
    let _alone = alone();
    let (authority, other) = (Authority::named("one"), Authority::named("two"));
    let (client, server) = trusting(&authority, &other);
    // A host of the same name, with a certificate from another authority.
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
    let newer = proved(newer, &accept.secret);
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
