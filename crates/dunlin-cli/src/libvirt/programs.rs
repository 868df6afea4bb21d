//! What the commands have in common: the configuration's flag, and the programs that they run.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result};
use clap::Args;
use serde_json::json;

use crate::line::print_json;
use crate::progress::Waiting;
use crate::state::StatePath;
use crate::text::clean;

/// The name of the redirect that `enable` writes.
pub(super) const NAME: &str = "libvirt";
/// The units of a redirect, in the order in which they are started.
pub(super) const UNITS: [&str; 3] = [
    "dunlin-redirect.service",
    "dunlin-redirect-watch.service",
    "dunlin-tunnel.service",
];

/// The tunnel's configuration.
#[derive(Clone, Debug, Args)]
pub(super) struct ConfigPath {
    /// The tunnel's configuration. `enable` creates it if it does not exist.
    #[arg(long, value_name = "FILE", default_value = "/etc/dunlin/tunnel.toml")]
    pub(super) config: PathBuf,
}

/// How a command reports its steps.
#[derive(Clone, Debug, Args)]
pub(super) struct Report {
    /// Print one JSON object per line.
    #[arg(long)]
    pub(super) json: bool,
}

impl Report {
    /// Reports a step that was done, or a note.
    pub(super) fn step(&self, step: &str, text: &str) {
        match self.json {
            true => print_json(&json!({ "step": step, "text": text })),
            false => println!("{step:<10} {}", clean(text)),
        }
    }

    /// Tells the operator what to do next.
    pub(super) fn advise(&self, text: &str) {
        match self.json {
            true => self.step("advice", text),
            false => println!("\n{text}"),
        }
    }

    /// Runs systemctl; returns whether it succeeded. Shows the command during a long wait, because
    /// a tunnel waits for its channels before it stops.
    pub(super) fn systemctl(&self, words: &[&str]) -> Result<bool> {
        let _waiting = Waiting::new(self.json, &format!("systemctl {}", words.join(" ")));
        let status = Command::new("systemctl").args(words).status();
        Ok(status.context("cannot run systemctl")?.success())
    }
}

/// Runs another subcommand of this program, with the same standard error.
pub(super) fn dunlin(
    words: &[&str],
    config: Option<&Path>,
    state: Option<&StatePath>,
) -> Result<Output> {
    let program =
        std::env::current_exe().context("cannot find the path of the running program dunlin")?;
    let mut command = Command::new(program);
    command.args(words).stderr(Stdio::inherit());
    if let Some(config) = config {
        command.arg("--config").arg(config);
    }
    if let Some(state) = state.and_then(StatePath::given) {
        command.arg("--state-dir").arg(state);
    }
    let what = format!("cannot run dunlin {}", words.join(" "));
    command.output().context(what)
}

/// Whether systemd manages this host.
pub(super) fn has_systemd() -> bool {
    Path::new("/run/systemd/system").is_dir()
}

/// Whether a unit runs, or is started at each boot.
pub(super) fn is_in_use(unit: &str) -> bool {
    ["is-enabled", "is-active"].iter().any(|question| {
        let mut asked = Command::new("systemctl");
        let asked = asked
            .args(["--quiet", question, unit])
            .stderr(Stdio::null());
        asked.status().is_ok_and(|status| status.success())
    })
}
