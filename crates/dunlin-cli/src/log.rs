//! The log of long-running commands: lines on standard error.

use std::io::Write;

use crate::text::clean;

/// Writes each warning as a line.
pub(crate) fn warn(warnings: impl IntoIterator<Item = String>) {
    for warning in warnings {
        say(&format!("warning: {warning}"));
    }
}

/// Writes one line. A closed standard error is not an error.
pub(crate) fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "dunlin: {}", clean(text));
}
