//! The programs under measurement.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use dunlin_rig::debian;
use serde::Deserialize;

/// Builds `dunlin` in release mode.
pub(super) fn dunlin() -> Result<PathBuf> {
    #[derive(Deserialize)]
    struct Message {
        executable: Option<PathBuf>,
    }
    let done = crate::cargo()
        .args(["build", "--locked", "--release", "--quiet"])
        .args(["--package", "dunlin-cli", "--bin", "dunlin"])
        .args(["--message-format", "json-render-diagnostics"])
        .current_dir(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/..")))
        .stderr(Stdio::inherit())
        .output()
        .context("cannot start cargo")?;
    if !done.status.success() {
        bail!("dunlin does not build");
    }
    String::from_utf8_lossy(&done.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str::<Message>(line).ok()?.executable)
        .next_back()
        .context("cargo does not say where it has put dunlin")
}

/// Returns a command that runs stunnel: the installed one, or Debian's package.
pub(super) fn stunnel() -> Result<Command> {
    let own = Command::new("stunnel4")
        .arg("-version")
        .stdin(Stdio::null())
        .output();
    if own.is_ok() {
        return Ok(Command::new("stunnel4"));
    }
    let root = debian::packages("trixie", &["stunnel4"])?;
    Ok(debian::program(&root, "stunnel4")?)
}
