//! Progress on a terminal.

use std::io::{IsTerminal, Write, stderr};

/// Shows the current step of a benchmark on one line of standard error, if that is a terminal and
/// the results are not printed as JSON.
#[derive(Debug)]
pub struct Progress {
    steps: usize,
    done: usize,
    is_shown: bool,
}

impl Progress {
    pub(crate) fn new(steps: usize, json: bool) -> Self {
        Self {
            steps,
            done: 0,
            is_shown: !json && stderr().is_terminal(),
        }
    }

    /// Shows the next step.
    pub fn step(&mut self, what: &str) {
        self.done += 1;
        self.write(&format!("{} of {}: {what}", self.done, self.steps));
    }

    fn write(&self, text: &str) {
        if self.is_shown {
            // Ignore errors: a measurement continues even if its progress cannot be shown.
            let _ = write!(stderr(), "\r\x1b[K{text}");
            let _ = stderr().flush();
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.write("");
    }
}
