//! `dunlin ipsec`: other programs' TCP connections between two hosts by IPsec, with a
//! security association for each CPU or each connection.
//!
//! `serve` and `up` keep a session between them and a control socket each ([`control_service`]),
//! over which `status` and `down` speak to them. `plan` shows what would be installed.

pub(crate) mod advice;
mod control_service;
mod plan;
mod run;

use anyhow::Result;
use clap::{Subcommand, ValueEnum};
use dunlin_ipsec::Mode;
use serde::{Deserialize, Serialize};

/// How traffic is spread over SAs.
#[derive(Clone, Copy, Debug, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ModeName {
    /// One SA for each CPU that sends (Linux 6.13).
    #[default]
    Cpu,
    /// One SA for each connection.
    Connection,
}

impl From<ModeName> for Mode {
    fn from(name: ModeName) -> Self {
        match name {
            ModeName::Cpu => Self::Cpu,
            ModeName::Connection => Self::Connection,
        }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Take sessions in, from authorised peers, until SIGTERM.
    Serve(run::Serve),
    /// Protect ports between this host and one where `serve` runs, until SIGTERM.
    Up(run::Up),
    /// Say how the sessions of this host stand, and what each SA has carried.
    Status(control_service::Status),
    /// End the sessions of this host's processes, and take back what they installed.
    Down(control_service::Which),
    /// Take back what killed processes have left, and free ports that stay blocked.
    Clean(run::Clean),
    /// Print what one side would install, an object a line; changes nothing.
    Plan(plan::Plan),
}

pub(crate) fn run(command: &Command) -> Result<i32> {
    match command {
        Command::Serve(serve) => serve.run(),
        Command::Up(up) => up.run(),
        Command::Status(status) => status.run(),
        Command::Down(which) => which.down(),
        Command::Clean(clean) => clean.run(),
        Command::Plan(plan) => plan.run(),
    }
}
