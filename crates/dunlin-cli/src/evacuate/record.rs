//! The state file of an evacuation: what has moved, and what was moving when the command ended. A
//! later run reads the file, to continue and for its report.

use std::fs::{self, DirBuilder, File, TryLockError};
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::file::replace;
use crate::state::StatePath;

/// What became of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Outcome {
    /// On its way.
    Moving,
    Moved,
    Stayed,
    /// Stayed, because its migration was cancelled.
    Cancelled,
    /// Stayed, because no destination has enough memory.
    NoRoom,
    /// Stayed, because the evacuation ended before the VM's turn.
    NotStarted,
    /// Not active any more: its guest powered off, or another program stopped it or moved it.
    Off,
    /// An operator has to find out where the VM runs.
    Doubt,
}

/// The entry of a VM in the state file and in the report.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Entry {
    pub(super) uuid: String,
    pub(super) name: String,
    /// The URI of the VM's destination; empty if there is none.
    pub(super) to: String,
    pub(super) result: Outcome,
    /// Why the VM did not move; empty if it did.
    pub(super) reason: String,
    pub(super) duration_s: Option<f64>,
    /// The bytes of memory and disks that libvirt sent.
    pub(super) bytes: Option<u64>,
    pub(super) downtime_ms: Option<u64>,
    /// Whether an earlier run moved the VM or left it in doubt.
    #[serde(default)]
    pub(super) earlier: bool,
}

/// The state file. While this value lives, no other command with the same state directory evacuates
/// the same host.
#[derive(Debug)]
pub(super) struct Record {
    path: PathBuf,
    _lock: File,
    pub(super) entries: Vec<Entry>,
}

impl Record {
    pub(super) fn open(state: &StatePath, from: &str) -> Result<Self> {
        let directory = state.directory()?.join("evacuate");
        let path = directory.join(format!("{}.json", file_name(from)));
        let what = || format!("cannot write {}", path.display());
        // This also creates the state directory. Journals accept it only with this mode.
        let mut builder = DirBuilder::new();
        let made = builder.recursive(true).mode(0o700).create(&directory);
        made.with_context(what)?;
        let lock = File::create(path.with_extension("lock")).with_context(what)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                bail!(
                    "another `dunlin evacuate` is emptying {from}: wait until it ends, or \
                     interrupt it"
                )
            }
            Err(TryLockError::Error(error)) => return Err(error).with_context(what),
        }
        Ok(Self {
            entries: read(&path)?,
            path,
            _lock: lock,
        })
    }

    /// Replaces the entry of the VM, and writes the file.
    pub(super) fn set(&mut self, entry: Entry) -> Result<()> {
        self.entries.retain(|one| one.uuid != entry.uuid);
        self.entries.push(entry);
        self.write()
    }

    pub(super) fn write(&self) -> Result<()> {
        replace(&self.path, &serde_json::to_string(&self.entries)?, 0o600)
    }

    /// Deletes the file, because the evacuation is complete.
    pub(super) fn remove(&self) -> Result<()> {
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(error).with_context(|| format!("cannot delete {}", self.path.display()))
            }
            _ => Ok(()),
        }
    }
}

fn read(path: &Path) -> Result<Vec<Entry>> {
    let text = match fs::read_to_string(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.with_context(|| format!("cannot read {}", path.display()))?,
    };
    let parsed = serde_json::from_str(&text);
    parsed.with_context(|| format!("{} is damaged: delete it", path.display()))
}

/// The name of the file for a URI. Different URIs have different names.
fn file_name(uri: &str) -> String {
    let part = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' => char::from(byte).to_string(),
        byte => format!("%{byte:02x}"),
    };
    uri.bytes().map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i7_a_uri_names_one_file_in_the_directory() {
        assert_eq!(file_name("qemu:///system"), "qemu%3a%2f%2f%2fsystem");
        assert_eq!(file_name(".."), "%2e%2e");
        assert_ne!(file_name("a_b"), file_name("a%5fb"));
    }
}
