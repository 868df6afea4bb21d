//! Dunlin removes only its own SAs and policies, and none of another program.
//! A policy that is left behind blocks the port until the policy is removed.

use std::net::TcpStream;
use std::process::ExitCode;
use std::time::Duration;

use dunlin_ipsec::xfrm::{Action, Protocol};
use dunlin_kernel_tests::ipsec::lanes::{Acceptor, Lane};
use dunlin_kernel_tests::ipsec::wire::Wire;
use dunlin_kernel_tests::ipsec::{Family, Host, Hosts, Sa, protect};
use dunlin_kernel_tests::{Guest, Needs, run};

const NEEDS: Needs = Needs {
    cpus: 4,
    packages: &["iproute2"],
    limit_seconds: 120,
    ..Needs::NOTHING
};

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        for family in [Family::V4, Family::V6] {
            beside_another(guest, family);
            left_behind(guest, family);
        }
    })
}

/// Returns the host's SAs and policies as `ip` lists them, without times and counters.
fn tables(guest: &Guest, host: &Host) -> [String; 2] {
    ["state", "policy"].map(|what| guest.output("ip", &["-n", &host.name, "xfrm", what]))
}

/// Another program has an SA and a policy with the same reqid and addresses, a neighbouring SPI and
/// a neighbouring port.
fn beside_another(guest: &Guest, family: Family) {
    let hosts = Hosts::new(guest);
    let (a, b) = (&hosts.a, &hosts.b);
    let [from, to] = [a, b].map(|host| host.address(family).to_string());
    let key = "0x000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f20212223";
    let state = format!(
        "-n {} xfrm state add src {from} dst {to} proto esp spi 0x1005 reqid 4242 mode transport \
         aead rfc4106(gcm(aes)) {key} 128",
        a.name
    );
    let policy = format!(
        "-n {} xfrm policy add src {from} dst {to} proto 6 dport 4112 dir out \
         tmpl src {from} dst {to} proto esp reqid 4242 mode transport",
        a.name
    );
    for line in [state, policy] {
        guest.command("ip", &line.split_whitespace().collect::<Vec<_>>());
    }
    let theirs = tables(guest, a);
    let read = a.xfrm.states().expect("the kernel answers");
    assert_eq!(read.len(), 1);
    assert_eq!(
        (read[0].id.spi, read[0].reqid, read[0].extended),
        (0x1005, 4242, false)
    );
    let listed = a.xfrm.policies().expect("the kernel answers");
    assert!(matches!(listed[..], [one] if matches!(one.action, Action::Protect { .. })));

    let ours = [Sa::new(0x1004), Sa::new(0x1006)].map(|sa| sa.of(family));
    for sa in &ours {
        sa.add_out(a, b);
    }
    let all = protect(&hosts, family, Protocol::TCP);
    assert_ne!(tables(guest, a), theirs);
    for (host, policy) in &all {
        assert!(host.xfrm.remove_policy(policy).expect("the kernel answers"));
        assert!(!host.xfrm.remove_policy(policy).expect("the kernel answers"));
    }
    for sa in &ours {
        assert!(a.xfrm.remove_state(&sa.id(b)).expect("the kernel answers"));
    }
    assert_eq!(
        tables(guest, a),
        theirs,
        "the other program's entries changed"
    );
}

/// The second host has policies but no SAs, as after a crash.
fn left_behind(guest: &Guest, family: Family) {
    let hosts = Hosts::new(guest);
    let (a, b) = (&hosts.a, &hosts.b);
    let listener = Acceptor::open(b, family, 0);
    let first = Lane::connect(a, 0, &listener);
    let all = protect(&hosts, family, Protocol::TCP);
    for (host, policy) in &all {
        if host.name == a.name {
            assert!(host.xfrm.remove_policy(policy).expect("the kernel answers"));
        }
    }
    let wait = Duration::from_secs(2);
    let connect = || a.run(|| TcpStream::connect_timeout(&listener.address, wait));
    let before = b.statistics();
    let wire = Wire::tap(&hosts);
    let error = connect().expect_err("the port is blocked");
    println!("{error}: {:?}", b.statistics().since(&before));
    let dropped = b.statistics();
    assert!(
        !dropped.since(&before).is_empty(),
        "the drop is not counted"
    );
    // Print the number of frames in the clear. Only the first host, which has no policies, should
    // have sent such frames.
    let answers = wire
        .left()
        .into_iter()
        .filter(|seen| seen.is_leak())
        .count();
    println!("{answers} frames in the clear from both hosts");
    for (host, policy) in &all {
        assert_eq!(
            host.xfrm.remove_policy(policy).expect("the kernel answers"),
            host.name == b.name
        );
    }
    connect().expect("no policy blocks it");
    first.send(0, 1000);
}
