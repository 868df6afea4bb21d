use dunlin_lane::sync::lock;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::sync::mpsc::Receiver;

use dunlin_proto::fault::FaultCode;
use dunlin_test_base::Scratch;
use dunlin_test_support::tunnel::fill_backlog;

use super::super::Acceptor;
use super::super::tests::{TIMEOUT, acceptor, until};
use super::*;

#[test]
fn i7_room_for_a_client_depends_on_idle_times_and_on_leaving_clients() {
    let now = Instant::now() + 10 * IDLE;
    let ago = |idle: Duration, has_sent_more| Activity {
        number: 0,
        is_leaving: false,
        has_sent_more,
        last: now - idle,
    };
    let leaving = || Activity {
        is_leaving: true,
        ..ago(2 * IDLE, true)
    };
    let short = Duration::from_nanos(1);
    let busy = || ago(Duration::ZERO, true);
    let many = |one: &dyn Fn() -> Activity, count| (0..count).map(|_| one()).collect::<Vec<_>>();
    for (case, most, mut all, expected) in [
        ("no clients", 1, vec![], Room::Free),
        ("fewer than the limit", 3, many(&busy, 2), Room::Free),
        ("all active", 2, many(&busy, 2), Room::Full),
        (
            "only a hello, at the grace period",
            1,
            vec![ago(GRACE, false)],
            Room::Evict(0),
        ),
        (
            "only a hello, before the grace period",
            1,
            vec![ago(GRACE - short, false)],
            Room::Full,
        ),
        (
            "more than a hello, at the idle limit",
            1,
            vec![ago(IDLE, true)],
            Room::Evict(0),
        ),
        (
            "more than a hello, before the idle limit",
            1,
            vec![ago(IDLE - short, true)],
            Room::Full,
        ),
        (
            "the longest idle",
            4,
            vec![
                busy(),
                ago(IDLE, true),
                ago(IDLE + short, true),
                ago(2 * GRACE, false),
            ],
            Room::Evict(2),
        ),
        (
            "the longest idle is below its limit",
            2,
            vec![ago(IDLE - short, true), ago(GRACE, false)],
            Room::Evict(1),
        ),
        ("one leaving", 2, vec![busy(), leaving()], Room::Free),
        (
            "one leaving, and the limit reached without it",
            2,
            [many(&busy, 2), vec![leaving()]].concat(),
            Room::Full,
        ),
        (
            "one leaving, and another evicted",
            1,
            vec![leaving(), ago(IDLE, true)],
            Room::Evict(1),
        ),
        (
            "the maximum leaving",
            1,
            [many(&leaving, LEAVING), vec![ago(IDLE, true)]].concat(),
            Room::Full,
        ),
    ] {
        for (number, one) in (0..).zip(&mut all) {
            one.number = number;
        }
        assert_eq!(room(most, &all, now), expected, "{case}");
    }
}

fn connected(acceptor: &Acceptor) -> TcpStream {
    let mut near = TcpStream::connect(acceptor.address()).unwrap();
    near.set_read_timeout(Some(TIMEOUT)).unwrap();
    near.write_all(b"x").unwrap();
    near
}

#[test]
fn i7_bytes_of_either_side_keep_a_client_and_the_idle_client_is_evicted() {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = Target::Tcp(server.local_addr().unwrap().to_string());
    let (acceptor, refusals) = acceptor(to, 3);
    let shared = &acceptor.shared;
    let mut all: Vec<_> = (0..3)
        .map(|_| {
            let mut near = connected(&acceptor);
            let mut far = server.accept().unwrap().0;
            far.set_read_timeout(Some(TIMEOUT)).unwrap();
            far.read_exact(&mut [0]).unwrap();
            near.write_all(b"+").unwrap();
            far.read_exact(&mut [0]).unwrap();
            (near, far)
        })
        .collect();
    let activity = |at: usize| {
        let state = lock(&shared.state);
        let mut all = state.forwarded.values().map(|one| one.activity());
        all.nth(at).unwrap()
    };
    // The acceptor counts bytes only after it has forwarded them, so wait until they are counted.
    until("bytes after the hello", || {
        (0..3).all(|at| activity(at).has_sent_more)
    });
    let silent = activity(2).last;
    until("the first client", || {
        all[0].0.write_all(b"x").unwrap();
        all[0].1.read_exact(&mut [0]).unwrap();
        activity(0).last > silent
    });
    until("the second client's backend", || {
        all[1].1.write_all(b"y").unwrap();
        all[1].0.read_exact(&mut [0]).unwrap();
        activity(1).last > silent
    });
    assert!(!make_room(shared, silent + IDLE - Duration::from_nanos(1)));
    assert!(make_room(shared, silent + IDLE));
    assert_aborted(&refusals);
    assert!(all[2].0.read_exact(&mut [0]).is_err());
    for (near, far) in &mut all[..2] {
        near.write_all(b"x").unwrap();
        far.read_exact(&mut [0]).unwrap();
    }
}

#[test]
fn i7_a_client_is_evicted_at_once_while_its_backend_does_not_accept() {
    let scratch = Scratch::new();
    let path = scratch.join("server");
    let _server = UnixListener::bind(&path).unwrap();
    let _queue = fill_backlog(&path);
    let (acceptor, refusals) = acceptor(Target::Unix(path), 1);
    let shared = &acceptor.shared;
    let mut near = connected(&acceptor);
    until("the client is forwarded", || {
        lock(&shared.state).forwarded.len() == 1
    });
    assert!(make_room(shared, Instant::now() + GRACE));
    // The acceptor aborts the client long before the backend's timeout.
    assert_aborted(&refusals);
    assert!(near.read_exact(&mut [0]).is_err());
    until("the client is removed", || {
        lock(&shared.state).forwarded.is_empty()
    });
}

/// Asserts that the next refusal has the code of [`Refusal::Aborted`].
fn assert_aborted(refusals: &Receiver<FaultCode>) {
    assert_eq!(refusals.recv_timeout(TIMEOUT), Ok(FaultCode::Ended));
}
