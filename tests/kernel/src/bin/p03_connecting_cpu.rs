//! A connection uses the SA of the CPU that connected it, even if its thread moves to another CPU.
//! After lost packets the connection may use another SA. If a thread sets a new traffic class
//! while it runs on the CPU that connected the connection, the connection returns to that CPU's SA.

use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use dunlin_kernel_tests::ipsec::lanes::{LIMIT, Lane, Scene, look_again, read_all};
use dunlin_kernel_tests::ipsec::{CPUS, Family, needs_per_cpu};
use dunlin_kernel_tests::{Guest, Needs, Under, run};

const NEEDS: Needs = Needs {
    cpus: CPUS,
    packages: &["iproute2"],
    limit_seconds: 180,
    under: Under::Oldest,
    ..Needs::NOTHING
};

const BYTES: usize = 200_000;

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        needs_per_cpu(guest);
        for family in [Family::V4, Family::V6] {
            let scene = Scene::new(guest, family, [CPUS, CPUS]);
            stays(&scene);
            strays_and_comes_back(&scene);
            a_changed_route(guest, &scene);
            a_lost_syn(&scene);
            a_cut(guest, &scene);
        }
    })
}

/// Opens four connections from each CPU. All use the CPU's SA, also after their thread has moved to
/// another CPU.
fn stays(scene: &Scene) {
    // Keep all lanes open, because a closed connection would still send packets during the next
    // check.
    let mut lanes = Vec::new();
    for round in 0..4 {
        for cpu in 0..CPUS {
            let mut lane = None;
            let by = scene.there(|| lane = Some(scene.lane(cpu)));
            assert_eq!(by, [Some(cpu)], "the handshake, round {round}");
            let lane = lane.expect("the closure opened it");
            for from in 0..CPUS {
                let by = scene.there(|| lane.send(from, BYTES));
                assert_eq!(by, [Some(cpu)], "sent from CPU {from}");
            }
            lanes.push(lane);
        }
    }
}

/// A new traffic class moves the connection to another CPU's SA, and another new class moves it
/// back. While no packet is in flight, each move takes effect immediately.
fn strays_and_comes_back(scene: &Scene) {
    let lane = scene.lane(1);
    for round in 0..8 {
        let to = [3, 0, 2, 1][round % 4];
        move_to(scene, &lane, to);
        let by = scene.there(|| lane.send(1, BYTES));
        assert_eq!(by, [Some(to)], "round {round}");
    }
}

/// Changes the traffic class on `cpu`, and reads the bytes that are sent for this change.
fn move_to(_: &Scene, lane: &Lane, cpu: u32) {
    look_again(&lane.near, cpu, b"x");
    read_all(&lane.far, &mut [0; 2]);
    // Wait for the far end's acknowledgement, which could otherwise still be in flight.
    lane.send(cpu, 1);
}

/// When an address is added or removed, all connections of the host look up their route again. Each
/// does so at its next send, on the CPU of that send.
fn a_changed_route(guest: &Guest, scene: &Scene) {
    let a = &scene.hosts.a;
    let lane = scene.lane(1);
    for what in ["add", "del"] {
        for address in ["10.99.0.1/32", "fd99::1/128"] {
            guest.command("ip", &["-n", &a.name, "addr", what, address, "dev", "lo"]);
        }
        let by = scene.there(|| lane.send(3, BYTES));
        println!(
            "{:?}, an address {what}: sent from CPU 3 with {by:?}",
            scene.there.fallback.family
        );
        move_to(scene, &lane, 1);
        assert_eq!(scene.there(|| lane.send(3, BYTES)), [Some(1)], "repaired");
    }
}

/// SYNs are lost, because the receiver lacks the SA of CPU 2. Later the receiver gets this SA.
fn a_lost_syn(scene: &Scene) {
    let (a, b) = (&scene.hosts.a, &scene.hosts.b);
    let sa = scene.there.own[2];
    let mut strayed = 0;
    let mut lanes = Vec::new();
    for round in 0..1 {
        assert!(b.xfrm.remove_state(&sa.id(b)).expect("the kernel answers"));
        let before = b.statistics().get("XfrmInNoStates");
        let mut lane = None;
        let by = scene.there(|| {
            thread::scope(|scope| {
                let connecting = scope.spawn(|| scene.lane(2));
                // Wait until a packet is lost because the receiver has no SA for it.
                let until = Instant::now() + LIMIT;
                while b.statistics().get("XfrmInNoStates") == before {
                    assert!(Instant::now() < until, "nothing is lost");
                    thread::sleep(Duration::from_millis(10));
                }
                // Retransmitted SYNs may use another SA. Wait until one of them does and the lane
                // is connected, but for at most eight seconds.
                let begun = Instant::now();
                while !connecting.is_finished() && begun.elapsed() < Duration::from_secs(8) {
                    thread::sleep(Duration::from_millis(10));
                }
                sa.add_in(a, b);
                lane = Some(connecting.join().expect("the peer connects"));
            });
        });
        let lane = lane.expect("the closure opened it");
        let sent_by = scene.there(|| lane.send(2, BYTES));
        println!(
            "{:?} round {round}: SYNs with {by:?}, then with {sent_by:?}",
            sa.family
        );
        strayed += usize::from(sent_by != [Some(2)]);
        move_to(scene, &lane, 2);
        assert_eq!(scene.there(|| lane.send(2, BYTES)), [Some(2)], "repaired");
        // A program can also open another connection instead of repairing this one.
        let other = scene.lane(2);
        let by = scene.there(|| other.send(2, BYTES));
        assert_eq!(by, [Some(2)], "connected again");
        lanes.extend([lane, other]);
    }
    println!("{strayed} of 1 has strayed after lost SYNs");
}

/// For at least three seconds, all packets are dropped while a lane of each CPU sends.
fn a_cut(guest: &Guest, scene: &Scene) {
    let Scene { hosts, there, .. } = scene;
    // The number of timeouts after which the route is looked up again. The default is three. A
    // lower number makes the lookup happen sooner.
    guest.command(
        "ip",
        &[
            "netns",
            "exec",
            &hosts.a.name,
            "sysctl",
            "-q",
            "-w",
            "net.ipv4.tcp_retries1=2",
        ],
    );
    let lanes: Vec<Lane> = (0..CPUS).map(|cpu| scene.lane(cpu)).collect();
    let before = there.packets(&hosts.a, &hosts.b);
    // Without its inbound SAs, the second host drops all packets.
    for sa in there.all() {
        assert!(
            hosts
                .b
                .xfrm
                .remove_state(&sa.id(&hosts.b))
                .expect("the kernel answers")
        );
    }
    let sums = |packets: &[u64]| packets.iter().sum::<u64>();
    thread::scope(|scope| {
        let sending: Vec<_> = lanes
            .iter()
            .zip(0..)
            .map(|(lane, cpu)| scope.spawn(move || lane.send(cpu, BYTES)))
            .collect();
        let (begun, until) = (Instant::now(), Instant::now() + LIMIT);
        // Wait for 16 packets: each of the four lanes sends one packet and retransmits it three
        // times.
        while sums(&there.packets(&hosts.a, &hosts.b)) < sums(&before) + 16
            || begun.elapsed() < Duration::from_secs(3)
        {
            assert!(Instant::now() < until, "nothing is retransmitted");
            thread::sleep(Duration::from_millis(20));
        }
        for sa in there.all() {
            sa.add_in(&hosts.a, &hosts.b);
        }
        for lane in sending {
            lane.join().expect("the thread does not panic");
        }
    });
    let mut strayed = 0;
    for (lane, cpu) in lanes.iter().zip(0..) {
        let by = scene.there(|| lane.send(cpu, BYTES));
        strayed += usize::from(by != [Some(cpu)]);
        move_to(scene, lane, cpu);
        assert_eq!(
            scene.there(|| lane.send(cpu, BYTES)),
            [Some(cpu)],
            "repaired"
        );
    }
    println!("{strayed} of {CPUS} have strayed in a cut");
}
