//! A tunnel in stripe mode with kernel TLS replaces lanes that reach their record limit.
//! One or both ends of a lane use kernel TLS.

use std::process::ExitCode;
use std::time::Duration;

use dunlin::lane::offload::Offload;
use dunlin_kernel_tests::{Guest, Needs, run};
use dunlin_test_support::tunnel::{Pair, Setup, expect, join, send};
use dunlin_tunnel::Limits;

const BYTES: usize = 64 << 20;

fn main() -> ExitCode {
    let needs = Needs {
        limit_seconds: 120,
        ..Needs::NOTHING
    };
    run(&needs, |guest| {
        // Load the module, because the counters exist only after that.
        guest.command("modprobe", &["tls"]);
        use Offload::{Kernel, Process};
        for offload in [[Kernel, Kernel], [Kernel, Process], [Process, Kernel]] {
            bytes_pass_in_both_directions_while_lanes_are_replaced(guest, offload);
        }
    })
}

fn bytes_pass_in_both_directions_while_lanes_are_replaced(guest: &Guest, offload: [Offload; 2]) {
    let before = guest.counter("/proc/net/tls_stat", "TlsTxSw");
    let pair = Pair::start(&Setup {
        lanes: 2,
        limits: Limits {
            lane_records: 1024,
            vanished: Duration::from_secs(60),
            connect: Duration::from_secs(60),
            ..Limits::default()
        },
        relayed: true,
        offload,
        ..Setup::default()
    });
    let (near, far) = pair.channel();
    join(vec![
        send(&near, 1, BYTES),
        send(&far, 2, BYTES / 4),
        expect(&far, 1, BYTES),
        expect(&near, 2, BYTES / 4),
    ]);
    let relay = pair.relay.as_ref().expect("the stream is piped");
    assert!(
        relay.count() >= 5,
        "too few connections, lanes were not replaced: {}",
        relay.count()
    );
    let kernels = offload
        .iter()
        .filter(|&&end| end == Offload::Kernel)
        .count() as u64;
    let sealed = guest.counter("/proc/net/tls_stat", "TlsTxSw") - before;
    // All connections except that of the control lane are lanes. In each direction, the last lane
    // is possibly not established yet.
    assert!(sealed >= kernels * (relay.count() as u64 - 3), "{sealed}");
    assert_eq!(guest.counter("/proc/net/tls_stat", "TlsDecryptError"), 0);
}
