//! A guest in QEMU: start on a host, output, control and migration.
//!
//! ```no_run
//! use dunlin_rig::debian::{self, Which};
//! use dunlin_rig::guest::{Content, Guest, Workload};
//! use dunlin_rig::machine::{Accelerator, Machine, Migration, Setup, migrate};
//!
//! let qemu = debian::qemu()?;
//! let workload = Workload {
//!     memory_mib: 256, pages: 40_000, hot: 10_000, rate: Some(20_000),
//!     content: Content::Random, seed: 1,
//! };
//! let setup = Setup::new(&qemu, Guest::Bare, workload, Accelerator::Kvm);
//! let mut source = Machine::start(&setup, None)?;
//! let mut destination = Machine::start_incoming(&setup, None)?;
//! source.wait_ready()?;
//! let migration = Migration::tcp("127.0.0.1:4444".parse()?);
//! migrate(&mut source, &mut destination, &migration)?;
//! assert_eq!(source.first_difference(&mut destination)?, None);
//! destination.resume()?;
//! destination.check_pages()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod compare;
mod credentials;
mod migration;
mod qmp;

use std::fs::{self, File};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use thiserror::Error;

pub use credentials::Credentials;
pub(crate) use credentials::of_hosts;
pub use migration::{Migrated, Migration, begin, cancel, finish, migrate};
pub use qmp::{Qmp, QmpError};

use crate::debian::Qemu;
use crate::guest::{Guest, Line, Workload};
use crate::hosts::Host;
use dunlin_test_base::Scratch;

/// The time limit for every wait, sufficient on a busy machine and under emulation.
pub const TIMEOUT: Duration = Duration::from_secs(120);

/// What executes the guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accelerator {
    /// The processor, through KVM.
    Kvm,
    /// QEMU's emulation (TCG).
    Tcg,
}

/// The configuration of a machine. Both ends of a migration use the same configuration.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The hypervisor.
    pub qemu: Qemu,
    /// The guest.
    pub guest: Guest,
    /// What the guest does.
    pub workload: Workload,
    /// What executes the guest's instructions.
    pub accelerator: Accelerator,
    /// Additional options for QEMU.
    pub options: Vec<String>,
}

impl Setup {
    /// A setup without additional options.
    #[must_use]
    pub fn new(qemu: &Qemu, guest: Guest, workload: Workload, accelerator: Accelerator) -> Self {
        Self {
            qemu: qemu.clone(),
            guest,
            workload,
            accelerator,
            options: Vec::new(),
        }
    }
}

/// An error of a machine.
#[derive(Debug, Error)]
pub enum MachineError {
    /// The machine's files cannot be written, or its process cannot be started.
    #[error("{0}")]
    Local(PathBuf, #[source] std::io::Error),
    /// The machine did not answer as expected.
    #[error("an error on QEMU's control socket")]
    Qmp(#[from] QmpError),
    /// A command failed: QEMU refused it, did not answer, or ended.
    #[error("{command} failed; QEMU {state}\nmessages: {messages:?}")]
    Command {
        /// The command's name.
        command: String,
        /// QEMU's exit status, or the states of its threads.
        state: String,
        /// QEMU's errors and warnings.
        messages: String,
        /// The error of the control socket.
        #[source]
        source: QmpError,
    },
    /// An expected line did not arrive.
    #[error("no {what} from the guest within {TIMEOUT:?}; its last lines:\n{said}")]
    Silent {
        /// A description of the expected line.
        what: &'static str,
        /// The guest's last lines, and QEMU's messages.
        said: String,
    },
    /// The guest found a page with unexpected contents.
    #[error("the guest found {found:#x} instead of {expected:#x} in page {page}")]
    Wrong {
        /// The page's number in the workload.
        page: u64,
        /// The expected count or signature of the page.
        expected: u64,
        /// The count or signature that the guest found.
        found: u64,
    },
    /// A migration ended without completing.
    #[error("the migration at the {side} ended with status {status}: {reason}")]
    Migration {
        /// "source" or "destination".
        side: &'static str,
        /// QEMU's name for the status.
        status: String,
        /// QEMU's description of the error.
        reason: String,
    },
}

/// A running QEMU. Dropping it ends the process.
#[derive(Debug)]
pub struct Machine {
    child: Child,
    qmp: Qmp,
    input: ChildStdin,
    lines: Receiver<String>,
    reader: Option<JoinHandle<()>>,
    /// The last lines from the serial line, for errors.
    said: Vec<String>,
    memory_bytes: u64,
    scratch: Scratch,
}

impl Machine {
    /// Starts the guest on `host`, one of the rig's simulated hosts. If `host` is `None`, QEMU runs
    /// directly on this machine.
    ///
    /// # Errors
    /// QEMU does not start; see [`MachineError`].
    pub fn start(setup: &Setup, host: Option<&Host>) -> Result<Self, MachineError> {
        Self::spawn(setup, host, &[])
    }

    /// Starts a QEMU that waits for a migration. The guest stays paused after the
    /// migration.
    ///
    /// # Errors
    /// QEMU does not start; see [`MachineError`].
    pub fn start_incoming(setup: &Setup, host: Option<&Host>) -> Result<Self, MachineError> {
        Self::spawn(setup, host, &["-incoming", "defer", "-S"])
    }

    fn spawn(setup: &Setup, host: Option<&Host>, more: &[&str]) -> Result<Self, MachineError> {
        let scratch = Scratch::try_new().map_err(at("a scratch folder"))?;
        let boot = setup.guest.boot(&setup.workload, scratch.path());
        for (path, content) in &boot.files {
            fs::write(path, content).map_err(at(path))?;
        }
        let socket = scratch.join("qmp");
        let messages = scratch.join("messages");
        let mut command = setup.qemu.command();
        command
            .args(["-nodefaults", "-no-user-config", "-display", "none"])
            .args(["-serial", "stdio"])
            .arg("-qmp")
            .arg(format!("unix:{},server=on,wait=off", socket.display()))
            .args(["-m", &format!("{}M", setup.workload.memory_mib)])
            .args(match setup.accelerator {
                Accelerator::Kvm => ["-accel", "kvm"],
                Accelerator::Tcg => ["-accel", "tcg"],
            })
            .args(&boot.options)
            .args(&setup.options)
            .args(more);
        if let Some(host) = host {
            command = host.enter(&command);
        }
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(File::create(&messages).map_err(at(&messages))?)
            .spawn()
            .map_err(at(PathBuf::from(command.get_program())))?;
        scratch.record(child.id()).map_err(at(scratch.path()))?;
        let input = child.stdin.take().expect("the command has a stdin pipe");
        let mut output =
            BufReader::new(child.stdout.take().expect("the command has a stdout pipe"));
        let (sender, lines) = channel();
        let reader = thread::spawn(move || {
            let mut line = Vec::new();
            while matches!(output.read_until(b'\n', &mut line), Ok(count) if count > 0) {
                if sender
                    .send(String::from_utf8_lossy(&line).trim_end().to_owned())
                    .is_err()
                {
                    return;
                }
                line.clear();
            }
        });
        let ended = |child: &mut Child| matches!(child.try_wait(), Ok(Some(_)) | Err(_));
        let qmp = match Qmp::connect(&socket, TIMEOUT, || ended(&mut child)) {
            Ok(qmp) => qmp,
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                let _ = reader.join();
                let said = fs::read_to_string(&messages).unwrap_or_default();
                return Err(QmpError::NotStarted(said, Box::new(error)).into());
            }
        };
        Ok(Self {
            child,
            qmp,
            input,
            lines,
            reader: Some(reader),
            said: Vec::new(),
            memory_bytes: u64::from(setup.workload.memory_mib) << 20,
            scratch,
        })
    }

    /// QEMU's control socket.
    pub fn qmp(&mut self) -> &mut Qmp {
        &mut self.qmp
    }

    /// Executes a command and returns its result. If the command fails, the error contains QEMU's
    /// messages. If QEMU has ended, the error has its exit status; otherwise, its threads' states.
    ///
    /// # Errors
    /// See [`MachineError::Command`].
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, MachineError> {
        self.qmp
            .execute(command, arguments)
            .map_err(|source| MachineError::Command {
                command: command.to_owned(),
                state: self.state(&source),
                messages: self.messages(),
                source,
            })
    }

    /// Returns QEMU's exit status, or the states of its threads if it still runs after `failure`.
    /// If QEMU has closed its control socket, it is about to exit. This method then kills QEMU, to
    /// bound the wait, so the status may be that of the kill.
    fn state(&mut self, failure: &QmpError) -> String {
        let closed =
            matches!(failure, QmpError::Socket(_, error) if error.kind() != ErrorKind::TimedOut);
        let ended = if closed {
            let _ = self.child.kill();
            self.child.wait().ok()
        } else {
            self.child.try_wait().ok().flatten()
        };
        if let Some(status) = ended {
            return format!("ended with {status}");
        }
        let mut threads = String::from("is running; the states of its threads:");
        let tasks = format!("/proc/{}/task", self.process());
        for task in fs::read_dir(tasks).into_iter().flatten().flatten() {
            let read = |file| fs::read_to_string(task.path().join(file)).unwrap_or_default();
            threads.push('\n');
            threads.push_str(read("stat").trim_end());
            threads.push(' ');
            threads.push_str(&read("wchan"));
        }
        threads
    }

    /// The ID of QEMU's process, for instance to kill it.
    #[must_use]
    pub fn process(&self) -> u32 {
        self.child.id()
    }

    /// Waits until the guest has filled its pages.
    ///
    /// # Errors
    /// The guest prints nothing, or reports a wrong page.
    pub fn wait_ready(&mut self) -> Result<Line, MachineError> {
        self.wait_line("ready", |line| matches!(line, Line::Ready { .. }))
    }

    /// Waits for the guest's next report. Returns the numbers of visits and passes so far.
    ///
    /// # Errors
    /// The guest prints nothing, or reports a wrong page.
    pub fn next_beat(&mut self) -> Result<(u64, u64), MachineError> {
        match self.wait_line("beat", |line| matches!(line, Line::Beat { .. }))? {
            Line::Beat { visits, passes } => Ok((visits, passes)),
            _ => Ok((0, 0)),
        }
    }

    /// Makes the guest check all of its pages. Returns their number.
    ///
    /// # Errors
    /// The guest prints nothing, or reports a wrong page.
    pub fn check_pages(&mut self) -> Result<u64, MachineError> {
        self.input
            .write_all(b"c\n")
            .and_then(|()| self.input.flush())
            .map_err(at("the guest's serial line"))?;
        match self.wait_line("answer", |line| matches!(line, Line::Checked { .. }))? {
            Line::Checked { pages, .. } => Ok(pages),
            _ => Ok(0),
        }
    }

    /// Waits for a line that `wanted` accepts. Skips earlier lines, except a report of a wrong
    /// page.
    ///
    /// # Errors
    /// No such line arrived within [`TIMEOUT`], QEMU ended, or a page is wrong.
    pub fn wait_line(
        &mut self,
        what: &'static str,
        wanted: impl Fn(&Line) -> bool,
    ) -> Result<Line, MachineError> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let text = match self.lines.recv_timeout(left) {
                Ok(text) => text,
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    return Err(MachineError::Silent {
                        what,
                        said: format!("{}\n{}", self.said.join("\n"), self.messages()),
                    });
                }
            };
            let line = Line::parse(&text);
            if self.said.len() == 20 {
                self.said.remove(0);
            }
            self.said.push(text);
            match line {
                Some(Line::Wrong {
                    page,
                    expected,
                    found,
                }) => {
                    return Err(MachineError::Wrong {
                        page,
                        expected,
                        found,
                    });
                }
                Some(line) if wanted(&line) => return Ok(line),
                _ => {}
            }
        }
    }

    /// Discards the guest's output so far; the next wait sees only new lines.
    pub fn forget_lines(&mut self) {
        while self.lines.try_recv().is_ok() {}
    }

    /// QEMU's errors and warnings.
    #[must_use]
    pub fn messages(&self) -> String {
        fs::read_to_string(self.scratch.join("messages")).unwrap_or_default()
    }

    /// Pauses the guest.
    ///
    /// # Errors
    /// QEMU refuses.
    pub fn pause(&mut self) -> Result<(), MachineError> {
        self.qmp.execute("stop", json!({}))?;
        Ok(())
    }

    /// Resumes the guest.
    ///
    /// # Errors
    /// QEMU refuses.
    pub fn resume(&mut self) -> Result<(), MachineError> {
        self.qmp.execute("cont", json!({}))?;
        Ok(())
    }

    /// Whether the guest runs.
    ///
    /// # Errors
    /// QEMU does not answer.
    pub fn runs(&mut self) -> Result<bool, MachineError> {
        let status = self.qmp.execute("query-status", json!({}))?;
        Ok(status["running"] == Value::Bool(true))
    }

    /// The first address at which the memories of two paused guests differ, as an offset in bytes
    /// from the start of memory.
    ///
    /// # Errors
    /// One of the guests is running, or its memory cannot be read.
    pub fn first_difference(&mut self, other: &mut Self) -> Result<Option<u64>, MachineError> {
        compare::first_difference(self, other)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

/// For `map_err`: wraps an I/O error that occurred at a path.
fn at(path: impl AsRef<Path>) -> impl FnOnce(std::io::Error) -> MachineError {
    let path = path.as_ref().to_path_buf();
    move |error| MachineError::Local(path, error)
}

/// Reads until the end of the stream or until the buffer is full.
fn read_full(from: &mut impl Read, buffer: &mut [u8]) -> std::io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match from.read(&mut buffer[filled..])? {
            0 => break,
            count => filled += count,
        }
    }
    Ok(filled)
}
