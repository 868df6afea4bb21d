//! An accepted connection uses the SA of the CPU that received its handshake.
//! A new traffic class moves the connection to the SA of the CPU that sends.

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use dunlin_kernel_tests::ipsec::lanes::{
    Ending, Lane, Scene, look_again, read_all, used, write_all,
};
use dunlin_kernel_tests::ipsec::{CPUS, Family, needs_per_cpu, on_cpu};
use dunlin_kernel_tests::{Needs, run};

const NEEDS: Needs = Needs {
    cpus: CPUS,
    packages: &["iproute2"],
    limit_seconds: 120,
    ..Needs::NOTHING
};

const BYTES: usize = 200_000;

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        needs_per_cpu(guest);
        let scene = Scene::new(guest, Family::V4, [CPUS, CPUS]);
        let _lanes = moved(&scene);
        moved_under_load(&scene);
    })
}

/// After the move, the lane uses the SA of the chosen CPU, whichever CPU received its handshake.
fn moved(scene: &Scene) -> Vec<Lane> {
    let mut lanes = Vec::new();
    for cpu in 0..CPUS {
        let lane = scene.lane(cpu);
        let first = scene.back(|| lane.send_back((cpu + 1) % CPUS, BYTES));
        println!("connected from CPU {cpu}: the accepted end uses {first:?}");
        assert_eq!(first.len(), 1);
        for to in 0..CPUS {
            look_again(&lane.far, to, b"x");
            read_all(&lane.near, &mut [0; 2]);
            lane.send_back(to, 1);
            let by = scene.back(|| lane.send_back(0, BYTES));
            assert_eq!(by, [Some(to)]);
        }
        lanes.push(lane);
    }
    // Return the lanes, because a closed connection would still send packets later.
    lanes
}

/// The near end sends continuously from CPU 3, while the test moves the far end to other SAs. The
/// far end's acknowledgements leave from the CPU that receives the near end's packets. If an
/// acknowledgement triggers the lookup of the SA before the data does, the test repeats the move.
fn moved_under_load(scene: &Scene) {
    const ROUNDS: u32 = 12;
    let lane = scene.lane(3);
    let done = AtomicBool::new(false);
    let (tries, most) = thread::scope(|scope| {
        scope.spawn(|| {
            on_cpu(3, || {
                // The data does not contain the byte 255, which marks its end.
                let data = [1; 16 << 10];
                while !done.load(Ordering::Relaxed) {
                    write_all(&lane.near, &data);
                }
                write_all(&lane.near, &[255]);
            });
        });
        scope.spawn(|| {
            let mut part = vec![0; 16 << 10];
            loop {
                let count = std::io::Read::read(&mut &lane.far, &mut part);
                let count = count.expect("the socket is open");
                if count == 0 || part[..count].contains(&255) {
                    break;
                }
            }
        });
        let _ending = Ending {
            done: &done,
            lane: &lane,
        };
        let (mut tries, mut most) = (0, 0);
        for round in 0..ROUNDS {
            let cpu = round % 3;
            let mut tried = 0;
            loop {
                tried += 1;
                assert!(tried < 1000, "the lane does not move to CPU {cpu}");
                look_again(&lane.far, cpu, b"x");
                read_all(&lane.near, &mut [0; 2]);
                if used_by(scene, &lane, cpu) == [Some(cpu)] {
                    break;
                }
            }
            // The lane keeps this SA, because a connection that has an SA does not look it up
            // again.
            assert_eq!(used_by(scene, &lane, cpu), [Some(cpu)]);
            tries += tried;
            most = most.max(tried);
        }
        (tries, most)
    });
    println!("under load: {tries} tries for {ROUNDS} moves, at most {most} for one");
}

/// Sends a reply from a thread on `cpu`. Returns the CPUs of the SAs that carried the reply, or an
/// acknowledgement sent with it.
fn used_by(scene: &Scene, lane: &Lane, cpu: u32) -> Vec<Option<u32>> {
    let Scene { hosts, back, .. } = scene;
    let by = used(back, &hosts.b, &hosts.a, || {
        on_cpu(cpu, || write_all(&lane.far, b"1234"));
        read_all(&lane.near, &mut [0; 4]);
    });
    by.into_iter().map(|(cpu, _)| cpu).collect()
}
