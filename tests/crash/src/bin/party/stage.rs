//! A process's reports on standard output and its orders on standard input.

use std::fs::File;
use std::io::{self, BufRead, Write};
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};

use dunlin::engine::journal::{Disk, Record};

/// Where the steps of this process are shown.
#[derive(Clone)]
pub(crate) struct Stage(Arc<Shared>);

struct Shared {
    hold: String,
    heard: Mutex<Receiver<String>>,
}

impl Stage {
    /// Waits at the step `hold`; empty for none. Ends the process when standard
    /// input ends: the test is over.
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

    /// Says a line.
    pub(crate) fn say(&self, line: &str) {
        let mut out = io::stdout().lock();
        // Fails once the test has ended; then standard input ends too.
        let _ = writeln!(out, "{line}").and_then(|()| out.flush());
    }

    /// The next line that the test says.
    pub(crate) fn hear(&self) -> String {
        let heard = self.0.heard.lock().unwrap_or_else(PoisonError::into_inner);
        // The process ends before its last sender does.
        heard.recv().unwrap_or_default()
    }

    /// This step comes next. Waits if it is the one to be held at.
    pub(crate) fn at(&self, step: &str) {
        self.say(&format!("at {step}"));
        if self.0.hold == step {
            while self.hear() != "go" {}
        }
    }
}

/// A disk with a step for each write and sync.
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
        let record = bytes.try_into().ok().map(Record::decode);
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
