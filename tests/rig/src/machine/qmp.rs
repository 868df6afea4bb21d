//! QEMU's control socket (docs/interop/qmp-spec.rst): one JSON object a line.

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

/// Longest answer that is waited for; QEMU answers at once, or when a piece of memory is saved.
const ANSWER: Duration = Duration::from_secs(60);

/// Why QEMU's control socket did not do.
#[derive(Debug, Error)]
pub enum QmpError {
    /// It does not come up.
    #[error("QEMU did not start: {0}")]
    NotStarted(String, #[source] Box<QmpError>),
    /// It was closed, or nothing came in time.
    #[error("{0}")]
    Socket(String, #[source] io::Error),
    /// QEMU refused a command.
    #[error("QEMU refuses {0}: {1}")]
    Refused(String, String),
    /// Something on it is no JSON object.
    #[error("QEMU said {0:?}")]
    Syntax(String),
}

/// A connection to the control socket of one QEMU.
#[derive(Debug)]
pub struct Qmp {
    stream: BufReader<UnixStream>,
    /// What was read of a line that is not yet whole.
    partial: Vec<u8>,
    /// Events that nobody has waited for yet.
    events: VecDeque<Value>,
}

impl Qmp {
    /// Connects to the socket as soon as it is there, while `ended` does not say that QEMU has
    /// gone, and enters command mode.
    ///
    /// # Errors
    /// QEMU ended, `patience` ran out, or somebody else listens there.
    pub fn connect(
        socket: &Path,
        patience: Duration,
        mut ended: impl FnMut() -> bool,
    ) -> Result<Self, QmpError> {
        let deadline = Instant::now() + patience;
        let stream = loop {
            match UnixStream::connect(socket) {
                Ok(stream) => break stream,
                Err(error) if ended() || Instant::now() >= deadline => {
                    return Err(QmpError::Socket(socket.display().to_string(), error));
                }
                // Nothing tells when another program begins to listen.
                Err(_) => thread::sleep(Duration::from_millis(5)),
            }
        };
        let mut qmp = Self {
            stream: BufReader::new(stream),
            partial: Vec::new(),
            events: VecDeque::new(),
        };
        qmp.read("its greeting", Instant::now() + ANSWER)?;
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Executes a command and returns its result. Events that come before the answer are kept.
    ///
    /// # Errors
    /// QEMU refuses it, or has gone.
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

    /// Gives QEMU a descriptor of this process's by a name of its own (`getfd`), for an address
    /// such as `fd:NAME`.
    ///
    /// # Errors
    /// QEMU refuses it, or has gone.
    pub fn give(&mut self, name: &str, descriptor: BorrowedFd<'_>) -> Result<(), QmpError> {
        let mut line = json!({"execute": "getfd", "arguments": {"fdname": name}}).to_string();
        line.push('\n');
        // QEMU looks for the descriptor beside the bytes that it reads; so short a line goes whole.
        fdpass::send(self.stream.get_ref(), line.as_bytes(), &[descriptor])
            .map_err(|error| QmpError::Socket("getfd".to_owned(), error))?;
        self.answer("getfd").map(|_| ())
    }

    /// The next event that `wanted` accepts by its name and data; others before it are dropped.
    ///
    /// # Errors
    /// None came in time, or QEMU has gone.
    pub fn wait_event(
        &mut self,
        patience: Duration,
        wanted: impl Fn(&str, &Value) -> bool,
    ) -> Result<Value, QmpError> {
        let deadline = Instant::now() + patience;
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
                // The end, in the middle of a line; the next read says so.
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
