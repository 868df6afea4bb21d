//! Two namespaces act as two hosts, to test the effect of a rate limit, a throttle, a time limit
//! and a downtime limit on a link.
#![allow(clippy::unwrap_used)]

mod support;
#[path = "support/namespaces.rs"]
mod wires;

use std::time::{Duration, Instant};

use dunlin_test_base::kvm;
use serde_json::Value;
use support::{Hosts, Process, finish, words};
use wires::{B, Wire};

const MIB: f64 = (1_u64 << 20) as f64;

/// The number of repetitions of a test that depends on chance: `few`, or ten times as many in the
/// soak.
fn rounds(few: u32) -> u32 {
    if std::env::var_os("DUNLIN_SOAK").is_some_and(|soak| soak == "1") {
        few * 10
    } else {
        few
    }
}

/// A running VM at one end of the wire, and a waiting process at the other.
fn both_ends(hosts: &Hosts, wire: &Wire, guest: &str) -> (Process, Process) {
    let run = words(&format!("vm run --name vm {guest}"));
    let source = Process::start(wire.at_a(&run), &hosts.scratch.join("1"));
    source.wait_for("started");
    (source, receiver(hosts, wire, "2"))
}

fn receiver(hosts: &Hosts, wire: &Wire, control: &str) -> Process {
    let mut receive = words(&format!("vm receive --listen {B}:0 --identity"));
    receive.arg(hosts.scratch.join("b"));
    let mut destination = Process::start(wire.at_b(&receive), &hosts.scratch.join(control));
    destination.address = destination.wait_for("listening")["address"]
        .as_str()
        .unwrap()
        .to_owned();
    destination
}

fn within(measured: f64, wanted: f64, share: f64, what: &str) {
    println!("{what}: {measured:.2} of {wanted:.2}");
    assert!(
        (measured - wanted).abs() <= wanted * share,
        "{what}: {measured:.2} instead of {wanted:.2}"
    );
}

/// Bytes of guest memory sent so far, according to a progress line.
fn gone(progress: &Value) -> f64 {
    let lanes = progress["lanes"].as_array().unwrap();
    lanes.iter().map(|lane| lane[1].as_f64().unwrap()).sum()
}

#[test]
fn the_rate_limit_holds_over_the_run_and_after_a_change() {
    let Some(_turn) = kvm() else { return };
    let Some(wire) = Wire::new(None) else { return };
    let hosts = Hosts::new();
    let guest = "--memory 128M --fill-size 120M --working-set 8M --dirty-rate 500";
    let (source, destination) = both_ends(&hosts, &wire, guest);
    let flags = "--peer b.test --lanes 4 --rate 32M";
    let client = hosts.begin(&source, &destination, "a", flags);
    for _ in 0..4 {
        client.wait_for("lane-up");
    }
    let (began, sent) = (Instant::now(), wire.sent_bytes());
    // Wait until half of the memory has been sent.
    let half = loop {
        let progress = client.wait_for("progress");
        if gone(&progress) >= 60.0 * MIB {
            break progress;
        }
    };
    let seconds = began.elapsed().as_secs_f64();
    within(gone(&half) / MIB / seconds, 32.0, 0.05, "MiB/s of pages");
    let on_the_wire = (wire.sent_bytes() - sent) as f64 / MIB / seconds;
    within(on_the_wire, 32.0, 0.05, "MiB/s on the wire");

    let mut set = words("vm set --name vm --rate 16M --control");
    set.arg(&source.control);
    finish(set).expect(0);
    let first = client.wait_for("progress");
    let (began, sent) = (Instant::now(), wire.sent_bytes());
    let last = loop {
        let progress = client.wait_for("progress");
        if began.elapsed() >= Duration::from_secs(2) {
            break progress;
        }
    };
    let seconds = began.elapsed().as_secs_f64();
    let pages = (gone(&last) - gone(&first)) / MIB / seconds;
    within(pages, 16.0, 0.05, "MiB/s of pages, changed");
    let on_the_wire = (wire.sent_bytes() - sent) as f64 / MIB / seconds;
    within(on_the_wire, 16.0, 0.05, "MiB/s on the wire, changed");
    assert_eq!(client.ended().0, 0);
}

/// The flags of a guest that writes 40 MiB/s. The wire carries only 24 MiB/s.
const OUTRUNS: &str = "--memory 64M --fill-size 24M --working-set 16M --dirty-rate 10000 \
                       --workload sequential";
const WIRE_MEGABITS: u32 = 200;

/// The predicted and the actual downtime, in milliseconds.
#[derive(Debug)]
struct Downtime {
    limit: f64,
    predicted: f64,
    source: f64,
    /// The downtime as the guest saw it; `None` if the guest's first heartbeat at the destination
    /// came too late.
    guest: Option<f64>,
}

impl Downtime {
    fn of(moved: &Value, limit: f64) -> Self {
        let iterations = moved["iterations"].as_array().unwrap();
        // The last iteration is the switchover. Its record has the downtime that the source
        // predicted before the switchover.
        let last = iterations.last().unwrap();
        let found = Self {
            limit,
            predicted: last["predicted_downtime_ms"].as_f64().unwrap(),
            source: moved["downtime"]["total_ms"].as_f64().unwrap(),
            guest: moved["downtime"]["guest_ms"].as_f64(),
        };
        println!("{found:.1?}");
        found
    }

    fn was_promised(&self) -> bool {
        self.predicted <= self.limit
    }

    fn is_kept(&self) -> bool {
        self.source <= self.limit && self.guest.is_none_or(|guest| guest <= self.limit)
    }
}

#[test]
fn throttling_makes_a_guest_that_outruns_its_link_converge() {
    let Some(_turn) = kvm() else { return };
    for _ in 0..rounds(1) {
        let Some(wire) = Wire::new(Some(WIRE_MEGABITS)) else {
            return;
        };
        let hosts = Hosts::new();
        let (source, destination) = both_ends(&hosts, &wire, OUTRUNS);
        let flags = "--json --peer b.test --downtime-limit 200ms";
        let done = finish(hosts.migrate(&source, &destination, "a", flags)).expect(0);
        let throttles: Vec<u64> = done
            .lines()
            .iter()
            .filter(|line| line["event"] == "throttled")
            .map(|line| line["percent"].as_u64().unwrap())
            .collect();
        println!("throttled: {throttles:?}");
        assert!(throttles.len() >= 2, "{throttles:?}");
        assert!(throttles[0] == 20 && throttles.last() == Some(&0));
        let downtime = Downtime::of(&done.last(), 200.0);
        assert!(
            downtime.was_promised() && downtime.is_kept(),
            "{downtime:?}"
        );
        // The guest runs and makes progress at the destination.
        hosts.assert_runs(&destination);
    }
}

/// Because the link is slow, the bytes in the buffers of many lanes take longer to arrive than the
/// downtime limit. Throttling the guest would not help, so the guest must not be throttled.
#[test]
fn a_slow_link_with_many_lanes_does_not_throttle_the_guest() {
    let Some(_turn) = kvm() else { return };
    let Some(wire) = Wire::new(Some(40)) else {
        return;
    };
    let hosts = Hosts::new();
    // The guest writes 0.8 MiB/s, the wire carries 4.8 MiB/s.
    let guest = "--memory 64M --fill-size 24M --working-set 16M --dirty-rate 200 --workload random";
    let (source, destination) = both_ends(&hosts, &wire, guest);
    let flags = "--json --peer b.test --lanes 8";
    let done = finish(hosts.migrate(&source, &destination, "a", flags)).expect(0);
    let moved = done.last();
    println!("{:?}", moved["iterations"]);
    assert!(!done.out.contains("throttled"), "{}", done.out);
    let downtime = Downtime::of(&moved, 300.0);
    assert!(
        downtime.was_promised() && downtime.is_kept(),
        "{downtime:?}"
    );
    hosts.assert_runs(&destination);
}

#[test]
fn at_the_time_limit_a_vm_stays_with_cancel_and_moves_with_stop() {
    let Some(_turn) = kvm() else { return };
    let Some(wire) = Wire::new(Some(WIRE_MEGABITS)) else {
        return;
    };
    let hosts = Hosts::new();
    let (source, destination) = both_ends(&hosts, &wire, OUTRUNS);
    let flags = "--json --peer b.test --throttle never --time-limit 3s";
    let started = Instant::now();
    let done = finish(hosts.migrate(&source, &destination, "a", flags)).expect(1);
    let took = started.elapsed();
    assert_eq!(done.last()["fault"], "time-limit");
    assert_eq!(done.last()["vm"], "at-source");
    assert!(took >= Duration::from_secs(3) && took < Duration::from_secs(5));
    destination.wait_for("rejected");
    hosts.assert_runs(&source);

    let flags = format!("{flags} --at-time-limit stop");
    let done = finish(hosts.migrate(&source, &destination, "a", &flags)).expect(0);
    let moved = done.last();
    let before_pause = moved["total_s"].as_f64().unwrap()
        - moved["downtime"]["total_ms"].as_f64().unwrap() / 1000.0;
    within(before_pause, 3.0, 0.1, "seconds until the pause");
    assert!(!Downtime::of(&moved, 300.0).was_promised());
    assert!(!done.out.contains("throttled"), "{}", done.out);
    hosts.assert_runs(&destination);
}

#[test]
fn a_predicted_downtime_stays_within_its_limit() {
    let Some(_turn) = kvm() else { return };
    let mut broken = Vec::new();
    for round in 0..rounds(3) {
        let Some(wire) = Wire::new(Some(WIRE_MEGABITS)) else {
            return;
        };
        let hosts = Hosts::new();
        let limit_ms = [60, 150, 400][round as usize % 3];
        // The guest writes only 8 MiB/s, so the wire, not the guest, limits how fast the
        // remaining memory shrinks.
        let guest = "--memory 64M --fill-size 16M --working-set 16M --dirty-rate 2000 \
                     --workload random";
        let (source, destination) = both_ends(&hosts, &wire, guest);
        let flags = format!("--json --peer b.test --downtime-limit {limit_ms}ms");
        let done = finish(hosts.migrate(&source, &destination, "a", &flags)).expect(0);
        let downtime = Downtime::of(&done.last(), f64::from(limit_ms));
        assert!(
            downtime.was_promised(),
            "paused above the downtime limit: {downtime:?}"
        );
        if !downtime.is_kept() {
            broken.push(downtime);
        }
        hosts.assert_runs(&destination);
    }
    assert!(broken.is_empty(), "{broken:?}");
}
