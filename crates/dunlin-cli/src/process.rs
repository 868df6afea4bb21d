//! Child `dunlin` processes on this host, and the lines that they print. The demo and the benches
//! move VMs between two such processes, as between two hosts.

use std::fs::DirBuilder;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, anyhow, bail, ensure};

use crate::identity::{Common, Reading};
use crate::line::{Line, MovedLine};
use crate::options::MigrateFlags;
use crate::pki;
use crate::text::clean_lines;
use crate::vm::{Ended, follow};

/// A child process that owns a VM or waits for one. Dropping this value kills the child. If the
/// parent dies first, the child's standard input closes; the child then removes the scratch
/// directory and ends. Reads of the child's output have no timeout, because the processes have
/// their own deadlines.
pub(crate) struct Process {
    child: Child,
    out: BufReader<ChildStdout>,
}

impl Process {
    fn start(scratch: &Scratch, control: &Path, arguments: &[&str]) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("vm")
            .args(arguments)
            .args(["--json", "--control"])
            .arg(control)
            .arg("--until-stdin-closes")
            .arg(&scratch.0)
            .arg("--state-dir")
            .arg(scratch.join("state"))
            // The terminal's Ctrl-C ends the parent but must not reach the child, which still has
            // to remove the scratch directory.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start a child process")?;
        let out = child
            .stdout
            .take()
            .context("the standard output of the child process is not available")?;
        Ok(Self {
            child,
            out: BufReader::new(out),
        })
    }

    /// Starts `vm receive` on a free port, with the destination's identity; returns the process and
    /// its address.
    pub(crate) fn receiving(
        scratch: &Scratch,
        control: &Path,
        more: &[&str],
    ) -> Result<(Self, String)> {
        let identity = scratch.join("destination").display().to_string();
        let peer = format!("source.{}", scratch.1);
        let flags = ["--identity", &identity, "--peer", &peer];
        let listen = ["receive", "--listen", "127.0.0.1:0"];
        let arguments = [&listen[..], &flags, more].concat();
        let mut process = Self::start(scratch, control, &arguments)?;
        let address = process.wait_for(|line| match line {
            Line::Listening { address } => Some(address),
            _ => None,
        })?;
        Ok((process, address))
    }

    /// Starts `vm run` with a guest of this name, and waits until the guest runs. If `more` asks
    /// for several guests, waits only for the first.
    pub(crate) fn running(
        scratch: &Scratch,
        control: &Path,
        name: &str,
        more: &[&str],
    ) -> Result<Self> {
        let arguments = [&["run", "--name", name][..], more].concat();
        let mut process = Self::start(scratch, control, &arguments)?;
        process.wait_for(|line| matches!(line, Line::Started { .. }).then_some(()))?;
        Ok(process)
    }

    /// The child's process id.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Reads lines until `wanted` returns a value for one. Fails if the child reports a failure or
    /// ends.
    pub(crate) fn wait_for<T>(&mut self, wanted: impl Fn(Line) -> Option<T>) -> Result<T> {
        loop {
            let mut text = String::new();
            if self.out.read_line(&mut text)? == 0 {
                let code = self.child.wait()?;
                bail!("a child process ended early ({code}); see its error above");
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
        // Ignore an error, because the child may already have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A process with a guest, and a process that waits for the guest, as on two hosts.
pub(crate) struct Pair {
    pub(crate) source: Process,
    pub(crate) destination: Process,
    address: String,
    common: Common,
    control: PathBuf,
}

impl Pair {
    /// Starts `vm run` with the flags `run`, and `vm receive` with the flags `receive`, in addition
    /// to their usual ones; `scratch` must have the certificates of [`Scratch::with_identities`].
    pub(crate) fn start(scratch: &Scratch, run: &[&str], receive: &[&str]) -> Result<Self> {
        let (destination, address) = Process::receiving(scratch, &scratch.join("b.sock"), receive)?;
        let control = scratch.join("a.sock");
        let source = Process::running(scratch, &control, scratch.1, run)?;
        Ok(Self {
            source,
            destination,
            address,
            common: scratch.source(),
            control,
        })
    }

    /// Flags for a migration of the guest, all at their defaults.
    pub(crate) fn flags(&self) -> MigrateFlags {
        MigrateFlags::new(self.address.clone())
    }

    /// Moves the guest; calls `show` with each line of the migration.
    pub(crate) fn migrate(
        &self,
        flags: &MigrateFlags,
        show: &mut dyn FnMut(&Line),
    ) -> Result<Ended> {
        follow(&self.control, &self.common, flags, None, None, show)
    }

    /// Moves the guest and waits until it runs at the destination.
    pub(crate) fn migrate_running(&mut self, flags: &MigrateFlags) -> Result<MovedLine> {
        let moved = self.migrate(flags, &mut |_| ())?;
        let moved = moved.map_err(|failed| anyhow!(failed.text))?;
        let runs = self.destination.wait_for(|line| match line {
            Line::Received { runs, .. } => Some(runs),
            _ => None,
        })?;
        ensure!(runs, "the guest does not run at the destination");
        Ok(*moved)
    }
}

/// A directory that is removed on drop, and its purpose.
pub(crate) struct Scratch(PathBuf, &'static str);

impl Scratch {
    /// A new directory with mode 0700.
    pub(crate) fn new(purpose: &'static str) -> Result<Self> {
        let name = format!("dunlin-{purpose}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Self(path, purpose))
    }

    /// A new directory with an authority and the identities of two hosts, `source` and
    /// `destination`. Their certificates have the names `source.PURPOSE` and `destination.PURPOSE`.
    pub(crate) fn with_identities(purpose: &'static str) -> Result<Self> {
        let scratch = Self::new(purpose)?;
        let ca = scratch.join("ca");
        pki::init(&ca, 1)?;
        for host in ["source", "destination"] {
            pki::issue(&ca, &[format!("{host}.{purpose}")], 1, &scratch.join(host))?;
        }
        Ok(scratch)
    }

    /// The identity and the peer of the source.
    pub(crate) fn source(&self) -> Common {
        let peers = vec![format!("destination.{}", self.1)];
        Common::new(&self.join("source"), peers, &Reading::default())
    }

    /// A path in the directory.
    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Ignore an error. The keys are only for this run, so leftover files do no harm.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
