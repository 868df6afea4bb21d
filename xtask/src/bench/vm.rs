//! Processes of `dunlin vm`, and the certificates of two hosts.

use std::io::{self, BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::{mem, thread};

use anyhow::{Context, Result, bail, ensure};
use dunlin_test_base::Scratch;
use serde_json::Value;

/// The names in the certificates.
pub(super) const SOURCE: &str = "source.bench";
pub(super) const DESTINATION: &str = "destination.bench";

/// The program under measurement, and a folder with the identities `source` and `destination` of
/// one authority.
pub(super) struct Files {
    pub(super) dunlin: PathBuf,
    scratch: Scratch,
}

impl Files {
    pub(super) fn new(dunlin: PathBuf) -> Result<Self> {
        let scratch = Scratch::try_new().context("cannot create a scratch folder")?;
        let files = Self { dunlin, scratch };
        files.pki(&["init", "ca"])?;
        files.pki(&["issue", "--ca", "ca", "--name", SOURCE, "source"])?;
        files.pki(&["issue", "--ca", "ca", "--name", DESTINATION, "destination"])?;
        Ok(files)
    }

    fn pki(&self, arguments: &[&str]) -> Result<()> {
        let done = Command::new(&self.dunlin)
            .arg("pki")
            .args(arguments)
            .current_dir(self.scratch.path())
            .stdout(Stdio::null())
            .status()
            .context("cannot start dunlin")?;
        ensure!(done.success(), "`dunlin pki {arguments:?}` failed");
        Ok(())
    }

    /// A path in the folder.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.scratch.join(name)
    }

    /// A command of `dunlin vm` that prints JSON.
    pub(super) fn vm(&self, command: &str) -> Command {
        let mut vm = Command::new(&self.dunlin);
        vm.args(["vm", command, "--json"]);
        vm
    }
}

/// A process that prints one JSON object per line. Dropping it kills the process.
pub(super) struct Process {
    child: Child,
    output: Box<dyn BufRead + Send>,
}

impl Process {
    pub(super) fn spawn(mut command: Command) -> Result<Self> {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start dunlin")?;
        let output = child
            .stdout
            .take()
            .context("the process has no stdout pipe")?;
        let output = Box::new(BufReader::new(output));
        Ok(Self { child, output })
    }

    /// Starts a process and waits for an event. Returns the process, and the line of the event.
    pub(super) fn start(command: Command, event: &str) -> Result<(Self, Value)> {
        let mut process = Self::spawn(command)?;
        let line = process.wait_for(event)?;
        Ok((process, line))
    }

    /// Discards all further output, because a full pipe would stop the process.
    pub(super) fn discard_output(&mut self) {
        let mut output = mem::replace(&mut self.output, Box::new(io::empty()));
        thread::spawn(move || io::copy(&mut output, &mut io::sink()));
    }

    pub(super) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Reads lines until one has this event.
    pub(super) fn wait_for(&mut self, event: &str) -> Result<Value> {
        let mut text = String::new();
        loop {
            text.clear();
            if self.output.read_line(&mut text)? == 0 {
                bail!("dunlin ended before the event {event}");
            }
            let line: Value = serde_json::from_str(&text)?;
            match line["event"].as_str() {
                Some(found) if found == event => return Ok(line),
                Some("failed") => bail!("dunlin failed: {}", line["text"]),
                _ => {}
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Ignore an error: kill(2) fails only if the process has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A number in a line of `dunlin vm migrate`.
pub(super) fn number(line: &Value, name: &str) -> Result<f64> {
    line[name]
        .as_f64()
        .with_context(|| format!("`dunlin vm migrate` does not print {name}"))
}
