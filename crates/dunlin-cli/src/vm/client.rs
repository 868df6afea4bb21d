//! Speaks to the process that owns a VM.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use super::owner::Request;
use crate::line::Line;

/// How long an answer may take that needs no migration.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// One request and the lines that answer it.
pub(crate) struct Client(BufReader<UnixStream>);

impl Client {
    /// Asks the process behind a control socket.
    pub(crate) fn ask(socket: &Path, request: &Request) -> Result<Self> {
        let limit = (!request.takes_long()).then_some(ANSWER_LIMIT);
        Self::ask_within(socket, request, limit)
    }

    /// The same, for an answer within `limit`.
    pub(crate) fn ask_within(
        socket: &Path,
        request: &Request,
        limit: Option<Duration>,
    ) -> Result<Self> {
        let mut stream = UnixStream::connect(socket).with_context(|| {
            format!(
                "no VM answers at {}: is its process running, and is --control the same?",
                socket.display()
            )
        })?;
        stream.set_read_timeout(limit)?;
        writeln!(stream, "{}", serde_json::to_string(request)?)?;
        Ok(Self(BufReader::new(stream)))
    }

    /// A connection over which more can be asked while an answer comes.
    pub(crate) fn more(&self) -> Result<UnixStream> {
        Ok(self.0.get_ref().try_clone()?)
    }

    /// The next line; none when the answer is complete.
    pub(crate) fn next(&mut self) -> Result<Option<Line>> {
        let mut text = String::new();
        let read = self
            .0
            .read_line(&mut text)
            .context("the VM's process does not answer; is it stopped?")?;
        if read == 0 {
            return Ok(None);
        }
        let line = serde_json::from_str(&text)
            .context("the VM's process answered something else: is it of another release?")?;
        Ok(Some(line))
    }
}

/// Asks the process behind a control socket for one line, within `limit`.
pub(crate) fn one_line(socket: &Path, request: &Request, limit: Duration) -> Result<Line> {
    let mut client = Client::ask_within(socket, request, Some(limit))?;
    client.next()?.context("the VM's process hung up")
}
