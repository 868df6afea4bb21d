//! The kernel refuses an SA with a nonexistent CPU, an outbound replay window or an SPI in use.

use std::process::ExitCode;

use dunlin_ipsec::xfrm::{Action, Direction, Error, Policy, Protocol, State, StateId};
use dunlin_kernel_tests::ipsec::{
    CPUS, Family, Hosts, REQID, Sa, has_per_cpu, lanes_from, policies,
};
use dunlin_kernel_tests::{Guest, Needs, run};

const NEEDS: Needs = Needs {
    cpus: CPUS,
    packages: &["iproute2"],
    ..Needs::NOTHING
};

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        let hosts = Hosts::new(guest);
        if has_per_cpu() {
            cpus(&hosts);
        }
        windows(&hosts);
        updated(guest, &hosts);
        for family in [Family::V4, Family::V6] {
            taken(&hosts, family);
            same_selector(&hosts, family);
        }
    })
}

/// SAs for the first and the last CPU are accepted. An SA for the next CPU is refused.
fn cpus(Hosts { a, b, .. }: &Hosts) {
    for cpu in [0, CPUS - 1] {
        Sa::new(0x1000 + cpu).of_cpu(cpu).add_out(a, b);
    }
    let beyond = Sa::new(0x1100).of_cpu(CPUS).state(a, b, Direction::Out);
    let refused = a.xfrm.add_state(&beyond).expect_err("there is no such CPU");
    assert!(
        matches!(refused, Error::NoSuchCpu { cpu: CPUS }),
        "{refused}"
    );
}

/// An outbound SA must not have a replay window, and an inbound SA must have one of at most 4096
/// packets. The library keeps the text of the kernel's error.
fn windows(Hosts { a, b, .. }: &Hosts) {
    let outbound = State {
        replay_window: 64,
        ..Sa::new(0x1300).state(a, b, Direction::Out)
    };
    let refused = a
        .xfrm
        .add_state(&outbound)
        .expect_err("outbound SAs have no window");
    let Error::Refused { text, .. } = &refused else {
        panic!("{refused}");
    };
    println!("{refused}");
    assert!(text.as_ref().is_some_and(|text| !text.is_empty()));
    for window in [0, 4097] {
        let inbound = State {
            replay_window: window,
            ..Sa::new(0x1301).state(b, a, Direction::In)
        };
        a.xfrm
            .add_state(&inbound)
            .expect_err("the kernel refuses the window");
    }
    assert_eq!(
        a.xfrm.state(&outbound.id).expect("the kernel answers"),
        None
    );
}

/// Another program updates an SA with another key. The kernel reports success but keeps the old
/// key.
fn updated(guest: &Guest, Hosts { a, b, .. }: &Hosts) {
    let state = Sa::new(0x1500).state(a, b, Direction::Out);
    a.xfrm.add_state(&state).expect("the kernel adds it");
    let (from, to) = (state.source, state.id.destination);
    let line = format!(
        "-n {} xfrm state update src {from} dst {to} proto esp spi 0x1500 reqid {REQID} \
         mode transport aead rfc4106(gcm(aes)) 0x{} 128 replay-window 0 flag esn dir out",
        a.name,
        "77".repeat(36)
    );
    guest.command("ip", &line.split_whitespace().collect::<Vec<_>>());
    a.xfrm.verify(&state).expect("the SA has the old key");
}

/// An SPI identifies a single SA of a destination.
fn taken(Hosts { a, b, .. }: &Hosts, family: Family) {
    let wanted = Sa::new(0x1400).of(family).state(a, b, Direction::In);
    b.xfrm.add_state(&wanted).expect("the kernel adds it");
    b.xfrm.verify(&wanted).expect("the SA matches the request");
    let stranger = State {
        reqid: REQID + 1,
        ..wanted.clone()
    };
    let refused = b.xfrm.add_state(&stranger).expect_err("the SPI is in use");
    assert!(matches!(refused, Error::Taken { what: "SPI" }), "{refused}");
    // A second SA with the same SPI is refused even if it equals the first one.
    let refused = b.xfrm.add_state(&wanted).expect_err("the SPI is in use");
    assert!(matches!(refused, Error::Taken { what: "SPI" }), "{refused}");

    assert!(b.xfrm.remove_state(&wanted.id).expect("the kernel answers"));
    assert!(!b.xfrm.remove_state(&wanted.id).expect("the kernel answers"));
    let none = StateId {
        spi: 0x77,
        ..wanted.id
    };
    assert!(!b.xfrm.remove_state(&none).expect("the kernel answers"));
}

/// For one selector and direction, the kernel keeps a single policy, regardless of its priority.
/// That policy can be replaced by another. `remove_policy` removes a policy only if it is exactly
/// the requested policy.
fn same_selector(Hosts { a, b, .. }: &Hosts, family: Family) {
    let selector = lanes_from(a, b, family, Protocol::TCP);
    let (_, protect) = policies(&selector, a, b, REQID)[0];
    assert_eq!(protect.direction, Direction::Out);
    let block = Policy {
        action: Action::Block,
        priority: protect.priority + 1,
        ..protect
    };
    let held = || {
        let held = a.xfrm.policy(&selector, Direction::Out);
        let held = held.expect("the kernel answers");
        held.map(|(policy, _)| policy)
    };
    a.xfrm.add_policy(&block).expect("there is no other policy");
    let refused = a
        .xfrm
        .add_policy(&protect)
        .expect_err("the selector has a policy");
    assert!(
        matches!(refused, Error::Taken { what: "selector" }),
        "{refused}"
    );
    assert!(!a.xfrm.remove_policy(&protect).expect("the kernel answers"));
    assert_eq!(held(), Some(block));
    a.xfrm
        .replace_policy(&protect)
        .expect("the kernel replaces it");
    assert_eq!(held(), Some(protect));
    assert_eq!(a.xfrm.policies().expect("the kernel answers"), [protect]);
    assert!(a.xfrm.remove_policy(&protect).expect("the kernel answers"));
    assert!(!a.xfrm.remove_policy(&protect).expect("the kernel answers"));
    assert_eq!(held(), None);
}
