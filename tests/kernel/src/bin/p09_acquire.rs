//! A policy that requests an SA for each CPU drops packets while it waits for the SA.
//! A fallback SA does not change this. Therefore Dunlin installs no such policy.

use std::io;
use std::net::TcpStream;
use std::process::ExitCode;
use std::time::Duration;

use dunlin_ipsec::xfrm::{Direction, Protocol};
use dunlin_kernel_tests::ipsec::acquires::{Acquires, add_acquiring_policy};
use dunlin_kernel_tests::ipsec::lanes::{Acceptor, Lane, users};
use dunlin_kernel_tests::ipsec::{
    CPUS, Family, Hosts, REQID, SaSet, lanes_from, needs_per_cpu, policies,
};
use dunlin_kernel_tests::{Needs, run};

const NEEDS: Needs = Needs {
    cpus: CPUS,
    packages: &["iproute2"],
    limit_seconds: 120,
    ..Needs::NOTHING
};

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        needs_per_cpu(guest);
        let hosts = Hosts::new(guest);
        let (a, b) = (&hosts.a, &hosts.b);
        let there = SaSet::new(0x1000, CPUS, Family::V4);
        there.fallback.add(a, b);
        there.own[0].add(a, b);
        SaSet::new(0x2000, 0, Family::V4).add(b, a);
        let selector = lanes_from(a, b, Family::V4, Protocol::TCP);
        let all = policies(&selector, a, b, REQID);
        for (host, policy) in &all {
            match policy.direction {
                Direction::Out if host.name == a.name => {
                    let added = host.run(|| add_acquiring_policy(policy));
                    added.expect("the kernel adds it");
                }
                _ => host.xfrm.add_policy(policy).expect("the kernel adds it"),
            }
        }
        let listener = Acceptor::open(b, Family::V4, 0);
        let connect = |cpu| -> io::Result<TcpStream> {
            let wait = Duration::from_secs(2);
            a.on_cpu(cpu, || TcpStream::connect_timeout(&listener.address, wait))
        };

        // CPU 0 has an SA, so the kernel does not request one.
        let lane = Lane::connect(a, 0, &listener);
        assert_eq!(users(&there, a, b, || lane.send(0, 50_000)), [Some(0)]);

        // Remove the only SA of a CPU. Otherwise a retransmission from that CPU could succeed.
        assert!(
            a.xfrm
                .remove_state(&there.own[0].id(b))
                .expect("the kernel answers")
        );
        // Without a key manager, packets are dropped, although a fallback SA exists.
        let before = (there.packets(a, b), a.statistics());
        let error = connect(1).expect_err("no key manager answers");
        let since = a.statistics();
        println!("no key manager: {error}, {:?}", since.since(&before.1));
        assert_eq!(
            there.packets(a, b),
            before.0,
            "the fallback SA carried packets"
        );
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);

        // A key manager listens but does not answer.
        let acquires = a.run(Acquires::open).expect("the socket opens");
        let before = there.packets(a, b);
        let first = connect(2);
        let after = there.packets(a, b);
        let requested = acquires.asked().expect("the socket is readable");
        println!(
            "first: {first:?}, requested for {requested:?}, packets {before:?} then {after:?}"
        );
        assert!(requested.contains(&Some(2)), "{requested:?}");
        let dropped = a.statistics();
        let second = connect(2);
        let since = a.statistics();
        println!(
            "second, while it waits: {second:?}, {:?}",
            since.since(&dropped)
        );

        // Without the flag `CPU_ACQUIRE`, the fallback SA is used and no SA is requested.
        for (host, policy) in &all {
            host.xfrm
                .replace_policy(policy)
                .expect("the kernel answers");
        }
        drop((first, second));
        let lane = Lane::connect(a, 3, &listener);
        assert_eq!(users(&there, a, b, || lane.send(3, 50_000)), [None]);
        assert_eq!(acquires.asked().expect("the socket is readable"), []);
    })
}
