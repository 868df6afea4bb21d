//! `dunlin bench`: the cost of lanes and migrations on this host. docs/benchmarking.md describes the
//! figures.

mod connections;
mod floor;
mod hosts;
mod lanes;
mod rig;
mod thrash;
mod whole;

use anyhow::{Result, ensure};
use clap::{Args, Subcommand};
use dunlin::lane::provider::{Provider, auto};
use dunlin_bench::Output;

use crate::options::parse_bytes;

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Cost of securing a lane: plain and TLS against the floor, for each crypto library and 1, 2
    /// and 4 lanes.
    Lanes(lanes::Lanes),
    /// Throughput by number of lanes, when the network limits each connection.
    Connections(connections::Connections),
    /// Migration time of a guest that dirties memory faster than one lane carries it: one lane
    /// against two.
    Thrash(thrash::Thrash),
    /// Whole migrations into new memory, from the command to the running guest, against the floor.
    Whole(whole::Whole),
}

/// Returns the exit code.
pub(crate) fn run(command: &Command) -> Result<i32> {
    match command {
        Command::Lanes(bench) => bench.run(),
        Command::Connections(bench) => bench.run(),
        Command::Thrash(bench) => bench.run(),
        Command::Whole(bench) => bench.run(),
    }?;
    Ok(0)
}

/// Flags of the benches of lanes.
#[derive(Debug, Args)]
struct Common {
    /// Number of measured rounds, after one warm-up round.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Guest memory on each side; both are touched before the measurement.
    #[arg(long, value_parser = parse_bytes, default_value = "1G")]
    size: u64,
    /// Measure only this crypto library: ring or aws-lc-rs.
    #[arg(long)]
    provider: Option<Provider>,
    #[command(flatten)]
    output: Output,
}

impl Common {
    fn check(&self) -> Result<()> {
        ensure!(self.rounds > 0, "--rounds must be 1 or more");
        ensure!(
            self.size >= 64 << 20 && self.size.is_multiple_of(2 << 20),
            "--size must be a multiple of 2 MiB, and 64M or more"
        );
        Ok(())
    }

    /// The libraries to measure.
    fn providers(&self) -> Vec<Provider> {
        match self.provider {
            Some(provider) => vec![provider],
            None => Provider::built_in().to_vec(),
        }
    }

    /// The library for a bench that does not compare them.
    fn one_provider(&self) -> Provider {
        self.provider.unwrap_or_else(|| auto().provider)
    }
}
