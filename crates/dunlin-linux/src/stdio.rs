//! A process's standard output, whose reader waits for its end.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::fd::AsRawFd;

/// Ends standard output: its reader sees the end while this process goes on. What
/// is written later is dropped; the descriptor's number is never free for another
/// file.
///
/// # Errors
/// What was written before cannot be flushed, or what open(2) and dup2(2) say.
pub fn end_output() -> io::Result<()> {
    let mut output = io::stdout().lock();
    output.flush()?;
    let nowhere = OpenOptions::new().write(true).open("/dev/null")?;
    // SAFETY: dup2(2) takes no pointers. `nowhere` is open, and standard output is
    // owned by nobody: whoever writes to it by its number finds an open descriptor,
    // before and after, since the kernel replaces it in one step.
    if unsafe { libc::dup2(nowhere.as_raw_fd(), libc::STDOUT_FILENO) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
