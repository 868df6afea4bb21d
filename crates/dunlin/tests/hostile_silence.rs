//! Tests peers that stop, or continue without progress. The session ends at its time limit, but not
//! before an honest, slow peer could have answered. Many of these tests take about ten seconds.
//! They run in parallel. The tests of other hostile peers run one at a time, in other programs.
#![allow(clippy::unwrap_used)]

use std::net::TcpListener;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use dunlin::engine::vmm::FaultCode;
use dunlin::engine::{Cancel, VmIs, source};
use dunlin_linux::poll::{Interest, poll};
use dunlin_proto::control::{Accept, Message};
use dunlin_proto::frame::{ChunkHeader, Encoding, Range};
use dunlin_proto::negotiate::{LaneSecurity, SessionSecret};
use dunlin_test_support::engine::peer::*;
use dunlin_test_support::engine::*;
use dunlin_test_support::hostile::{Liar, Victim, runs, with_causes};

/// The peers' time limits are at most ten seconds. The remaining six seconds are tolerance for a
/// busy host.
const END_LIMIT: Duration = Duration::from_secs(16);

/// The bytes that a guest has written before it is migrated.
const FILLED: usize = 16 << 20;

/// Asserts that a destination ends with `fault` and `text` while `play` acts as its source.
fn outlasts(fault: FaultCode, text: &str, play: impl FnOnce(&Victim<'_>)) {
    outlasts_within(END_LIMIT, fault, text, play);
}

fn outlasts_within(limit: Duration, fault: FaultCode, text: &str, play: impl FnOnce(&Victim<'_>)) {
    let (client, server) = tls();
    let options = impatient();
    let receiving = Receiving::start(&server, &options, TestBuilder::default());
    let began = Instant::now();
    play(&Victim {
        to: receiving.address,
        tls: &client,
    });
    let (result, builder, _) = receiving.finish(false);
    assert!(began.elapsed() < limit, "{:?}", began.elapsed());
    let error = result.err().unwrap();
    let said = with_causes(&error);
    assert_eq!((error.code(), error.vm), (fault, VmIs::AtSource), "{said}");
    assert!(said.contains(text), "{said}");
    if let Some(vm) = builder.built {
        assert_eq!(runs(&vm), 0);
        assert_eq!(vm.calls().last(), Some(&"discard"));
    }
}

/// Answers pings and sends nothing else until the peer disconnects. Waits twice, because the first
/// wait can time out before the peer reaches its own time limit and disconnects.
fn only_answer(peer: &mut Peer) {
    while peer.receive().is_some() {}
    let _ = peer
        .stream
        .receive(&mut [0], dunlin_test_support::lane::soon());
}

#[test]
fn i7_a_source_that_never_describes_its_vm_is_given_up() {
    let text = "did not describe its VM";
    outlasts(FaultCode::ControlLost, text, |victim| {
        let (mut peer, _) = Peer::source(victim.to, victim.tls, LaneSecurity::Tls);
        let mut token = 0;
        while peer.send(&Message::Ping { token }) {
            token += 1;
            thread::sleep(Duration::from_millis(100));
            let _ = peer.stream.receive(&mut [0; 4096], Instant::now());
        }
    });
}

#[test]
fn i7_a_source_that_stops_inside_a_message_is_given_up() {
    outlasts(
        FaultCode::ControlLost,
        "stalled in the middle of a message",
        |victim| {
            let mut liar = victim.liar();
            let bytes = liar.peer.encode(&describe());
            liar.peer.stream.send(&bytes[..60]).unwrap();
            only_answer(&mut liar.peer);
        },
    );
}

/// Asserts that the destination gives up and fences the stalled lane, and that the session
/// continues until the source sends an unexpected *release*.
fn loses_its_lane(play: impl FnOnce(&mut Liar<'_>)) {
    outlasts(FaultCode::Malformed, "unexpected release", |victim| {
        let mut liar = victim.liar();
        play(&mut liar);
        let fenced = |message: &Message| matches!(message, Message::Fenced { lane: 1, .. });
        let began = Instant::now();
        let mut reply = None;
        // Wait repeatedly, because one wait for a message is only as long as the lane's limit.
        while reply.is_none() && began.elapsed() < END_LIMIT {
            reply = liar.peer.await_message(fenced);
        }
        assert!(reply.is_some());
        liar.peer.send(&Message::Release);
        only_answer(&mut liar.peer);
    });
}

#[test]
fn i7_a_source_that_stops_inside_a_chunk_loses_its_lane() {
    loses_its_lane(|liar| {
        let mut header = Vec::new();
        let range = Range {
            region: 0,
            encoding: Encoding::Raw,
            page_count: 4,
            offset: 0,
        };
        ChunkHeader::encode(0, 1, &[range], &mut header).unwrap();
        liar.frame(&header);
    });
}

/// Unread pongs fill the connection to the source; then the destination stops
/// reading and ends the session.
#[test]
fn i7_i8_a_source_that_pings_and_reads_nothing_is_given_up() {
    let before = dunlin_test_support::hostile::Before::now();
    // The destination's last two writes each have a timeout of their own, so allow twice the time.
    outlasts_within(
        2 * END_LIMIT,
        FaultCode::ControlLost,
        "the control lane was lost",
        |victim| {
            let mut liar = victim.liar();
            let socket = liar.peer.stream.socket();
            socket
                .set_write_timeout(Some(Duration::from_millis(500)))
                .unwrap();
            let mut token = 0;
            loop {
                let mut many = Vec::new();
                for _ in 0..1000 {
                    token += 1;
                    many.extend(liar.peer.encode(&Message::Ping { token }));
                }
                if liar.peer.stream.send(&many).is_err() {
                    break;
                }
            }
            // Keep the connection open and unread until the destination resets it.
            let reset = Interest::failure(liar.peer.stream.socket());
            let gone = poll(&[reset], Some(Duration::from_secs(60))).unwrap();
            assert_eq!(gone, [true], "the destination has not given up");
        },
    );
    let peak = before.peak_bytes();
    println!("pings, answers unread: {} MiB", peak >> 20);
    assert!(peak < 64 << 20, "{peak} bytes");
}

/// A destination answers pings and acknowledges nothing. This prevents only the migration: the
/// guest runs, and an operator can cancel.
#[test]
fn i2_a_destination_that_acknowledges_nothing_does_not_hold_the_source() {
    let (client, server) = tls();
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let to = listener.local_addr().unwrap().to_string();
    let vm = TestVm::new(32 << 20);
    vm.fill(FILLED);
    vm.start(64, Duration::from_micros(100));
    let cancel = Cancel::new();
    let options = source::Options::builder().lanes(1).build().unwrap();
    let (all_came, all_read) = channel();
    let (result, took) = thread::scope(|scope| {
        scope.spawn(|| {
            let mut peer = Peer::destination(&listener, &server, None);
            assert!(matches!(peer.receive(), Some(Message::Describe(_))));
            peer.send(&Message::Accept(Accept {
                secret: SessionSecret([5; 32]),
                lanes_max: 4,
                endpoints: Vec::new(),
            }));
            let (mut lane, _) = take_lane(&listener, &server);
            peer.send(&Message::LaneUp { lane: 1 });
            let reader = thread::spawn(move || {
                let mut bytes = [0; 4096];
                let mut read = 0;
                while lane.read_exact(&mut bytes).is_ok() {
                    read += bytes.len();
                    if read == FILLED {
                        all_came.send(()).unwrap();
                    }
                }
            });
            only_answer(&mut peer);
            reader.join().unwrap();
        });
        let migrating = scope.spawn(|| send(&vm, &to, &client, &options, &cancel).0);
        all_read
            .recv_timeout(Duration::from_secs(60))
            .expect("the first pass was sent");
        assert!(vm.goes_on());
        let began = Instant::now();
        cancel.cancel();
        (migrating.join().unwrap(), began.elapsed())
    });
    let error = result.unwrap_err();
    assert_eq!(
        (error.code(), error.vm),
        (FaultCode::Cancelled, VmIs::AtSource),
        "{error}"
    );
    assert!(took < Duration::from_secs(3), "{took:?}");
    assert!(vm.goes_on());
}

/// A source has sent everything and does not commit. The VM does not run at the destination, and
/// an operator can cancel the migration there.
#[test]
fn i1_a_source_that_never_commits_is_ended_by_the_operator() {
    let (client, server) = tls();
    let options = impatient();
    let receiving = Receiving::start(&server, &options, TestBuilder::default());
    let victim = Victim {
        to: receiving.address,
        tls: &client,
    };
    let mut liar = victim.liar();
    liar.conclude(0, 0);
    liar.await_ready();
    receiving.cancel.cancel();
    let reply = liar
        .peer
        .await_message(|message| matches!(message, Message::Cancel { .. }));
    assert!(reply.is_some());
    drop(liar);
    let (result, builder, _) = receiving.finish(false);
    assert_eq!(result.err().unwrap().code(), FaultCode::Cancelled);
    assert_eq!(runs(&builder.built.unwrap()), 0);
}

/// At its idle limit, the destination gives up a source that only answers pings. It does so before
/// and after all memory has arrived.
///
/// Claim P9 of docs/security.
#[test]
fn i1_i2_a_source_that_only_answers_is_given_up_at_the_idle_limit() {
    for ready in [false, true] {
        let (client, server) = tls();
        let options = impatient()
            .to_builder()
            .idle_limit(Duration::from_secs(2))
            .build()
            .unwrap();
        let receiving = Receiving::start(&server, &options, TestBuilder::default());
        let victim = Victim {
            to: receiving.address,
            tls: &client,
        };
        let mut liar = victim.liar();
        // The chunks together take longer than the idle limit. Each chunk is progress and restarts
        // the limit, so the session continues.
        for number in 0..6 {
            thread::sleep(Duration::from_millis(500));
            assert!(liar.frame(&zero_chunk(number, 0, 4096 * number)), "{ready}");
        }
        if ready {
            liar.conclude(6, 6);
            liar.await_ready();
        }
        let began = Instant::now();
        let reply = liar
            .peer
            .await_message(|message| matches!(message, Message::Cancel { .. }));
        let Some(Message::Cancel { fault, text }) = reply else {
            panic!("no *cancel* was sent, ready: {ready}")
        };
        assert_eq!(fault, FaultCode::Standstill, "{text}");
        let took = began.elapsed();
        assert!((1..4).contains(&took.as_secs()), "{took:?}, ready: {ready}");
        drop(liar);
        let (result, builder, _) = receiving.finish(false);
        let error = result.err().unwrap();
        let said = with_causes(&error);
        assert_eq!(error.code(), FaultCode::Standstill, "{said}");
        for part in ["answers pings", "for 2s", "at fault: peer"] {
            assert!(said.contains(part), "no {part:?} in {said}");
        }
        assert_eq!(runs(&builder.built.unwrap()), 0);
    }
}
