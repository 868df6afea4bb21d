//! `cargo xtask bench whole`: whole migrations of Dunlin and of other VMMs, in turn.
//!
//! A turn is a migration between two new processes. This program runs `dunlin bench whole` to
//! measure Dunlin and the floor, for one round and one number of lanes at a time. QEMU and Cloud
//! Hypervisor migrate a guest with the same memory, content and rate of writes. The results include
//! every turn that does not fail.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use dunlin_bench::{Comparison, Output, Results, process, touch_physical_memory};
use dunlin_rig::debian::{self, Qemu};
use dunlin_rig::guest::{Content, Guest, Workload};
use dunlin_rig::machine::{Accelerator, Credentials, Machine, Migration, Setup, begin, finish};
use dunlin_test_base::Scratch;
use serde_json::{Map, Value, json};

use super::{cloud_hypervisor, program, turns, vcpu};

/// Options of the benchmark.
#[derive(Args, Debug)]
pub struct WholeOptions {
    /// Number of turns of each variant.
    #[arg(long, value_name = "N", default_value_t = 5)]
    rounds: usize,
    /// MiB of guest memory, at most 2048.
    #[arg(long, value_name = "MIB", default_value_t = 1024)]
    size: u32,
    /// Leaves QEMU out.
    #[arg(long)]
    without_qemu: bool,
    #[command(flatten)]
    output: Output,
}

/// Before each migration, the benchmark allocates memory, writes to it and frees it, as
/// `dunlin bench whole` does. The amount is this multiple of the guest's memory.
const TOUCHED: u64 = 2;
/// How many MiB of an idle guest's memory stay zero.
const LEFT_OUT_MIB: u32 = 32;
/// The numbers of lanes, for Dunlin and for the floor.
const LANES: [u8; 2] = [2, 4];
/// The numbers of QEMU's multifd channels.
const CHANNELS: [u8; 2] = [2, 4];
/// The numbers of Cloud Hypervisor's connections.
const CONNECTIONS: [u8; 3] = [1, 2, 4];
/// The names in the certificates of destination and source.
const SERVER: &str = "destination.bench";
const CLIENT: &str = "source.bench";
/// Figures in the lines of `dunlin bench whole`.
const FIGURES: [&str; 10] = [
    "total_s",
    "gib_per_s",
    "cpu_s_per_gib",
    "source_cpu_s_per_gib",
    "destination_cpu_s_per_gib",
    "downtime_ms",
    "iterations",
    "destination_peak_mib",
    "floor_ratio",
    "stolen_s",
];

/// The guest's activity during the migration, as in `dunlin bench whole`.
#[derive(Clone, Copy)]
enum Activity {
    /// The guest halts, and its memory has the content of a file.
    Idle,
    /// The guest writes 100 MiB/s to an eighth of its memory. Between the writes it spins, with a
    /// limit on its CPU time; see [`vcpu`].
    Writing,
}

impl Activity {
    fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Writing => "writing",
        }
    }

    fn workload(self, memory_mib: u32) -> Workload {
        let pages = match self {
            Self::Idle => 0,
            Self::Writing => u64::from(memory_mib - 4) << 8,
        };
        Workload {
            memory_mib,
            pages,
            hot: pages / 8,
            rate: Some(25_600),
            content: Content::Random,
            seed: 0xbe7c,
        }
    }
}

/// A hypervisor with which Dunlin is compared, and the connections of its migration.
#[derive(Clone, Copy)]
enum Peer {
    Qemu { channels: u8, tls: bool },
    CloudHypervisor { connections: u8, tls: bool },
}

impl Peer {
    /// The variant's name and its number of connections.
    fn variant(self) -> (&'static str, u8) {
        match self {
            Self::Qemu {
                channels,
                tls: true,
            } => ("qemu-tls", channels),
            Self::Qemu { channels, .. } => ("qemu-plain", channels),
            Self::CloudHypervisor {
                connections,
                tls: true,
            } => ("cloud-hypervisor-tls", connections),
            Self::CloudHypervisor { connections, .. } => ("cloud-hypervisor-plain", connections),
        }
    }
}

/// A part of a round that is measured on its own.
#[derive(Clone, Copy)]
enum Turn {
    /// A run of `dunlin bench whole`, which measures the floor, and Dunlin with an idle guest and
    /// with a writing guest.
    Own {
        lanes: u8,
    },
    Peer {
        activity: Activity,
        peer: Peer,
    },
}

impl fmt::Display for Turn {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Own { lanes } => write!(out, "dunlin and the floor, lanes: {lanes}"),
            Self::Peer { activity, peer } => {
                let (variant, connections) = peer.variant();
                let guest = activity.name();
                write!(out, "{variant}, {guest} guest, connections: {connections}")
            }
        }
    }
}

pub(super) fn run(options: &WholeOptions) -> Result<()> {
    ensure!(options.rounds > 0, "--rounds must be 1 or more");
    let dunlin = program::dunlin()?;
    let mut peers = Vec::new();
    if !options.without_qemu {
        for channels in CHANNELS {
            peers.extend([true, false].map(|tls| Peer::Qemu { channels, tls }));
        }
    }
    if dunlin_rig::cloud_hypervisor::program().is_some() {
        for connections in CONNECTIONS {
            let tls = true;
            peers.push(Peer::CloudHypervisor { connections, tls });
        }
        peers.push(Peer::CloudHypervisor {
            connections: 4,
            tls: false,
        });
    } else {
        eprintln!("the variable CLOUD_HYPERVISOR is not set: Cloud Hypervisor is left out");
    }
    let rig = match peers.is_empty() {
        true => None,
        false => Some(Rig::new(options.size)?),
    };
    let mut turns: Vec<_> = LANES.map(|lanes| Turn::Own { lanes }).into();
    for activity in [Activity::Idle, Activity::Writing] {
        turns.extend(peers.iter().map(|&peer| Turn::Peer { activity, peer }));
    }
    let mut results = Results::default();
    let mut progress = options.output.progress(options.rounds * turns.len())?;
    let measured = turns::rounds(options.rounds, &turns, &mut results, |turn, results| {
        progress.step(&turn.to_string());
        match (*turn, &rig) {
            (Turn::Own { lanes }, _) => own(&dunlin, options, lanes, results),
            (Turn::Peer { activity, peer }, Some(rig)) => {
                let moved = rig.migrate(activity, peer)?;
                add(activity, peer, &moved, options.size, results);
                Ok(())
            }
            (Turn::Peer { .. }, None) => unreachable!("without a rig there are no peers"),
        }
    });
    drop(progress);
    compare(&mut results);
    options.output.print(&results)?;
    measured
}

/// Compares Dunlin with each hypervisor's best lines with TLS.
fn compare(results: &mut Results) {
    let of = |peer, figure, is_rate, ratio| Comparison {
        scenario: "whole",
        peer,
        same: &["guest"],
        figure,
        is_rate,
        ratio,
    };
    for comparison in [
        of(
            "cloud-hypervisor-tls",
            "gib_per_s",
            true,
            "against_cloud_hypervisor",
        ),
        of(
            "cloud-hypervisor-tls",
            "cpu_s_per_gib",
            false,
            "cpu_against_cloud_hypervisor",
        ),
        of("qemu-tls", "gib_per_s", true, "against_qemu"),
        of("qemu-tls", "cpu_s_per_gib", false, "cpu_against_qemu"),
    ] {
        results.compare(&comparison, |variant| variant == "dunlin");
    }
}

/// Adds the measurements of a migration by another hypervisor.
fn add(activity: Activity, peer: Peer, moved: &Moved, memory_mib: u32, results: &mut Results) {
    let (variant, connections) = peer.variant();
    let gibibytes = f64::from(memory_mib) / 1024.0;
    let mut line = results
        .line("whole", variant)
        .with("guest", activity.name())
        .with("lanes", connections)
        .with("guest_bytes", u64::from(memory_mib) << 20)
        .with("content", "random")
        .figure("total_s", moved.total_s)
        .figure("gib_per_s", gibibytes / moved.total_s)
        .figure("cpu_s_per_gib", moved.cpu_s / gibibytes)
        .figure("downtime_ms", moved.downtime_ms)
        .figure("destination_peak_mib", moved.destination_peak_mib)
        .figure("stolen_s", moved.stolen_s);
    if let Some(iterations) = moved.iterations {
        line = line.figure("iterations", iterations);
    }
    line.add();
}

/// One round of `dunlin bench whole` with this number of lanes.
fn own(dunlin: &Path, options: &WholeOptions, lanes: u8, results: &mut Results) -> Result<()> {
    let size = format!("{}M", options.size);
    let done = Command::new(dunlin)
        .args(["bench", "whole", "--rounds", "1", "--json", "--size", &size])
        .args(["--lanes", &lanes.to_string()])
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

/// What the migrations of QEMU and of Cloud Hypervisor share.
struct Rig {
    qemu: Qemu,
    accelerator: Accelerator,
    credentials: Credentials,
    memory_mib: u32,
    scratch: Scratch,
}

/// The measurements of one migration.
pub(super) struct Moved {
    pub(super) total_s: f64,
    pub(super) cpu_s: f64,
    pub(super) downtime_ms: f64,
    /// The number of iterations; `None` if the hypervisor does not report it.
    pub(super) iterations: Option<f64>,
    pub(super) destination_peak_mib: f64,
    /// CPU time that the hypervisor of this host took from it.
    pub(super) stolen_s: f64,
}

/// Writes to memory and frees it, so that the host has backed these pages when the destination
/// allocates its memory, as after a preceding migration. Call this function right before that: the
/// host may reclaim the freed memory within seconds.
pub(super) fn touch(workload: &Workload) -> Result<()> {
    touch_physical_memory(TOUCHED * (u64::from(workload.memory_mib) << 20))
}

impl Rig {
    fn new(memory_mib: u32) -> Result<Self> {
        ensure!(
            (128..=2048).contains(&memory_mib),
            "--size must be between 128 and 2048 for the guests of QEMU and Cloud Hypervisor"
        );
        let accelerator = match File::open("/dev/kvm") {
            Ok(_) => Accelerator::Kvm,
            Err(_) => Accelerator::Tcg,
        };
        if accelerator == Accelerator::Kvm {
            vcpu::check()?;
        }
        let rig = Self {
            qemu: debian::qemu()?,
            accelerator,
            credentials: Credentials::new(SERVER, CLIENT)?,
            memory_mib,
            scratch: Scratch::try_new().context("cannot create a scratch folder")?,
        };
        // Write the content that QEMU and Cloud Hypervisor load into the guest's memory as an
        // initial RAM disk.
        let bytes = u64::from(memory_mib - LEFT_OUT_MIB) << 20;
        let mut random = File::open("/dev/urandom").context("cannot open /dev/urandom")?;
        let mut content = File::create(rig.content()).context("cannot create the RAM disk")?;
        io::copy(&mut random.by_ref().take(bytes), &mut content)
            .context("cannot write the RAM disk")?;
        Ok(rig)
    }

    /// The file with the content of an idle guest's memory.
    fn content(&self) -> PathBuf {
        self.scratch.join("content")
    }

    fn migrate(&self, activity: Activity, peer: Peer) -> Result<Moved> {
        let workload = activity.workload(self.memory_mib);
        let content = match activity {
            Activity::Idle => Some(self.content()),
            Activity::Writing => None,
        };
        match peer {
            Peer::Qemu { channels, tls } => {
                self.migrate_qemu(workload, content.as_deref(), channels, tls)
            }
            Peer::CloudHypervisor { connections, tls } => {
                let folder = self.credentials.folder();
                let tls = tls.then_some(folder.as_path());
                let way = cloud_hypervisor::Way::direct(connections, tls)?;
                cloud_hypervisor::migrate(&workload, content.as_deref(), &way)
            }
        }
    }

    /// Starts a guest and migrates it once. Bandwidth is not limited, and the downtime limit is
    /// QEMU's default, 300 ms.
    fn migrate_qemu(
        &self,
        workload: Workload,
        content: Option<&Path>,
        channels: u8,
        tls: bool,
    ) -> Result<Moved> {
        let mut setup = Setup::new(&self.qemu, Guest::Bare, workload, self.accelerator);
        if let Some(content) = content {
            let content = content.to_string_lossy().into_owned();
            setup.options = vec!["-initrd".to_owned(), content];
        }
        let mut source = Machine::start(&setup, None)?;
        let mut destination = Machine::start_incoming(&setup, None)?;
        source.wait_ready()?;
        vcpu::limit_qemu(&mut source, &setup)?;
        let ids = [source.process(), destination.process()];
        let cpu = || {
            ids.iter()
                .map(|&id| process::cpu_s(id))
                .sum::<Result<f64>>()
        };
        // Another program may take this free port before QEMU listens there. QEMU then reports
        // that, and this turn fails.
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let mut migration = Migration::tcp(address);
        migration.multifd = Some(channels);
        if tls {
            migration.tls = Some((self.credentials.folder(), SERVER.to_owned()));
        }
        touch(&setup.workload)?;
        let (before, stolen_before) = (cpu()?, process::stolen_s()?);
        let started = Instant::now();
        begin(&mut source, &mut destination, &migration)?;
        destination.qmp().execute("cont", json!({}))?;
        // Wait for RESUME first, because the destination reports it before the end of its
        // migration.
        let resumed = |name: &str, data: &Value| name == "RESUME" || data["status"] == "failed";
        let event = destination
            .qmp()
            .wait_event(dunlin_rig::machine::TIMEOUT, resumed)?;
        let total_s = started.elapsed().as_secs_f64();
        if event["event"] != "RESUME" {
            bail!("the destination failed: {}", destination.messages());
        }
        finish(&mut source, "source")?;
        let cpu_s = cpu()? - before;
        let report = source.qmp().execute("query-migrate", json!({}))?;
        Ok(Moved {
            total_s,
            cpu_s,
            downtime_ms: report["downtime"].as_f64().unwrap_or_default(),
            iterations: report["ram"]["dirty-sync-count"].as_f64(),
            destination_peak_mib: process::peak_bytes(destination.process())? as f64
                / f64::from(1 << 20),
            stolen_s: process::stolen_s()? - stolen_before,
        })
    }
}
