//! `dunlin tunnel`: carries the connections of unmodified hypervisors between two hosts over
//! encrypted lanes.
//!
//! `run` is the service; it serves a control socket ([`control_service`]) for the other commands
//! and `dunlin status`.

mod ask;
mod check;
mod config;
mod control_service;
pub(crate) mod line;
mod redirected;
mod report;
mod rules;
mod run;
mod show;
mod stdio;

use anyhow::Result;
use clap::Subcommand;

pub(crate) use ask::set_rate;
pub(crate) use check::prober;
pub(crate) use config::Config;
pub(crate) use config::rate::parse_tunnel_rate;
pub(crate) use config::redirect::{Listeners, PEER_PORT, Redirect, RedirectPeer, today};
pub(crate) use config::socket::{parse_group, parse_mode};
pub(crate) use config::table::{Port, parse_port, parse_server, socket_path};
pub(crate) use redirected::look_up;
pub(crate) use report::{Report, unix};
pub(crate) use show::{show, status_within};

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Carry connections until SIGTERM; SIGHUP reloads the configuration.
    Run(run::Run),
    /// Check a configuration and its certificates, and report every mistake; with --connect, test
    /// the path to each peer.
    Check(check::Check),
    /// Add a listener to a running tunnel, for example for one VM's migration, and print its
    /// address. The listener closes with its last connection.
    Open(ask::Open),
    /// Limit the rate at which a running tunnel sends on a route or to a peer, until the
    /// configuration is reloaded.
    Set(ask::Set),
    /// Close a listener that `open` added. The listener's connections continue.
    Close(ask::Close),
    /// Carry standard input and output through a running tunnel.
    Stdio(stdio::Stdio),
}

pub(crate) fn run(command: &Command) -> Result<i32> {
    match command {
        Command::Run(run) => run.run(),
        Command::Check(check) => check.run(),
        Command::Open(open) => open.run(),
        Command::Set(set) => set.run(),
        Command::Close(close) => close.run(),
        Command::Stdio(stdio) => stdio.run(),
    }
}
