//! The records of one session.

use std::fmt;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use dunlin_lane::peers::{PeerIdentity, Principal};
use dunlin_proto::journal::peer::RecordedPeer;
use dunlin_proto::journal::{DestinationRecord, Record, SourceRecord, State};
use dunlin_proto::limits::{MAX_ENDPOINT_BYTES, MAX_RECORDS_OF_A_PEER};
use dunlin_proto::negotiate::SessionId;
use dunlin_proto::text::harmless;

use super::entry::{Entry, Role};
use super::error::JournalError;
use super::files::HeldFile;
use super::memory::HeldInMemory;
use super::storage::{Journal, Storage};

/// One session's records, locked by the session's process.
pub struct SessionJournal {
    record: Record,
    peer: RecordedPeer,
    held: Held,
}

enum Held {
    File(HeldFile),
    Memory(HeldInMemory),
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
    /// The first record of a session.
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
            peer: peer[..peer.floor_char_boundary(MAX_ENDPOINT_BYTES)].into(),
            owner: owner.into(),
            started_ms: now_ms(),
            written_ms: 0,
        }
    }

    /// Creates and locks the file of the session in `record`, with space for all of its later
    /// records. Nothing is recorded yet.
    ///
    /// An existing session may be started again if its last attempt has ended and this
    /// attempt has a higher number.
    ///
    /// # Errors
    /// [`JournalError::Io`], for example if there is no space; [`JournalError::Held`],
    /// [`JournalError::Undecided`] and [`JournalError::Unreadable`] for an existing session.
    pub fn create(journal: &Journal, record: Record) -> Result<Self, JournalError> {
        let role = Role::of(record.state);
        let held = match &journal.0 {
            Storage::Directory(directory) => Held::File(directory.create(&record, role)?),
            Storage::Memory(memory) => Held::Memory(memory.create(&record, role)?),
        };
        Ok(Self {
            record,
            peer: RecordedPeer::Unknown,
            held,
        })
    }

    /// Creates the file for the first attempt of a session of a VM, and removes obsolete records of
    /// earlier sessions.
    ///
    /// At the source, all records of earlier sessions of the same VM are obsolete. If one of these
    /// sessions is undecided, the call fails. `peer` is `None`, because a source has not connected
    /// to a peer yet.
    ///
    /// At the destination, only records of sessions that `peer` started can be obsolete. A record
    /// of the same VM is obsolete unless it says *running*. The records of other VMs that never ran
    /// here are limited to the newest [`MAX_RECORDS_OF_A_PEER`] of `peer`, including the new
    /// record. The older ones are obsolete.
    ///
    /// A record that a living process holds is kept.
    ///
    /// # Errors
    /// Same as [`SessionJournal::create`]; at the source also [`JournalError::Unresolved`].
    pub(crate) fn begin(
        journal: &Journal,
        record: Record,
        peer: Option<&PeerIdentity>,
    ) -> Result<Self, JournalError> {
        let mut others = 0;
        // Begin with the newest sessions, so that those beyond the limit are the oldest.
        for entry in journal.list()?.iter().rev() {
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
                        remove(journal, entry);
                    }
                }
                continue;
            }
            let over = match before.state {
                State::Source(
                    SourceRecord::Committing | SourceRecord::RanThenDied | SourceRecord::RunHere,
                ) => {
                    return Err(JournalError::Unresolved {
                        path: journal.path(entry.session, entry.role),
                        state: before.state,
                    });
                }
                State::Source(_) => true,
                State::Destination(DestinationRecord::Running) => false,
                State::Destination(_) => theirs(before),
            };
            if over && !entry.lives {
                remove(journal, entry);
            }
        }
        Self::create(journal, record)
    }

    /// Takes over a session that no process holds. If the journal is in memory, no thread of this
    /// process may hold the session.
    ///
    /// # Errors
    /// [`JournalError::Missing`], including when nothing was ever recorded; [`JournalError::Held`];
    /// [`JournalError::Unreadable`]; [`JournalError::Io`].
    pub fn take(journal: &Journal, session: SessionId, role: Role) -> Result<Self, JournalError> {
        let directory = match &journal.0 {
            Storage::Directory(directory) => directory,
            Storage::Memory(memory) => {
                let (held, record, peer) = memory.take(session, role)?;
                let held = Held::Memory(held);
                return Ok(Self { record, peer, held });
            }
        };
        match directory.take(directory.path(session, role))? {
            (held, Some(record)) => Ok(Self {
                peer: held.read_peer(record.session)?,
                record,
                held: Held::File(held),
            }),
            (held, None) => Err(JournalError::Missing { path: held.path }),
        }
    }

    /// The newest record; before the first write, the record passed to
    /// [`SessionJournal::create`].
    #[must_use]
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// Records the session's peer. Call it after the peer is authenticated and before the first
    /// record about which the peer may ask.
    ///
    /// # Errors
    /// [`JournalError::Io`], or [`JournalError::Record`] if the peer's name is too long.
    pub fn write_peer(&mut self, peer: &Principal) -> Result<(), JournalError> {
        match &mut self.held {
            Held::File(held) => held.write_peer(peer, self.record.session)?,
            Held::Memory(held) => held.write_peer(peer),
        }
        self.peer = RecordedPeer::Known(peer.clone());
        Ok(())
    }

    /// The session's peer.
    #[must_use]
    pub fn peer(&self) -> &RecordedPeer {
        &self.peer
    }

    /// Whether `peer` is the session's peer, the only one that may ask about the
    /// session, settle it or release it.
    #[must_use]
    pub fn is_with(&self, peer: &PeerIdentity) -> bool {
        is_with(&self.peer, &self.record, peer)
    }

    /// Records the state of this side: on success the record is on the disk, unless the journal is
    /// in memory.
    ///
    /// # Errors
    /// [`JournalError::Io`]: the disk then holds the previous record or this one, and the caller
    /// may retry. [`JournalError::Record`]: a text in the record is too long.
    pub fn write(&mut self, state: State) -> Result<(), JournalError> {
        let record = Record {
            state,
            ..self.record.clone()
        };
        self.overwrite(record)
    }

    /// Records only the epoch of a new control lane.
    ///
    /// # Errors
    /// Same as [`SessionJournal::write`]. The next record that can be written contains the epoch.
    pub fn write_epoch(&mut self, epoch: u32) -> Result<(), JournalError> {
        let record = Record {
            epoch,
            ..self.record.clone()
        };
        let written = self.overwrite(record);
        self.record.epoch = epoch;
        written
    }

    fn overwrite(&mut self, mut record: Record) -> Result<(), JournalError> {
        record.written_ms = now_ms();
        match &mut self.held {
            Held::File(held) => held.write(&record)?,
            Held::Memory(held) => held.write(&record),
        }
        self.record = record;
        Ok(())
    }

    /// Removes the session's record. Call it when no side will ask about the session again.
    ///
    /// # Errors
    /// [`JournalError::Io`]: the record still exists, or may reappear if the host crashes now.
    pub fn forget(self) -> Result<(), JournalError> {
        match self.held {
            Held::File(held) => held.forget(),
            Held::Memory(held) => {
                held.forget();
                Ok(())
            }
        }
    }

    /// Removes the session's record. Fails if the record shows that the session still needs a
    /// decision or an action.
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

/// Removes a record if possible. A record that remains does no harm, and the next session tries
/// again.
fn remove(journal: &Journal, entry: &Entry) {
    let _ =
        SessionJournal::take(journal, entry.session, entry.role).and_then(SessionJournal::forget);
}

impl Held {
    fn path(&self) -> PathBuf {
        match self {
            Self::File(held) => held.path.clone(),
            Self::Memory(held) => held.path(),
        }
    }
}

/// Whether `peer` is the peer of a recorded session.
///
/// A record of an older release has no peer block and identifies the peer less exactly. At the
/// destination, the record has the names in the source's certificate: `peer` must have the same
/// names, certified by an authority. At the source, the record has only the destination's address,
/// so every peer that the source trusts matches.
fn is_with(recorded: &RecordedPeer, record: &Record, peer: &PeerIdentity) -> bool {
    match (recorded, record.state) {
        (RecordedPeer::Known(principal), _) => peer.is(principal),
        (RecordedPeer::Unknown, _) => false,
        (RecordedPeer::BeforeBlocks, State::Source(_)) => true,
        (RecordedPeer::BeforeBlocks, State::Destination(_)) => {
            let names = names_of(peer);
            peer.authority.is_some()
                && !names.is_empty()
                // A text of maximum length may have been truncated, so its end is unknown.
                && names.len() < MAX_ENDPOINT_BYTES
                && names == record.peer
        }
    }
}

/// The names in a peer's certificate, for display.
pub(crate) fn names_of(peer: &PeerIdentity) -> String {
    let names: Vec<String> = peer.names.iter().map(ToString::to_string).collect();
    // A certificate may contain any text.
    harmless(&names.join(", "))
}

/// Milliseconds since 1970; 0 if the clock is set to an earlier time.
fn now_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |now| u64::try_from(now.as_millis()).unwrap_or(u64::MAX))
}
