//! On hosts with different numbers of CPUs, each direction has an SA for each CPU of its sender.
//! An SA can be added while lanes send.

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use dunlin_kernel_tests::ipsec::lanes::{
    Ending, Lane, Scene, look_again, read_all, used, write_all,
};
use dunlin_kernel_tests::ipsec::wire::Wire;
use dunlin_kernel_tests::ipsec::{CPUS, Family, Sa, needs_per_cpu, on_cpu};
use dunlin_kernel_tests::{Needs, run};
use dunlin_test_base::pattern;

const NEEDS: Needs = Needs {
    cpus: CPUS,
    packages: &["iproute2"],
    limit_seconds: 120,
    ..Needs::NOTHING
};

const BYTES: usize = 500_000;

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        needs_per_cpu(guest);
        for (family, cpus) in [(Family::V4, [2, 4]), (Family::V6, [4, 2])] {
            let scene = Scene::new(guest, family, cpus);
            let wire = Wire::tap(&scene.hosts);
            let lanes = one_each(&scene, cpus);
            one_more(&scene, &lanes, cpus[0]);
            assert_eq!(wire.left().into_iter().find(|seen| seen.is_leak()), None);
        }
    })
}

/// Opens four lanes, spread over the CPUs of each side. In each direction, a lane uses the SA of
/// its sender's CPU.
fn one_each(scene: &Scene, [there, back]: [u32; 2]) -> Vec<Lane> {
    let (a, b) = (&scene.hosts.a, &scene.hosts.b);
    let lanes: Vec<Lane> = (0..CPUS).map(|number| scene.lane(number % there)).collect();
    for (lane, number) in lanes.iter().zip(0..) {
        look_again(&lane.far, number % back, b"x");
        read_all(&lane.near, &mut [0; 2]);
        lane.send_back(number % back, 1);
    }
    for (way, from, to, cpus) in [(&scene.there, a, b, there), (&scene.back, b, a, back)] {
        let forth = cpus == there && from.name == a.name;
        let by = used(way, from, to, || {
            for (lane, number) in lanes.iter().zip(0..) {
                match forth {
                    true => lane.send(number % cpus, BYTES),
                    false => lane.send_back(number % cpus, BYTES),
                }
            }
        });
        println!("{} to {}: {by:?}", from.name, to.name);
        let own: Vec<_> = (0..cpus).map(Some).collect();
        let by: Vec<_> = by.into_iter().map(|(cpu, _)| cpu).collect();
        assert_eq!(by, own, "not exactly the SAs of the CPUs carried data");
    }
    lanes
}

/// If a CPU of host a has no SA yet, adds its SA while a lane sends: first at the receiver, then at
/// the sender. A new lane on this CPU uses the SA immediately. No packet is lost.
fn one_more(scene: &Scene, lanes: &[Lane], cpus: u32) {
    let (a, b) = (&scene.hosts.a, &scene.hosts.b);
    let done = AtomicBool::new(false);
    let before = [a, b].map(|host| host.statistics());
    thread::scope(|scope| {
        let Lane { near, far } = &lanes[0];
        scope.spawn(|| {
            on_cpu(0, || {
                while !done.load(Ordering::Relaxed) {
                    write_all(near, &pattern(10_000, 1));
                }
                near.shutdown(std::net::Shutdown::Write)
                    .expect("the socket is open");
            });
        });
        scope.spawn(|| {
            while std::io::Read::read(&mut &*far, &mut [0; 10_000]).expect("the socket is open") > 0
            {
            }
        });
        let _ending = Ending {
            done: &done,
            lane: &lanes[0],
        };
        let next = cpus % CPUS;
        let mut way = scene.there.clone();
        if next == cpus {
            let without = scene.lane(next);
            assert_eq!(scene.there(|| without.send(next, BYTES)), [None, Some(0)]);
            let sa = Sa::new(0x1800).of(way.fallback.family).of_cpu(next);
            sa.add(a, b);
            way.own.push(sa);
            let lane = scene.lane(next);
            let by = used(&way, a, b, || lane.send(next, BYTES));
            assert!(by.iter().any(|(cpu, _)| *cpu == Some(next)), "{by:?}");
            assert!(
                by.iter()
                    .all(|(cpu, _)| [Some(0), Some(next)].contains(cpu)),
                "{by:?}"
            );
        }
    });
    for (host, before) in [a, b].into_iter().zip(&before) {
        let lost = host.statistics();
        assert!(lost.since(before).is_empty(), "{:?}", lost.since(before));
    }
}
