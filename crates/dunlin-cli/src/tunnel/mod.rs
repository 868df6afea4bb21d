//! `dunlin tunnel`: carries the connections of hypervisors that know nothing of
//! it, between two hosts, over encrypted lanes.

mod config;
mod run;

use anyhow::Result;
use clap::Subcommand;

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Carry connections until SIGTERM; SIGHUP reads the configuration anew.
    Run(run::Run),
    /// Read a configuration and the certificates that it names, and say what is
    /// wrong with them.
    Check(run::Check),
}

pub(crate) fn run(command: &Command) -> Result<i32> {
    match command {
        Command::Run(run) => run.run(),
        Command::Check(check) => check.run(),
    }
}
