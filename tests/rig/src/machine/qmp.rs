//! QEMU's control socket (docs/interop/qmp-spec.rst): one JSON object per line.

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use dunlin_linux::fdpass;
use serde_json::{Value, json};
use thiserror::Error;

/// The timeout for a reply. QEMU replies immediately, except to a command that saves a piece of
/// memory.
const ANSWER: Duration = Duration::from_secs(60);

/// An error of QEMU's control socket.
#[derive(Debug, Error)]
pub enum QmpError {
    /// The socket did not appear.
    #[error("QEMU did not start: {0}")]
    NotStarted(String, #[source] Box<QmpError>),
    /// The socket was closed, or a timeout expired.
    #[error("{0}")]
    Socket(String, #[source] io::Error),
    /// QEMU refused a command.
    #[error("QEMU refuses {0}: {1}")]
    Refused(String, String),
    /// A line is not a JSON object.
    #[error("line from QEMU is not a JSON object: {0:?}")]
    Syntax(String),
}

/// A connection to the control socket of one QEMU.
#[derive(Debug)]
pub struct Qmp {
    stream: BufReader<UnixStream>,
    /// The received part of an incomplete line.
    partial: Vec<u8>,
    /// Events that no call has returned yet.
    events: VecDeque<Value>,
}

impl Qmp {
    /// Connects to the socket as soon as it exists, and enters command mode. Stops waiting if
    /// `ended` reports that QEMU has exited.
    ///
    /// # Errors
    /// QEMU exited, the time limit expired, or another program listens there.
    pub fn connect(
        socket: &Path,
        timeout: Duration,
        mut ended: impl FnMut() -> bool,
    ) -> Result<Self, QmpError> {
        let deadline = Instant::now() + timeout;
        let stream = loop {
            match UnixStream::connect(socket) {
                Ok(stream) => break stream,
                Err(error) if ended() || Instant::now() >= deadline => {
                    return Err(QmpError::Socket(socket.display().to_string(), error));
                }
                // QEMU does not listen yet. No event reports when it begins to, so try again soon.
                Err(_) => thread::sleep(Duration::from_millis(5)),
            }
        };
        let mut qmp = Self {
            stream: BufReader::new(stream),
            partial: Vec::new(),
            events: VecDeque::new(),
        };
        qmp.read("the greeting", Instant::now() + ANSWER)?;
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Executes a command and returns its result. Keeps events that arrive before the reply.
    ///
    /// # Errors
    /// QEMU refuses the command, or has exited.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        let mut line = json!({"execute": command, "arguments": arguments}).to_string();
        line.push('\n');
        self.stream
            .get_mut()
            .write_all(line.as_bytes())
            .map_err(|error| QmpError::Socket(command.to_owned(), error))?;
        self.answer(command)
    }

    fn answer(&mut self, command: &str) -> Result<Value, QmpError> {
        let deadline = Instant::now() + ANSWER;
        loop {
            let mut answer = self.read(command, deadline)?;
            if answer.get("event").is_some() {
                self.events.push_back(answer);
            } else if let Some(error) = answer.get("error") {
                let reason = error["desc"].as_str().unwrap_or_default();
                return Err(QmpError::Refused(command.to_owned(), reason.to_owned()));
            } else {
                return Ok(answer["return"].take());
            }
        }
    }

    /// Passes QEMU a descriptor of this process under a name (`getfd`), for an address such as
    /// `fd:NAME`.
    ///
    /// # Errors
    /// QEMU refuses the command, or has exited.
    pub fn give(&mut self, name: &str, descriptor: BorrowedFd<'_>) -> Result<(), QmpError> {
        let mut line = json!({"execute": "getfd", "arguments": {"fdname": name}}).to_string();
        line.push('\n');
        // QEMU expects the descriptor together with the first bytes of the command. A line this
        // short is sent in one piece.
        fdpass::send(self.stream.get_ref(), line.as_bytes(), &[descriptor])
            .map_err(|error| QmpError::Socket("getfd".to_owned(), error))?;
        self.answer("getfd").map(|_| ())
    }

    /// Returns the next event with a name and data that `wanted` accepts; drops earlier events.
    ///
    /// # Errors
    /// No such event arrived in time, or QEMU has exited.
    pub fn wait_event(
        &mut self,
        timeout: Duration,
        wanted: impl Fn(&str, &Value) -> bool,
    ) -> Result<Value, QmpError> {
        let deadline = Instant::now() + timeout;
        loop {
            let event = match self.events.pop_front() {
                Some(event) => event,
                None => self.read("an event", deadline)?,
            };
            let name = event["event"].as_str().unwrap_or_default();
            if wanted(name, &event["data"]) {
                return Ok(event);
            }
        }
    }

    fn read(&mut self, what: &str, deadline: Instant) -> Result<Value, QmpError> {
        let failed = |error| QmpError::Socket(format!("waiting for {what}"), error);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(failed(io::Error::from(ErrorKind::TimedOut)));
            }
            self.stream
                .get_ref()
                .set_read_timeout(Some(left))
                .map_err(failed)?;
            match self.stream.read_until(b'\n', &mut self.partial) {
                Ok(0) => return Err(failed(io::Error::from(ErrorKind::UnexpectedEof))),
                Ok(_) if self.partial.ends_with(b"\n") => break,
                // The stream ended in the middle of a line; the next read reports the end again.
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(failed(error)),
            }
        }
        let value: Option<Value> = serde_json::from_slice(&self.partial).ok();
        let text = String::from_utf8_lossy(&self.partial).into_owned();
        self.partial.clear();
        value.filter(Value::is_object).ok_or(QmpError::Syntax(text))
    }
}
