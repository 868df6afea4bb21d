//! A process's reports, on standard output, and the orders that it receives, on standard
//! input.

use std::fs::File;
use std::io::{self, BufRead, Write};
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};

use dunlin::engine::journal::{Disk, decode};

/// Reports the steps of this process, and receives the test's orders.
#[derive(Clone)]
pub(crate) struct Stage(Arc<Shared>);

struct Shared {
    hold: String,
    heard: Mutex<Receiver<String>>,
}

impl Stage {
    /// Creates a stage that makes this process wait at the step `hold`, or at no step if `hold` is
    /// empty. When the test ends, this process's standard input ends too, and this process exits.
    pub(crate) fn new(hold: &str) -> Self {
        let (sender, heard) = channel();
        std::thread::spawn(move || {
            for line in io::stdin().lock().lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
            std::process::exit(0);
        });
        Self(Arc::new(Shared {
            hold: hold.into(),
            heard: Mutex::new(heard),
        }))
    }

    /// Prints a line.
    pub(crate) fn say(&self, line: &str) {
        let mut out = io::stdout().lock();
        // Ignore an error: writing fails only after the test has ended. This process then exits,
        // because its standard input has ended too.
        let _ = writeln!(out, "{line}").and_then(|()| out.flush());
    }

    /// Waits for the next line from the test.
    pub(crate) fn hear(&self) -> String {
        let heard = self.0.heard.lock().unwrap_or_else(PoisonError::into_inner);
        // An error is impossible: the thread that owns the sender ends the process before it drops
        // the sender.
        heard.recv().unwrap_or_default()
    }

    /// Reports that `step` is next. If it is the step at which this process must wait, waits for
    /// the line `go`.
    pub(crate) fn at(&self, step: &str) {
        self.say(&format!("at {step}"));
        if self.0.hold == step {
            while self.hear() != "go" {}
        }
    }
}

/// A disk that reports a step before each write and sync of a record.
pub(crate) struct ShownDisk {
    stage: Stage,
    written: Mutex<Option<String>>,
}

impl ShownDisk {
    pub(crate) fn new(stage: &Stage) -> Self {
        Self {
            stage: stage.clone(),
            written: Mutex::default(),
        }
    }
}

impl Disk for ShownDisk {
    fn write(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        let record = bytes.try_into().ok().map(decode);
        let state = match record {
            Some(Ok((record, _))) => record.state.to_string(),
            _ => return file.write_all_at(bytes, offset),
        };
        let name = state.split(", ").last().unwrap_or_default().to_owned();
        self.stage.at(&format!("{name}-unwritten"));
        *self.written.lock().unwrap_or_else(PoisonError::into_inner) = Some(name);
        file.write_all_at(bytes, offset)
    }

    fn sync(&self, file: &File) -> io::Result<()> {
        let written = self
            .written
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(name) = written {
            self.stage.at(&format!("{name}-unsynced"));
        }
        file.sync_data()
    }
}
