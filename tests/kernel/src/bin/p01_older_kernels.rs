//! A kernel without per-CPU SAs silently ignores the CPU number in a request to add an SA. Dunlin
//! detects this when it reads the SA back. A kernel's version does not show whether the kernel has
//! per-CPU SAs.

use std::net::IpAddr;
use std::process::ExitCode;

use dunlin_ipsec::xfrm::{Direction, Error, Protocol, Xfrm};
use dunlin_kernel_tests::ipsec::{CPUS, Family, Hosts, Sa, protect};
use dunlin_kernel_tests::{Needs, run};
use dunlin_linux::privileges::keep_capabilities;
use dunlin_proto::ipsec::LEAST_SPI;

const NEEDS: Needs = Needs {
    cpus: CPUS,
    packages: &["iproute2"],
    ..Needs::NOTHING
};

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        let hosts = Hosts::new(guest);
        let Hosts { a, b, .. } = &hosts;
        let probed = a.xfrm.probe().expect("the kernel answers");
        let has_per_cpu = probed.cpu.is_some();
        assert_eq!(probed.cpu, has_per_cpu.then_some(0));
        // The supported kernels store the direction of an SA (since Linux 6.10).
        assert_eq!(probed.direction, Some(Direction::In));
        println!("per-CPU SAs: {has_per_cpu}");
        a.xfrm.esp().expect("the kernel has ESP");
        // The probes have removed the SAs that they reserved and added.
        assert_eq!(a.xfrm.states().expect("the kernel answers"), []);
        // The probe does not change an SA of another program, even if the SA has the probe's SPI.
        let mut other = Sa::new(LEAST_SPI).state(a, b, Direction::In);
        other.id.destination = IpAddr::from([192, 0, 2, 2]);
        a.xfrm.add_state(&other).expect("the kernel adds it");
        a.xfrm.esp().expect("the kernel has ESP");
        a.xfrm.verify(&other).expect("the SA is unchanged");
        a.xfrm.remove_state(&other.id).expect("the kernel answers");

        let sa = Sa::new(0x1000).of_cpu(1);
        let state = sa.state(a, b, Direction::Out);
        a.xfrm.add_state(&state).expect("the kernel accepts it");
        let held = a.xfrm.state(&state.id).expect("the kernel answers");
        let held = held.expect("the SA exists");
        assert_eq!(held.cpu, has_per_cpu.then_some(1));
        assert_eq!(held.direction, Some(Direction::Out));
        match a.xfrm.verify(&state) {
            Ok(()) => assert!(has_per_cpu),
            Err(Error::Differs { what: "the CPU" }) => assert!(!has_per_cpu),
            Err(other) => panic!("{other}"),
        }

        // Opening the socket checks that the thread has the capability.
        let refused = a.run(|| {
            keep_capabilities(&[]).expect("a thread may drop capabilities");
            Xfrm::open().map(drop)
        });
        let refused = refused.expect_err("the thread has no capabilities");
        println!("{refused}");
        assert!(matches!(refused, Error::NotPermitted { .. }), "{refused}");

        let _ = protect(&hosts, Family::V6, Protocol::UDP);
    })
}
