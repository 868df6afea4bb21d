//! `cargo xtask bench status`: how much CPU time and lane throughput the observers of Dunlin cost,
//! and how much hostile clients of the observers cost.
//!
//! In all variants, two tunnels that share one channel publish their status, and so does a VM that
//! migrates. The variants differ only in the programs that read this status. In each round,
//! `dunlin bench lanes` runs at the same time as each variant, once per variant.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use dunlin_bench::{Output, Progress, Results, process};
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use serde_json::Value;

use super::clients::Clients;
use super::ends::{self, Ends, Site};
use super::evacuate::name;
use super::pair::{self, Pair, Report, free_port};
use super::{program, turns, vm};

/// Options of the benchmark.
#[derive(Args, Debug)]
pub struct StatusOptions {
    /// How often `dunlin bench lanes` runs during each variant.
    #[arg(long, value_name = "N", default_value_t = 7)]
    rounds: usize,
    /// A built dunlin to measure, instead of a release build of this tree.
    #[arg(long, value_name = "FILE")]
    dunlin: Option<PathBuf>,
    #[command(flatten)]
    output: Output,
}

/// What reads the status of the observed processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Variant {
    None,
    /// `serve-status` with a client that reads it once a second, and `top` in a terminal.
    Observers,
    /// Hostile clients, which read `serve-status` and the status sockets.
    Hostile,
}

const VARIANTS: [Variant; 3] = [Variant::None, Variant::Observers, Variant::Hostile];

/// The lanes of the tunnel and of the migration.
const LANES: u16 = 8;
/// The time between the start of the observers and the measurement.
const SETTLE: Duration = Duration::from_secs(2);
/// The number of bytes that the channel carries in each [`PERIOD`]. Its rate is thus 8 MiB/s.
const PIECE_BYTES: usize = 1 << 20;
const PERIOD: Duration = Duration::from_millis(125);

pub(super) fn run(options: &StatusOptions) -> Result<()> {
    ensure!(options.rounds > 0, "--rounds must be 1 or more");
    let dunlin = match &options.dunlin {
        Some(dunlin) => dunlin
            .canonicalize()
            .context("cannot find the file of --dunlin")?,
        None => program::dunlin()?,
    };
    let cpus = thread::available_parallelism()?.get();
    let observed = Observed::start(dunlin)?;
    let mut results = Results::default();
    let steps = options.rounds * VARIANTS.len() + 1;
    let mut progress = options.output.progress(steps)?;
    progress.step("warm-up");
    observed.lanes()?;
    let mut round = 0;
    let measured = turns::rounds(
        options.rounds,
        &["all variants"],
        &mut results,
        |_, results| {
            round += 1;
            compare(&observed, round, cpus, results, &mut progress)
        },
    );
    drop(progress);
    options.output.print(&results)?;
    measured
}

/// The order of the variants in a round. It rotates, so each variant is the first one in every
/// third round.
fn order(round: usize) -> [Variant; 3] {
    let mut order = VARIANTS;
    order.rotate_left((round - 1) % VARIANTS.len());
    order
}

/// Measures all variants once.
fn compare(
    observed: &Observed,
    round: usize,
    cpus: usize,
    results: &mut Results,
    progress: &mut Progress,
) -> Result<()> {
    let mut turns = Vec::new();
    for variant in order(round) {
        progress.step(&format!("round {round}, {}", name(&variant)));
        let turn = observed.turn(variant);
        turns.push((variant, turn.with_context(|| name(&variant))?));
    }
    let none = turns.iter().find(|(variant, _)| *variant == Variant::None);
    let (_, none) = none.context("the round has no turn without observers")?;
    for (variant, turn) in &turns {
        let line = results.line("status", &name(variant)).with("lanes", 2);
        let mut line = line.with("cpus", cpus);
        for (name, value) in figures(*variant, turn, none, cpus) {
            line = line.figure(name, value);
        }
        line.add();
    }
    Ok(())
}

/// The measurements of one turn.
struct Turn {
    wall_s: f64,
    lanes: Lanes,
    used: Used,
}

/// The rate in GiB/s, and the CPU seconds per GiB. Each is the mean over TLS lanes and plain lanes.
type Lanes = [f64; 2];

/// Four numbers: CPU seconds of the observed processes, CPU seconds of the observers, answers of
/// `serve-status`, answers of the status sockets.
type Used = [f64; 4];

/// The figures of a turn. `none` is the turn of the same round without observers.
fn figures(variant: Variant, turn: &Turn, none: &Turn, cpus: usize) -> Vec<(&'static str, f64)> {
    let percent = |turn: &Turn, cpu_s: f64| cpu_s / (turn.wall_s * cpus as f64) * 100.0;
    let [gib_per_s, cpu_s_per_gib] = turn.lanes;
    let [observed_s, observers_s, answers, statuses] = turn.used;
    let observed = percent(turn, observed_s);
    let mut figures = vec![
        ("wall_s", turn.wall_s),
        ("gib_per_s", gib_per_s),
        ("cpu_s_per_gib", cpu_s_per_gib),
        ("observed_cpu_s", observed_s),
        ("observed_percent", observed),
    ];
    if variant != Variant::None {
        let more = observed - percent(none, none.used[0]);
        figures.extend([
            ("against_none", gib_per_s / none.lanes[0]),
            ("cpu_against_none", cpu_s_per_gib / none.lanes[1]),
            ("observed_more_percent", more),
            ("observers_cpu_s", observers_s),
            ("observers_percent", percent(turn, observers_s)),
            ("answers_per_s", answers / turn.wall_s),
            ("statuses_per_s", statuses / turn.wall_s),
        ]);
    }
    figures
}

/// Reads the output of `dunlin bench lanes --json`.
fn lanes(output: &str) -> Result<Lanes> {
    let (mut sum, mut count) = ([0.0; 2], 0.0);
    for line in output.lines() {
        let line: Value = serde_json::from_str(line)?;
        if matches!(line["variant"].as_str(), Some("tls" | "plain")) {
            for (sum, name) in sum.iter_mut().zip(["gib_per_s", "cpu_s_per_gib"]) {
                let figure = line[name].as_f64();
                *sum += figure
                    .with_context(|| format!("`dunlin bench lanes` does not print {name}"))?;
            }
            count += 1.0;
        }
    }
    ensure!(count > 0.0, "`dunlin bench lanes` measured no lanes");
    Ok(sum.map(|sum| sum / count))
}

/// The CPU time of processes, all of which must run.
fn cpu_s(ids: impl Iterator<Item = u32>) -> Result<f64> {
    let mut seconds = 0.0;
    for id in ids {
        let stat = fs::read_to_string(format!("/proc/{id}/stat"))?;
        ensure!(!stat.contains(") Z "), "a process has ended: {stat}");
        seconds += process::cpu_s(id)?;
    }
    Ok(seconds)
}

/// Two tunnels with a channel, and a VM that migrates slowly. Their processes are killed on drop.
struct Observed {
    pair: Pair,
    /// The processes of `vm run`, `vm receive` and `vm migrate`.
    vm: [vm::Process; 3],
    site: Site,
}

impl Observed {
    fn start(dunlin: PathBuf) -> Result<Self> {
        let site = Site::new(dunlin)?;
        let pair = Pair::start(&site, ends::Variant::Stripe(LANES))?;
        feed(&site, &pair)?;
        let command = |name: &str, control: &str| {
            let mut command = Command::new(&site.dunlin);
            command.args(["vm", name, "--json", "--control"]);
            command.arg(site.path(control));
            command
        };
        // The guest writes faster than `--rate` lets the migration send, so the migration does not
        // end.
        let mut run = command("run", "control");
        run.args(["--name", "vm", "--guest", "process", "--memory", "256M"])
            .args(["--fill-size", "192M", "--working-set", "64M"])
            .args(["--dirty-rate", "4000", "--state-dir"])
            .arg(site.path("state"));
        let (run, _) = vm::Process::start(run, "started")?;
        let mut receive = command("receive", "control-b");
        receive
            .args(["--listen", "127.0.0.1:0", "--identity"])
            .arg(site.path("b"))
            .arg("--state-dir")
            .arg(site.path("state-b"));
        let (receive, line) = vm::Process::start(receive, "listening")?;
        let address = line["address"]
            .as_str()
            .context("the destination reports no address")?;
        let mut migrate = command("migrate", "control");
        migrate
            .args(["--name", "vm", "--to", address, "--peer", "b.test"])
            .args(["--rate", "8M", "--throttle", "never"])
            .args(["--lanes", &LANES.to_string(), "--identity"])
            .arg(site.path("a"));
        let (migrate, _) = vm::Process::start(migrate, "progress")?;
        let mut vm = [run, receive, migrate];
        vm.iter_mut().for_each(vm::Process::discard_output);
        Ok(Self { pair, vm, site })
    }

    /// Runs the benchmark of lanes.
    fn lanes(&self) -> Result<Lanes> {
        let mut bench = Command::new(&self.site.dunlin);
        bench.args(["bench", "lanes", "--json", "--rounds", "3", "--lanes", "2"]);
        let done = bench.output().context("cannot start dunlin")?;
        ensure!(done.status.success(), "{bench:?} failed: {done:?}");
        lanes(&String::from_utf8(done.stdout)?)
    }

    /// Runs the benchmark of lanes beside a variant.
    fn turn(&self, variant: Variant) -> Result<Turn> {
        let mut observers = match variant {
            Variant::None => None,
            Variant::Observers => Some(Observers::start(&self.site, false)?),
            Variant::Hostile => Some(Observers::start(&self.site, true)?),
        };
        thread::sleep(SETTLE);
        let before = self.used(observers.as_mut())?;
        let began = Instant::now();
        let lanes = self.lanes()?;
        let wall_s = began.elapsed().as_secs_f64();
        let after = self.used(observers.as_mut())?;
        let used: Used = std::array::from_fn(|of| after[of] - before[of]);
        ensure!(
            (used[2] > 0.0) == (variant != Variant::None)
                && (used[3] > 0.0) == (variant == Variant::Hostile),
            "clients got no answers: {used:?}"
        );
        Ok(Turn {
            wall_s,
            lanes,
            used,
        })
    }

    /// The CPU times and the numbers of answers since the processes began.
    fn used(&self, observers: Option<&mut Observers>) -> Result<Used> {
        let vm = self.vm.iter().map(vm::Process::id);
        let observed_s = cpu_s(self.pair.ids().chain(vm))?;
        let Some(observers) = observers else {
            return Ok([observed_s, 0.0, 0.0, 0.0]);
        };
        let observers_s = cpu_s(observers.processes.iter().map(pair::Process::id))?;
        let [answers, statuses] = observers.clients.counts()?.map(f64::from);
        Ok([observed_s, observers_s, answers, statuses])
    }
}

/// Opens a channel, and keeps it busy until a tunnel ends.
fn feed(site: &Site, pair: &Pair) -> Result<()> {
    let near = pair.connect(Ends::Unix)?;
    let piece = vec![1; PIECE_BYTES];
    (&near).write_all(&piece[..1])?;
    let far = site.accept(Ends::Unix)?;
    thread::spawn(move || {
        while (&near).write_all(&piece).is_ok() {
            thread::sleep(PERIOD);
        }
    });
    thread::spawn(move || io::copy(&mut &far, &mut io::sink()));
    Ok(())
}

/// What reads the status. Its processes are killed on drop.
struct Observers {
    clients: Clients,
    processes: Vec<pair::Process>,
}

impl Observers {
    fn start(site: &Site, hostile: bool) -> Result<Self> {
        let address = free_port()?;
        let mut serve = Command::new(&site.dunlin);
        serve
            .args(["serve-status", "--listen", &address.to_string()])
            .arg("--control")
            .arg(site.path("control"))
            .stderr(Stdio::null());
        let serve = pair::Process::start(serve, Report::Stdout, "listening on ")?;
        let mut processes = vec![serve];
        if !hostile {
            processes.push(top(site)?);
        }
        let clients = Clients::start(hostile, address, &site.path("control/status"))?;
        Ok(Self { clients, processes })
    }
}

/// Starts `dunlin top` in a pseudo-terminal, and returns when it draws.
fn top(site: &Site) -> Result<pair::Process> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let mut terminal = File::from(openpt(flags)?);
    unlockpt(&terminal)?;
    let size = Winsize {
        ws_row: 40,
        ws_col: 140,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    tcsetwinsize(&terminal, size)?;
    let end = ioctl_tiocgptpeer(&terminal, flags)?;
    let mut top = Command::new("setsid");
    top.arg("--ctty").arg(&site.dunlin);
    top.args(["top", "--control"]).arg(site.path("control"));
    top.arg("--state-dir").arg(site.path("state"));
    top.env("TERM", "xterm-256color");
    top.stdin(end.try_clone()?).stdout(end.try_clone()?);
    let process = pair::Process(top.stderr(end).spawn().context("cannot start setsid")?);
    // Close this process's copies of the end that `dunlin top` uses, so that reading from the
    // terminal fails after `dunlin top` has ended.
    drop(top);
    terminal
        .read_exact(&mut [0])
        .context("cannot read what `dunlin top` draws")?;
    thread::spawn(move || io::copy(&mut terminal, &mut io::sink()));
    Ok(process)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn each_variant_is_first_in_turn() {
        assert_eq!(order(1), VARIANTS);
        assert_eq!([1, 2, 3].map(|round| order(round)[0]), VARIANTS);
        assert_eq!(order(4), VARIANTS);
    }

    #[test]
    fn the_figures_of_lanes_are_the_means_of_tls_and_plain() {
        let line = |variant: &str, rate: f64, cpu: f64| {
            format!(r#"{{"variant":"{variant}","gib_per_s":{rate},"cpu_s_per_gib":{cpu}}}"#)
        };
        let floor = line("floor", 9.0, 9.0);
        let lines = [&floor, &line("plain", 4.0, 0.5), &line("tls", 2.0, 1.0)];
        let mean = lanes(&lines.map(String::as_str).join("\n")).unwrap();
        assert_eq!(mean, [3.0, 0.75]);
        lanes(&floor).unwrap_err();
        lanes(r#"{"variant":"tls","gib_per_s":1.0}"#).unwrap_err();
    }

    #[test]
    fn shares_are_of_all_cpus_and_ratios_are_to_the_turn_without_observers() {
        let turn = |wall_s, gib_per_s, observed_s| Turn {
            wall_s,
            lanes: [gib_per_s, 1.0 / gib_per_s],
            used: [observed_s, 0.5, 30.0, 60.0],
        };
        // The observed processes take 5 % of both CPUs without observers, and 7.5 % with them.
        let (none, hostile) = (turn(5.0, 2.0, 0.5), turn(10.0, 1.0, 1.5));
        let figures = figures(Variant::Hostile, &hostile, &none, 2);
        let expected = [
            ("wall_s", 10.0),
            ("gib_per_s", 1.0),
            ("cpu_s_per_gib", 1.0),
            ("observed_cpu_s", 1.5),
            ("observed_percent", 7.5),
            ("against_none", 0.5),
            ("cpu_against_none", 2.0),
            ("observed_more_percent", 2.5),
            ("observers_cpu_s", 0.5),
            ("observers_percent", 2.5),
            ("answers_per_s", 3.0),
            ("statuses_per_s", 6.0),
        ];
        assert_eq!(figures, expected);
    }
}
