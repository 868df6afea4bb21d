//! `dunlin libvirt`: makes the migrations of this host's libvirt go through a tunnel, by the redirect
//! of docs/tunnel/redirect.md.
//!
//! ```text
//!  enable: look up (host, qemu_conf) ─▶ reserved ports ─▶ configuration (block) ─▶ rules ─▶ units
//!          ─▶ test of the path                                     ▲
//!  disable: units ─▶ rules ─▶ configuration ─▶ reserved ports      └ restored if the rules fail
//! ```

mod block;
mod disable;
mod enable;
mod host;
mod qemu_conf;
mod record;
mod reserved;
mod status;

use std::path::{Path, PathBuf};
use std::process::{Command as Process, Output};

use anyhow::{Context, Result};
use clap::{Args, Subcommand};

/// The name of the redirect that `enable` writes.
const NAME: &str = "libvirt";
/// The units of a redirect, in the order in which they are started.
const UNITS: [&str; 3] = [
    "dunlin-redirect.service",
    "dunlin-redirect-watch.service",
    "dunlin-tunnel.service",
];

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Let this host's migrations to and from its peers go through a tunnel.
    Enable(enable::Enable),
    /// Undo `enable`: migrations are in the clear again.
    Disable(disable::Disable),
    /// Show the rules, the tunnel and the peers of `enable`.
    Status(status::Status),
}

pub(crate) fn run(command: &Command) -> Result<i32> {
    match command {
        Command::Enable(enable) => enable.run(),
        Command::Disable(disable) => disable.run(),
        Command::Status(status) => status.run(),
    }
}

/// The tunnel's configuration.
#[derive(Clone, Debug, Args)]
struct ConfigPath {
    /// The tunnel's configuration, which is created if it does not exist.
    #[arg(long, value_name = "FILE", default_value = "/etc/dunlin/tunnel.toml")]
    config: PathBuf,
}

/// Runs another subcommand of this program, with its standard error on that of this process.
fn dunlin(words: &[&str], config: Option<&Path>) -> Result<Output> {
    let program = std::env::current_exe().context("cannot find this program")?;
    let mut command = Process::new(program);
    command.args(words).stderr(std::process::Stdio::inherit());
    if let Some(config) = config {
        command.arg("--config").arg(config);
    }
    let what = format!("cannot run dunlin {}", words.join(" "));
    command.output().context(what)
}

/// Whether systemd manages this host.
fn has_systemd() -> bool {
    Path::new("/run/systemd/system").is_dir()
}

/// Runs systemctl; returns whether it succeeded.
fn systemctl(words: &[&str]) -> Result<bool> {
    let status = Process::new("systemctl").args(words).status();
    Ok(status.context("cannot run systemctl")?.success())
}
