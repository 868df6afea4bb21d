//! `dunlin handoff`: connected sockets whose TLS the kernel does, for programs that do no TLS.

mod accept;
mod connect;
mod line;

use std::ffi::OsString;
use std::path::Path;

use anyhow::{Error, Result, anyhow};
use clap::Subcommand;
use clap::error::ErrorKind;

use crate::text::chained;

/// The name under which `dunlin` is `dunlin handoff connect`, as toolstacks call theirs.
const HELPER: &str = "ktls-helper";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Connect, make the TLS handshake, leave the rest of TLS to the kernel, and pass the socket
    /// to the caller.
    #[command(visible_alias = HELPER)]
    Connect(connect::Connect),
    /// Take clients in: those of some names are handed over, all others connected with the server
    /// behind.
    Accept(accept::Accept),
}

pub(crate) fn run(command: &Command) -> Result<i32> {
    match command {
        Command::Connect(connect) => connect.run().map_err(|error| anyhow!(in_one_line(&error))),
        Command::Accept(accept) => accept.run(),
    }
}

/// The words of a command line, if it is a helper's: its caller reads one line of its errors, and
/// knows the exit codes 0 and 1.
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

/// A helper's usage error in one line; help and version are printed.
pub(crate) fn refused(error: &clap::Error) -> Error {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => error.exit(),
        _ => anyhow!(without_usage(&error.to_string())),
    }
}

/// What clap says, without how the command is used.
fn without_usage(text: &str) -> String {
    let what = text.split("\n\nUsage:").next().unwrap_or(text);
    let what = what.strip_prefix("error: ").unwrap_or(what);
    let words: Vec<_> = what.split_whitespace().collect();
    words.join(" ")
}

fn in_one_line(error: &Error) -> String {
    chained(error).replace('\n', " ")
}
