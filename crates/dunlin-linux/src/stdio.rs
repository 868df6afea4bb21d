//! Ends this process's standard output before the process exits, for a reader that waits for the
//! end.

use std::fs::OpenOptions;
use std::io::{self, Write};

/// Ends standard output: its reader sees the end while this process continues. Replaces standard
/// output with /dev/null, so later output is discarded and no other file can get its descriptor
/// number.
///
/// # Errors
/// An error from flushing earlier output, open(2) or dup2(2).
pub fn end_output() -> io::Result<()> {
    let mut output = io::stdout().lock();
    output.flush()?;
    let null = OpenOptions::new().write(true).open("/dev/null")?;
    Ok(rustix::stdio::dup2_stdout(&null)?)
}
