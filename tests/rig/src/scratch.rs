//! Folders for a test's files.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::maker::Maker;

/// In a folder, the process that works there: its id.
const PROCESS: &str = "process";

/// An empty folder that goes with its owner. Those of killed processes go when the next process
/// makes its first.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    /// Makes one.
    ///
    /// # Errors
    /// The folder for temporary files cannot be written.
    pub fn new() -> io::Result<Self> {
        static SWEPT: Once = Once::new();
        static NEXT: AtomicU32 = AtomicU32::new(0);
        SWEPT.call_once(sweep);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}-{number}", Maker::this_process().prefix());
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path)?;
        Ok(Self(path))
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// A path in it.
    #[must_use]
    pub fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Has the process `id`, a child, end with the folder if its owner is killed.
    pub(crate) fn record(&self, id: u32) -> io::Result<()> {
        // It bears the same kind of name; the number after it says nothing.
        let name = Maker::process(id).map(|child| child.prefix() + "-0");
        fs::write(self.join(PROCESS), name.unwrap_or_default())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Removes the folders of processes that are gone, and ends what was recorded in them.
fn sweep() {
    for entry in fs::read_dir(std::env::temp_dir())
        .into_iter()
        .flatten()
        .flatten()
    {
        let name = entry.file_name();
        let stale = |name: &str| Maker::of(name).is_some_and(|maker| !maker.lives());
        if !name.to_str().is_some_and(stale) {
            continue;
        }
        let recorded = fs::read_to_string(entry.path().join(PROCESS)).unwrap_or_default();
        if let Some(process) = Maker::of(&recorded) {
            process.kill();
        }
        let _ = fs::remove_dir_all(entry.path());
    }
}
