//! A route from unix socket to unix socket: bytes in both directions, ends and aborts.
#![allow(clippy::unwrap_used)]

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::time::{Duration, Instant};

use dunlin_proto::fault::{AtFault, FaultCode};
use dunlin_test_base::sockets::ReadOnce as _;
use dunlin_test_support::tunnel::{Pair, Setup, expect, join, send};
use dunlin_tunnel::Event;

#[test]
fn bytes_flow_both_ways_at_once_and_each_direction_ends_by_itself() {
    let pair = Pair::start(&Setup::default());
    let (near, far) = pair.channel();
    let bytes = 24 << 20;
    join(vec![
        send(&near, 1, bytes),
        send(&far, 2, bytes / 2),
        expect(&far, 1, bytes),
        expect(&near, 2, bytes / 2),
    ]);
    let closed = |event: &Event| matches!(event, Event::Closed { .. });
    pair.near_events.wait("close", closed);
    pair.far_events.wait("close", closed);
}

#[test]
fn a_direction_that_has_ended_leaves_the_other_open() {
    let pair = Pair::start(&Setup::default());
    let (mut near, mut far) = pair.channel();
    near.write_all(b"question").unwrap();
    near.shutdown(Shutdown::Write).unwrap();
    let mut question = String::new();
    far.read_to_string(&mut question).unwrap();
    assert_eq!(question, "question");
    for word in ["some ", "time ", "later"] {
        far.write_all(word.as_bytes()).unwrap();
        std::thread::sleep(Duration::from_millis(20));
    }
    drop(far);
    let mut answer = String::new();
    near.read_to_string(&mut answer).unwrap();
    assert_eq!(answer, "some time later");
}

#[test]
fn a_closed_connection_is_noticed_at_once_on_the_other_side() {
    let pair = Pair::start(&Setup::default());
    for near_goes in [true, false] {
        let (near, far) = pair.channel();
        let (goes, mut stays) = if near_goes { (near, far) } else { (far, near) };
        // Closing a unix socket with unread bytes makes the other end report a reset.
        stays.write_all(b"unread").unwrap();
        std::thread::sleep(Duration::from_millis(100));
        let begin = Instant::now();
        drop(goes);
        let mut all = Vec::new();
        let _ = stays.read_to_end(&mut all);
        assert!(all.is_empty());
        let error = loop {
            match stays.write_all(&[0; 4096]) {
                Ok(()) => assert!(begin.elapsed() < Duration::from_secs(2)),
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), ErrorKind::BrokenPipe);
        assert!(
            begin.elapsed() < Duration::from_secs(2),
            "{:?}",
            begin.elapsed()
        );
    }
}

#[test]
fn a_byte_is_sent_without_waiting_for_more() {
    let pair = Pair::start(&Setup::default());
    let (mut near, mut far) = pair.channel();
    let begin = Instant::now();
    let rounds = 200;
    let mut byte = [0];
    for round in 0..rounds {
        near.write_all(&[round as u8]).unwrap();
        far.read_exact(&mut byte).unwrap();
        far.write_all(&byte).unwrap();
        near.read_exact(&mut byte).unwrap();
        assert_eq!(byte, [round as u8]);
    }
    // This limit is far longer than the transfer of a byte takes, and far shorter than any timer
    // that could delay it.
    let each = begin.elapsed() / rounds;
    assert!(each < Duration::from_millis(20), "{each:?}");
}

#[test]
fn a_missing_target_refuses_the_channel_and_the_route_continues() {
    let pair = Pair::start(&Setup::default());
    let target = pair.scratch.join("target");
    let aside = pair.scratch.join("aside");
    std::fs::rename(&target, &aside).unwrap();
    let mut near = pair.connect();
    assert_eq!(near.read_once(&mut [0]).unwrap(), 0);
    let Event::Refused { route, failure } = pair
        .near_events
        .wait("refusal", |event| matches!(event, Event::Refused { .. }))
    else {
        unreachable!()
    };
    assert_eq!(route, "ram");
    assert_eq!(failure.code(), FaultCode::TargetUnreachable, "{failure}");
    assert_eq!(failure.at_fault(), AtFault::Peer, "{failure}");
    std::fs::rename(&aside, &target).unwrap();
    let (mut near, mut far) = pair.channel();
    near.write_all(b"x").unwrap();
    far.read_exact(&mut [0]).unwrap();
}
