//! Whole migrations between two threads: real lanes, real TLS, ordinary
//! memory with a writer.
#![allow(clippy::unwrap_used)]

mod engine_support;
mod lane_support;

use std::time::Duration;

use dunlin::engine::source::LaneSecurity;
use dunlin::engine::{Cancel, destination, source};
use dunlin::lane::identity::{ClientTls, ServerTls};
use dunlin::lane::provider::{Crypto, Provider};
use engine_support::{TestBuilder, TestVm, run, state};
use lane_support::{Authority, DESTINATION, SOURCE, names};

fn tls() -> (ClientTls, ServerTls) {
    let authority = Authority::new();
    let crypto = Crypto::with(Provider::built_in()[0]);
    let client = authority
        .identity(&[SOURCE])
        .client(&crypto, names(&[DESTINATION]))
        .unwrap();
    let server = authority
        .identity(&[DESTINATION])
        .server(&crypto, names(&[SOURCE]))
        .unwrap();
    (client, server)
}

fn verified(lanes: u16) -> source::Options {
    source::Options {
        lanes,
        verify: true,
        ..source::Options::default()
    }
}

#[test]
fn i3_a_running_vm_arrives_byte_for_byte_over_1_to_8_lanes() {
    let (client, server) = tls();
    for lanes in [1, 2, 3, 8] {
        let vm = TestVm::new(48 << 20);
        vm.fill(16 << 20);
        vm.start(2000, Duration::from_micros(20));
        let moved = run(
            &vm,
            (&client, &server),
            &verified(lanes),
            &destination::Options::default(),
            TestBuilder::default(),
            &Cancel::new(),
        );
        let report = moved.source.unwrap();
        let received = moved.destination.unwrap();
        let built = moved.builder.built.unwrap();
        assert_eq!(report.digests_equal, Some(true));
        assert_eq!(vm.digest(), built.digest());
        assert_eq!(*built.loaded.lock().unwrap(), state());
        assert!(received.runs && report.runs);
        assert_eq!(report.lanes.len(), usize::from(lanes));
        assert!(vm.writes.load(std::sync::atomic::Ordering::SeqCst) > 0);
        assert_eq!(
            vm.calls(),
            ["describe", "pause", "relinquish", "save", "hold", "destroy"]
        );
        assert_eq!(built.calls(), ["load", "acquire", "resume", "announce"]);
    }
}
