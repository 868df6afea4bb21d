//! Runs other programs.

use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Runs a program, and returns its output.
pub(super) fn output(command: &mut Command) -> Result<String> {
    let name = format!("{command:?}");
    let done = command
        .output()
        .with_context(|| format!("cannot run {name}"))?;
    ensure!(
        done.status.success(),
        "{name} failed: {}",
        String::from_utf8_lossy(&done.stderr)
    );
    let text = String::from_utf8(done.stdout)
        .with_context(|| format!("the output of {name} is not UTF-8"))?;
    Ok(text.trim_end().to_owned())
}

/// Runs a program. Its output goes to this process's standard output and standard error.
pub(super) fn run(command: &mut Command) -> Result<()> {
    let name = format!("{command:?}");
    let status = command
        .status()
        .with_context(|| format!("cannot run {name}"))?;
    ensure!(status.success(), "{name} failed: {status}");
    Ok(())
}
