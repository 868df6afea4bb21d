//! A process's standard output, whose reader waits for its end.

use std::fs::OpenOptions;
use std::io::{self, Write};

/// Ends standard output: its reader sees the end while this process goes on. What
/// is written later is dropped; the descriptor's number is never free for another
/// file.
///
/// # Errors
/// The error of flushing what was written before, of open(2) or of dup2(2).
pub fn end_output() -> io::Result<()> {
    let mut output = io::stdout().lock();
    output.flush()?;
    let nowhere = OpenOptions::new().write(true).open("/dev/null")?;
    Ok(rustix::stdio::dup2_stdout(&nowhere)?)
}
