//! What a journal lists, and the disk that it is on.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use dunlin_proto::journal::peer::RecordedPeer;
use dunlin_proto::journal::{DestinationRecord, Record, SourceRecord, State, Unreadable};
use dunlin_proto::negotiate::SessionId;

/// The operations that a full or failing disk fails; tests put their own in.
pub trait Disk: Send + Sync {
    /// Writes all of `bytes` at `offset`.
    ///
    /// # Errors
    /// Any of pwrite(2).
    fn write(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        file.write_all_at(bytes, offset)
    }

    /// Returns when what was written is on the disk.
    ///
    /// # Errors
    /// Any of fdatasync(2). What was written may be there nevertheless.
    fn sync(&self, file: &File) -> io::Result<()> {
        file.sync_data()
    }

    /// Returns when the entries of a directory are on the disk: a file that was
    /// made in it is there after a crash, and one that was removed is not.
    ///
    /// # Errors
    /// Any of fsync(2).
    fn sync_directory(&self, directory: &File) -> io::Result<()> {
        directory.sync_all()
    }
}

/// The disk as it is.
#[derive(Clone, Copy, Debug, Default)]
pub struct StandardDisk;

impl Disk for StandardDisk {}

/// Which side of a session a file belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// The VM leaves this host.
    Source,
    /// The VM comes to this host.
    Destination,
}

impl Role {
    pub(super) fn of(state: State) -> Self {
        match state {
            State::Source(_) => Self::Source,
            State::Destination(_) => Self::Destination,
        }
    }

    /// The role's name, which ends its files' names.
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
    /// This host's side of it.
    pub role: Role,
    /// What it remembers; none where the session ended before its first
    /// record.
    pub record: Result<Option<Record>, Unreadable>,
    /// What it remembers of the session's peer.
    pub peer: RecordedPeer,
    /// Whether the process lives that has the session; then it is the one to
    /// ask, and no other may act on the record.
    pub lives: bool,
}

/// Whether an attempt with this record is over, with the VM at the source.
pub(super) fn is_over(state: State) -> bool {
    matches!(
        state,
        State::Source(SourceRecord::Kept) | State::Destination(DestinationRecord::Aborted)
    )
}
