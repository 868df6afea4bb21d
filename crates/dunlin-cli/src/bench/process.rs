//! The processes of a bench: the same `dunlin` commands that two hosts would
//! run, read line by line.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::line::Line;

/// One process; killed with its owner. A process that neither speaks nor ends
/// holds the bench up: every one that is started here has deadlines of its
/// own.
pub(super) struct Process {
    child: Child,
    out: BufReader<ChildStdout>,
}

impl Process {
    /// Starts `dunlin` with `arguments` and `--json`.
    pub(super) fn start(arguments: &[&str]) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(arguments)
            .arg("--json")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("a process of the bench cannot be started")?;
        let out = child.stdout.take().context("a process has no output")?;
        Ok(Self {
            child,
            out: BufReader::new(out),
        })
    }

    /// Reads lines until `wanted` makes something of one.
    pub(super) fn wait_for<T>(&mut self, wanted: impl Fn(Line) -> Option<T>) -> Result<T> {
        loop {
            let mut text = String::new();
            if self.out.read_line(&mut text)? == 0 {
                let code = self.child.wait()?;
                bail!("a process of the bench ended early ({code}); its reason is above");
            }
            match serde_json::from_str(&text)? {
                Line::Failed(failed) => bail!("{}", failed.text),
                Line::Rejected { text } => bail!("the destination turned the VM away: {text}"),
                line => {
                    if let Some(found) = wanted(line) {
                        return Ok(found);
                    }
                }
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
