//! `dunlin ipsec`: protects other programs' TCP connections between two hosts with IPsec, with one
//! security association per CPU or per connection.
//!
//! `serve` and `up` maintain a session between two hosts, and each serves a control socket
//! ([`control_service`]) for `status` and `down`. `plan` shows what a session would install.

pub(crate) mod advice;
mod control_service;
mod mode;
mod plan;
mod run;

use anyhow::Result;
use clap::Subcommand;

pub(crate) use self::control_service::{Answer, AssociationLine, SessionLine, status_within};
pub(crate) use self::mode::ModeName;

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Accept sessions from authorised peers until SIGTERM.
    Serve(run::Serve),
    /// Protect ports between this host and a host that runs `serve`, until SIGTERM.
    Up(run::Up),
    /// Show the sessions of this host, and each SA's counters.
    Status(control_service::Status),
    /// End the sessions of this host's processes, and remove what they installed.
    Down(control_service::Down),
    /// Remove what killed processes left, and free blocked ports.
    Clean(run::Clean),
    /// Print what one side would install, one object per line; changes nothing.
    Plan(plan::Plan),
}

pub(crate) fn run(command: &Command) -> Result<i32> {
    match command {
        Command::Serve(serve) => serve.run(),
        Command::Up(up) => up.run(),
        Command::Status(status) => status.run(),
        Command::Down(down) => down.run(),
        Command::Clean(clean) => clean.run(),
        Command::Plan(plan) => plan.run(),
    }
}
