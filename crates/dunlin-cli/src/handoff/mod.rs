//! `dunlin handoff`: connected sockets with kernel TLS, for programs that do not implement TLS.

mod accept;
mod connect;
mod line;
mod tally;

use std::ffi::OsString;
use std::path::Path;

use anyhow::{Error, Result, anyhow};
use clap::Subcommand;
use clap::error::ErrorKind;

use crate::line::FailedLine;

/// A program name under which `dunlin` runs `dunlin handoff connect`. Toolstacks expect a helper
/// with this name.
const HELPER: &str = "ktls-helper";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Connect, perform the TLS handshake, move TLS into the kernel, and pass the socket to the
    /// caller.
    #[command(visible_alias = HELPER)]
    Connect(connect::Connect),
    /// Accept TLS clients: hand over those with the given server names, forward all others to a
    /// server.
    Accept(accept::Accept),
}

pub(crate) fn run(command: &Command) -> Result<i32> {
    match command {
        Command::Connect(connect) => connect.run().map_err(|error| in_one_line(&error)),
        Command::Accept(accept) => accept.run(),
    }
}

/// The command line of `dunlin handoff connect`, if `words` runs that command under one of its
/// names; otherwise `None`. The caller of that command reads a single error line, and expects exit
/// code 0 or 1.
pub(crate) fn helper(mut words: Vec<OsString>) -> Option<Vec<OsString>> {
    let name = words.first().and_then(|word| Path::new(word).file_name());
    if name.is_some_and(|name| name == HELPER) {
        let rest = words.split_off(1);
        words = ["dunlin", "handoff", "connect"].map(Into::into).to_vec();
        words.extend(rest);
    }
    let is = |at: usize, names: &[&str]| {
        let word = words.get(at);
        word.is_some_and(|word| names.iter().any(|name| word == name))
    };
    (is(1, &["handoff"]) && is(2, &["connect", HELPER])).then_some(words)
}

/// Turns a helper's usage error into an error of one line. If help or the version was requested,
/// prints it and ends the process.
pub(crate) fn refused(error: &clap::Error) -> Error {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => error.exit(),
        _ => anyhow!(without_usage(&error.to_string())),
    }
}

/// clap's error without the usage text.
fn without_usage(text: &str) -> String {
    let what = text.split("\n\nUsage:").next().unwrap_or(text);
    let what = what.strip_prefix("error: ").unwrap_or(what);
    let words: Vec<_> = what.split_whitespace().collect();
    words.join(" ")
}

fn in_one_line(error: &Error) -> Error {
    let mut failed = FailedLine::from(error);
    failed.text = failed.text.replace('\n', " ");
    failed.into()
}
