//! `dunlin bench`: what lanes and migrations cost on this host, one JSON
//! object a line.
//!
//! Variants are measured in turn, round after round, so that whatever else
//! runs on the host falls on all of them; every figure is a median with its
//! smallest and largest value beside it. docs/benchmarking.md says how to read
//! the lines.

mod connections;
mod figures;
mod hosts;
mod lanes;
mod rig;
mod thrash;

use anyhow::{Result, ensure};
use clap::{Args, Subcommand};
use dunlin::lane::provider::{Provider, auto};

use crate::options::parse_bytes;

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// What securing a lane costs: plain and TLS against the floor, for each
    /// crypto library and 1, 2 and 4 lanes.
    Lanes(lanes::Lanes),
    /// How throughput grows with lanes when the network limits each
    /// connection.
    Connections(connections::Connections),
    /// How long a guest takes to move that dirties its memory faster than one
    /// lane carries it: one lane against two.
    Thrash(thrash::Thrash),
}

/// Returns the exit code.
pub(crate) fn run(command: &Command) -> Result<i32> {
    match command {
        Command::Lanes(bench) => bench.run(),
        Command::Connections(bench) => bench.run(),
        Command::Thrash(bench) => bench.run(),
    }?;
    Ok(0)
}

/// What the benches of lanes have in common.
#[derive(Debug, Args)]
struct Common {
    /// Measured rounds; one more comes first and does not count.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Guest memory on each side; both are touched before anything is timed.
    #[arg(long, value_parser = parse_bytes, default_value = "1G")]
    size: u64,
    /// Only this crypto library: ring or aws-lc-rs.
    #[arg(long)]
    provider: Option<Provider>,
}

impl Common {
    fn check(&self) -> Result<()> {
        ensure!(self.rounds > 0, "no rounds, no figures: --rounds 1 or more");
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

    /// The one library of a bench that does not compare them.
    fn one_provider(&self) -> Provider {
        self.provider.unwrap_or_else(|| auto().provider)
    }
}
