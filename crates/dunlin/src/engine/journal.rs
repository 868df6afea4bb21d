//! The journal's files: what this host remembers of its migrations when a
//! process or the host itself has died. docs/journal.md describes them;
//! `dunlin_proto::switchover` says what is recorded when.
//!
//! ```text
//!   Journal::open ─▶ create ─▶ SessionJournal: record, record … forget
//!        │                          (locked while its process lives)
//!        ├─▶ list: every session here, and whether its process lives
//!        └─▶ take: the session of a process that has died
//! ```
//!
//! A session's file is written full of zeros and synced, with its directory,
//! when the session starts, and only overwritten in place afterwards: no
//! record needs new room on the disk, and its sync writes no metadata.
//! (Zeros, and not posix_fallocate(3): on ext4 and XFS the first write to
//! space that was merely set aside changes metadata.)
//!
//! [`Journal::none`] remembers in the process's memory. What is lost with it:
//! if a process dies after *commit*, the other side gets *no record* for an
//! answer, or none, and the VM stays in doubt until an operator has found out
//! where it is; and a source that died does not know that it must not be
//! started again.
//!
//! A session's record goes when nobody will ask about it any more. Where that
//! was not heard of, it goes when the same VM is moved again: a source begins
//! nothing while an earlier session of its VM is undecided, so that it asks
//! about none of them.

use std::fmt;
use std::fs::{DirBuilder, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

pub use dunlin_proto::journal::peer::RecordedPeer;
pub use dunlin_proto::journal::{DestinationRecord, Record, SourceRecord, State, Unreadable};
use dunlin_proto::limits::{MAX_ENDPOINT_BYTES, MAX_RECORDS_OF_A_PEER};
pub use dunlin_proto::negotiate::SessionId;

mod entry;
mod error;
mod files;
mod memory;
#[cfg(test)]
mod tests;

use entry::is_over;
pub use entry::{Disk, Entry, Role, StandardDisk};
pub use error::JournalError;
use error::io_error;
use files::{Directory, HeldFile, file_name};
use memory::{HeldInMemory, Memory};

use crate::lane::peers::{PeerIdentity, Principal};
use dunlin_proto::text::harmless;

/// Where the records of this host's sessions lie.
#[derive(Clone)]
pub struct Journal(Shelf);

#[derive(Clone)]
enum Shelf {
    Directory(Directory),
    Memory(Memory),
}

/// One session's records, held by the process whose session it is.
pub struct SessionJournal {
    record: Record,
    peer: RecordedPeer,
    held: Held,
}

enum Held {
    File(HeldFile),
    Memory(HeldInMemory),
}

impl Journal {
    /// The journal in `directory`, which is made (mode 0700) if it is not
    /// there.
    ///
    /// # Errors
    /// [`JournalError::Io`], or [`JournalError::Exposed`].
    pub fn open(directory: &Path) -> Result<Self, JournalError> {
        Self::open_on(directory, Arc::new(StandardDisk))
    }

    /// The same, with every record's write and sync done by `disk`.
    ///
    /// # Errors
    /// As [`Journal::open`].
    pub fn open_on(directory: &Path, disk: Arc<dyn Disk>) -> Result<Self, JournalError> {
        let failed = |what| io_error(what, directory);
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .map_err(failed("made"))?;
        let mode = directory.metadata().map_err(failed("read"))?.mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(JournalError::Exposed {
                path: directory.into(),
                mode,
            });
        }
        Ok(Self(Shelf::Directory(Directory {
            directory: directory.into(),
            disk,
        })))
    }

    /// No journal: sessions are remembered as long as this process lives and
    /// this, or a clone of it, is there.
    #[must_use]
    pub fn none() -> Self {
        Self(Shelf::Memory(Memory::default()))
    }

    /// The record with which a session begins.
    pub(crate) fn first_record(
        state: State,
        session: SessionId,
        vm: (&[u8; 16], &str),
        peer: &str,
        owner: &str,
    ) -> Record {
        Record {
            state,
            session,
            attempt: 1,
            epoch: 1,
            vm_uuid: *vm.0,
            vm_name: vm.1.into(),
            peer: bounded(peer, MAX_ENDPOINT_BYTES).into(),
            owner: owner.into(),
            started_ms: now_ms(),
            written_ms: 0,
        }
    }

    /// Makes the file of the session that `record` is about, for as many
    /// records as will come, and takes it. Nothing is recorded yet;
    /// `record.state` says only which side this is.
    ///
    /// A session that is known here may be begun again if its last attempt is
    /// over and this one's number is higher.
    ///
    /// # Errors
    /// [`JournalError::Io`] where there is no room; [`JournalError::Held`],
    /// [`JournalError::Undecided`], [`JournalError::Unreadable`] of a session
    /// that is there already.
    pub fn create(&self, record: Record) -> Result<SessionJournal, JournalError> {
        let role = Role::of(record.state);
        let place = match &self.0 {
            Shelf::Directory(place) => place,
            Shelf::Memory(memory) => return memory.create(record, role),
        };
        let path = place.path(record.session, role);
        let created = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path);
        let held = match created {
            Ok(file) => {
                let allocated = place.allocate(&file, &path);
                if allocated.is_err() {
                    // Best effort: an empty file says nothing.
                    let _ = std::fs::remove_file(&path);
                }
                allocated?;
                HeldFile {
                    file,
                    path,
                    place: place.clone(),
                    generation: 0,
                    next_slot: 0,
                }
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let (held, before) = place.take(path)?;
                if let Some(before) = before
                    && !(is_over(before.state) && before.attempt < record.attempt)
                {
                    return Err(JournalError::Undecided {
                        path: held.path,
                        state: before.state,
                        attempt: before.attempt,
                    });
                }
                held
            }
            Err(source) => return Err(io_error("made", &path)(source)),
        };
        Ok(SessionJournal {
            record,
            peer: RecordedPeer::Unknown,
            held: Held::File(held),
        })
    }

    /// The same, for the first attempt of a session of a VM: removes what
    /// sessions before it have left and nobody asks about any more. At the
    /// destination these are the ones that `peer` began and that never ran
    /// here; of those of its other VMs, the oldest goes beyond
    /// [`MAX_RECORDS_OF_A_PEER`]. A source has connected to no peer yet.
    ///
    /// # Errors
    /// As [`Journal::create`]; at the source also [`JournalError::Unresolved`].
    pub(crate) fn begin(
        &self,
        record: Record,
        peer: Option<&PeerIdentity>,
    ) -> Result<SessionJournal, JournalError> {
        let mut others = 0;
        // The newest first.
        for entry in self.list()?.iter().rev() {
            let Ok(Some(before)) = &entry.record else {
                continue;
            };
            let theirs =
                |before: &Record| peer.is_some_and(|peer| is_with(&entry.peer, before, peer));
            let same_side = entry.role == Role::of(record.state);
            if !same_side || entry.session == record.session {
                continue;
            }
            if before.vm_uuid != record.vm_uuid {
                let never_ran = matches!(
                    before.state,
                    State::Destination(DestinationRecord::Prepared | DestinationRecord::Aborted)
                );
                if never_ran && theirs(before) && !entry.lives {
                    others += 1;
                    if others >= MAX_RECORDS_OF_A_PEER {
                        self.remove(entry);
                    }
                }
                continue;
            }
            let over = match before.state {
                State::Source(
                    SourceRecord::Committing | SourceRecord::RanThenDied | SourceRecord::RunHere,
                ) => {
                    return Err(JournalError::Unresolved {
                        path: self.path(entry.session, entry.role),
                        state: before.state,
                    });
                }
                State::Source(_) => true,
                State::Destination(DestinationRecord::Running) => false,
                State::Destination(_) => theirs(before),
            };
            if over && !entry.lives {
                self.remove(entry);
            }
        }
        self.create(record)
    }

    /// Left behind it does no harm, and the next session tries again.
    fn remove(&self, entry: &Entry) {
        let _ = self
            .take(entry.session, entry.role)
            .and_then(SessionJournal::forget);
    }

    fn path(&self, session: SessionId, role: Role) -> PathBuf {
        match &self.0 {
            Shelf::Directory(place) => place.path(session, role),
            Shelf::Memory(_) => file_name(session, role).into(),
        }
    }

    /// Takes over the session of a process that has died.
    ///
    /// # Errors
    /// [`JournalError::Missing`], also where nothing was ever recorded;
    /// [`JournalError::Held`] while the process lives;
    /// [`JournalError::Unreadable`]; [`JournalError::Io`].
    pub fn take(&self, session: SessionId, role: Role) -> Result<SessionJournal, JournalError> {
        let place = match &self.0 {
            Shelf::Directory(place) => place,
            Shelf::Memory(memory) => return memory.take(session, role),
        };
        match place.take(place.path(session, role))? {
            (held, Some(record)) => Ok(SessionJournal {
                peer: held.read_peer(record.session)?,
                record,
                held: Held::File(held),
            }),
            (held, None) => Err(JournalError::Missing { path: held.path }),
        }
    }

    /// Every session in the journal, the oldest first.
    ///
    /// # Errors
    /// [`JournalError::Io`].
    pub fn list(&self) -> Result<Vec<Entry>, JournalError> {
        let mut entries = match &self.0 {
            Shelf::Directory(place) => place.list()?,
            Shelf::Memory(memory) => memory.list(),
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
            Shelf::Directory(place) => Some(&place.directory),
            Shelf::Memory(_) => None,
        };
        formatter.debug_tuple("Journal").field(&directory).finish()
    }
}

impl fmt::Debug for SessionJournal {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("SessionJournal")
            .field("record", &self.record)
            .field("path", &self.held.path())
            .finish()
    }
}

impl SessionJournal {
    /// The newest record; before the first, what [`Journal::create`] was given.
    #[must_use]
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// Records who the session's peer is. To be called once the peer is
    /// authenticated, and before the first record about which it may ask.
    ///
    /// # Errors
    /// [`JournalError::Io`].
    pub fn write_peer(&mut self, peer: &Principal) -> Result<(), JournalError> {
        match &mut self.held {
            Held::File(held) => held.write_peer(peer, self.record.session)?,
            Held::Memory(held) => held.write_peer(peer),
        }
        self.peer = RecordedPeer::Known(peer.clone());
        Ok(())
    }

    /// Who the session's peer is.
    #[must_use]
    pub fn peer(&self) -> &RecordedPeer {
        &self.peer
    }

    /// Whether `peer` is the session's own: the only one that may ask about it,
    /// settle it or release it.
    #[must_use]
    pub fn is_with(&self, peer: &PeerIdentity) -> bool {
        is_with(&self.peer, &self.record, peer)
    }

    /// Records where this side stands, and returns how long it took when that
    /// is on the disk.
    ///
    /// # Errors
    /// [`JournalError::Io`]: the disk then holds the record from before or
    /// this one. It may be tried again.
    pub fn write(&mut self, state: State) -> Result<Duration, JournalError> {
        let record = Record {
            state,
            ..self.record.clone()
        };
        self.overwrite(record)
    }

    /// Records the epoch of a new control lane, and nothing else.
    ///
    /// # Errors
    /// As [`SessionJournal::write`].
    pub fn write_epoch(&mut self, epoch: u32) -> Result<Duration, JournalError> {
        let record = Record {
            epoch,
            ..self.record.clone()
        };
        self.overwrite(record)
    }

    fn overwrite(&mut self, mut record: Record) -> Result<Duration, JournalError> {
        let began = Instant::now();
        record.written_ms = now_ms();
        match &mut self.held {
            Held::File(held) => held.write(&record)?,
            Held::Memory(held) => held.write(&record),
        }
        self.record = record;
        Ok(began.elapsed())
    }

    /// Removes the session: nobody will ask about it any more.
    ///
    /// # Errors
    /// [`JournalError::Io`]: the record is still there, or comes back if the
    /// host crashes now.
    pub fn forget(self) -> Result<(), JournalError> {
        match self.held {
            Held::File(held) => {
                std::fs::remove_file(&held.path).map_err(io_error("removed", &held.path))?;
                held.place.sync_directory()
            }
            Held::Memory(held) => {
                held.forget();
                Ok(())
            }
        }
    }

    /// The same, unless the record says that something is still to be decided
    /// or done.
    pub(crate) fn forget_if_over(self) -> Result<(), JournalError> {
        let Record { state, attempt, .. } = self.record;
        match state {
            State::Source(
                SourceRecord::Migrating
                | SourceRecord::Committing
                | SourceRecord::RanThenDied
                | SourceRecord::RunHere,
            ) => Err(JournalError::Undecided {
                path: self.held.path(),
                state,
                attempt,
            }),
            _ => self.forget(),
        }
    }
}

impl Held {
    fn path(&self) -> PathBuf {
        match self {
            Self::File(held) => held.path.clone(),
            Self::Memory(held) => held.path(),
        }
    }
}

/// Whether the session of a record is one with `peer`.
///
/// A file from before the peer block knows the source's peer by the names in
/// its certificate, which have to be the same and vouched for by an authority;
/// of the destination it knows the address alone, so any peer that the source
/// admits is taken for it, as that release did.
fn is_with(recorded: &RecordedPeer, record: &Record, peer: &PeerIdentity) -> bool {
    match (recorded, record.state) {
        (RecordedPeer::Known(principal), _) => peer.is(principal),
        (RecordedPeer::Unknown, _) => false,
        (RecordedPeer::BeforeBlocks, State::Source(_)) => true,
        (RecordedPeer::BeforeBlocks, State::Destination(_)) => {
            let names = names_of(peer);
            peer.authority.is_some()
                && !names.is_empty()
                // What was longer has been cut, and may have gone on otherwise.
                && names.len() < MAX_ENDPOINT_BYTES
                && names == record.peer
        }
    }
}

/// The names in a peer's certificate, for people.
pub(crate) fn names_of(peer: &PeerIdentity) -> String {
    let names: Vec<String> = peer.names.iter().map(ToString::to_string).collect();
    // A certificate may bear anything.
    harmless(&names.join(", "))
}

/// What fits of a text that is for people.
pub(crate) fn bounded(text: &str, bytes: usize) -> &str {
    let mut end = text.len().min(bytes);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Milliseconds since 1970; 0 for a clock before that.
fn now_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |now| u64::try_from(now.as_millis()).unwrap_or(u64::MAX))
}
