//! Several sessions in one process, each with its own thread and listener.
#![allow(clippy::unwrap_used)]

use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use dunlin::engine::vmm::RunState;
use dunlin::engine::{Cancel, VmIs};
use dunlin_test_support::engine::{Receiving, TestBuilder, TestVm, impatient, send, tls, verified};

const SESSIONS: usize = 4;

#[test]
fn i1_i3_four_vms_move_at_once_between_the_same_hosts_and_one_stays() {
    let (client, server) = tls();
    let together = Barrier::new(SESSIONS);
    thread::scope(|scope| {
        for number in 0..SESSIONS {
            let (client, server, together) = (&client, &server, &together);
            scope.spawn(move || {
                let vm = TestVm::new((4 + 2 * number) << 20);
                vm.fill(2 << 20);
                vm.start(64, Duration::from_micros(200));
                // The session that fails does not affect the others.
                let fails = number == 2;
                let builder = TestBuilder {
                    fail: fails.then_some("load"),
                    ..TestBuilder::default()
                };
                let receiving = Receiving::start(server, &impatient(), builder);
                let to = receiving.address.to_string();
                together.wait();
                let (result, _) = send(&vm, &to, client, &verified(2), &Cancel::new());
                let (received, builder, _) = receiving.finish(fails);
                let there = builder.built.unwrap();
                if fails {
                    assert_eq!(result.unwrap_err().vm, VmIs::AtSource);
                    assert!(received.is_err() && vm.goes_on());
                    return;
                }
                assert_eq!(result.unwrap().digests_equal, Some(true));
                assert!(received.unwrap().runs);
                assert_eq!(vm.digest(), there.digest(), "{number}");
                assert_eq!(*vm.state.lock().unwrap(), RunState::Stopped("moved".into()));
            });
        }
    });
}
