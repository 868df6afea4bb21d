//! The journal's files: records of this host's migrations that survive the death of a process or of
//! the host. docs/journal.md describes the files; `dunlin_proto::switchover` decides when to write
//! which record.
//!
//! ```text
//!   Journal::open ─▶ SessionJournal::create ─▶ write, write … forget
//!        │                                     (locked while its process lives)
//!        ├─▶ Journal::list: every session on this host, and whether its process lives
//!        └─▶ SessionJournal::take: the session of a process that has died
//! ```
//!
//! When a session starts, its file is filled with zeros, and the file and its directory are synced.
//! Later records overwrite the file in place. Unless the file system copies on write, they need no
//! new space on the disk, and their syncs write no metadata. (posix_fallocate(3) would not be
//! enough: on ext4 and XFS the first write to preallocated space changes metadata.)
//!
//! [`Journal::none`] keeps records in the process's memory. Drawback: the destination's process can
//! die before it has answered *commit*. In that case the source gets the answer *no record*, or no
//! answer, and the VM stays in doubt until an operator has found where it runs. If the source's
//! process dies, a restarted source has no sign that it must not start the VM again.
//!
//! A session's record is removed when no side will ask about the session again. If a side does not
//! learn that its record is obsolete, it keeps the record until the same VM moves again
//! ([`SessionJournal`]'s `begin` has the conditions). Removing the record is then safe: a source
//! starts no session while an earlier session of its VM is undecided, so it will not ask about any
//! earlier session.

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
    dunlin_proto::journal::peer::RecordedPeer,
    dunlin_proto::journal::{Unreadable, decode},
    entry::{Disk, StandardDisk},
    session::SessionJournal,
};
#[cfg(not(feature = "unstable-internals"))]
pub(crate) use {dunlin_proto::journal::peer::RecordedPeer, session::SessionJournal};
