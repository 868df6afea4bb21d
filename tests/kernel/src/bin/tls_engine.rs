//! Migrations over kernel TLS replace lanes that reach their record limit, break or stall.
//! One or both ends of a lane use kernel TLS.

use std::process::ExitCode;
use std::time::Duration;

use dunlin::engine::Cancel;
use dunlin::lane::offload::Offload;
use dunlin::lane::policy::{ClientTls, ServerTls};
use dunlin::lane::provider::Crypto;
use dunlin_kernel_tests::vm::{slowly, unhurried};
use dunlin_kernel_tests::{Guest, Needs, run};
use dunlin_test_support::engine::proxy::{At, Fault, Proxy};
use dunlin_test_support::engine::scene::{HOT_PAGES, Scene, quick};
use dunlin_test_support::engine::{Receiving, TestBuilder, TestVm};
use dunlin_test_support::lane::{Authority, DESTINATION, SOURCE, names};

const PAIRINGS: [[Offload; 2]; 3] = [
    [Offload::Kernel, Offload::Kernel],
    [Offload::Kernel, Offload::Process],
    [Offload::Process, Offload::Kernel],
];

fn main() -> ExitCode {
    let needs = Needs {
        limit_seconds: 180,
        ..Needs::NOTHING
    };
    run(&needs, |guest| {
        // Load the module, because the counters exist only after that.
        guest.command("modprobe", &["tls"]);
        for pairing in PAIRINGS {
            i3_a_guest_moves_while_lanes_are_replaced(guest, pairing);
        }
        for fault in [Fault::Cut, Fault::Swallow] {
            i3_i4_a_lane_that_dies_is_replaced(guest, fault);
        }
    })
}

/// The record limit of a lane is low, so the source replaces lanes.
fn i3_a_guest_moves_while_lanes_are_replaced(guest: &Guest, pairing: [Offload; 2]) {
    let tls = tls(pairing);
    let receiving = Receiving::start(&tls.1, &unhurried(), TestBuilder::default());
    let proxy = Proxy::start(receiving.address);
    let vm = TestVm::new(32 << 20);
    vm.fill(24 << 20);
    vm.start(HOT_PAGES, Duration::from_micros(100));
    let options = slowly(quick(2, 1).to_builder().records_per_lane(512).rate(None));
    let to = proxy.address.to_string();
    let before = sealed_by_kernel(guest);
    let (result, events) =
        dunlin_test_support::engine::send(&vm, &to, &tls.0, &options, &Cancel::new());
    let report = result.unwrap_or_else(|error| panic!("{error}: {events:?}"));
    assert_eq!(report.lanes_lost, 0, "{pairing:?}: {events:?}");
    assert_eq!(report.digests_equal, Some(true));
    assert!(report.lanes.len() >= 4, "{:?}", report.lanes);
    let of_kernel = pairing
        .iter()
        .filter(|&&end| end == Offload::Kernel)
        .count() as u64;
    let sealed = sealed_by_kernel(guest) - before;
    // A replacement lane may be established after the last page has been sent. The report then does
    // not list it.
    let carried = report.lanes.len() as u64;
    let opened = proxy.connections() as u64 - 1;
    let possible = of_kernel * carried..=of_kernel * opened;
    assert!(
        possible.contains(&sealed),
        "{pairing:?}: {sealed}, not {possible:?}"
    );
    for connection in 1..proxy.connections() {
        let records = proxy.progress(connection).records;
        assert!(records <= 512, "{records} records on {connection}");
    }
    assert!(receiving.finish(false).0.expect("the VM arrived").runs);
}

fn i3_i4_a_lane_that_dies_is_replaced(guest: &Guest, fault: Fault) {
    let before = sealed_by_kernel(guest);
    let scene = Scene::with(&tls(PAIRINGS[0]), 8, &unhurried(), HOT_PAGES);
    scene.proxy.strike_at(1, At::Opened(700_000), fault);
    let report = scene
        .send(&slowly(quick(2, 24).to_builder()))
        .unwrap_or_else(|error| panic!("{error}: {:?}", scene.events.lock()));
    assert_eq!(report.lanes_lost, 1, "{fault:?}: {:?}", scene.events.lock());
    assert!(sealed_by_kernel(guest) >= before + 4);
    scene.finish(&report);
}

fn tls([near, far]: [Offload; 2]) -> (ClientTls, ServerTls) {
    let authority = Authority::new();
    let crypto = |offload| Crypto {
        offload,
        ..Crypto::auto()
    };
    let (source, destination) = (
        authority.identity(&[SOURCE]),
        authority.identity(&[DESTINATION]),
    );
    let client = source.client(&crypto(near), names(&[DESTINATION]));
    let server = destination.server(&crypto(far), names(&[SOURCE]));
    (
        client.expect("the settings are valid"),
        server.expect("the settings are valid"),
    )
}

/// Returns the kernel's counter of connections with a sending key in the kernel. It starts at zero
/// with the machine, and also counts the connections of probes.
fn sealed_by_kernel(guest: &Guest) -> u64 {
    guest.counter("/proc/net/tls_stat", "TlsTxSw")
}
