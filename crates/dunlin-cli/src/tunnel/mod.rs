//! `dunlin tunnel`: carries the connections of hypervisors that know nothing of
//! it, between two hosts, over encrypted lanes.
//!
//! `run` is the service; it keeps a control socket ([`control_service`]) over which the other
//! commands speak to it, and `dunlin status`.

mod ask;
mod config;
mod control_service;
pub(crate) mod line;
mod run;
mod show;
mod stdio;

use anyhow::Result;
use clap::Subcommand;

pub(crate) use config::table::{Port, host_of, parse_port, socket_path};
pub(crate) use show::{show, status_within};

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Carry connections until SIGTERM; SIGHUP reads the configuration anew.
    Run(run::Run),
    /// Read a configuration and the certificates that it names, and say what is
    /// wrong with them.
    Check(run::Check),
    /// Have a tunnel that runs listen for one purpose, such as one VM's
    /// migration; print where. It goes when its last connection has ended.
    Open(ask::Open),
    /// Close what `open` has opened; connections go on.
    Close(ask::Close),
    /// Carry standard input and output through a tunnel that runs.
    Stdio(stdio::Stdio),
}

pub(crate) fn run(command: &Command) -> Result<i32> {
    match command {
        Command::Run(run) => run.run(),
        Command::Check(check) => check.run(),
        Command::Open(open) => open.run(),
        Command::Close(close) => close.run(),
        Command::Stdio(stdio) => stdio.run(),
    }
}
