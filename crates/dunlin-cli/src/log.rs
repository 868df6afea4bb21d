//! The log of the commands that run until they are told to end: lines on standard error.

use std::io::Write;

use crate::text::clean;

/// Writes one line. That nothing reads it is no failure.
pub(crate) fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "dunlin: {}", clean(text));
}
