//! Receive packet steering (RPS) spreads the packets of several SAs over CPUs.
//! It uses the SPI for plain ESP, and the ports for ESP in UDP. A single IPv4 SA stays on one CPU.

use std::collections::BTreeSet;
use std::net::UdpSocket;
use std::process::ExitCode;

use dunlin_ipsec::xfrm::{Encapsulation, PortBlock, Protocol};
use dunlin_kernel_tests::ipsec::lanes::{Acceptor, Lane};
use dunlin_kernel_tests::ipsec::{
    CPUS, ENCAPSULATED, Family, Hosts, LANES, LINK, REQID, Sa, lanes_from, policies,
};
use dunlin_kernel_tests::{Guest, Needs, run};
use dunlin_linux::tcp::incoming_cpu;
use dunlin_linux::udp_encap::receive_encapsulated;

const NEEDS: Needs = Needs {
    cpus: CPUS,
    packages: &["iproute2"],
    limit_seconds: 120,
    ..Needs::NOTHING
};

const BYTES: usize = 50_000;
/// The CPU that receives the packets from the link.
const QUEUE: u32 = 1;
/// The maximum number of lanes. The kernel's hash of the ports differs at each boot. With this many
/// lanes, the probability that fewer than three of four CPUs are used is about one in a billion.
const MOST: u16 = 32;

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        for family in [Family::V4, Family::V6] {
            for within_udp in [false, true] {
                let case = Case {
                    family,
                    within_udp,
                    each: true,
                    steered: true,
                };
                // The receiver spreads the packets by the SPI or by the ports.
                let seen = spread(guest, case);
                assert!(seen.len() >= 3, "{case:?}: {seen:?}");
                let one_sa = Case {
                    each: false,
                    ..case
                };
                let seen = spread(guest, one_sa);
                // IPv6 packets have the flow label of their connection, which is part of the hash.
                assert!(
                    seen.len() == 1 || family == Family::V6,
                    "{one_sa:?}: {seen:?}"
                );
                let one_queue = Case {
                    steered: false,
                    ..case
                };
                assert_eq!(spread(guest, one_queue), [QUEUE].into(), "{one_queue:?}");
            }
        }
    })
}

/// The parameters of a test case.
#[derive(Clone, Copy, Debug)]
struct Case {
    family: Family,
    within_udp: bool,
    /// Whether each lane has an SA of its own.
    each: bool,
    /// Whether the receiver uses RPS.
    steered: bool,
}

/// Returns the CPUs that process the received packets of the lanes.
fn spread(guest: &Guest, case: Case) -> BTreeSet<u32> {
    let Case {
        family, within_udp, ..
    } = case;
    let hosts = Hosts::with_one_queue(guest, QUEUE);
    let (a, b) = (&hosts.a, &hosts.b);
    let steer = format!("echo f >/sys/class/net/{LINK}/queues/rx-0/rps_cpus");
    if case.steered {
        guest.command("ip", &["netns", "exec", &b.name, "sh", "-c", &steer]);
    }
    let address = (b.address(family), ENCAPSULATED);
    let socket = b
        .run(|| UdpSocket::bind(address))
        .expect("the port is free");
    receive_encapsulated(&socket).expect("the kernel has ESP in UDP");
    let mut seen = BTreeSet::new();
    let mut lanes = Vec::new();
    for number in 0..MOST {
        let spi = match case.each {
            true => u32::from(number),
            false => 0,
        };
        let reqid = REQID + spi;
        let there = Sa {
            reqid,
            encapsulation: within_udp.then_some(Encapsulation {
                source_port: 50_000 + number,
                destination_port: ENCAPSULATED,
            }),
            ..Sa::new(0x1000 + spi).of(family)
        };
        let back = Sa {
            reqid,
            ..Sa::new(0x2000 + spi).of(family)
        };
        if number == 0 || case.each {
            there.add(a, b);
            back.add(b, a);
        }
        let mut selector = lanes_from(a, b, family, Protocol::TCP);
        selector.destination_ports = PortBlock::only(LANES.port + number);
        for (host, policy) in policies(&selector, a, b, reqid) {
            host.xfrm.add_policy(&policy).expect("the kernel adds it");
        }
        let lane = Lane::connect(a, 1, &Acceptor::open(b, family, number));
        lane.send(1, BYTES);
        assert!(a.carried(&there.id(b)).packets > 0);
        seen.insert(incoming_cpu(&lane.far).expect("the socket is connected"));
        lanes.push(lane);
        if seen.len() >= 3 || ((!case.each || !case.steered) && number == 7) {
            break;
        }
    }
    println!("{case:?}: {} lanes on CPUs {seen:?}", lanes.len());
    seen
}
