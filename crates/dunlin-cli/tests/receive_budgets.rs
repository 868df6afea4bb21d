//! Rate limits of several VMs that leave one host for another over a limited link: the
//! destination's budget for all VMs (`vm receive --rate`), the limit of each VM
//! (`vm migrate --rate`), and the sum of the VMs' limits.
#![allow(clippy::unwrap_used)]

mod support;
#[path = "support/namespaces.rs"]
mod wires;

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use support::{Hosts, Process, finish, words};
use wires::{B, Wire};

const MIB: f64 = (1_u64 << 20) as f64;
/// The rate of the link: 100 MiB/s, more than any budget.
const WIRE_MEGABITS: u32 = 840;
/// Limits of socket buffers, in bytes. The bytes that wait in them are a small part of what crosses the
/// link while a test measures.
const BUFFERS: &str = "4096 131072 524288";
/// How long the rates may take to settle after a change. The buffered bytes must arrive first.
const SETTLE: Duration = Duration::from_millis(700);
/// How far a measured rate may differ from its limit, as a fraction of the limit.
const SHARE: f64 = 0.05;
/// The number of VMs.
const COUNT: usize = 3;

/// VMs that are being copied to one destination.
struct Scene {
    clients: Vec<Process>,
    sources: Vec<Process>,
    _destination: Process,
    wire: Wire,
    _hosts: Hosts,
}

impl Scene {
    /// Starts to migrate VMs of `memory_mib` MiB each. Together they arrive at `inbound` MiB/s.
    fn new(inbound: u32, memory_mib: u32) -> Option<Self> {
        let wire = Wire::new(Some(WIRE_MEGABITS))?;
        let mut limit = Command::new("sh");
        let line = "for one in tcp_rmem tcp_wmem; do echo \"$1\" >/proc/sys/net/ipv4/$one; done";
        limit.args(["-c", line, "sh", BUFFERS]);
        for at in [wire.at_a(&limit), wire.at_b(&limit)] {
            finish(at).expect(0);
        }
        let hosts = Hosts::new();
        let mut receive = words(&format!(
            "vm receive --listen {B}:0 --peer a.test --sessions {COUNT} --rate {inbound}M --identity"
        ));
        receive.arg(hosts.scratch.join("b"));
        let destination = Process::start(wire.at_b(&receive), &hosts.scratch.join("to"));
        let listening = destination.wait_for("listening");
        let to = listening["address"].as_str().unwrap();
        let sources: Vec<_> = (1..=COUNT)
            .map(|number| {
                let run = words(&format!(
                    "vm run --name vm{number} --guest process --memory {memory_mib}M --workload idle"
                ));
                let control = hosts.scratch.join(format!("source{number}"));
                let source = Process::start(wire.at_a(&run), &control);
                source.wait_for("started");
                source
            })
            .collect();
        let begin = |(number, source): (usize, &Process)| {
            let mut migrate = words(&format!(
                "vm migrate --name vm{} --to {to} --peer b.test --lanes 2 --identity",
                number + 1
            ));
            migrate.arg(hosts.scratch.join("a"));
            migrate.arg("--control").arg(&source.control);
            Process::follow(migrate, &source.control)
        };
        let clients: Vec<_> = sources.iter().enumerate().map(begin).collect();
        for client in &clients {
            client.wait_for("progress");
        }
        Some(Self {
            clients,
            sources,
            _destination: destination,
            wire,
            _hosts: hosts,
        })
    }

    /// Limits the rate of a VM.
    fn limit(&self, vm: usize, mib_per_s: u32) {
        let mut set = words(&format!("vm set --name vm{} --rate {mib_per_s}M", vm + 1));
        set.arg("--control").arg(&self.sources[vm].control);
        finish(set).expect(0);
    }

    /// Expects these rates of the VMs, in MiB/s, and their sum on the link.
    fn expect(&mut self, wanted: [f64; COUNT], what: &str) {
        // The measurement begins when the rates have settled.
        thread::sleep(SETTLE);
        let (wire, clients) = (&self.wire, &mut self.clients);
        let (rates, on_the_wire) = thread::scope(|scope| {
            let threads: Vec<_> = clients
                .iter_mut()
                .map(|client| scope.spawn(move || rate(client)))
                .collect();
            let (began, before) = (Instant::now(), wire.sent_bytes());
            thread::sleep(window());
            let sent = (wire.sent_bytes() - before) as f64 / MIB;
            let on_the_wire = sent / began.elapsed().as_secs_f64();
            let rates: Vec<f64> = threads.into_iter().map(|one| one.join().unwrap()).collect();
            (rates, on_the_wire)
        });
        println!("{what}: {rates:.2?} of {wanted:.2?}, {on_the_wire:.2} on the wire");
        let is_kept = |rate: f64, wanted: f64| (rate - wanted).abs() <= wanted * SHARE;
        for (rate, wanted) in rates.iter().zip(wanted) {
            assert!(is_kept(*rate, wanted), "{what}: {rates:?}");
        }
        let sum = wanted.iter().sum();
        assert!(is_kept(on_the_wire, sum), "{what}: {on_the_wire}");
    }
}

/// Bytes of guest memory that were sent, according to a progress line.
fn sent(progress: &Value) -> f64 {
    let lanes = progress["lanes"].as_array().unwrap();
    lanes.iter().map(|lane| lane[1].as_f64().unwrap()).sum()
}

/// The rate of a migration in MiB/s, between two of its progress lines.
fn rate(client: &mut Process) -> f64 {
    // Skip the lines that were printed before the measurement.
    let first = loop {
        let asked = Instant::now();
        let progress = client.wait_for("progress");
        if asked.elapsed() > Duration::from_millis(20) {
            break progress;
        }
    };
    let began = Instant::now();
    loop {
        let progress = client.wait_for("progress");
        let took = began.elapsed();
        if took >= window() {
            return (sent(&progress) - sent(&first)) / MIB / took.as_secs_f64();
        }
    }
}

fn soaks() -> bool {
    std::env::var_os("DUNLIN_SOAK").is_some_and(|soak| soak == "1")
}

/// How long a rate is measured.
fn window() -> Duration {
    Duration::from_millis(if soaks() { 4000 } else { 1500 })
}

/// The budgets to test, in MiB/s. `make test` tests one of them.
fn budgets() -> &'static [u32] {
    match soaks() {
        true => &[24, 48, 78, 48, 24],
        false => &[48],
    }
}

#[test]
fn budgets_of_hosts_and_vms_hold_within_five_percent() {
    for &inbound in budgets() {
        // More than the VMs can send until the end of the test.
        let memory_mib = if soaks() { 6 * inbound } else { 4 * inbound };
        let Some(mut scene) = Scene::new(inbound, memory_mib) else {
            return;
        };
        let all = f64::from(inbound);
        scene.expect(
            [all / 3.0; COUNT],
            "the destination's budget, shared evenly",
        );
        let own = inbound / 6;
        scene.limit(0, own);
        let rest = (all - f64::from(own)) / 2.0;
        let wanted = [f64::from(own), rest, rest];
        scene.expect(wanted, "a VM's own limit, and the rest for the others");
        for vm in 1..COUNT {
            scene.limit(vm, own);
        }
        scene.expect(
            [f64::from(own); COUNT],
            "the limits of all VMs of the source",
        );
    }
}
