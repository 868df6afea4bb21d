//! A packet arrives after packets with higher sequence numbers. If it is still within the replay
//! window, the receiver accepts it exactly once. If it is older than the window, the receiver
//! assigns it to the next 2^32 sequence numbers, and the packet fails authentication.

use std::net::UdpSocket;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use dunlin_ipsec::xfrm::{Counters, Protocol};
use dunlin_kernel_tests::ipsec::lanes::{Acceptor, LIMIT, Lane, used};
use dunlin_kernel_tests::ipsec::wire::{Seen, left, seen, tap};
use dunlin_kernel_tests::ipsec::{CPUS, Family, Host, Hosts, LANES, Sa, SaSet, protect};
use dunlin_kernel_tests::{Guest, Needs, run};

const NEEDS: Needs = Needs {
    cpus: CPUS,
    packages: &["iproute2"],
    limit_seconds: 120,
    ..Needs::NOTHING
};

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        for family in [Family::V4, Family::V6] {
            overtaken(guest, family, 32, false);
            overtaken(guest, family, 1024, true);
        }
        four_cpus(guest);
    })
}

/// The first of 101 packets arrives after the other packets.
fn overtaken(guest: &Guest, family: Family, replay_window: u32, accepted: bool) {
    let hosts = Hosts::new(guest);
    let (a, b) = (&hosts.a, &hosts.b);
    let sa = Sa {
        replay_window,
        ..Sa::new(0x1000).of(family)
    };
    let _ = protect(&hosts, family, Protocol::UDP);
    sa.add_out(a, b);
    let wire = tap(a);
    let socket = |host: &Host, port| {
        let socket = host.run(|| UdpSocket::bind((host.address(family), port)));
        let socket = socket.expect("the port is free");
        socket
            .set_read_timeout(Some(LIMIT))
            .expect("the descriptor is a socket");
        socket
    };
    let (near, far) = (socket(a, 0), socket(b, LANES.port));
    let send = |byte: u8| {
        let to = (b.address(family), LANES.port);
        near.send_to(&[byte], to).expect("the packet is sent");
    };
    // The receiver has no SA yet, so it drops the packet.
    send(1);
    let until = Instant::now() + LIMIT;
    let mut first = None;
    while first.is_none() {
        assert!(Instant::now() < until, "nothing leaves");
        first = left(&wire).into_iter().find(|frame| {
            matches!(
                seen(frame),
                Seen::Esp {
                    spi: 0x1000,
                    sequence: 1,
                    ..
                }
            )
        });
        thread::sleep(Duration::from_millis(1));
    }
    let first = first.expect("the frame was captured");
    let is_dropped = || b.statistics().get("XfrmInNoStates") == 1;
    while !is_dropped() {
        assert!(Instant::now() < until, "the packet does not arrive");
    }
    sa.add_in(a, b);
    for byte in 2..=101 {
        send(byte);
        assert_eq!(receive(&far), byte);
    }
    let expect = |expected: Counters| {
        let until = Instant::now() + LIMIT;
        loop {
            let held = b.carried(&sa.id(b));
            let held = Counters { bytes: 0, ..held };
            if held == expected {
                return;
            }
            assert!(Instant::now() < until, "{held:?}, not {expected:?}");
            thread::sleep(Duration::from_millis(1));
        }
    };
    let all = Counters {
        packets: 100,
        ..Counters::default()
    };
    expect(all);
    wire.send(&first.bytes).expect("the packet is sent");
    let late = match accepted {
        true => {
            assert_eq!(receive(&far), 1);
            let all = Counters {
                packets: 101,
                ..all
            };
            expect(all);
            // Send the same packet again.
            wire.send(&first.bytes).expect("the packet is sent");
            Counters { replay: 1, ..all }
        }
        // With extended sequence numbers, the receiver treats no packet as too late. It infers the
        // upper half of a later sequence number instead (RFC 4303, appendix A2.2).
        false => Counters {
            integrity_failed: 1,
            ..all
        },
    };
    expect(late);
    let counted = |name| b.statistics().get(name);
    let errors = ["XfrmInStateSeqError", "XfrmInStateProtoError"].map(counted);
    assert_eq!(errors, if accepted { [1, 0] } else { [0, 1] });
    // A packet in which one bit was changed fails authentication.
    send(102);
    assert_eq!(receive(&far), 102);
    let next = left(&wire).pop().expect("the frame was captured");
    let mut wrong = next.bytes;
    let head = wrong.len() - 1;
    wrong[head] ^= 1;
    // Give the changed packet the sequence number of a packet that has not arrived.
    let sequence = 14 + if family == Family::V4 { 20 } else { 40 } + 4;
    wrong[sequence + 3] += 1;
    wire.send(&wrong).expect("the packet is sent");
    expect(Counters {
        integrity_failed: late.integrity_failed + 1,
        packets: late.packets + 1,
        ..late
    });
}

fn receive(socket: &UdpSocket) -> u8 {
    let mut byte = [0];
    loop {
        match socket.recv(&mut byte) {
            Ok(_) => return byte[0],
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => panic!("{error}"),
        }
    }
}

/// Four CPUs seal with one SA. The packets of these CPUs can overtake each other on the way to the
/// link. All data arrives nevertheless. How many packets the receiver rejects with its window
/// depends on when each CPU runs, so the test prints this number and has no limit for it.
fn four_cpus(guest: &Guest) {
    let hosts = Hosts::new(guest);
    let (a, b) = (&hosts.a, &hosts.b);
    let there = SaSet::new(0x1000, 0, Family::V4);
    there.add(a, b);
    SaSet::new(0x2000, 0, Family::V4).add(b, a);
    let _ = protect(&hosts, Family::V4, Protocol::TCP);
    let listener = Acceptor::open(b, Family::V4, 0);
    let lanes: Vec<Lane> = (0..CPUS)
        .map(|cpu| Lane::connect(a, cpu, &listener))
        .collect();
    let by = used(&there, a, b, || {
        thread::scope(|scope| {
            for (lane, cpu) in lanes.iter().zip(0..) {
                scope.spawn(move || lane.send(cpu, 1 << 20));
            }
        });
    });
    let counted = |name| b.statistics().get(name);
    let late = ["XfrmInStateSeqError", "XfrmInStateProtoError"].map(counted);
    println!("four CPUs on one SA: {by:?}, too late for the window or a replay: {late:?}");
    assert_eq!(by.len(), 1);
}
