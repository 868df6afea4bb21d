//! A kernel without SAs of one CPU passes over the number in silence; what it is asked to read back tells, where its version does not.

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
        let knows = a.xfrm.has_per_cpu_sas().expect("it can be asked");
        // SAs of one CPU need one.
        assert!(a.xfrm.keeps_directions().expect("it can be asked"));
        println!("SAs of one CPU: {knows}");
        a.xfrm.esp().expect("it has ESP");
        // What was reserved and added for these questions is gone.
        assert_eq!(a.xfrm.states().expect("it can be asked"), []);
        // An SA that another program has where the probe would put its own stays.
        let mut other = Sa::new(LEAST_SPI).state(a, b, Direction::In);
        other.id.destination = IpAddr::from([192, 0, 2, 2]);
        a.xfrm.add_state(&other).expect("it is added");
        a.xfrm.esp().expect("it has ESP");
        a.xfrm.verify(&other).expect("it is as it was");
        a.xfrm.remove_state(&other.id).expect("it is there");

        let sa = Sa::new(0x1000).of_cpu(1);
        let state = sa.state(a, b, Direction::Out);
        a.xfrm
            .add_state(&state)
            .expect("it is added without a word");
        let held = a.xfrm.state(&state.id).expect("it can be asked");
        let held = held.expect("it is there");
        assert_eq!(held.cpu, knows.then_some(1));
        // Both kernels know directions (6.10).
        assert_eq!(held.direction, Some(Direction::Out));
        match a.xfrm.verify(&state) {
            Ok(()) => assert!(knows),
            Err(Error::Differs { what: "the CPU" }) => assert!(!knows),
            Err(other) => panic!("{other}"),
        }

        // The right to change anything is asked for when it is opened.
        let refused = a.run(|| {
            keep_capabilities(&[]).expect("they are its own");
            Xfrm::open().map(drop)
        });
        let refused = refused.expect_err("it has no capabilities");
        println!("{refused}");
        assert!(matches!(refused, Error::NotPermitted { .. }), "{refused}");

        let _ = protect(&hosts, Family::V6, Protocol::UDP);
    })
}
