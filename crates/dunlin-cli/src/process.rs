//! Other `dunlin` processes of this host, read line by line: the demo and the
//! benches move VMs between the same processes as two hosts would.

use std::fs::DirBuilder;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::line::Line;
use crate::text::clean_lines;

/// One process; killed with its owner. One that neither speaks nor ends holds
/// its owner up: every one that is started has deadlines of its own.
pub(crate) struct Process {
    child: Child,
    out: BufReader<ChildStdout>,
}

impl Process {
    /// A `dunlin` command without arguments.
    pub(crate) fn command() -> Result<Command> {
        Ok(Command::new(std::env::current_exe()?))
    }

    /// Starts a process.
    pub(crate) fn start(mut command: Command) -> Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("a process cannot be started")?;
        let out = child.stdout.take().context("a process has no output")?;
        Ok(Self {
            child,
            out: BufReader::new(out),
        })
    }

    /// Starts a process that owns a VM. When its owner is gone it ends, and
    /// removes `scratch`.
    pub(crate) fn start_owner(mut command: Command, scratch: &Scratch) -> Result<Self> {
        command
            .arg("--until-stdin-closes")
            .arg(&scratch.0)
            .arg("--state-dir")
            .arg(scratch.join("state"))
            // Out of reach of the terminal's Ctrl-C, which ends its owner: so
            // that somebody is left to remove the scratch directory.
            .process_group(0);
        Self::start(command)
    }

    /// Its process identifier.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Reads lines until `wanted` makes something of one.
    pub(crate) fn wait_for<T>(&mut self, wanted: impl Fn(Line) -> Option<T>) -> Result<T> {
        loop {
            let mut text = String::new();
            if self.out.read_line(&mut text)? == 0 {
                let code = self.child.wait()?;
                bail!("a process ended early ({code}); its reason is above");
            }
            match serde_json::from_str(&text)? {
                Line::Failed(failed) => bail!("{}", failed.text),
                Line::Rejected { text } => eprintln!("destination: {}", clean_lines(&text)),
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

/// A directory that goes with its owner.
pub(crate) struct Scratch(pub(crate) PathBuf);

impl Scratch {
    /// A new directory, readable by nobody else.
    pub(crate) fn new(purpose: &str) -> Result<Self> {
        let name = format!("dunlin-{purpose}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .with_context(|| format!("cannot make {}", path.display()))?;
        Ok(Self(path))
    }

    /// A name within it.
    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Keys for one occasion; nothing is lost if they stay.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
