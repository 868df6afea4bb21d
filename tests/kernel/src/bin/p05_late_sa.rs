//! A connection that uses the fallback SA keeps it when an SA for its CPU is added.
//! The fallback must be added first. Otherwise it can take precedence over the other SAs when the
//! table grows.

use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use dunlin_ipsec::xfrm::Protocol;
use dunlin_kernel_tests::ipsec::lanes::{Acceptor, Lane, look_again, read_all, users};
use dunlin_kernel_tests::ipsec::{CPUS, Family, Host, Hosts, Sa, SaSet, needs_per_cpu, protect};
use dunlin_kernel_tests::{Guest, Needs, Under, run};

const NEEDS: Needs = Needs {
    cpus: CPUS,
    packages: &["iproute2"],
    limit_seconds: 120,
    under: Under::Oldest,
    ..Needs::NOTHING
};

const BYTES: usize = 100_000;

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        needs_per_cpu(guest);
        late(guest);
        grown(guest, true);
        grown(guest, false);
    })
}

/// Adds only the fallback SA at first, and later an SA for CPU 1.
fn late(guest: &Guest) {
    let hosts = Hosts::new(guest);
    let (a, b) = (&hosts.a, &hosts.b);
    let there = SaSet::new(0x1000, CPUS, Family::V4);
    there.fallback.add(a, b);
    SaSet::new(0x2000, 0, Family::V4).add(b, a);
    let _ = protect(&hosts, Family::V4, Protocol::TCP);
    let listener = Acceptor::open(b, Family::V4, 0);
    let lane = Lane::connect(a, 1, &listener);
    assert_eq!(users(&there, a, b, || lane.send(1, BYTES)), [None]);
    there.own[1].add(a, b);
    assert_eq!(
        users(&there, a, b, || lane.send(1, BYTES)),
        [None],
        "the lane did not stay with the fallback SA"
    );
    look_again(&lane.near, 1, b"x");
    read_all(&lane.far, &mut [0; 2]);
    lane.send(1, 1);
    assert_eq!(users(&there, a, b, || lane.send(1, BYTES)), [Some(1)]);
    // A new connection from CPU 1 uses the SA of this CPU immediately. A connection from another
    // CPU uses the fallback.
    let second = Lane::connect(a, 1, &listener);
    assert_eq!(users(&there, a, b, || second.send(1, BYTES)), [Some(1)]);
    let third = Lane::connect(a, 2, &listener);
    assert_eq!(users(&there, a, b, || third.send(2, BYTES)), [None]);
}

/// The kernel finds SAs in a hash table, which grows with the number of SAs. If the fallback was
/// added first, checks that lanes from every CPU keep using the SAs of their CPUs while the table
/// grows. Otherwise only prints the SAs that the lanes use.
fn grown(guest: &Guest, fallback_first: bool) {
    let hosts = Hosts::new(guest);
    let (a, b) = (&hosts.a, &hosts.b);
    let there = SaSet::new(0x1000, CPUS, Family::V4);
    // The kernel compares the times at which SAs were added, in whole seconds. Add the fallback and
    // the other SAs in different seconds.
    if fallback_first {
        there.fallback.add(a, b);
        next_second();
    }
    for sa in &there.own {
        sa.add(a, b);
    }
    if !fallback_first {
        next_second();
        there.fallback.add(a, b);
    }
    SaSet::new(0x2000, 0, Family::V4).add(b, a);
    let _ = protect(&hosts, Family::V4, Protocol::TCP);
    let listener = Acceptor::open(b, Family::V4, 0);
    // Keep all lanes open, because closing a lane would send packets during the next check.
    let mut lanes = Vec::new();
    let mut goes_by = || {
        let mut all = Vec::new();
        for cpu in 0..CPUS {
            let lane = Lane::connect(a, cpu, &listener);
            all.extend(users(&there, a, b, || lane.send(cpu, BYTES)));
            lanes.push(lane);
        }
        all
    };
    let own: Vec<_> = (0..CPUS).map(Some).collect();
    let mut seen = vec![goes_by()];
    let mut buckets = vec![counted(guest, a).1];
    let mut spi = 0x7000;
    while buckets.len() < 4 {
        let grown = Instant::now() + Duration::from_secs(30);
        let wanted = buckets[buckets.len() - 1];
        loop {
            let (states, lists) = counted(guest, a);
            if lists > wanted {
                buckets.push(lists);
                break;
            }
            // Add SAs with another reqid until the kernel has grown the table, which it does
            // asynchronously.
            if states <= 2 * lists {
                let other = Sa {
                    reqid: 1,
                    ..Sa::new(spi)
                };
                other.add_out(a, b);
                spi += 1;
            }
            assert!(
                Instant::now() < grown,
                "the table of {lists} lists does not grow with {states} SAs"
            );
        }
        seen.push(goes_by());
    }
    println!("the fallback first: {fallback_first}; lists {buckets:?}: {seen:?}");
    if fallback_first {
        assert!(seen.iter().all(|seen| *seen == own), "{seen:?}");
    }
}

/// Returns the number of a host's SAs, and the number of buckets of the hash table for SAs.
fn counted(guest: &Guest, host: &Host) -> (u32, u32) {
    let said = guest.output("ip", &["-n", &host.name, "-s", "xfrm", "state", "count"]);
    let number = |name: &str| -> u32 {
        let rest = said.split_once(name).expect("the output has the count").1;
        let word = rest.split_whitespace().next().expect("a number follows");
        word.parse().expect("the text is a number")
    };
    (number("SAD count"), number("buckets count"))
}

/// Waits for the next second of the kernel's clock, which may lag by a tick.
fn next_second() {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let part = since.expect("the clock is right").subsec_nanos();
    let left = Duration::from_secs(1) - Duration::from_nanos(part.into());
    thread::sleep(left + Duration::from_millis(50));
}
