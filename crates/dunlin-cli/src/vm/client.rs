//! Speaks to the process that owns a VM.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use super::request::Request;
use crate::control::Client;
use crate::line::Line;

/// How long an answer may take that needs no migration.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// Who is asked.
const WHOM: &str = "VM";

/// Asks the process behind a control socket.
pub(super) fn ask(socket: &Path, request: &Request) -> Result<Client> {
    let limit = (!request.takes_long()).then_some(ANSWER_LIMIT);
    Client::ask(socket, WHOM, request, limit)
}

/// The same, for an answer within `limit`.
pub(super) fn ask_within(socket: &Path, request: &Request, limit: Duration) -> Result<Client> {
    Client::ask(socket, WHOM, request, Some(limit))
}

/// Asks the process behind a control socket for one line, within `limit`.
pub(crate) fn one_line(socket: &Path, request: &Request, limit: Duration) -> Result<Line> {
    let mut client = ask_within(socket, request, limit)?;
    client.next()?.context("the VM's process hung up")
}
