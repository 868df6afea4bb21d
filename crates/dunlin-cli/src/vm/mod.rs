//! `dunlin vm`: the reference VMM as separate processes.
//!
//! `run` owns a new VM, `receive` one that arrives; either process then keeps
//! a control socket over which the other commands speak to it ([`owner`]).

mod control_service;
mod migrate;
mod moving;
mod owner;
mod receive;
pub(crate) mod request;
mod run;

use anyhow::Result;
use clap::Subcommand;

pub(crate) use migrate::{Ended, describe, follow, status};

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a new VM in this process until it ends or has moved away.
    Run(run::Run),
    /// Wait for a VM, then run it in this process until it ends or moves on.
    Receive(receive::Receive),
    /// Move a VM of this host to another.
    Migrate(migrate::Migrate),
    /// Follow the migration of a VM of this host until it ends.
    Watch(migrate::Target),
    /// Change the migration of a VM of this host while it runs.
    Set(migrate::Set),
    /// Say how a VM of this host is.
    Status(migrate::Target),
    /// Pause a VM of this host, let it go on, or have it power itself off.
    Ask(migrate::Ask),
}

/// Returns the exit code.
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
