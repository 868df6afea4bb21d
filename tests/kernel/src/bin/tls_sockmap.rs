//! A map of sockets takes none that has keys; kernels that let keys come afterwards send in the clear what a program redirects.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::process::ExitCode;
use std::time::Duration;

use dunlin_kernel_tests::tls::{
    DATA, Half, Keys, connected, errno, install, kernels, read_record, set,
};
use dunlin_kernel_tests::{Needs, run};
use dunlin_linux::ktls::{Direction, attach};
use dunlin_rig::linux::bpf::{Kind, SocketMap, Task, load, redirect, whatever_has_come};
use nix::errno::Errno;

const TEXT: &[u8] = b"a guest's memory";

fn main() -> ExitCode {
    run(&Needs::NOTHING, |_| {
        for kind in [Kind::Received, Kind::Sent] {
            without_keys_it_goes_from_one_to_the_other(kind);
            none_with_keys_is_taken(kind);
        }
        if keys_are_refused_afterwards() {
            return;
        }
        what_was_opened_goes_on_with_its_record_around_it();
        what_is_redirected_leaves_in_the_clear();
    })
}

/// A map whose program redirects to the second socket what the first receives, or is given to send.
fn map(kind: Kind) -> SocketMap {
    let map = SocketMap::new(2).expect("the kernel has such maps");
    let verdict = load(kind, &redirect(kind, &map, 1)).expect("it is a program");
    if kind == Kind::Sent {
        map.attach(Task::JudgeSent, &verdict).expect("it judges");
    } else {
        let parser = load(kind, &whatever_has_come()).expect("it is a program");
        map.attach(Task::Parse, &parser).expect("it parses");
        map.attach(Task::Judge, &verdict).expect("it judges");
    }
    map
}

fn without_keys_it_goes_from_one_to_the_other(kind: Kind) {
    let map = map(kind);
    let ((mut from_far, mut from), (to, mut to_far)) = (connected(), connected());
    map.put(0, &from).expect("it is taken");
    map.put(1, &to).expect("it is taken");
    let source = if kind == Kind::Sent {
        &mut from
    } else {
        &mut from_far
    };
    source.write_all(TEXT).expect("it is sent");
    let mut got = [0; TEXT.len()];
    to_far.read_exact(&mut got).expect("it arrives");
    assert_eq!(got, TEXT);
}

/// sk_psock_init refuses a socket that has an upper protocol.
fn none_with_keys_is_taken(kind: Kind) {
    let map = map(kind);
    let (near, _far) = kernels();
    assert_eq!(map.put(0, &near).map_err(errno), Err(Errno::EINVAL));
    let (near, _far) = connected();
    attach(&near).expect("the kernel has TLS");
    assert_eq!(map.put(0, &near).map_err(errno), Err(Errno::EINVAL));
}

/// The kernel's 460e6486617c ("tls: reject the combination of TLS and sockmap") and its copies.
fn keys_are_refused_afterwards() -> bool {
    let map = map(Kind::Received);
    let (near, _far) = connected();
    map.put(0, &near).expect("it is taken");
    attach(&near).expect("the kernel has TLS");
    let outcomes = [
        set(&near, Direction::Sending, &Keys::new(1)),
        set(&near, Direction::Receiving, &Keys::new(2)),
    ];
    println!(
        "count of keys that a socket of a map takes: {}",
        outcomes.iter().flatten().count()
    );
    match outcomes {
        [Err(Errno::EINVAL), Err(Errno::EINVAL)] => true,
        [Ok(()), Ok(())] => false,
        other => panic!("neither: {other:?}"),
    }
}

/// Two connections whose near ends are in the map, and have keys afterwards.
fn with_keys(kind: Kind) -> (SocketMap, [TcpStream; 2], [TcpStream; 2]) {
    let map = map(kind);
    let ((from_far, from), (to, to_far)) = (connected(), connected());
    map.put(0, &from).expect("it is taken");
    map.put(1, &to).expect("it is taken");
    install(&from, &Keys::new(1), &Keys::new(2));
    install(&to, &Keys::new(3), &Keys::new(4));
    (map, [from, to], [from_far, to_far])
}

/// And only when somebody reads from the first: records are opened by a read.
fn what_was_opened_goes_on_with_its_record_around_it() {
    let (_map, [mut from, _to], [mut from_far, mut to_far]) = with_keys(Kind::Received);
    let record = Half::new(&Keys::new(2)).seal(DATA, TEXT);
    from_far.write_all(&record).expect("it is sent");
    let short = Some(Duration::from_millis(500));
    to_far.set_read_timeout(short).expect("it can be set");
    let nothing = to_far.read(&mut [0]).expect_err("nobody reads");
    assert_eq!(nothing.kind(), ErrorKind::WouldBlock);

    from.set_read_timeout(short).expect("it can be set");
    let nothing = from.read(&mut [0; 64]).expect_err("it is redirected");
    assert_eq!(nothing.kind(), ErrorKind::WouldBlock);
    to_far.set_read_timeout(None).expect("it can be set");
    let redirected = read_record(&mut to_far)
        .expect("it arrives")
        .expect("no end");
    let opened = Half::new(&Keys::new(3)).open(&redirected);
    let (_, content) = opened.expect("it is sealed with the second one's keys");
    assert_eq!(content.len(), record.len(), "as long as a record");
    assert_ne!(content, TEXT);
}

fn what_is_redirected_leaves_in_the_clear() {
    let (_map, [mut from, _to], [_from_far, mut to_far]) = with_keys(Kind::Sent);
    from.write_all(TEXT).expect("nothing refuses it");
    let mut got = [0; TEXT.len()];
    to_far.read_exact(&mut got).expect("it arrives");
    assert_eq!(got, TEXT, "no key was used");
}
