//! `dunlin vm`: the reference VMM as separate processes.
//!
//! `run` owns a new VM, `receive` an arriving one; either process serves a control socket for the
//! other commands ([`owner`]).

mod control_service;
mod migrate;
mod moving;
mod owner;
mod receive;
pub(crate) mod request;
mod run;
mod story;

use anyhow::Result;
use clap::Subcommand;

pub(crate) use migrate::{Ended, describe, follow, status};

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a new VM in this process until it ends or moves away.
    Run(run::Run),
    /// Wait for a VM, then run it in this process until it ends or moves away.
    Receive(receive::Receive),
    /// Move a VM of this host to another host.
    Migrate(migrate::Migrate),
    /// Follow the migration of a VM of this host until it ends.
    Watch(migrate::Target),
    /// Change the rate limit of a migration under way.
    Set(migrate::Set),
    /// Show the status of a VM of this host.
    Status(migrate::Target),
    /// Pause or resume a VM of this host, or ask it to power itself off.
    Ask(migrate::Ask),
}

/// Runs one command; returns the exit code.
pub(crate) fn run(command: Command) -> Result<i32> {
    match command {
        Command::Run(run) => run.run(),
        Command::Receive(receive) => receive.run(),
        Command::Migrate(migrate) => migrate.run(),
        Command::Watch(target) => target.watch(),
        Command::Set(set) => set.run(),
        Command::Status(target) => target.status(),
        Command::Ask(ask) => ask.run(),
    }
}
