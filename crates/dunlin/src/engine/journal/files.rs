//! Records of sessions in files. Each file is locked by the session's process.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dunlin_linux::regular;
use dunlin_proto::journal::peer::{PEER_BLOCK_AT, PEER_BLOCK_BYTES, Principal, RecordedPeer};
use dunlin_proto::journal::{
    JOURNAL_BYTES, Newest, RECORD_BYTES, Record, SLOT_BYTES, SLOTS_BYTES, Unreadable, encode,
    newest,
};
use dunlin_proto::negotiate::SessionId;

use super::entry::{Disk, Entry, Role, may_follow};
use super::error::{JournalError, io_error};

/// How long to wait for a file's lock. This is long enough for a listing, which holds the lock for
/// microseconds. A longer wait is useless, because a session holds the lock for the whole migration
/// or for the lifetime of the VM.
const LOCK_LIMIT: Duration = Duration::from_millis(200);
const LOCK_PAUSE: Duration = Duration::from_millis(5);

/// The journal's directory, and the operations on its disk.
#[derive(Clone)]
pub(super) struct Directory {
    pub(super) path: PathBuf,
    pub(super) disk: Arc<dyn Disk>,
}

/// A session's file.
pub(super) struct HeldFile {
    file: File,
    pub(super) path: PathBuf,
    directory: Directory,
    generation: u64,
    next_slot: usize,
}

impl HeldFile {
    pub(super) fn write(&mut self, record: &Record) -> Result<(), JournalError> {
        let bytes = encode(record, self.generation + 1)?;
        self.put(&bytes, self.next_slot * SLOT_BYTES)?;
        // Use the next generation and slot only after the sync. Until then, the other slot has the
        // only record that is known to be on the disk.
        self.generation += 1;
        self.next_slot = 1 - self.next_slot;
        Ok(())
    }

    /// Writes and syncs the peer block.
    pub(super) fn write_peer(
        &self,
        peer: &Principal,
        session: SessionId,
    ) -> Result<(), JournalError> {
        self.put(&peer.encode(session)?, PEER_BLOCK_AT)
    }

    /// Removes the file.
    pub(super) fn forget(self) -> Result<(), JournalError> {
        std::fs::remove_file(&self.path).map_err(io_error("removed", &self.path))?;
        self.directory.sync()
    }

    /// Writes bytes at an offset and syncs them.
    fn put(&self, bytes: &[u8], offset: usize) -> Result<(), JournalError> {
        let disk = &self.directory.disk;
        disk.write(&self.file, bytes, offset as u64)
            .map_err(io_error("written", &self.path))?;
        disk.sync(&self.file)
            .map_err(io_error("synced", &self.path))
    }

    /// The session's peer, from the file.
    pub(super) fn read_peer(&self, session: SessionId) -> Result<RecordedPeer, JournalError> {
        read_peer(&self.file, session).map_err(io_error("read", &self.path))
    }
}

impl Directory {
    pub(super) fn path(&self, session: SessionId, role: Role) -> PathBuf {
        self.path.join(file_name(session, role))
    }

    /// Creates and locks the file of the session in `record`, with space for all of its later
    /// records. If the session has a file from an earlier attempt, takes over that file. This is
    /// an error unless that attempt has a lower number and has ended with the VM at the source.
    pub(super) fn create(&self, record: &Record, role: Role) -> Result<HeldFile, JournalError> {
        let path = self.path(record.session, role);
        let created = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path);
        match created {
            Ok(file) => {
                self.allocate(&file, &path).inspect_err(|_| {
                    // Best effort: other processes ignore a file without a record.
                    let _ = std::fs::remove_file(&path);
                })?;
                Ok(HeldFile {
                    file,
                    path,
                    directory: self.clone(),
                    generation: 0,
                    next_slot: 0,
                })
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let (held, before) = self.take(path)?;
                may_follow(before.as_ref(), record, &held.path)?;
                Ok(held)
            }
            Err(source) => Err(io_error("created", &path)(source)),
        }
    }

    /// Locks a new file, fills it with zeros, and syncs it and its directory.
    fn allocate(&self, file: &File, path: &Path) -> Result<(), JournalError> {
        lock(file, path)?;
        self.disk
            .write(file, &[0; JOURNAL_BYTES], 0)
            .map_err(io_error("allocated", path))?;
        self.disk.sync(file).map_err(io_error("synced", path))?;
        file.sync_all().map_err(io_error("synced", path))?;
        self.sync()
    }

    fn sync(&self) -> Result<(), JournalError> {
        File::open(&self.path)
            .and_then(|directory| self.disk.sync_directory(&directory))
            .map_err(io_error("synced", &self.path))
    }

    /// Every session in the directory, in any order.
    pub(super) fn list(&self) -> Result<Vec<Entry>, JournalError> {
        let failed = |what| io_error(what, &self.path);
        let mut entries = Vec::new();
        for file in std::fs::read_dir(&self.path).map_err(failed("read"))? {
            let name = file.map_err(failed("read"))?.file_name();
            let Some((session, role)) = name.to_str().and_then(parse_name) else {
                continue;
            };
            let path = self.path.join(&name);
            let file = match regular::open(&path, false) {
                Ok(file) => file,
                // This is not a regular file. List it as unreadable, so that the other sessions are
                // listed too.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                    entries.push(Entry {
                        session,
                        role,
                        record: Err(Unreadable::BothTorn),
                        peer: RecordedPeer::Unknown,
                        lives: false,
                    });
                    continue;
                }
                // The file was removed after the directory was read.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(source) => return Err(io_error("read", &path)(source)),
            };
            // Take a shared lock, so that two concurrent listings do not see each other as owners.
            let lives = match file.try_lock_shared() {
                Ok(()) => false,
                Err(TryLockError::WouldBlock) => true,
                Err(TryLockError::Error(source)) => return Err(io_error("locked", &path)(source)),
            };
            let record = match read(&file, &path) {
                Ok(newest) => Ok(newest.record),
                Err(JournalError::Unreadable { source, .. }) => Err(source),
                Err(error) => return Err(error),
            };
            let peer = read_peer(&file, session).map_err(io_error("read", &path))?;
            entries.push(Entry {
                session,
                role,
                record,
                peer,
                lives,
            });
        }
        Ok(entries)
    }

    /// Opens and locks an existing file; returns it with its newest record.
    pub(super) fn take(&self, path: PathBuf) -> Result<(HeldFile, Option<Record>), JournalError> {
        let file = match regular::open(&path, true) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(JournalError::Missing { path });
            }
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                let source = Unreadable::BothTorn;
                return Err(JournalError::Unreadable { path, source });
            }
            Err(source) => return Err(io_error("opened", &path)(source)),
        };
        lock(&file, &path)?;
        // The previous owner may have removed the file before it released the lock.
        let ours = file.metadata().map_err(io_error("read", &path))?;
        match std::fs::symlink_metadata(&path) {
            Ok(there) if (there.dev(), there.ino()) == (ours.dev(), ours.ino()) => {}
            Ok(_) => return Err(JournalError::Held { path }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(JournalError::Missing { path });
            }
            Err(source) => return Err(io_error("read", &path)(source)),
        }
        let newest = read(&file, &path)?;
        if ours.len() < SLOTS_BYTES as u64 {
            // The previous process crashed before it had allocated the file.
            self.disk
                .write(&file, &[0; JOURNAL_BYTES], 0)
                .map_err(io_error("allocated", &path))?;
            file.sync_all().map_err(io_error("synced", &path))?;
        }
        let held = HeldFile {
            file,
            path,
            directory: self.clone(),
            generation: newest.generation,
            next_slot: newest.next_slot,
        };
        Ok((held, newest.record))
    }
}

/// Locks a file with flock(2). The lock ends when the file is closed or the process dies.
fn lock(file: &File, path: &Path) -> Result<(), JournalError> {
    let until = Instant::now() + LOCK_LIMIT;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(()),
            // A listing may hold the lock. The kernel has no lock call with a deadline, so poll.
            Err(TryLockError::WouldBlock) if Instant::now() < until => {
                std::thread::sleep(LOCK_PAUSE);
            }
            Err(TryLockError::WouldBlock) => return Err(JournalError::Held { path: path.into() }),
            Err(TryLockError::Error(source)) => return Err(io_error("locked", path)(source)),
        }
    }
}

/// Reads the peer block. A file that ends before the block is treated as one from a release without
/// peer blocks.
fn read_peer(file: &File, session: SessionId) -> io::Result<RecordedPeer> {
    if file.metadata()?.len() <= SLOTS_BYTES as u64 {
        return Ok(RecordedPeer::BeforeBlocks);
    }
    let mut bytes = [0; PEER_BLOCK_BYTES];
    match file.read_exact_at(&mut bytes, PEER_BLOCK_AT as u64) {
        Ok(()) => Ok(RecordedPeer::decode(&bytes, session)),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(RecordedPeer::Unknown),
        Err(error) => Err(error),
    }
}

/// Reads both slots. The missing part of a short file is read as zeros.
fn read(file: &File, path: &Path) -> Result<Newest, JournalError> {
    let mut bytes = Vec::with_capacity(SLOTS_BYTES);
    let mut whole = file.take(SLOTS_BYTES as u64);
    whole
        .read_to_end(&mut bytes)
        .map_err(io_error("read", path))?;
    bytes.resize(SLOTS_BYTES, 0);
    let slots = [0, SLOT_BYTES].map(|start| {
        let mut slot = [0; RECORD_BYTES];
        slot.copy_from_slice(&bytes[start..start + RECORD_BYTES]);
        slot
    });
    newest(&slots).map_err(|source| JournalError::Unreadable {
        path: path.into(),
        source,
    })
}

pub(super) fn file_name(session: SessionId, role: Role) -> String {
    let session = u128::from_be_bytes(session);
    format!("{session:032x}.{}", role.name())
}

fn parse_name(name: &str) -> Option<(SessionId, Role)> {
    let (digits, role) = name.split_once('.')?;
    let role = match role {
        "source" => Role::Source,
        "destination" => Role::Destination,
        _ => return None,
    };
    let lower_hex = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    if digits.len() != 32 || !digits.bytes().all(lower_hex) {
        return None;
    }
    let session = u128::from_str_radix(digits, 16).ok()?;
    Some((session.to_be_bytes(), role))
}
