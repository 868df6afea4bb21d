//! `dunlin bench thrash`: migrates a guest that dirties its memory faster than one lane can carry
//! it. Compares a migration over one lane with a migration over two lanes.
//!
//! The guest runs on KVM in one process and moves to another process: `vm run` and `vm receive`, as
//! on two hosts. By default, the kernel limits each lane to 300 MiB/s, and the session limits
//! itself to 500 MiB/s, so that the network is the bottleneck instead of this host's CPUs.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use dunlin_bench::{Output, Results, touch_physical_memory};
use serde_json::{Value, json};

use crate::line::{IterationLine, MovedLine};
use crate::options::{MigrateFlags, parse_bytes};
use crate::process::{Pair, Scratch};

/// How long the guest dirties its memory before it moves.
const RUNS_FOR: Duration = Duration::from_secs(1);
const PAGE_BYTES: u64 = 4096;
const LANES: [u16; 2] = [1, 2];
/// The minimum duration of an iteration from which the dirty rate is computed. A shorter iteration
/// would show the guest's bursts of writes instead of its average rate.
const MEASURABLE_MS: f64 = 100.0;

#[derive(Debug, Args)]
pub(crate) struct Thrash {
    /// Number of measured rounds.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// The guest's memory, all of which it dirties.
    #[arg(long, value_parser = parse_bytes, default_value = "1G")]
    size: u64,
    /// Rate limit for each lane, enforced by the kernel, in bytes per second.
    #[arg(long, value_parser = parse_bytes, default_value = "300M")]
    lane_rate: u64,
    /// Rate limit for all lanes together, in bytes per second.
    #[arg(long, value_parser = parse_bytes, default_value = "500M")]
    rate: u64,
    /// Dirty rate of the guest, in bytes per second; repeatable [default: 350M and 450M].
    #[arg(long = "dirty", value_parser = parse_bytes)]
    dirty: Vec<u64>,
    #[command(flatten)]
    output: Output,
}

impl Thrash {
    pub(super) fn run(&self) -> Result<()> {
        ensure!(self.rounds > 0, "--rounds must be 1 or more");
        let rates = match &self.dirty[..] {
            [] => &[350 << 20, 450 << 20],
            some => some,
        };
        let scratch = Scratch::with_identities("bench")?;
        let provider = dunlin::lane::fastest::auto().provider;
        let mut results = Results::default();
        let steps = self.rounds * rates.len() * LANES.len();
        let mut progress = self.output.progress(steps)?;
        for _ in 0..self.rounds {
            for &rate in rates {
                let pages_per_s = rate / PAGE_BYTES;
                let mut one_lane_s = 0.0;
                for lanes in LANES {
                    progress.step(&format!("{pages_per_s} pages/s, lanes: {lanes}"));
                    let moved = self.migrate(&scratch, lanes, pages_per_s)?;
                    if lanes == 1 {
                        one_lane_s = moved.total_s;
                    }
                    let cpu = moved.source_cpu_s_per_gib + moved.destination_cpu_s_per_gib;
                    let throttle = moved.iterations.iter().map(|pass| pass.throttle).max();
                    results
                        .line("thrash", "tls")
                        .with("provider", provider.to_string())
                        .with("lanes", lanes)
                        .with("lane_bytes_per_s", self.lane_rate)
                        .with("session_bytes_per_s", self.rate)
                        .with("guest_bytes", self.size)
                        .with("content", "random")
                        // In pages per second, unlike the flags, which are in bytes per second.
                        // By default the rate is above --lane-rate and below --rate, so that two
                        // lanes can carry it and one cannot.
                        .with("dirty_rate", pages_per_s)
                        .figure("total_s", moved.total_s)
                        .figure("one_lane_ratio", moved.total_s / one_lane_s)
                        .figure("downtime_ms", moved.downtime.guest_ms.unwrap_or(0.0))
                        .figure("gib_per_s", moved.gib_per_s)
                        .figure("cpu_s_per_gib", cpu)
                        .figure("iterations", moved.iterations.len() as f64)
                        .figure("throttle_percent", f64::from(throttle.unwrap_or(0)))
                        .figure("dirty_rate_seen", dirty_rate_seen(&moved.iterations))
                        .detail("last_round", iterations(&moved.iterations))
                        .add();
                }
            }
        }
        drop(progress);
        self.output.print(&results)
    }

    /// Starts a guest and moves it once.
    fn migrate(&self, scratch: &Scratch, lanes: u16, pages_per_s: u64) -> Result<MovedLine> {
        let (memory, rate) = (self.size.to_string(), pages_per_s.to_string());
        let run = ["--fill", "random", "--workload", "sequential"];
        let sizes = ["--memory", &memory, "--dirty-rate", &rate];
        let mut pair = Pair::start(scratch, &[run, sizes].concat(), &[])?;
        std::thread::sleep(RUNS_FOR);
        touch_physical_memory(2 * self.size)?;
        let flags = MigrateFlags {
            lanes: lanes.into(),
            lane_rate: Some(self.lane_rate),
            rate: Some(self.rate),
            ..pair.flags()
        };
        let moved = pair.migrate_running(&flags)?;
        moved
            .downtime
            .guest_ms
            .context("the guest did not measure its downtime")?;
        Ok(moved)
    }
}

/// The guest's real write rate in pages per second, according to the dirty log: the highest rate of
/// all iterations in which the guest was not throttled. 0 if no such iteration was long enough.
fn dirty_rate_seen(iterations: &[IterationLine]) -> f64 {
    iterations
        .iter()
        .filter(|pass| pass.throttle == 0 && pass.duration_ms >= MEASURABLE_MS)
        .map(|pass| pass.dirtied_pages as f64 / (pass.duration_ms / 1000.0))
        .fold(0.0, f64::max)
}

/// The iterations of a migration, for the report.
pub(super) fn iterations(iterations: &[IterationLine]) -> Vec<Value> {
    let line = |pass: &IterationLine| {
        json!({
            "duration_ms": (pass.duration_ms * 10.0).round() / 10.0,
            "pages": pass.pages,
            "dirtied_pages": pass.dirtied_pages,
            "throttle": pass.throttle,
        })
    };
    iterations.iter().map(line).collect()
}
