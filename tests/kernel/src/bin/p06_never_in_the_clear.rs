//! While a stream's policies exist, none of its packets leaves in the clear.
//! This holds whatever SAs and other policies are added or removed. The packets use another SA or
//! wait.

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use dunlin_ipsec::xfrm::{Action, Direction, Network, Policy, PortBlock, Protocol};
use dunlin_kernel_tests::ipsec::lanes::{Acceptor, Ending, LIMIT, Lane, write_all};
use dunlin_kernel_tests::ipsec::wire::{Seen, Wire};
use dunlin_kernel_tests::ipsec::{
    Family, Host, Hosts, REQID, Sa, has_per_cpu, lanes_from, on_cpu, policies, protect,
};
use dunlin_kernel_tests::{Guest, Needs, Under, run};
use dunlin_test_base::pattern;

const NEEDS: Needs = Needs {
    cpus: 4,
    packages: &["iproute2"],
    limit_seconds: 180,
    under: Under::Oldest,
    ..Needs::NOTHING
};

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        for family in [Family::V4, Family::V6] {
            under_a_stream(guest, family);
        }
    })
}

/// A lane on which data is written and read continuously.
struct Stream<'a> {
    received: &'a AtomicU64,
    wire: &'a Wire,
}

impl Stream<'_> {
    /// Waits until more data has arrived.
    fn continues(&self, after: &str) {
        let until = Instant::now() + LIMIT;
        let before = self.received.load(Ordering::Relaxed);
        while self.received.load(Ordering::Relaxed) < before + 20_000 {
            assert!(Instant::now() < until, "no data arrives after: {after}");
            thread::sleep(Duration::from_millis(1));
        }
        self.sealed(after);
    }

    /// Waits until no more data arrives.
    fn stops(&self, after: &str) {
        let until = Instant::now() + LIMIT;
        loop {
            let before = self.received.load(Ordering::Relaxed);
            // The writer sends data every millisecond. If nothing arrives during this wait, the
            // stream has stopped.
            thread::sleep(Duration::from_millis(300));
            if self.received.load(Ordering::Relaxed) == before {
                break;
            }
            assert!(Instant::now() < until, "data still arrives after: {after}");
        }
        self.sealed(after);
    }

    /// Checks that all frames that were captured since the last call were sealed.
    fn sealed(&self, after: &str) {
        let left = self.wire.left();
        let leak = left.iter().find(|seen| seen.is_leak());
        assert_eq!(leak, None, "after: {after}");
    }
}

fn under_a_stream(guest: &Guest, family: Family) {
    let hosts = Hosts::new(guest);
    let (a, b) = (&hosts.a, &hosts.b);
    let wire = Wire::tap(&hosts);
    let fallback = Sa::new(0x1000).of(family);
    let own = match has_per_cpu() {
        true => Sa::new(0x1001).of(family).of_cpu(1),
        false => Sa::new(0x1001).of(family),
    };
    let answers = Sa::new(0x2000).of(family);
    for (sa, from, to) in [(fallback, a, b), (own, a, b), (answers, b, a)] {
        sa.add(from, to);
    }
    let all = protect(&hosts, family, Protocol::TCP);
    let listener = Acceptor::open(b, family, 0);
    let lane = Lane::connect(a, 1, &listener);
    let (received, done) = (AtomicU64::new(0), AtomicBool::new(false));
    let stream = Stream {
        received: &received,
        wire: &wire,
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            on_cpu(1, || {
                let data = pattern(8 << 10, 1);
                while !done.load(Ordering::Relaxed) {
                    write_all(&lane.near, &data);
                    // Leave CPU time for the guest's other threads.
                    thread::sleep(Duration::from_millis(1));
                }
                lane.near
                    .shutdown(std::net::Shutdown::Write)
                    .expect("the socket is open");
            });
        });
        scope.spawn(|| {
            let mut part = vec![0; 64 << 10];
            loop {
                match std::io::Read::read(&mut &lane.far, &mut part).expect("the socket is open") {
                    0 => break,
                    count => received.fetch_add(count as u64, Ordering::Relaxed),
                };
            }
        });
        let _ending = Ending {
            done: &done,
            lane: &lane,
        };
        stream.continues("the beginning");
        changed_under(&stream, a, b, [fallback, own], family);
        for (host, policy) in &all {
            replaced(&stream, host, policy);
        }
    });
    stream.sealed("all of it");
    drop(lane);
    removed(&hosts, &wire, &all, [fallback, own, answers], family);
}

/// While a stream runs, removes and adds SAs, and adds and removes policies other than the lane's
/// own.
fn changed_under(
    stream: &Stream<'_>,
    a: &Host,
    b: &Host,
    [fallback, own]: [Sa; 2],
    family: Family,
) {
    let selector = lanes_from(a, b, family, Protocol::TCP);
    // Remove the SA that the sender uses. The other SA takes over.
    assert!(a.xfrm.remove_state(&own.id(b)).expect("the kernel answers"));
    let before = a.carried(&fallback.id(b)).packets;
    stream.continues("its SA was removed");
    assert!(a.carried(&fallback.id(b)).packets > before);
    // Remove the last SA. The stream waits.
    assert!(
        a.xfrm
            .remove_state(&fallback.id(b))
            .expect("the kernel answers")
    );
    stream.stops("the last SA was removed");
    // Add an SA with another key. The stream continues.
    let next = Sa::new(0x1800).of(family);
    next.add(a, b);
    stream.continues("a new SA was added");
    // Remove the SA at the receiver. The sender continues to seal, but the receiver accepts
    // nothing.
    assert!(
        b.xfrm
            .remove_state(&next.id(b))
            .expect("the kernel answers")
    );
    stream.stops("the receiver's SA was removed");
    assert!(b.statistics().get("XfrmInNoStates") > 0);
    let last = Sa::new(0x1801).of(family);
    last.add(a, b);
    assert!(
        a.xfrm
            .remove_state(&next.id(b))
            .expect("the kernel answers")
    );
    stream.continues("both hosts have another SA");

    // Add a policy for other ports, and then a wider policy with lower precedence. After each
    // change, the kernel looks up the SAs of all connections again.
    let beside = Policy {
        selector: dunlin_ipsec::xfrm::Selector {
            destination_ports: PortBlock::only(9),
            ..selector
        },
        direction: Direction::Out,
        action: Action::Block,
        priority: 5,
    };
    let wider = Policy {
        selector: dunlin_ipsec::xfrm::Selector {
            source: Network {
                prefix: 8,
                ..selector.source
            },
            destination_ports: PortBlock::ANY,
            ..selector
        },
        priority: 9000,
        ..beside
    };
    for policy in [beside, wider] {
        a.xfrm.add_policy(&policy).expect("the kernel adds it");
        stream.continues("a policy was added");
        assert!(a.xfrm.remove_policy(&policy).expect("the kernel answers"));
        stream.continues("the policy was removed again");
    }
}

/// Replaces a policy by a blocking policy, and then the blocking policy by the original policy.
fn replaced(stream: &Stream<'_>, host: &Host, policy: &Policy) {
    let block = Policy {
        action: Action::Block,
        ..*policy
    };
    host.xfrm
        .replace_policy(&block)
        .expect("the kernel answers");
    stream.stops("a policy blocks");
    host.xfrm
        .replace_policy(policy)
        .expect("the kernel answers");
    stream.continues("the policy protects again");
}

/// Removes the SAs first and the policies last. Until the policies are removed, no connection
/// succeeds. Without policies a connection is in the clear, which shows that the tap detects such
/// packets.
fn removed(hosts: &Hosts, wire: &Wire, all: &[(&Host, Policy)], sas: [Sa; 3], family: Family) {
    let (a, b) = (&hosts.a, &hosts.b);
    let selector = lanes_from(a, b, family, Protocol::TCP);
    assert_eq!(all.len(), policies(&selector, a, b, REQID).len());
    for host in [a, b] {
        for state in host.xfrm.states().expect("the kernel answers") {
            assert!(state.algorithm.is_none() || sas.len() == 3);
            host.xfrm
                .remove_state(&state.id)
                .expect("the kernel answers");
        }
    }
    let listener = Acceptor::open(b, family, 1);
    let connect = || {
        let address = listener.address;
        a.run(move || std::net::TcpStream::connect_timeout(&address, Duration::from_secs(2)))
    };
    let error = connect().expect_err("there is no SA");
    println!("without SAs: {error}");
    assert_eq!(wire.left().into_iter().find(|seen| seen.is_leak()), None);
    for (host, policy) in all {
        assert!(host.xfrm.remove_policy(policy).expect("the kernel answers"));
    }
    connect().expect("no policy blocks it");
    let left = wire.left();
    assert!(
        left.iter().any(|seen| seen.is_leak()),
        "the tap missed packets in the clear"
    );
    assert!(!left.iter().any(|seen| matches!(seen, Seen::Esp { .. })));
}
