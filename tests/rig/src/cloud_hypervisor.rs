//! Cloud Hypervisor, with the binary that the variable `CLOUD_HYPERVISOR` names.
//!
//! The tests control the program over HTTP on a unix socket, as its own tool `ch-remote` does. The
//! program prints its events on standard error, and its guest's serial line on standard output.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use dunlin_test_base::Scratch;
use serde_json::Value;
use thiserror::Error;

use crate::hosts::Host;

/// The limit for every wait.
const TIMEOUT: Duration = Duration::from_secs(120);
/// How many of the program's last lines an error contains.
const KEPT: usize = 40;
/// The interval between checks for the API socket of a new process, and for the end of a process.
const PERIOD: Duration = Duration::from_millis(5);

/// An error of a Cloud Hypervisor.
#[derive(Debug, Error)]
pub enum CloudHypervisorError {
    /// The program cannot be started, or one of its files or its socket cannot be used.
    #[error("{0}")]
    Local(PathBuf, #[source] io::Error),
    /// An expected line did not arrive.
    #[error("no {what} from Cloud Hypervisor; its last lines:\n{said}")]
    Silent {
        /// A description of the expected line.
        what: String,
        /// The last lines that arrived.
        said: String,
    },
    /// The program refused a request.
    #[error("Cloud Hypervisor refused {action}: {status}")]
    Refused {
        /// The request.
        action: String,
        /// The first line of the answer.
        status: String,
    },
}

/// Returns the program, if `CLOUD_HYPERVISOR` names one.
#[must_use]
pub fn program() -> Option<OsString> {
    env::var_os("CLOUD_HYPERVISOR").filter(|name| !name.is_empty())
}

/// The socket at which a process receives requests.
#[derive(Debug)]
pub struct Api(PathBuf);

/// A running process. Dropping it ends the process.
#[derive(Debug)]
pub struct CloudHypervisor {
    child: Child,
    api: Api,
    lines: Receiver<(Instant, String)>,
    _scratch: Scratch,
}

impl CloudHypervisor {
    /// Starts the program on `host`, or outside any host if `host` is `None`.
    ///
    /// # Errors
    /// The program does not start.
    pub fn start(
        program: &OsString,
        host: Option<&Host>,
        options: &[&str],
    ) -> Result<Self, CloudHypervisorError> {
        let scratch = Scratch::try_new().map_err(at("a scratch folder"))?;
        let api = Api(scratch.join("api"));
        let mut command = Command::new(program);
        command
            .arg("--api-socket")
            .arg(&api.0)
            // Events go to standard error.
            .args(["--event-monitor", "fd=2"])
            .args(options);
        if let Some(host) = host {
            command = host.enter(&command);
        }
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(at(program))?;
        scratch.record(child.id()).map_err(at(scratch.path()))?;
        let (sender, lines) = channel();
        let streams: [Box<dyn Read + Send>; 2] = [
            Box::new(child.stdout.take().expect("the command has a stdout pipe")),
            Box::new(child.stderr.take().expect("the command has a stderr pipe")),
        ];
        for stream in streams {
            let sender = sender.clone();
            thread::spawn(move || {
                let mut stream = BufReader::new(stream);
                let mut line = Vec::new();
                while matches!(stream.read_until(b'\n', &mut line), Ok(count) if count > 0) {
                    let text = String::from_utf8_lossy(&line).trim().to_owned();
                    if sender.send((Instant::now(), text)).is_err() {
                        break;
                    }
                    line.clear();
                }
            });
        }
        Ok(Self {
            child,
            api,
            lines,
            _scratch: scratch,
        })
    }

    /// The ID of the process.
    #[must_use]
    pub fn process(&self) -> u32 {
        self.child.id()
    }

    /// Waits for a line that `wanted` accepts; returns the time at which it arrived.
    ///
    /// # Errors
    /// The line does not arrive in time, or the process ends.
    pub fn wait(
        &self,
        what: &str,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<Instant, CloudHypervisorError> {
        let deadline = Instant::now() + TIMEOUT;
        let mut said = Vec::new();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok((when, line)) = self.lines.recv_timeout(left) else {
                return Err(CloudHypervisorError::Silent {
                    what: what.to_owned(),
                    said: said.join("\n"),
                });
            };
            if wanted(&line) {
                return Ok(when);
            }
            if said.len() == KEPT {
                said.remove(0);
            }
            said.push(line);
        }
    }

    /// Waits for an event, a pretty-printed JSON object with the name on a separate line.
    ///
    /// # Errors
    /// See [`Self::wait`].
    pub fn wait_event(&self, name: &str) -> Result<Instant, CloudHypervisorError> {
        let line = format!("\"event\": \"{name}\"");
        self.wait(name, |text| text.trim_end_matches(',') == line)
    }

    /// Waits until the process has ended. It is not reaped yet, so its CPU times can still be read.
    ///
    /// # Errors
    /// The process does not end in time.
    pub fn wait_end(&self) -> Result<(), CloudHypervisorError> {
        let deadline = Instant::now() + TIMEOUT;
        let stat = PathBuf::from(format!("/proc/{}/stat", self.process()));
        loop {
            let text = fs::read_to_string(&stat).map_err(at(&stat))?;
            let state = text.rsplit_once(')').map(|(_, fields)| fields.trim_start());
            if state.is_some_and(|state| state.starts_with('Z')) {
                return Ok(());
            }
            if Instant::now() > deadline {
                let what = "end of the process".to_owned();
                let said = String::new();
                return Err(CloudHypervisorError::Silent { what, said });
            }
            thread::sleep(PERIOD);
        }
    }

    /// The socket for requests.
    #[must_use]
    pub fn api(&self) -> &Api {
        &self.api
    }
}

impl Api {
    /// Sends a request on a new connection, and waits for the answer. Waits for the socket if the
    /// process has just started.
    ///
    /// # Errors
    /// The program does not answer, or refuses.
    pub fn request(&self, action: &str, body: &Value) -> Result<(), CloudHypervisorError> {
        let deadline = Instant::now() + TIMEOUT;
        let mut stream = loop {
            match UnixStream::connect(&self.0) {
                Ok(stream) => break stream,
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::NotFound | ErrorKind::ConnectionRefused
                    ) && Instant::now() < deadline =>
                {
                    thread::sleep(PERIOD);
                }
                Err(error) => return Err(at(&self.0)(error)),
            }
        };
        let body = body.to_string();
        write!(
            stream,
            "PUT /api/v1/{action} HTTP/1.1\r\nHost: localhost\r\nContent-Type: \
             application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )
        .map_err(at(&self.0))?;
        let mut status = String::new();
        BufReader::new(&stream)
            .read_line(&mut status)
            .map_err(at(&self.0))?;
        let code = status.split(' ').nth(1);
        if code.is_some_and(|code| code.starts_with('2')) {
            return Ok(());
        }
        Err(CloudHypervisorError::Refused {
            action: action.to_owned(),
            status: status.trim().to_owned(),
        })
    }
}

impl Drop for CloudHypervisor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn at(path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> CloudHypervisorError {
    let path = path.as_ref().to_path_buf();
    move |error| CloudHypervisorError::Local(path, error)
}
