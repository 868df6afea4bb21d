//! Whatever is added and removed under a stream, nothing of it leaves in the clear: it goes by another SA, or waits.

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use dunlin_ipsec::xfrm::{Action, Direction, Network, Policy, PortBlock, Protocol};
use dunlin_kernel_tests::ipsec::lanes::{Acceptor, Ending, LIMIT, Lane, pattern, write_all};
use dunlin_kernel_tests::ipsec::wire::{Seen, Wire};
use dunlin_kernel_tests::ipsec::{
    Family, Host, Hosts, REQID, Sa, has_per_cpu, lanes_from, on_cpu, policies, protect,
};
use dunlin_kernel_tests::{Guest, Needs, Under, run};

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

/// A lane that is written to and read from without pause, and what has come.
struct Stream<'a> {
    came: &'a AtomicU64,
    wire: &'a Wire,
}

impl Stream<'_> {
    /// More has come.
    fn goes_on(&self, after: &str) {
        let until = Instant::now() + LIMIT;
        let before = self.came.load(Ordering::Relaxed);
        while self.came.load(Ordering::Relaxed) < before + 20_000 {
            assert!(Instant::now() < until, "nothing comes after {after}");
            thread::sleep(Duration::from_millis(1));
        }
        self.sealed(after);
    }

    /// Nothing comes any more.
    fn stops(&self, after: &str) {
        let until = Instant::now() + LIMIT;
        loop {
            let before = self.came.load(Ordering::Relaxed);
            thread::sleep(Duration::from_millis(300));
            if self.came.load(Ordering::Relaxed) == before {
                break;
            }
            assert!(Instant::now() < until, "it goes on after {after}");
        }
        self.sealed(after);
    }

    /// What has left since was sealed.
    fn sealed(&self, after: &str) {
        let left = self.wire.left();
        let leak = left.iter().find(|seen| seen.is_leak());
        assert_eq!(leak, None, "after {after}");
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
    let (came, done) = (AtomicU64::new(0), AtomicBool::new(false));
    let stream = Stream {
        came: &came,
        wire: &wire,
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            on_cpu(1, || {
                let data = pattern(8 << 10);
                while !done.load(Ordering::Relaxed) {
                    write_all(&lane.near, &data);
                    // A guest's other threads go on.
                    thread::sleep(Duration::from_millis(1));
                }
                lane.near
                    .shutdown(std::net::Shutdown::Write)
                    .expect("it is open");
            });
        });
        scope.spawn(|| {
            let mut part = vec![0; 64 << 10];
            loop {
                match std::io::Read::read(&mut &lane.far, &mut part).expect("it is open") {
                    0 => break,
                    count => came.fetch_add(count as u64, Ordering::Relaxed),
                };
            }
        });
        let _ending = Ending {
            done: &done,
            lane: &lane,
        };
        stream.goes_on("the beginning");
        changed_under(&stream, a, b, [fallback, own], family);
        for (host, policy) in &all {
            replaced(&stream, host, policy);
        }
    });
    stream.sealed("all of it");
    drop(lane);
    undone(&hosts, &wire, &all, [fallback, own, answers], family);
}

/// SAs go and come, and policies beside those of the lane.
fn changed_under(
    stream: &Stream<'_>,
    a: &Host,
    b: &Host,
    [fallback, own]: [Sa; 2],
    family: Family,
) {
    let selector = lanes_from(a, b, family, Protocol::TCP);
    // The one in use goes at the sender: the other takes over.
    assert!(a.xfrm.remove_state(&own.id(b)).expect("it can be"));
    let before = a.carried(&fallback.id(b)).packets;
    stream.goes_on("its SA went");
    assert!(a.carried(&fallback.id(b)).packets > before);
    // With no SA at all it waits.
    assert!(a.xfrm.remove_state(&fallback.id(b)).expect("it can be"));
    stream.stops("the last SA went");
    // A new one, with another key: the rest follows.
    let next = Sa::new(0x1800).of(family);
    next.add(a, b);
    stream.goes_on("a new SA came");
    // At the receiver: the sender seals on, and nothing is taken.
    assert!(b.xfrm.remove_state(&next.id(b)).expect("it can be"));
    stream.stops("the receiver's SA went");
    assert!(b.statistics().get("XfrmInNoStates") > 0);
    let last = Sa::new(0x1801).of(family);
    last.add(a, b);
    assert!(a.xfrm.remove_state(&next.id(b)).expect("it can be"));
    stream.goes_on("both have another");

    // Policies for other ports, and one that is wider and comes behind: all are looked at anew.
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
        a.xfrm.add_policy(&policy).expect("it is added");
        stream.goes_on("a policy came");
        assert!(a.xfrm.remove_policy(&policy).expect("it can be"));
        stream.goes_on("it went again");
    }
}

/// A policy is replaced by one that blocks, and that again by itself.
fn replaced(stream: &Stream<'_>, host: &Host, policy: &Policy) {
    let block = Policy {
        action: Action::Block,
        ..*policy
    };
    host.xfrm.replace_policy(&block).expect("it can be");
    stream.stops("a policy blocks");
    host.xfrm.replace_policy(policy).expect("it can be");
    stream.goes_on("it protects again");
}

/// SAs first, policies last: until then whoever connects gets nowhere. Without policies it is in
/// the clear, which shows that it would have been seen.
fn undone(hosts: &Hosts, wire: &Wire, all: &[(&Host, Policy)], sas: [Sa; 3], family: Family) {
    let (a, b) = (&hosts.a, &hosts.b);
    let selector = lanes_from(a, b, family, Protocol::TCP);
    assert_eq!(all.len(), policies(&selector, a, b, REQID).len());
    for host in [a, b] {
        for state in host.xfrm.states().expect("it can be asked") {
            assert!(state.algorithm.is_none() || sas.len() == 3);
            host.xfrm.remove_state(&state.id).expect("it can be");
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
        assert!(host.xfrm.remove_policy(policy).expect("it can be"));
    }
    connect().expect("nothing stands in the way");
    let left = wire.left();
    assert!(
        left.iter().any(|seen| seen.is_leak()),
        "it would have been seen"
    );
    assert!(!left.iter().any(|seen| matches!(seen, Seen::Esp { .. })));
}
