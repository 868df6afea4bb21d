//! The files of one run.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The directory of one run.
#[derive(Clone, Debug)]
pub struct Files(PathBuf);

impl Files {
    /// The files in `directory`, which must exist.
    #[must_use]
    pub fn new(directory: &Path) -> Self {
        Self(directory.to_owned())
    }

    /// The directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.0
    }

    /// The journal of `side`, which is `source` or `destination`.
    #[must_use]
    pub fn journal(&self, side: &str) -> PathBuf {
        self.0.join(format!("journal-{side}"))
    }

    /// The guest memory of `side`, which is `source` or `destination`.
    #[must_use]
    pub fn memory(&self, side: &str) -> PathBuf {
        self.0.join(format!("memory-{side}"))
    }

    /// The file with the highest count that the guest has reached at the source or the destination.
    #[must_use]
    pub fn witness(&self) -> PathBuf {
        self.0.join("witness")
    }

    /// The unix socket of the process that contains the VM; other processes send requests to it.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.0.join("vm.sock")
    }

    /// Takes the lock `what`, which only one process may hold at a time. The kernel releases it
    /// when that process dies. If another process holds the lock, records that as a violation and
    /// returns `None`.
    ///
    /// # Errors
    /// The file cannot be opened or locked, or the violation cannot be recorded.
    pub fn take(&self, what: &str, side: &str) -> io::Result<Option<File>> {
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.0.join(what))?;
        match file.try_lock() {
            Ok(()) => Ok(Some(file)),
            Err(TryLockError::WouldBlock) => {
                self.note(&format!(
                    "{what}: taken by the {side} while another process holds it"
                ))?;
                Ok(None)
            }
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    /// Records a violation: something that must never happen.
    ///
    /// # Errors
    /// The note cannot be written.
    pub fn note(&self, what: &str) -> io::Result<()> {
        let mut file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.notes())?;
        writeln!(file, "{what}")
    }

    /// The file that contains the notes.
    #[must_use]
    pub fn notes(&self) -> PathBuf {
        self.0.join("notes")
    }
}
