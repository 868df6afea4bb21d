//! Tests migrations through a proxy that reads the bytes of the lanes, stalls the handshake of one
//! lane, or disconnects a lane or the control lane. Also tests the errors for invalid and
//! unreachable addresses.
#![allow(clippy::unwrap_used)]

use std::net::TcpListener;
use std::thread;
use std::time::{Duration, Instant};

use dunlin::engine::destination::{self, DestinationEvent};
use dunlin::engine::source::LaneSecurity;
use dunlin::engine::vmm::FaultCode;
use dunlin::engine::{AtFault, Cancel, VmIs};
use dunlin_test_support::engine::proxy::Proxy;
use dunlin_test_support::engine::{Receiving, TestBuilder, TestVm, impatient, send, tls, verified};
use vm_memory::{Bytes, GuestAddress};

const CANARY: &[u8; 32] = b"never to be seen on any wire -->";

/// Moves a VM that has [`CANARY`] in 64 pages and `uuid` as its UUID. Returns the bytes of all
/// connections of this migration.
fn recorded(security: LaneSecurity, uuid: [u8; 16]) -> Vec<u8> {
    let (client, server) = tls();
    let options = destination::Options::builder()
        .allow_plain(true)
        .build()
        .unwrap();
    let receiving = Receiving::start(&server, &options, TestBuilder::default());
    let proxy = Proxy::start(receiving.address);
    proxy.record();
    let vm = TestVm::new(4 << 20);
    *vm.uuid.lock().unwrap() = uuid;
    vm.fill(1 << 20);
    for page in 0..64 {
        vm.memory
            .write_slice(CANARY, GuestAddress(page * 4096 + 100))
            .unwrap();
    }
    let options = verified(2).to_builder().security(security).build().unwrap();
    let to = proxy.address.to_string();
    let (result, _) = send(&vm, &to, &client, &options, &Cancel::new());
    assert_eq!(result.unwrap().digests_equal, Some(true));
    receiving.finish(false).0.unwrap();
    let seen = proxy.recorded();
    assert!(seen.len() > 1 << 20);
    seen
}

fn occurrences(seen: &[u8], wanted: &[u8]) -> usize {
    let parts = seen.windows(wanted.len());
    parts.filter(|part| *part == wanted).count()
}

/// Claim N1 of docs/security.
#[test]
fn i6_guest_memory_never_crosses_the_network_in_the_clear() {
    for security in [LaneSecurity::Tls, LaneSecurity::Plain] {
        let seen = recorded(security, [7; 16]);
        // Check the search itself: with plain lanes it must find the content.
        let expected = if security == LaneSecurity::Tls { 0 } else { 64 };
        assert_eq!(occurrences(&seen, CANARY), expected);
    }
}

/// The UUID is in the description, which the source sends on the control lane.
///
/// Claim N14 of docs/security.
#[test]
fn i6_the_control_lane_of_plain_lanes_is_not_plain() {
    let uuid = *b"UUID of a new VM";
    let seen = recorded(LaneSecurity::Plain, uuid);
    assert_eq!(occurrences(&seen, CANARY), 64);
    assert_eq!(occurrences(&seen, &uuid), 0);
}

#[test]
fn a_stalled_lane_handshake_delays_none_of_the_others_and_is_done_without() {
    let (client, server) = tls();
    let options = destination::Options::default();
    let receiving = Receiving::start(&server, &options, TestBuilder::default());
    let proxy = Proxy::start(receiving.address);
    // The proxy forwards no bytes of the first data lane.
    proxy.hold(1, 0);
    let vm = TestVm::new(4 << 20);
    vm.fill(1 << 20);
    vm.start(16, Duration::from_micros(100));
    let options = verified(4)
        .to_builder()
        .connect_limit(Duration::from_millis(1500))
        .build()
        .unwrap();
    let to = proxy.address.to_string();
    let began = Instant::now();
    thread::scope(|scope| {
        let sending = scope.spawn(|| send(&vm, &to, &client, &options, &Cancel::new()));
        let up = |event: &DestinationEvent| matches!(event, DestinationEvent::LaneUp { .. });
        while receiving
            .events
            .lock()
            .unwrap()
            .iter()
            .filter(|e| up(e))
            .count()
            < 3
        {
            assert!(
                began.elapsed() < Duration::from_secs(1),
                "the other lanes are not up"
            );
            thread::sleep(Duration::from_millis(2));
        }
        let report = sending.join().unwrap().0.unwrap();
        assert_eq!(report.digests_equal, Some(true));
        // The stalled lane carried nothing: at `connect_limit` the source begins with the other
        // lanes. The stalled lane counts as lost only if the source handles its failure before the
        // session ends.
        assert_eq!(report.lanes.len(), 3, "{report:?}");
        assert!(report.lanes_lost <= 1, "{report:?}");
    });
    assert!(began.elapsed() < Duration::from_secs(4));
    assert!(receiving.finish(false).0.unwrap().runs);
}

#[test]
fn cancelling_does_not_wait_for_a_stalled_handshake() {
    let (client, server) = tls();
    // Lanes connect to this listener, and get no answer.
    let silent = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let options = destination::Options::builder()
        .endpoints(vec![silent.local_addr().unwrap().to_string()])
        .build()
        .unwrap();
    let receiving = Receiving::start(&server, &options, TestBuilder::default());
    let vm = TestVm::new(4 << 20);
    vm.start(16, Duration::from_micros(100));
    let cancel = Cancel::new();
    let to = receiving.address.to_string();
    thread::scope(|scope| {
        let sending = scope.spawn(|| send(&vm, &to, &client, &verified(2), &cancel));
        let _lanes = [silent.accept().unwrap(), silent.accept().unwrap()];
        let began = Instant::now();
        cancel.cancel();
        let error = sending.join().unwrap().0.unwrap_err();
        assert_eq!(
            (error.code(), error.vm),
            (FaultCode::Cancelled, VmIs::AtSource),
            "{error}"
        );
        assert!(
            began.elapsed() < Duration::from_secs(2),
            "{:?}",
            began.elapsed()
        );
    });
    assert!(vm.goes_on());
    assert!(receiving.finish(true).0.is_err());
}

#[test]
fn i4_a_lane_that_is_cut_costs_what_it_had_under_way_and_no_more() {
    let (client, server) = tls();
    for lanes in [2, 8] {
        let options = destination::Options::default();
        let receiving = Receiving::start(&server, &options, TestBuilder::default());
        let proxy = Proxy::start(receiving.address);
        // Of the first data lane, the proxy forwards only the handshake, the opening and a part of
        // the first chunk. This lane cannot complete its pass, and the other lanes wait for it.
        proxy.hold(1, 60_000);
        let vm = TestVm::new(16 << 20);
        vm.fill(4 << 20);
        vm.start(64, Duration::from_micros(100));
        let to = proxy.address.to_string();
        let report = thread::scope(|scope| {
            // The rate is low enough that every lane gets a chunk of the first pass.
            let options = verified(lanes)
                .to_builder()
                .rate(Some(50 << 20))
                .build()
                .unwrap();
            let (vm, client) = (&vm, &client);
            let sending = scope.spawn(move || send(vm, &to, client, &options, &Cancel::new()));
            proxy.await_connections(usize::from(lanes) + 1);
            proxy.await_progress(1, |progress| progress.struck.is_some());
            proxy.cut(1);
            sending.join().unwrap().0.unwrap()
        });
        assert_eq!(report.digests_equal, Some(true));
        assert_eq!(report.lanes_lost, 1);
        assert!(report.pages_again > 0);
        // Without the pages that were sent again, the number of pages sent is at most the sum of
        // the pages of all passes.
        let waiting: u64 = report.iterations.iter().map(|one| one.pages).sum();
        let sent = report.traffic.raw_pages + report.traffic.zero_pages;
        assert!(sent <= waiting + report.pages_again, "{sent} {waiting}");
        assert!(receiving.finish(false).0.unwrap().runs);
    }
}

fn options_of() -> destination::Options {
    destination::Options::default()
}

#[test]
fn a_control_lane_that_is_cut_in_pre_copy_is_made_anew_and_no_iteration_restarts() {
    let (client, server) = tls();
    let receiving = Receiving::start(&server, &options_of(), TestBuilder::default());
    let proxy = Proxy::start(receiving.address);
    let vm = TestVm::new(16 << 20);
    vm.fill(4 << 20);
    vm.start(64, Duration::from_micros(100));
    let options = verified(2)
        .to_builder()
        .rate(Some(8 << 20))
        .build()
        .unwrap();
    let to = proxy.address.to_string();
    let report = thread::scope(|scope| {
        let sending = scope.spawn(|| send(&vm, &to, &client, &options, &Cancel::new()));
        receiving.await_event(|event| matches!(event, DestinationEvent::LaneUp { lane: 2 }));
        proxy.cut(0);
        sending.join().unwrap().0.unwrap()
    });
    assert_eq!(report.digests_equal, Some(true));
    assert_eq!((report.control_resumed, report.lanes_lost), (1, 0));
    assert_eq!(report.pages_again, 0);
    assert_eq!(report.iterations[0].pages, 2048);
    assert!(report.iterations[1..].iter().all(|one| one.pages <= 64));
    assert!(receiving.finish(false).0.unwrap().runs);
}

/// Claim N9 of docs/security.
#[test]
fn i2_a_control_lane_that_cannot_be_made_anew_leaves_the_vm_at_the_source() {
    let (client, server) = tls();
    let receiving = Receiving::start(&server, &impatient(), TestBuilder::default());
    let proxy = Proxy::start(receiving.address);
    let vm = TestVm::new(16 << 20);
    vm.fill(4 << 20);
    vm.start(64, Duration::from_micros(100));
    let options = verified(2)
        .to_builder()
        .rate(Some(2 << 20))
        .control_limit(Duration::from_millis(500))
        .build()
        .unwrap();
    let to = proxy.address.to_string();
    thread::scope(|scope| {
        let sending = scope.spawn(|| send(&vm, &to, &client, &options, &Cancel::new()));
        receiving.await_event(|event| matches!(event, DestinationEvent::LaneUp { lane: 2 }));
        proxy.refuse();
        proxy.cut(0);
        let error = sending.join().unwrap().0.unwrap_err();
        assert_eq!(
            (error.code(), error.vm),
            (FaultCode::ControlLost, VmIs::AtSource),
            "{error}"
        );
    });
    assert!(vm.goes_on());
    assert_eq!(
        receiving.finish(false).0.err().unwrap().code(),
        FaultCode::ControlLost
    );
    // The next attempt succeeds (invariant I5).
    let receiving = Receiving::start(&server, &options_of(), TestBuilder::default());
    let to = receiving.address.to_string();
    let (result, _) = send(&vm, &to, &client, &verified(2), &Cancel::new());
    assert_eq!(result.unwrap().digests_equal, Some(true));
    assert!(receiving.finish(false).0.unwrap().runs);
}

#[test]
fn what_is_no_address_is_the_configurations_fault_and_an_unheard_one_the_networks() {
    let (client, _) = tls();
    for (to, at_fault) in [
        ("127.0.0.1", AtFault::Configuration),
        ("127.0.0.1:65536", AtFault::Configuration),
        ("127.0.0.1:1", AtFault::Network),
    ] {
        let vm = TestVm::new(1 << 20);
        let error = send(&vm, to, &client, &verified(1), &Cancel::new())
            .0
            .unwrap_err();
        assert_eq!(
            (error.vm, error.at_fault()),
            (VmIs::AtSource, at_fault),
            "{error}"
        );
    }
}
