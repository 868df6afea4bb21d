//! `dunlin bench whole`: whole migrations into new memory, from the command to the running guest.
//!
//! The guest moves between `vm run` and `vm receive`, as between two hosts. The floor
//! ([`super::floor`]) is a reference for the cost of a transfer. This bench measures the
//! floor with destination memory that has not been touched, so the floor includes the cost of
//! populating that memory.

use std::time::Instant;

use anyhow::{Result, ensure};
use clap::Args;
use dunlin_bench::{Output, Progress, Results, process, touch_physical_memory};

use super::common::check_size;
use super::floor;
use super::rig::{fresh_memory, memory};
use super::thrash::iterations;
use crate::line::MovedLine;
use crate::options::{MigrateFlags, parse_bytes, parse_lanes};
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
    /// The guest's memory; repeatable.
    #[arg(long = "size", value_name = "SIZE", value_parser = parse_bytes, default_value = "1G")]
    sizes: Vec<u64>,
    /// The part of the guest's memory with random content, in percent; the rest is zero. A host has
    /// to hold this part twice, so a smaller part allows a larger guest.
    #[arg(long, value_name = "PERCENT", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..=100))]
    content: u64,
    /// Number of lanes; repeatable [default: 2 and 4].
    #[arg(long, value_name = "N", value_parser = parse_lanes())]
    lanes: Vec<u16>,
    /// Do not write to unused memory of the host before each migration.
    #[arg(long)]
    no_touch: bool,
    #[command(flatten)]
    output: Output,
}

/// The guests.
const GUESTS: [&str; 2] = ["idle", "writing"];

/// The size of the memory and of its content, and the number of lanes.
#[derive(Clone, Copy)]
struct Run {
    size: u64,
    content: u64,
    lanes: u16,
}

/// The measurements of one migration.
struct Measured {
    total_s: f64,
    source_cpu_s: f64,
    destination_cpu_s: f64,
    destination_peak_bytes: u64,
    /// CPU time that the hypervisor of this host took from it.
    stolen_s: f64,
    moved: MovedLine,
}

impl Whole {
    pub(super) fn run(&self) -> Result<()> {
        ensure!(self.rounds > 0, "--rounds must be 1 or more");
        for &size in &self.sizes {
            check_size(size, 2 * u128::from(size) * u128::from(self.content) / 100)?;
        }
        let lanes = match &self.lanes[..] {
            [] => &[2, 4],
            some => some,
        };
        let scratch = Scratch::with_identities("bench")?;
        let mut results = Results::default();
        let steps = self.rounds * self.sizes.len() * lanes.len() * (1 + GUESTS.len());
        let mut progress = self.output.progress(steps)?;
        for _ in 0..self.rounds {
            for &size in &self.sizes {
                for &lanes in lanes {
                    let content = size * self.content / 100;
                    let run = Run {
                        size,
                        content,
                        lanes,
                    };
                    self.turn(&scratch, run, &mut results, &mut progress)?;
                }
            }
        }
        drop(progress);
        self.output.print(&results)
    }

    /// Measures the floor, and then each guest.
    fn turn(
        &self,
        scratch: &Scratch,
        run: Run,
        results: &mut Results,
        progress: &mut Progress,
    ) -> Result<()> {
        let Run {
            size,
            content,
            lanes,
        } = run;
        let provider = dunlin::lane::fastest::auto().provider;
        let gibibytes = size as f64 / f64::from(1 << 30);
        progress.step(&format!("floor, lanes: {lanes}"));
        self.touch(size)?;
        let floor = {
            let (source, target) = (memory(content, 1)?, fresh_memory(content)?);
            floor::floor(&source, &target, content, provider, usize::from(lanes))?
        };
        results
            .line("whole", "floor")
            .with("guest", "none")
            .with("lanes", lanes)
            .with("guest_bytes", size)
            .with("content", self.named_content())
            .figure("total_s", floor.wall_s)
            .figure("gib_per_s", gibibytes / floor.wall_s)
            .figure("cpu_s_per_gib", floor.cpu_s / gibibytes)
            .figure("stolen_s", floor.stolen_s)
            .add();
        for guest in GUESTS {
            progress.step(&format!("dunlin, {guest} guest, lanes: {lanes}"));
            let measured = self.migrate(scratch, guest, run)?;
            let cpu_s = measured.source_cpu_s + measured.destination_cpu_s;
            let peak = measured.destination_peak_bytes as f64 / f64::from(1 << 20);
            results
                .line("whole", "dunlin")
                .with("guest", guest)
                .with("lanes", lanes)
                .with("guest_bytes", size)
                .with("content", self.named_content())
                .figure("total_s", measured.total_s)
                .figure("gib_per_s", gibibytes / measured.total_s)
                .figure("cpu_s_per_gib", cpu_s / gibibytes)
                .figure("source_cpu_s_per_gib", measured.source_cpu_s / gibibytes)
                .figure(
                    "destination_cpu_s_per_gib",
                    measured.destination_cpu_s / gibibytes,
                )
                .figure("downtime_ms", measured.moved.downtime.total_ms)
                .figure("iterations", measured.moved.iterations.len() as f64)
                .figure("destination_peak_mib", peak)
                .figure("stolen_s", measured.stolen_s)
                .figure("floor_ratio", cpu_s / floor.cpu_s)
                .detail("last_round", iterations(&measured.moved.iterations))
                .add();
        }
        Ok(())
    }

    /// What the results say about the content of the guest's memory.
    fn named_content(&self) -> String {
        match self.content {
            100 => "random".to_owned(),
            part => format!("random, {part} %"),
        }
    }

    /// Writes to unused memory of the host, unless --no-touch is given. If this host is a guest,
    /// the write makes its hypervisor allocate that memory before the measurement. Call this right
    /// before the destination allocates its memory, because the hypervisor can reclaim freed memory
    /// within seconds.
    fn touch(&self, size: u64) -> Result<()> {
        match self.no_touch {
            true => Ok(()),
            false => touch_physical_memory(TOUCHED * size),
        }
    }

    /// Starts a guest and moves it once. The CPU time of a process includes that of its guest.
    fn migrate(&self, scratch: &Scratch, guest: &str, run: Run) -> Result<Measured> {
        let Run {
            size,
            content,
            lanes,
        } = run;
        let memory = size.to_string();
        let content = content.to_string();
        let working_set = (size / WORKING_SET_DIVISOR).to_string();
        let writes = WRITES_PER_S.to_string();
        let mut flags = vec!["--memory", &memory];
        flags.extend(["--fill", "random", "--fill-size", &content]);
        match guest {
            "writing" => {
                flags.extend(["--workload", "sequential", "--working-set", &working_set]);
                flags.extend(["--dirty-rate", &writes]);
            }
            idle => flags.extend(["--workload", idle]),
        }
        let mut pair = Pair::start(scratch, &flags, &[])?;
        let (source, destination) = (pair.source.id(), pair.destination.id());
        let cpu = || -> Result<_> { Ok((process::cpu_s(source)?, process::cpu_s(destination)?)) };
        let flags = MigrateFlags {
            lanes: lanes.into(),
            ..pair.flags()
        };
        self.touch(size)?;
        let (before, stolen_before) = (cpu()?, process::stolen_s()?);
        let begin = Instant::now();
        let moved = pair.migrate_running(&flags)?;
        let total_s = begin.elapsed().as_secs_f64();
        let after = cpu()?;
        Ok(Measured {
            total_s,
            source_cpu_s: after.0 - before.0,
            destination_cpu_s: after.1 - before.1,
            destination_peak_bytes: process::peak_bytes(destination)?,
            stolen_s: process::stolen_s()? - stolen_before,
            moved,
        })
    }
}
