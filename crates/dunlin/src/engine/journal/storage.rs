//! A journal: a directory of records, or the memory of the process.

use std::fmt;
use std::fs::DirBuilder;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dunlin_linux::socket::own_user;
use dunlin_proto::negotiate::SessionId;

use super::entry::{Disk, Entry, Role, StandardDisk};
use super::error::{JournalError, io_error};
use super::files::{Directory, file_name};
use super::memory::Memory;

/// The records of this host's sessions.
#[derive(Clone)]
pub struct Journal(pub(super) Storage);

#[derive(Clone)]
pub(super) enum Storage {
    Directory(Directory),
    Memory(Memory),
}

impl Journal {
    /// Opens the journal in `directory`. Creates the directory (mode 0700) if it does
    /// not exist.
    ///
    /// # Errors
    /// [`JournalError::Io`], or [`JournalError::Exposed`].
    pub fn open(directory: &Path) -> Result<Self, JournalError> {
        Self::open_with(directory, Arc::new(StandardDisk))
    }

    /// Opens the journal in `directory`; `disk` performs every write and sync of a
    /// record.
    ///
    /// # Errors
    /// Same as [`Journal::open`].
    #[cfg(feature = "unstable-internals")]
    pub fn open_on(directory: &Path, disk: Arc<dyn Disk>) -> Result<Self, JournalError> {
        Self::open_with(directory, disk)
    }

    fn open_with(directory: &Path, disk: Arc<dyn Disk>) -> Result<Self, JournalError> {
        let failed = |what| io_error(what, directory);
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .map_err(failed("created"))?;
        let found = directory.metadata().map_err(failed("read"))?;
        let (mode, owner) = (found.mode() & 0o777, found.uid());
        if mode & 0o077 != 0 || owner != own_user() {
            return Err(JournalError::Exposed {
                path: directory.into(),
                mode,
                owner,
            });
        }
        Ok(Self(Storage::Directory(Directory {
            path: directory.into(),
            disk,
        })))
    }

    /// A journal without files: the process keeps the sessions in memory while this value, or a
    /// clone of it, exists.
    #[must_use]
    pub fn none() -> Self {
        Self(Storage::Memory(Memory::default()))
    }

    pub(super) fn path(&self, session: SessionId, role: Role) -> PathBuf {
        match &self.0 {
            Storage::Directory(directory) => directory.path(session, role),
            Storage::Memory(_) => file_name(session, role).into(),
        }
    }

    /// Every session in the journal, oldest first. Sessions without a readable record come before
    /// all others.
    ///
    /// # Errors
    /// [`JournalError::Io`].
    pub fn list(&self) -> Result<Vec<Entry>, JournalError> {
        let mut entries = match &self.0 {
            Storage::Directory(directory) => directory.list()?,
            Storage::Memory(memory) => memory.list(),
        };
        entries.sort_by_key(|entry| {
            let started = match &entry.record {
                Ok(Some(record)) => record.started_ms,
                _ => 0,
            };
            (started, entry.session, entry.role)
        });
        Ok(entries)
    }
}

impl fmt::Debug for Journal {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let directory = match &self.0 {
            Storage::Directory(directory) => Some(&directory.path),
            Storage::Memory(_) => None,
        };
        formatter.debug_tuple("Journal").field(&directory).finish()
    }
}
