//! The journal's files: what this host records of its migrations, so that it survives the
//! death of a process or of the host. docs/journal.md describes the files;
//! `dunlin_proto::switchover` decides when to write which record.
//!
//! ```text
//!   Journal::open ─▶ SessionJournal::create ─▶ record, record … forget
//!        │                                     (locked while its process lives)
//!        ├─▶ Journal::list: every session on this host, and whether its process lives
//!        └─▶ SessionJournal::take: the session of a process that has died
//! ```
//!
//! When a session starts, its file is filled with zeros and synced, with its directory.
//! Later records overwrite it in place: they need no new space on the disk, and their
//! syncs write no metadata. (Zeros instead of posix_fallocate(3): on ext4 and XFS the
//! first write to preallocated space changes metadata.)
//!
//! [`Journal::none`] keeps records in the process's memory. Drawback: if a process dies
//! after *commit*, the other side gets the answer *no record*, or no answer, and the VM
//! stays in doubt until an operator has found where it runs. A source that is restarted
//! after its process died has no sign that it must not start the VM again.
//!
//! A session's record is removed when no side will ask about it again. A side that does not
//! learn of this removes the record when the same VM moves again: a source starts no
//! session while an earlier session of its VM is undecided, so it will not ask about any of
//! them.

pub use dunlin_proto::journal::{DestinationRecord, Record, SourceRecord, State};
pub use dunlin_proto::negotiate::SessionId;

mod entry;
mod error;
mod files;
mod memory;
mod session;
mod storage;
#[cfg(test)]
mod tests;

pub use entry::{Entry, Role};
pub use error::JournalError;
pub(crate) use session::names_of;
pub use storage::Journal;

#[cfg(feature = "unstable-internals")]
pub use {
    dunlin_proto::journal::Unreadable,
    dunlin_proto::journal::peer::RecordedPeer,
    entry::{Disk, StandardDisk},
    session::SessionJournal,
};
#[cfg(not(feature = "unstable-internals"))]
pub(crate) use {dunlin_proto::journal::peer::RecordedPeer, session::SessionJournal};
