//! `dunlin bench`: the cost of lanes and migrations on this host. docs/benchmarking.md describes
//! the figures.

mod common;
mod connections;
mod floor;
mod hosts;
mod lanes;
mod rig;
mod thrash;
mod whole;

use anyhow::Result;
use clap::Subcommand;

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Cost of securing a lane, relative to the floor (a reference): plain and TLS lanes, for
    /// each crypto library and 1, 2 and 4 lanes.
    Lanes(lanes::Lanes),
    /// Throughput by number of lanes, when the network limits each connection.
    Connections(connections::Connections),
    /// Migration time of a guest that dirties memory faster than one lane carries it, with one lane
    /// and with two.
    Thrash(thrash::Thrash),
    /// Whole migrations into new memory, from the command to the running guest, relative to the
    /// floor, which is a reference for the cost.
    Whole(whole::Whole),
}

/// Runs one bench; returns the exit code.
pub(crate) fn run(command: &Command) -> Result<i32> {
    match command {
        Command::Lanes(bench) => bench.run(),
        Command::Connections(bench) => bench.run(),
        Command::Thrash(bench) => bench.run(),
        Command::Whole(bench) => bench.run(),
    }?;
    Ok(0)
}
