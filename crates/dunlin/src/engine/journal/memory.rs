//! Records of sessions in the memory of the process.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use dunlin_lane::peers::Principal;
use dunlin_proto::journal::Record;
use dunlin_proto::journal::peer::RecordedPeer;
use dunlin_proto::negotiate::SessionId;

use super::super::sync::{Mutex, lock};
use super::entry::{Entry, Role, may_follow};
use super::error::JournalError;
use super::files::file_name;

/// At this number of sessions, a new session displaces the oldest one that no thread holds.
/// Inquiries about the displaced session can no longer be answered. A peer reaches the number only
/// with more failing sessions than any host has VMs (invariant I8).
const SESSIONS_LIMIT: usize = 4096;

type Name = (SessionId, Role);

/// The sessions of a process.
#[derive(Clone, Default)]
pub(super) struct Memory(Arc<Mutex<BTreeMap<Name, Remembered>>>);

#[derive(Default)]
struct Remembered {
    record: Option<Record>,
    peer: Option<Principal>,
    /// Whether a thread of this process holds the session.
    held: bool,
}

/// A session that a thread of this process holds.
pub(super) struct HeldInMemory {
    name: Name,
    memory: Memory,
}

impl Memory {
    pub(super) fn create(&self, record: &Record, role: Role) -> Result<HeldInMemory, JournalError> {
        let name = (record.session, role);
        let mut sessions = lock(&self.0);
        if sessions.len() >= SESSIONS_LIMIT {
            let free = sessions.iter().filter(|(_, session)| !session.held);
            let started = |session: &Remembered| session.record.as_ref().map(|r| r.started_ms);
            let oldest = free.min_by_key(|(_, session)| started(session));
            if let Some(oldest) = oldest.map(|(name, _)| *name) {
                sessions.remove(&oldest);
            }
        }
        let session = sessions.entry(name).or_default();
        let path = || PathBuf::from(file_name(name.0, name.1));
        if session.held {
            return Err(JournalError::Held { path: path() });
        }
        may_follow(session.record.as_ref(), record, &path())?;
        session.held = true;
        session.peer = None;
        Ok(self.held(name))
    }

    pub(super) fn take(
        &self,
        session: SessionId,
        role: Role,
    ) -> Result<(HeldInMemory, Record, RecordedPeer), JournalError> {
        let name = (session, role);
        let path = || file_name(session, role).into();
        match lock(&self.0).get_mut(&name) {
            Some(found) if found.held => Err(JournalError::Held { path: path() }),
            Some(Remembered {
                record: Some(record),
                peer,
                held,
            }) => {
                *held = true;
                Ok((self.held(name), record.clone(), recorded(peer.clone())))
            }
            _ => Err(JournalError::Missing { path: path() }),
        }
    }

    pub(super) fn list(&self) -> Vec<Entry> {
        let sessions = lock(&self.0);
        let entries = sessions.iter().map(|(&(session, role), found)| Entry {
            session,
            role,
            record: Ok(found.record.clone()),
            peer: recorded(found.peer.clone()),
            lives: found.held,
        });
        entries.collect()
    }

    fn held(&self, name: Name) -> HeldInMemory {
        HeldInMemory {
            name,
            memory: self.clone(),
        }
    }
}

fn recorded(peer: Option<Principal>) -> RecordedPeer {
    peer.map_or(RecordedPeer::Unknown, RecordedPeer::Known)
}

impl HeldInMemory {
    pub(super) fn path(&self) -> PathBuf {
        file_name(self.name.0, self.name.1).into()
    }

    pub(super) fn write(&self, record: &Record) {
        if let Some(session) = lock(&self.memory.0).get_mut(&self.name) {
            session.record = Some(record.clone());
        }
    }

    pub(super) fn write_peer(&self, peer: &Principal) {
        if let Some(session) = lock(&self.memory.0).get_mut(&self.name) {
            session.peer = Some(peer.clone());
        }
    }

    pub(super) fn forget(self) {
        lock(&self.memory.0).remove(&self.name);
    }
}

impl Drop for HeldInMemory {
    fn drop(&mut self) {
        let mut sessions = lock(&self.memory.0);
        match sessions.get_mut(&self.name) {
            // Remove a session that has no record.
            Some(session) if session.record.is_none() => drop(sessions.remove(&self.name)),
            Some(session) => session.held = false,
            None => {}
        }
    }
}
