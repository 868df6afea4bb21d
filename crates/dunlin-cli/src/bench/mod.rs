//! `dunlin bench`: what lanes and migrations cost on this host, one JSON
//! object a line.
//!
//! Variants are measured in turn, round after round, so that whatever else
//! runs on the host falls on all of them; every figure is a median with its
//! smallest and largest value beside it. docs/benchmarking.md says how to read
//! the lines.

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
