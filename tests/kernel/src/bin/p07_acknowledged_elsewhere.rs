//! A connection's acknowledgements may arrive on another CPU than the writer's. The data that this
//! CPU then sends still uses the connection's SA.

use std::process::ExitCode;
use std::thread;

use dunlin_kernel_tests::ipsec::lanes::{Scene, read_all, write_all};
use dunlin_kernel_tests::ipsec::{CPUS, Family, needs_per_cpu, on_cpu};
use dunlin_kernel_tests::{Needs, run};
use dunlin_linux::socket::set_buffers;
use dunlin_linux::tcp::incoming_cpu;
use dunlin_test_base::pattern;

const NEEDS: Needs = Needs {
    cpus: CPUS,
    packages: &["iproute2"],
    limit_seconds: 120,
    ..Needs::NOTHING
};

const BYTES: usize = 2 << 20;

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        needs_per_cpu(guest);
        let scene = Scene::new(guest, Family::V4, [CPUS, CPUS]);
        let mut elsewhere = 0;
        let mut lanes = Vec::new();
        for (from, to) in [(0, 3), (2, 1), (1, 0)] {
            let lane = scene.lane(from);
            // With this small buffer, the writer usually waits for buffer space, and each
            // acknowledgement allows more data to be sent.
            set_buffers(&lane.near, Some(16 << 10), None).expect("the socket is connected");
            let by = scene.there(|| {
                thread::scope(|scope| {
                    scope.spawn(|| on_cpu(from, || write_all(&lane.near, &pattern(BYTES, 1))));
                    let mut all = vec![0; BYTES];
                    on_cpu(to, || read_all(&lane.far, &mut all));
                    assert!(all == pattern(BYTES, 1));
                });
            });
            let acknowledged_on = incoming_cpu(&lane.near).expect("the socket is connected");
            println!(
                "from CPU {from}, read on {to}: acknowledged on {acknowledged_on}, sent with {by:?}"
            );
            assert_eq!(by, [Some(from)]);
            elsewhere += u32::from(acknowledged_on != from);
            lanes.push(lane);
        }
        println!("{elsewhere} of 3 were acknowledged on another CPU");
    })
}
