//! Entries of a journal, and operations on the disk that stores it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use dunlin_proto::journal::peer::RecordedPeer;
use dunlin_proto::journal::{DestinationRecord, Record, SourceRecord, State, Unreadable};
use dunlin_proto::negotiate::SessionId;

use super::error::JournalError;

/// Disk operations that can fail because of a full or defective disk. Tests replace them.
pub trait Disk: Send + Sync {
    /// Writes all of `bytes` at `offset`.
    ///
    /// # Errors
    /// An error from pwrite(2).
    fn write(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        file.write_all_at(bytes, offset)
    }

    /// Syncs the file: when this returns, the written bytes are on the disk.
    ///
    /// # Errors
    /// An error from fdatasync(2). The bytes may still have reached the disk.
    fn sync(&self, file: &File) -> io::Result<()> {
        file.sync_data()
    }

    /// Syncs a directory: when this returns, the directory's entries are on the disk. After a
    /// crash, a created file exists and a removed file does not.
    ///
    /// # Errors
    /// An error from fsync(2).
    fn sync_directory(&self, directory: &File) -> io::Result<()> {
        directory.sync_all()
    }
}

/// The real disk.
#[derive(Clone, Copy, Debug, Default)]
pub struct StandardDisk;

impl Disk for StandardDisk {}

/// This host's role in the session that a file records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// The VM leaves this host.
    Source,
    /// The VM arrives on this host.
    Destination,
}

impl Role {
    pub(super) fn of(state: State) -> Self {
        match state {
            State::Source(_) => Self::Source,
            State::Destination(_) => Self::Destination,
        }
    }

    /// The role's name, which is the extension of its file names.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Destination => "destination",
        }
    }
}

/// A session in the journal.
#[derive(Debug)]
pub struct Entry {
    /// The session.
    pub session: SessionId,
    /// This host's role in the session.
    pub role: Role,
    /// The session's newest record; `None` if the session has not written one.
    pub record: Result<Option<Record>, Unreadable>,
    /// The session's peer, according to this journal.
    pub peer: RecordedPeer,
    /// Whether a living process holds the session. In a journal in memory: whether a thread of this
    /// process holds it. If so, only the holder may act on the record.
    pub lives: bool,
}

/// Checks that `record` may begin an attempt of its session. If the session already has a record,
/// `before`, the attempt in `before` must have ended with the VM at the source and must have a lower
/// number.
pub(super) fn may_follow(
    before: Option<&Record>,
    record: &Record,
    path: &Path,
) -> Result<(), JournalError> {
    match before {
        Some(&Record { state, attempt, .. })
            if attempt >= record.attempt
                || !matches!(
                    state,
                    State::Source(SourceRecord::Kept)
                        | State::Destination(DestinationRecord::Aborted)
                ) =>
        {
            Err(JournalError::Undecided {
                path: path.into(),
                state,
                attempt,
            })
        }
        _ => Ok(()),
    }
}
