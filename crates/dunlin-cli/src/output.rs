//! Writes lines to standard output and standard error. The reader of these streams can be gone or
//! stalled. Such a reader must not end or delay a process that holds a VM.

use std::io::{Write, stdout};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dunlin_linux::poll::{Interest, poll};

/// How long a line waits for a stalled reader. The time is short, because the threads that print
/// and log also move VMs, and a stalled reader must not keep a guest paused.
const STALL_LIMIT: Duration = Duration::from_millis(10);

/// The length of a line, with its line break, for which every writable pipe has space (PIPE_BUF,
/// pipe(7)).
const LINE_LIMIT: usize = 4096;

/// The number of lines lost since the last printed one.
static LOST: AtomicU64 = AtomicU64::new(0);

/// Whether `stream` accepts a line within [`STALL_LIMIT`]; if not, adds one to `lost`. While `lost`
/// is above 0, a line does not wait. Pipes and sockets are reported as writable only if they have
/// space for a line.
pub(crate) fn is_writable(stream: &impl AsFd, lost: &AtomicU64) -> bool {
    let wait = match lost.load(Ordering::Relaxed) {
        0 => STALL_LIMIT,
        _ => Duration::ZERO,
    };
    // A line also counts as lost if a signal interrupts the wait.
    let ready = poll(&[Interest::write(stream)], Some(wait));
    let is_writable = ready.is_ok_and(|ready| ready == [true]);
    if !is_writable {
        lost.fetch_add(1, Ordering::Relaxed);
    }
    is_writable
}

/// Prints a line on standard output. A closed output is not an error.
pub(crate) fn put(line: &str) {
    let mut out = stdout().lock();
    let _ = out.write_all(format!("{line}\n").as_bytes());
    let _ = out.flush();
}

/// Prints a line on standard output. If no process reads standard output, the line is lost.
/// `warning` turns a text about lost lines into a line.
pub(crate) fn offer(line: &str, warning: impl Fn(String) -> String) {
    if !is_writable(&stdout(), &LOST) {
        return;
    }
    let lost = LOST.swap(0, Ordering::Relaxed);
    if lost > 0 {
        let text = format!("{lost} lines were lost, because no process read standard output");
        put(&warning(text));
        // The warning may have used the space for the line.
        if !is_writable(&stdout(), &LOST) {
            return;
        }
    }
    match line.len() {
        ..LINE_LIMIT => put(line),
        bytes => put(&warning(format!("a line of {bytes} bytes is left out"))),
    }
}
