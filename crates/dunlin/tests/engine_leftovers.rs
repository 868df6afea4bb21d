//! Tests that a session leaves none of its threads, sockets or other descriptors behind. The test
//! is alone in its process, because it counts all threads and descriptors of the process.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use dunlin::engine::Cancel;
use dunlin_test_support::engine::peer::{Peer, lane_open, open_lane};
use dunlin_test_support::engine::{
    Receiving, TestBuilder, TestVm, impatient, run, send, tls, verified,
};

/// A name, whether the session succeeds, and the function that runs it.
type Case<'a> = (&'a str, bool, Box<dyn Fn() -> bool + 'a>);

/// The numbers of this process's threads and descriptors.
fn held() -> (usize, usize) {
    let count = |path| fs::read_dir(path).unwrap().count();
    (count("/proc/self/task"), count("/proc/self/fd"))
}

#[test]
fn nothing_is_left_after_success_and_after_each_kind_of_failure() {
    let (client, server) = tls();
    let tls = (&client, &server);
    let options = impatient();
    let failing = |step| {
        let vm = TestVm::new(8 << 20);
        vm.fill(2 << 20);
        vm.start(64, Duration::from_micros(100));
        *vm.fail.lock().unwrap() = step;
        vm
    };
    let migrate = |vm: Arc<TestVm>, builder, cancel: &Cancel| {
        run(&vm, tls, &verified(4), &options, builder, cancel)
            .source
            .is_ok()
    };
    let cases: Vec<Case<'_>> = vec![
        (
            "success",
            true,
            Box::new(|| migrate(failing(None), TestBuilder::default(), &Cancel::new())),
        ),
        (
            "pause",
            false,
            Box::new(|| {
                migrate(
                    failing(Some("pause")),
                    TestBuilder::default(),
                    &Cancel::new(),
                )
            }),
        ),
        (
            "save",
            false,
            Box::new(|| {
                migrate(
                    failing(Some("save")),
                    TestBuilder::default(),
                    &Cancel::new(),
                )
            }),
        ),
        (
            "hold",
            false,
            Box::new(|| {
                migrate(
                    failing(Some("hold")),
                    TestBuilder::default(),
                    &Cancel::new(),
                )
            }),
        ),
        (
            "load",
            false,
            Box::new(|| {
                let builder = TestBuilder {
                    fail: Some("load"),
                    ..TestBuilder::default()
                };
                migrate(failing(None), builder, &Cancel::new())
            }),
        ),
        (
            "resume",
            false,
            Box::new(|| {
                let builder = TestBuilder {
                    fail: Some("resume"),
                    ..TestBuilder::default()
                };
                migrate(failing(None), builder, &Cancel::new())
            }),
        ),
        (
            "cancelled",
            false,
            Box::new(|| {
                let cancel = Cancel::new();
                cancel.cancel();
                migrate(failing(None), TestBuilder::default(), &cancel)
            }),
        ),
        (
            "no listener",
            false,
            Box::new(|| {
                send(
                    &failing(None),
                    "127.0.0.1:1",
                    &client,
                    &verified(2),
                    &Cancel::new(),
                )
                .0
                .is_ok()
            }),
        ),
        (
            "a source that goes away",
            false,
            Box::new(|| {
                let receiving = Receiving::start(&server, &options, TestBuilder::default());
                let (peer, accept) = Peer::accepted(receiving.address, &client);
                let open = lane_open(peer.envelope.session, &accept.secret, 1);
                let lane = open_lane(receiving.address, Some(&client), &open);
                drop((peer, lane));
                receiving.finish(false).0.is_ok()
            }),
        ),
        (
            "a destination without a source",
            false,
            Box::new(|| {
                Receiving::start(&server, &options, TestBuilder::default())
                    .finish(true)
                    .0
                    .is_ok()
            }),
        ),
    ];
    // The first migration creates resources that the process keeps until it ends.
    migrate(failing(None), TestBuilder::default(), &Cancel::new());
    let before = held();
    for (name, well, case) in cases {
        assert_eq!(case(), well, "{name}");
        // A thread that has been joined disappears from /proc a moment later.
        let until = Instant::now() + Duration::from_millis(500);
        while held() != before && Instant::now() < until {
            thread::sleep(Duration::from_millis(2));
        }
        assert_eq!(held(), before, "threads and descriptors after: {name}");
    }
}
