//! `dunlin bench`: the cost of lanes and migrations on this host, as one JSON object per line.
//!
//! Variants run in turn, round after round, so that other load on the host affects all of them;
//! every figure is a median with its minimum and maximum. docs/benchmarking.md describes the lines.

mod common;
mod connections;
mod figures;
mod hosts;
mod lanes;
mod rig;
mod thrash;

use anyhow::Result;
use clap::Subcommand;

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
