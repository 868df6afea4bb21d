//! Progress on a terminal: one line of standard error that says what a command waits for.
//!
//! Migrations show their progress by [`crate::display`], and benches by [`dunlin_bench::Progress`].

use std::io::{IsTerminal, Write, stderr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use crate::text::clean;

/// Time until the line appears, and between its updates. Most waits end sooner and show no line, so
/// the terminal does not flicker.
const TICK: Duration = Duration::from_secs(1);

/// Whether the line is on the terminal now.
static SHOWN: AtomicBool = AtomicBool::new(false);

/// Until it is dropped, shows what the command waits for and how long the wait has lasted.
#[must_use]
pub(crate) struct Waiting(Option<(Sender<()>, JoinHandle<()>)>);

impl Waiting {
    /// Shows nothing if the command prints JSON or standard error is not a terminal.
    pub(crate) fn new(json: bool, what: &str) -> Self {
        if json || !stderr().is_terminal() {
            return Self(None);
        }
        let (what, began) = (clean(what), Instant::now());
        let (end, ended) = channel();
        let show = move || {
            while ended.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
                SHOWN.store(true, Ordering::SeqCst);
                // Wrapping is off for this line, because a wrapped line could not be rewritten.
                let seconds = began.elapsed().as_secs();
                write(&format!("\r\x1b[K\x1b[?7l{what} ({seconds} s)\x1b[?7h"));
            }
        };
        // Without a thread no line is shown. Nothing else depends on the thread.
        let thread = Builder::new().name("progress".into()).spawn(show);
        Self(thread.ok().map(|thread| (end, thread)))
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Some((end, thread)) = self.0.take() {
            drop(end);
            let _ = thread.join();
            clear();
        }
    }
}

/// Clears the line before other output. It appears again after [`TICK`].
pub(crate) fn clear() {
    if SHOWN.swap(false, Ordering::SeqCst) {
        write("\r\x1b[K");
    }
}

/// Writes to standard error. A closed terminal is not an error.
fn write(text: &str) {
    let _ = stderr().write_all(text.as_bytes());
}
