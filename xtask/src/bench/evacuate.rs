//! `cargo xtask bench evacuate`: all guests of a host leave it, through Dunlin's lanes and through
//! pairs of stunnels.
//!
//! Each guest has a process `dunlin vm run` of its own. One process `dunlin vm receive` receives
//! all of them. With stunnel, each migration has a pair of stunnel processes, and carries its
//! memory in one connection without security of its own. Engine, guests and destination are the
//! same in all variants. Only the transport differs, and whether the guests leave all at once or in
//! turn.

use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use dunlin_bench::{Output, Progress, Results, process, touch_physical_memory};
use dunlin_test_base::Scratch;
use serde_json::{Value, json};

use super::pair::{self, free_port, wait};
use super::vm::{DESTINATION, Files, Process, SOURCE, number};
use super::{program, turns};

/// Options of the benchmark.
#[derive(Args, Debug)]
pub struct EvacuateOptions {
    /// Number of evacuations with each variant and each kind of guest.
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: usize,
    /// Number of guests, at most 128.
    #[arg(long, value_name = "N", default_value_t = 10)]
    guests: u16,
    /// MiB of memory of each guest.
    #[arg(long, value_name = "MIB", default_value_t = 512)]
    size: u32,
    /// The kinds of guests.
    #[arg(
        long,
        value_delimiter = ',',
        value_enum,
        default_value = "idle,medium,thrashing"
    )]
    kinds: Vec<Kind>,
    /// The variants.
    #[arg(
        long,
        value_delimiter = ',',
        value_enum,
        default_value = "stunnel,stunnel-in-turn,dunlin,dunlin-in-turn,plain"
    )]
    variants: Vec<Variant>,
    /// What the guests are: `process` needs no KVM.
    #[arg(long, value_name = "process|kvm", default_value = "process")]
    guest: String,
    /// Rate at which a medium guest writes to an eighth of its memory, in MiB/s.
    #[arg(long, value_name = "MIB", default_value_t = 8)]
    medium: u32,
    /// Rate at which a thrashing guest writes to half of its memory, in MiB/s.
    #[arg(long, value_name = "MIB", default_value_t = 32)]
    thrashing: u32,
    /// Lanes of each guest's migration. A migration through stunnel has one.
    #[arg(long, value_name = "N", default_value_t = 2)]
    lanes: u16,
    /// Limit on the rate at which all guests together arrive, in MiB/s.
    #[arg(long, value_name = "MIB")]
    rate: Option<u32>,
    /// Limit on the rate of each connection, in MiB/s. The kernel of the source enforces it.
    #[arg(long, value_name = "MIB")]
    lane_rate: Option<u32>,
    /// Longest acceptable downtime in ms.
    #[arg(long, value_name = "MS", default_value_t = 300)]
    downtime_limit: u32,
    /// A built dunlin to measure, instead of a release build of this tree.
    #[arg(long, value_name = "FILE")]
    dunlin: Option<PathBuf>,
    #[command(flatten)]
    output: Output,
}

/// What the guests do.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Kind {
    Idle,
    Medium,
    Thrashing,
}

/// How the guests leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Variant {
    /// Through stunnel, all at once.
    Stunnel,
    /// Through stunnel, one after the other.
    StunnelInTurn,
    /// With TLS lanes, all at once.
    Dunlin,
    /// With TLS lanes, one after the other.
    DunlinInTurn,
    /// With lanes without security, all at once. Shows the costs without encryption.
    Plain,
}

/// The name of a value, as on the command line.
pub(super) fn name(value: &impl ValueEnum) -> String {
    let value = value.to_possible_value();
    value.map_or_else(String::new, |value| value.get_name().to_owned())
}

impl Variant {
    fn uses_stunnel(self) -> bool {
        matches!(self, Self::Stunnel | Self::StunnelInTurn)
    }

    fn is_in_turn(self) -> bool {
        matches!(self, Self::StunnelInTurn | Self::DunlinInTurn)
    }

    /// The variant with stunnel in which the guests leave in the same way, at once or in turn.
    fn with_stunnel(self) -> Self {
        match self.is_in_turn() {
            true => Self::StunnelInTurn,
            false => Self::Stunnel,
        }
    }
}

pub(super) fn run(options: &EvacuateOptions) -> Result<()> {
    ensure!(options.rounds > 0, "--rounds must be 1 or more");
    ensure!(
        (2..=128).contains(&options.guests),
        "--guests must be between 2 and 128"
    );
    let dunlin = match &options.dunlin {
        Some(dunlin) => dunlin
            .canonicalize()
            .context("cannot find the file of --dunlin")?,
        None => program::dunlin()?,
    };
    let bench = Bench {
        options,
        files: Files::new(dunlin)?,
    };
    let kinds: Vec<_> = options
        .kinds
        .iter()
        .map(|kind| (*kind, name(kind)))
        .collect();
    let turns: Vec<_> = kinds.iter().map(|(_, name)| name).collect();
    let mut results = Results::default();
    let steps = options.rounds * kinds.len() * options.variants.len();
    let mut progress = options.output.progress(steps)?;
    let measured = turns::rounds(options.rounds, &turns, &mut results, |turn, results| {
        let kind = kinds.iter().find(|(_, name)| name == *turn);
        let (kind, _) = kind.context("a turn of the benchmark names no known kind of guest")?;
        bench.compare(*kind, results, &mut progress)
    });
    drop(progress);
    options.output.print(&results)?;
    measured
}

struct Bench<'a> {
    options: &'a EvacuateOptions,
    files: Files,
}

/// The measurements of one evacuation.
struct Measured {
    total_s: f64,
    /// CPU time of all processes of the evacuation: the guests at the source, the process at the
    /// destination, and stunnel.
    cpu_s: f64,
    vms: Vec<Moved>,
}

/// The measurements of one VM.
struct Moved {
    total_s: f64,
    downtime_ms: f64,
    wire_bytes: f64,
    iterations: f64,
    /// The strongest throttle of any iteration.
    throttle_percent: f64,
}

impl Moved {
    fn read(line: &Value, total: Duration) -> Result<Self> {
        let iterations = line["iterations"].as_array().map_or(&[][..], |all| all);
        let throttles = iterations.iter().filter_map(|one| one["throttle"].as_f64());
        let downtime = &line["downtime"];
        let of_guest = downtime["guest_ms"].as_f64();
        Ok(Self {
            total_s: total.as_secs_f64(),
            downtime_ms: of_guest.map_or_else(|| number(downtime, "total_ms"), Ok)?,
            wire_bytes: number(line, "wire_bytes")?,
            iterations: iterations.len() as f64,
            throttle_percent: throttles.fold(0.0, f64::max),
        })
    }

    fn json(&self) -> Value {
        json!({
            "total_s": self.total_s,
            "downtime_ms": self.downtime_ms,
            "wire_bytes": self.wire_bytes,
            "iterations": self.iterations,
            "throttle_percent": self.throttle_percent,
        })
    }
}

impl Measured {
    fn largest(&self, figure: impl Fn(&Moved) -> f64) -> f64 {
        self.vms.iter().map(figure).fold(0.0, f64::max)
    }
}

impl Bench<'_> {
    /// Evacuates the host once by each variant. If one variant fails, the others still run.
    fn compare(&self, kind: Kind, results: &mut Results, progress: &mut Progress) -> Result<()> {
        let mut measured = Vec::new();
        let mut failed = Vec::new();
        for &variant in &self.options.variants {
            progress.step(&format!("{}, {}", name(&kind), name(&variant)));
            match self.evacuate(kind, variant) {
                Ok(one) => measured.push((variant, one)),
                Err(error) => failed.push(format!("{}: {error:#}", name(&variant))),
            }
        }
        let total = |wanted: Variant| {
            let found = measured.iter().find(|(variant, _)| *variant == wanted);
            found.map(|(_, one)| one.total_s)
        };
        for (variant, one) in &measured {
            let stunnel = total(variant.with_stunnel()).filter(|_| !variant.uses_stunnel());
            self.add(kind, *variant, one, stunnel, results);
        }
        ensure!(failed.is_empty(), "{}", failed.join("; "));
        Ok(())
    }

    /// Adds a line for one variant to `results`. `stunnel` is the total time of the corresponding
    /// variant with stunnel in the same round.
    fn add(
        &self,
        kind: Kind,
        variant: Variant,
        measured: &Measured,
        stunnel: Option<f64>,
        results: &mut Results,
    ) {
        let options = self.options;
        let gibibytes = f64::from(options.guests) * f64::from(options.size) / 1024.0;
        let limit = f64::from(options.downtime_limit);
        let late = measured.vms.iter().filter(|vm| vm.downtime_ms > limit);
        let wire: f64 = measured.vms.iter().map(|vm| vm.wire_bytes).sum();
        let lanes = match variant.uses_stunnel() {
            true => 1,
            false => options.lanes,
        };
        let mut line = results
            .line("evacuate", &name(&variant))
            .with("guest", name(&kind))
            .with("guests", options.guests)
            .with("lanes", lanes)
            .with("guest_bytes", u64::from(options.size) << 20)
            .with("content", "random")
            .with("downtime_limit_ms", options.downtime_limit);
        for (name, rate) in [("rate", options.rate), ("lane_rate", options.lane_rate)] {
            if let Some(rate) = rate {
                line = line.with(name, u64::from(rate) << 20);
            }
        }
        // `vm_s`, `downtime_ms` and `throttle_percent` are the largest values of all VMs.
        let mut line = line
            .figure("total_s", measured.total_s)
            .figure("gib_per_s", gibibytes / measured.total_s)
            .figure("wire_gib", wire / f64::from(1 << 30))
            .figure("cpu_s_per_gib", measured.cpu_s / gibibytes)
            .figure("vm_s", measured.largest(|vm| vm.total_s))
            .figure("downtime_ms", measured.largest(|vm| vm.downtime_ms))
            .figure("vms_over_limit", late.count() as f64)
            .figure(
                "throttle_percent",
                measured.largest(|vm| vm.throttle_percent),
            );
        if let Some(stunnel) = stunnel {
            line = line.figure("against_stunnel", stunnel / measured.total_s);
        }
        let vms: Vec<_> = measured.vms.iter().map(Moved::json).collect();
        line.detail("last_round", vms).add();
    }

    /// Starts all guests and migrates them.
    fn evacuate(&self, kind: Kind, variant: Variant) -> Result<Measured> {
        let scratch = Scratch::try_new().context("cannot create a scratch folder")?;
        let count = self.options.guests;
        let (mut destination, address) = self.receive(&scratch)?;
        let guests = (1..=count).map(|number| self.guest(&scratch, kind, number));
        let guests = guests.collect::<Result<Vec<_>>>()?;
        let mut stunnels = Vec::new();
        if variant.uses_stunnel() {
            for number in 1..=count {
                stunnels.push(Stunnels::start(&self.files, &scratch, number, address)?);
            }
        }
        let of_stunnels = stunnels.iter().flat_map(Stunnels::ids);
        let mut ids: Vec<u32> = of_stunnels.chain(guests.iter().map(Process::id)).collect();
        ids.push(destination.id());
        // A guest's process ends when the guest has left. It stays a zombie until its `Process` is
        // dropped, so /proc still has its CPU time.
        let cpu = || {
            ids.iter()
                .map(|id| process::cpu_s(*id))
                .sum::<Result<f64>>()
        };
        let migrate = |number: u16| {
            let stunnel = stunnels.get(usize::from(number - 1));
            let to = stunnel.map_or(address, |stunnel| stunnel.near);
            self.migrate(&scratch, variant, number, to)
        };
        touch_physical_memory(u64::from(count) * (u64::from(self.options.size) << 20))?;
        let before = cpu()?;
        let began = Instant::now();
        let vms = match variant.is_in_turn() {
            true => (1..=count).map(&migrate).collect(),
            false => at_once(count, &migrate),
        };
        let total_s = began.elapsed().as_secs_f64();
        let cpu_s = cpu()? - before;
        let vms: Vec<Moved> = vms?;
        for _ in 1..=count {
            let received = destination.wait_for("received")?;
            ensure!(received["runs"] == true, "a guest does not run: {received}");
        }
        Ok(Measured {
            total_s,
            cpu_s,
            vms,
        })
    }

    /// The destination of all guests, and its address.
    fn receive(&self, scratch: &Scratch) -> Result<(Process, SocketAddr)> {
        let mut receive = self.files.vm("receive");
        receive
            .args(["--listen", "127.0.0.1:0", "--peer", SOURCE, "--allow-plain"])
            .args(["--sessions", &self.options.guests.to_string()])
            .arg("--identity")
            .arg(self.files.path("destination"))
            .arg("--control")
            .arg(scratch.join("destination"))
            .arg("--state-dir")
            .arg(scratch.join("destination-state"));
        if let Some(rate) = self.options.rate {
            receive.args(["--rate", &format!("{rate}M")]);
        }
        let (process, line) = Process::start(receive, "listening")?;
        let address = line["address"]
            .as_str()
            .context("the destination reports no address")?
            .parse()?;
        Ok((process, address))
    }

    fn guest(&self, scratch: &Scratch, kind: Kind, number: u16) -> Result<Process> {
        let options = self.options;
        let mut run = self.files.vm("run");
        run.args(["--name", &vm_name(number), "--guest", &options.guest])
            .args(["--memory", &format!("{}M", options.size)])
            .arg("--control")
            .arg(scratch.join("source"))
            .arg("--state-dir")
            .arg(scratch.join("source-state"));
        let (workload, part, rate) = match kind {
            Kind::Idle => ("idle", 1, 0),
            Kind::Medium => ("random", 8, options.medium),
            Kind::Thrashing => ("sequential", 2, options.thrashing),
        };
        run.args(["--workload", workload]);
        if rate > 0 {
            let pages = u64::from(rate) * 256;
            run.args(["--working-set", &format!("{}M", options.size / part)])
                .args(["--dirty-rate", &pages.to_string()]);
        }
        Ok(Process::start(run, "started")?.0)
    }

    /// Moves a guest.
    fn migrate(
        &self,
        scratch: &Scratch,
        variant: Variant,
        number: u16,
        to: SocketAddr,
    ) -> Result<Moved> {
        let options = self.options;
        let (security, lanes) = match variant {
            Variant::Dunlin | Variant::DunlinInTurn => ("tls", options.lanes),
            Variant::Plain => ("plain", options.lanes),
            Variant::Stunnel | Variant::StunnelInTurn => ("plain", 1),
        };
        let mut migrate = self.files.vm("migrate");
        migrate
            .args(["--name", &vm_name(number), "--to", &to.to_string()])
            .args(["--peer", DESTINATION, "--security", security])
            .args(["--lanes", &lanes.to_string()])
            .args(["--downtime-limit", &format!("{}ms", options.downtime_limit)])
            .arg("--identity")
            .arg(self.files.path("source"))
            .arg("--control")
            .arg(scratch.join("source"));
        if let Some(rate) = options.lane_rate {
            migrate.args(["--lane-rate", &format!("{rate}M")]);
        }
        let began = Instant::now();
        let mut process = Process::spawn(migrate)?;
        let moved = process.wait_for("moved")?;
        Moved::read(&moved, began.elapsed())
    }
}

fn vm_name(number: u16) -> String {
    format!("vm{number}")
}

/// Moves all guests, each on its own thread.
fn at_once(count: u16, migrate: &(impl Fn(u16) -> Result<Moved> + Sync)) -> Result<Vec<Moved>> {
    thread::scope(|scope| {
        let threads: Vec<_> = (1..=count)
            .map(|number| scope.spawn(move || migrate(number)))
            .collect();
        let joined = threads.into_iter().map(|thread| match thread.join() {
            Ok(moved) => moved,
            Err(_) => bail!("a thread panicked"),
        });
        joined.collect()
    })
}

/// The stunnels of one migration.
struct Stunnels {
    processes: [pair::Process; 2],
    /// The address to which the source connects.
    near: SocketAddr,
}

impl Stunnels {
    fn start(files: &Files, scratch: &Scratch, number: u16, to: SocketAddr) -> Result<Self> {
        let (near, far) = (free_port()?, free_port()?);
        let start = |side: &str, identity: &str, services: &str| {
            let config = scratch.join(format!("stunnel-{side}-{number}.conf"));
            pair::Process::stunnel(&files.path(identity), &config, services)
        };
        let server = format!("[vm]\naccept = {far}\nconnect = {to}\n");
        let client = format!("client = yes\n[vm]\naccept = {near}\nconnect = {far}\n");
        let processes = [
            start("far", "destination", &server)?,
            start("near", "source", &client)?,
        ];
        // These connections only check that each stunnel listens. The destination rejects the
        // connections that stunnel forwards to it.
        for (side, port) in [("far", far), ("near", near)] {
            wait(&format!("stunnel at the {side} side"), || {
                TcpStream::connect(port).is_ok()
            })?;
        }
        Ok(Self { processes, near })
    }

    fn ids(&self) -> impl Iterator<Item = u32> + '_ {
        self.processes.iter().map(pair::Process::id)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_variant_is_compared_with_stunnel_in_the_same_course() {
        let pairs = [
            (Variant::Dunlin, Variant::Stunnel),
            (Variant::DunlinInTurn, Variant::StunnelInTurn),
            (Variant::Plain, Variant::Stunnel),
        ];
        for (variant, stunnel) in pairs {
            assert_eq!(variant.with_stunnel(), stunnel);
            assert!(stunnel.uses_stunnel() && !variant.uses_stunnel());
        }
        assert_eq!(name(&Variant::StunnelInTurn), "stunnel-in-turn");
    }

    #[test]
    fn the_downtime_is_that_of_the_guest_if_the_guest_has_seen_it() {
        let read = |guest_ms: Value| {
            let line = json!({
                "wire_bytes": 4096,
                "downtime": { "guest_ms": guest_ms, "total_ms": 7.0 },
                "iterations": [{ "throttle": 20 }, { "throttle": 40 }, { "throttle": 0 }],
            });
            Moved::read(&line, Duration::from_millis(500)).unwrap()
        };
        let moved = read(json!(9.5));
        assert_eq!(
            (moved.downtime_ms, moved.throttle_percent, moved.iterations),
            (9.5, 40.0, 3.0)
        );
        assert_eq!((moved.total_s, read(Value::Null).downtime_ms), (0.5, 7.0));
        assert!(Moved::read(&json!({}), Duration::ZERO).is_err());
    }

    #[test]
    fn a_guest_that_fails_fails_the_evacuation() {
        let moved = |number: u16| match number {
            2 => bail!("the cause"),
            _ => Moved::read(
                &json!({ "wire_bytes": 1, "downtime": { "total_ms": 1.0 } }),
                Duration::ZERO,
            ),
        };
        assert_eq!(at_once(1, &moved).unwrap().len(), 1);
        assert_eq!(at_once(3, &moved).err().unwrap().to_string(), "the cause");
    }
}
