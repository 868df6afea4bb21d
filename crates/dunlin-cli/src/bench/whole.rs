//! `dunlin bench whole`: whole migrations into new memory, from the command to the running guest.
//!
//! The guest moves between `vm run` and `vm receive`, as between two hosts. The floor
//! ([`super::floor`]) is the minimum cost of a transfer. This bench measures the
//! floor with destination memory that has not been touched, so the floor includes the cost of
//! populating that memory.

use std::time::Instant;

use anyhow::{Result, ensure};
use clap::Args;
use dunlin_bench::{Output, Progress, Results, process, touch_physical_memory};

use super::floor;
use super::rig::{fresh_memory, memory};
use super::thrash::iterations;
use crate::line::MovedLine;
use crate::options::{MigrateFlags, parse_bytes};
use crate::process::{Pair, Scratch};

/// Pages that a writing guest writes per second, which amounts to 100 MiB/s.
const WRITES_PER_S: u64 = 25_600;
/// The amount of memory that is written to and freed before each measurement, as a multiple of the
/// guest's memory.
const TOUCHED: u64 = 2;
/// The working set of a writing guest is its memory size divided by this number.
const WORKING_SET_DIVISOR: u64 = 8;

#[derive(Debug, Args)]
pub(crate) struct Whole {
    /// Number of measured rounds.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// The guest's memory, filled with random content.
    #[arg(long, value_parser = parse_bytes, default_value = "1G")]
    size: u64,
    /// Number of lanes; repeatable [default: 2 and 4].
    #[arg(long)]
    lanes: Vec<u16>,
    /// Do not write to free memory of the host before each migration.
    #[arg(long)]
    no_touch: bool,
    #[command(flatten)]
    output: Output,
}

/// The measurements of one migration.
struct Measured {
    total_s: f64,
    cpu_s: f64,
    destination_peak_bytes: u64,
    moved: MovedLine,
}

impl Whole {
    pub(super) fn run(&self) -> Result<()> {
        ensure!(self.rounds > 0, "--rounds must be 1 or more");
        let lanes = match &self.lanes[..] {
            [] => &[2, 4],
            some => some,
        };
        let scratch = Scratch::with_identities("bench")?;
        let source = memory(self.size, 1)?;
        let provider = dunlin::lane::fastest::auto().provider;
        let gibibytes = self.size as f64 / f64::from(1 << 30);
        let guests = ["idle", "writing"];
        let mut results = Results::default();
        let steps = lanes.len() * (1 + guests.len());
        let mut progress = Progress::new(self.rounds * steps);
        for _ in 0..self.rounds {
            for &lanes in lanes {
                progress.step(&format!("floor, lanes: {lanes}"));
                self.touch()?;
                let target = fresh_memory(self.size)?;
                let floor =
                    floor::floor(&source, &target, self.size, provider, usize::from(lanes))?;
                drop(target);
                results
                    .line("whole", "floor")
                    .with("guest", "none")
                    .with("lanes", lanes)
                    .with("guest_bytes", self.size)
                    .with("content", "random")
                    .figure("total_s", floor.wall_s)
                    .figure("gib_per_s", gibibytes / floor.wall_s)
                    .figure("cpu_s_per_gib", floor.cpu_s / gibibytes)
                    .add();
                for guest in guests {
                    progress.step(&format!("dunlin, {guest} guest, lanes: {lanes}"));
                    let measured = self.migrate(&scratch, guest, lanes)?;
                    let peak = measured.destination_peak_bytes as f64 / f64::from(1 << 20);
                    results
                        .line("whole", "dunlin")
                        .with("guest", guest)
                        .with("lanes", lanes)
                        .with("guest_bytes", self.size)
                        .with("content", "random")
                        .figure("total_s", measured.total_s)
                        .figure("gib_per_s", gibibytes / measured.total_s)
                        .figure("cpu_s_per_gib", measured.cpu_s / gibibytes)
                        .figure("downtime_ms", measured.moved.downtime.total_ms)
                        .figure("iterations", measured.moved.iterations.len() as f64)
                        .figure("destination_peak_mib", peak)
                        .figure("floor_ratio", measured.cpu_s / floor.cpu_s)
                        .detail("last_round", iterations(&measured.moved.iterations))
                        .add();
                }
            }
        }
        drop(progress);
        self.output.print(&results)
    }

    /// Writes to free memory of the host, unless --no-touch is given. If this host is a guest, its
    /// hypervisor then allocates that memory before the measurement. Called right before the
    /// destination allocates its memory, because the hypervisor may reclaim freed memory within
    /// seconds.
    fn touch(&self) -> Result<()> {
        match self.no_touch {
            true => Ok(()),
            false => touch_physical_memory(TOUCHED * self.size),
        }
    }

    /// Starts a guest and moves it once. The CPU time is that of both processes and includes the
    /// guest's own.
    fn migrate(&self, scratch: &Scratch, guest: &str, lanes: u16) -> Result<Measured> {
        let memory = self.size.to_string();
        let working_set = (self.size / WORKING_SET_DIVISOR).to_string();
        let writes = WRITES_PER_S.to_string();
        let mut run = vec!["--memory", &memory, "--fill", "random"];
        match guest {
            "writing" => {
                run.extend(["--workload", "sequential", "--working-set", &working_set]);
                run.extend(["--dirty-rate", &writes]);
            }
            idle => run.extend(["--workload", idle]),
        }
        let mut pair = Pair::start(scratch, &run, &[])?;
        let ids = [pair.source.id(), pair.destination.id()];
        let cpu = || {
            ids.iter()
                .map(|&id| process::cpu_s(id))
                .sum::<Result<f64>>()
        };
        let flags = MigrateFlags {
            lanes,
            ..pair.flags()
        };
        self.touch()?;
        let before = cpu()?;
        let begin = Instant::now();
        let moved = pair.migrate_running(&flags)?;
        Ok(Measured {
            total_s: begin.elapsed().as_secs_f64(),
            cpu_s: cpu()? - before,
            destination_peak_bytes: process::peak_bytes(pair.destination.id())?,
            moved,
        })
    }
}
