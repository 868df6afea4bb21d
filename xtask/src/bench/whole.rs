//! `cargo xtask bench whole`: whole migrations of Dunlin and of other VMMs, in turn.
//!
//! One turn is a migration between two new processes. Dunlin's own turns, and the floor, are those of
//! `dunlin bench whole`, which this program runs for one round at a time. QEMU moves a guest with the
//! same memory, content and rate of writes.

use std::fs::File;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use dunlin_bench::{Output, Progress, Results, process, touch_physical_memory};
use dunlin_rig::debian::{self, Qemu};
use dunlin_rig::guest::{Content, Guest, Workload};
use dunlin_rig::machine::{Accelerator, Credentials, Machine, Migration, Setup, begin, finish};
use serde_json::{Map, Value, json};

use super::program;

/// Options of the benchmark.
#[derive(Args, Debug)]
pub struct WholeOptions {
    /// Turns of each variant.
    #[arg(long, value_name = "N", default_value_t = 5)]
    rounds: usize,
    /// MiB of guest memory, at most 2048.
    #[arg(long, value_name = "MIB", default_value_t = 1024)]
    size: u32,
    /// Skips QEMU.
    #[arg(long)]
    without_qemu: bool,
    #[command(flatten)]
    output: Output,
}

/// Memory written to and freed before each migration, in sizes of the guest, as in `dunlin bench whole`.
const TOUCHED: u64 = 4;
/// Numbers of multifd channels.
const CHANNELS: [u8; 2] = [2, 4];
/// The names of the certificates.
const SERVER: &str = "destination.bench";
const CLIENT: &str = "source.bench";
/// Figures in the lines of `dunlin bench whole`.
const FIGURES: [&str; 7] = [
    "total_s",
    "gib_per_s",
    "cpu_s_per_gib",
    "downtime_ms",
    "iterations",
    "destination_peak_mib",
    "floor_ratio",
];

/// What the guest does meanwhile: its name, and how many pages it writes of how many, per second, as in
/// `dunlin bench whole`.
#[derive(Clone, Copy)]
struct Writes {
    guest: &'static str,
    pages_divisor: u64,
    rate: u64,
}

const GUESTS: [Writes; 2] = [
    Writes {
        guest: "idle",
        pages_divisor: u64::MAX,
        rate: 1,
    },
    Writes {
        guest: "writing",
        pages_divisor: 8,
        rate: 25_600,
    },
];

pub(super) fn run(options: &WholeOptions) -> Result<()> {
    ensure!(options.rounds > 0, "--rounds must be 1 or more");
    let dunlin = program::dunlin()?;
    let peer = match options.without_qemu {
        true => None,
        false => Some(Peer::new(options.size)?),
    };
    let mut results = Results::default();
    let per_round = 1 + peer
        .as_ref()
        .map_or(0, |_| GUESTS.len() * CHANNELS.len() * 2);
    let mut progress = Progress::new(options.rounds * per_round);
    for _ in 0..options.rounds {
        progress.step("dunlin and the floor");
        own(&dunlin, options, &mut results)?;
        let Some(peer) = &peer else { continue };
        for writes in GUESTS {
            for channels in CHANNELS {
                for tls in [true, false] {
                    let variant = if tls { "qemu-tls" } else { "qemu-plain" };
                    progress.step(&format!(
                        "{variant}, {} guest, channels: {channels}",
                        writes.guest
                    ));
                    touch_physical_memory(TOUCHED * (u64::from(options.size) << 20))?;
                    let moved = peer.migrate(writes, channels, tls).with_context(|| {
                        format!("{variant} with {channels} channels, {} guest", writes.guest)
                    })?;
                    let gibibytes = f64::from(options.size) / 1024.0;
                    results
                        .line("whole", variant)
                        .with("guest", writes.guest)
                        .with("lanes", channels)
                        .with("guest_bytes", u64::from(options.size) << 20)
                        .with("content", "random")
                        .figure("total_s", moved.total_s)
                        .figure("gib_per_s", gibibytes / moved.total_s)
                        .figure("cpu_s_per_gib", moved.cpu_s / gibibytes)
                        .figure("downtime_ms", moved.downtime_ms)
                        .figure("iterations", moved.iterations)
                        .figure("destination_peak_mib", moved.destination_peak_mib)
                        .add();
                }
            }
        }
    }
    drop(progress);
    options.output.print(&results)
}

/// One round of `dunlin bench whole`.
fn own(dunlin: &Path, options: &WholeOptions, results: &mut Results) -> Result<()> {
    let size = format!("{}M", options.size);
    let done = Command::new(dunlin)
        .args(["bench", "whole", "--rounds", "1", "--json", "--size", &size])
        .stderr(Stdio::inherit())
        .output()
        .context("cannot start dunlin")?;
    if !done.status.success() {
        bail!("`dunlin bench whole` failed");
    }
    for line in String::from_utf8(done.stdout)?.lines() {
        let fields: Map<String, Value> = serde_json::from_str(line)?;
        let text = |name: &str| fields.get(name).and_then(Value::as_str).unwrap_or_default();
        let mut row = results.line(text("scenario"), text("variant"));
        for name in ["guest", "lanes", "guest_bytes", "content"] {
            row = row.with(name, fields.get(name).cloned().unwrap_or_default());
        }
        for name in FIGURES {
            if let Some(value) = fields.get(name).and_then(Value::as_f64) {
                row = row.figure(name, value);
            }
        }
        if let Some(passes) = fields.get("last_round") {
            row = row.detail("last_round", passes.clone());
        }
        row.add();
    }
    Ok(())
}

/// QEMU with its certificates.
struct Peer {
    qemu: Qemu,
    accelerator: Accelerator,
    credentials: Credentials,
    memory_mib: u32,
}

/// The measurements of one migration.
struct Moved {
    total_s: f64,
    cpu_s: f64,
    downtime_ms: f64,
    iterations: f64,
    destination_peak_mib: f64,
}

impl Peer {
    fn new(memory_mib: u32) -> Result<Self> {
        ensure!(
            (64..=2048).contains(&memory_mib),
            "--size must be between 64 and 2048 for QEMU's guest; --without-qemu allows more"
        );
        let accelerator = match File::open("/dev/kvm") {
            Ok(_) => Accelerator::Kvm,
            Err(_) => Accelerator::Tcg,
        };
        Ok(Self {
            qemu: debian::qemu()?,
            accelerator,
            credentials: Credentials::new(SERVER, CLIENT)?,
            memory_mib,
        })
    }

    /// Starts a guest and moves it once. Bandwidth is not limited, and the limit on the downtime is
    /// QEMU's own, 300 ms.
    fn migrate(&self, writes: Writes, channels: u8, tls: bool) -> Result<Moved> {
        let pages = u64::from(self.memory_mib - 4) << 8;
        let workload = Workload {
            memory_mib: self.memory_mib,
            pages,
            hot: (pages / writes.pages_divisor).max(1),
            rate: Some(writes.rate),
            content: Content::Random,
            seed: 0xbe7c,
        };
        let setup = Setup::new(&self.qemu, Guest::Bare, workload, self.accelerator);
        let mut source = Machine::start(&setup, None)?;
        let mut destination = Machine::start_incoming(&setup, None)?;
        source.wait_ready()?;
        let ids = [source.process(), destination.process()];
        let cpu = || {
            ids.iter()
                .map(|&id| process::cpu_s(id))
                .sum::<Result<f64>>()
        };
        // The port is free until QEMU listens there, unless another program takes it meanwhile: then
        // QEMU reports it and the benchmark ends.
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let mut migration = Migration::tcp(address);
        migration.multifd = Some(channels);
        if tls {
            migration.tls = Some((self.credentials.folder(), SERVER.to_owned()));
        }
        let before = cpu()?;
        let started = Instant::now();
        begin(&mut source, &mut destination, &migration)?;
        destination.qmp().execute("cont", json!({}))?;
        finish(&mut source, "source")?;
        finish(&mut destination, "destination")?;
        let resumed = |name: &str, _: &Value| name == "RESUME";
        destination
            .qmp()
            .wait_event(dunlin_rig::machine::TIMEOUT, resumed)?;
        let total_s = started.elapsed().as_secs_f64();
        let cpu_s = cpu()? - before;
        let report = source.qmp().execute("query-migrate", json!({}))?;
        Ok(Moved {
            total_s,
            cpu_s,
            downtime_ms: report["downtime"].as_f64().unwrap_or_default(),
            iterations: report["ram"]["dirty-sync-count"]
                .as_f64()
                .unwrap_or_default(),
            destination_peak_mib: process::peak_bytes(destination.process())? as f64
                / f64::from(1 << 20),
        })
    }
}
