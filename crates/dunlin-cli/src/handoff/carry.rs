//! `dunlin handoff carry`: the process behind a socket that was handed over where the kernel has
//! no TLS.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;
use dunlin_handoff::carry;
use dunlin_linux::session;

use crate::code;

/// A connection comes at once, or whoever was to send it has died.
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Debug, Args)]
pub(crate) struct Carry {
    /// Already the child of nobody.
    #[arg(long)]
    alone: bool,
}

/// What starts one.
pub(super) fn program() -> Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg0("dunlin").args(["handoff", "carry"]);
    Ok(command)
}

impl Carry {
    pub(crate) fn run(&self) -> Result<i32> {
        if self.alone {
            carry::run(io::stdin(), Instant::now() + PATIENCE)?;
            return Ok(code::DONE);
        }
        session::leave().context("the caller's session cannot be left")?;
        // Twice removed from the caller: nobody waits for it, and nobody has to.
        program()?
            .arg("--alone")
            .spawn()
            .context("a process to carry the connection cannot be started")?;
        Ok(code::DONE)
    }
}
