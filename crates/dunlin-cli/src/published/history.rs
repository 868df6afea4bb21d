//! The most recent migrations of this host. When a migration ends, its process adds one file.
//!
//! An entry is one file with one JSON object, written by one call. A reader ignores a file that it
//! cannot parse, so a process that dies while it writes leaves nothing that is shown, and no
//! process needs a lock. The directory is below the control directory, which is in memory on most
//! hosts. So a reboot removes the history, and no disk can delay an entry.

use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::line::{DowntimeLine, FailedLine, MovedLine};
use crate::options::ControlPath;
use crate::service::start;

const HISTORY: &str = "history";

/// Maximum number of entries. Older ones are removed.
pub(crate) const MAX_ENTRIES: usize = 100;

/// Maximum length of an entry: the numbers, and five texts of [`MAX_TEXT`] bytes. JSON takes up to
/// six bytes for a byte of a text.
const ENTRY_LIMIT_BYTES: u64 = 16 << 10;

/// Maximum bytes of each text in an entry: a name, or the text of an error.
const MAX_TEXT: usize = 400;

/// How long the writing of an entry may delay the end of its migration.
const WRITE_LIMIT: Duration = Duration::from_millis(500);

/// A migration that has ended.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Finished {
    /// The end, in milliseconds since 1970.
    pub(crate) ended_ms: u64,
    /// `source` or `destination`.
    pub(crate) role: String,
    pub(crate) vm: String,
    pub(crate) peer: String,
    /// `moved`, `failed`, `cancelled` or `in-doubt`.
    pub(crate) result: String,
    /// The fault code; empty if the VM moved.
    #[serde(default)]
    pub(crate) fault: String,
    #[serde(default)]
    pub(crate) at_fault: String,
    #[serde(default)]
    pub(crate) text: String,
    /// The time from the first connection to the end.
    pub(crate) total_s: f64,
    /// Bytes that the source sent.
    #[serde(default)]
    pub(crate) wire_bytes: Option<u64>,
    /// The downtime and its parts, as the source measured them.
    #[serde(default)]
    pub(crate) downtime: Option<DowntimeLine>,
    /// The downtime as the guest saw it.
    #[serde(default)]
    pub(crate) guest_downtime_ms: Option<f64>,
    #[serde(default)]
    pub(crate) iterations: u32,
}

impl Finished {
    /// A migration that ends now. Its result is `moved`, unless [`Finished::failed`] replaces it.
    pub(crate) fn now(role: &str, vm: &str, peer: &str, total_s: f64) -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            ended_ms: u64::try_from(since.unwrap_or_default().as_millis()).unwrap_or(u64::MAX),
            role: role.to_owned(),
            vm: shortened(vm),
            peer: shortened(peer),
            result: "moved".to_owned(),
            total_s,
            ..Self::default()
        }
    }

    /// Adds what the source measured.
    pub(crate) fn moved(self, moved: &MovedLine) -> Self {
        Self {
            wire_bytes: Some(moved.wire_bytes),
            guest_downtime_ms: moved.downtime.guest_ms,
            downtime: Some(moved.downtime.clone()),
            iterations: moved.iterations.len() as u32,
            ..self
        }
    }

    /// Adds why the migration failed.
    pub(crate) fn failed(self, failed: &FailedLine) -> Self {
        let result = match (&*failed.fault, &*failed.vm) {
            (_, "in-doubt" | "ran-then-died") => "in-doubt",
            ("cancelled", _) => "cancelled",
            _ => "failed",
        };
        Self {
            result: result.to_owned(),
            fault: shortened(&failed.fault),
            at_fault: shortened(&failed.at_fault),
            text: shortened(&failed.text),
            ..self
        }
    }
}

/// At most the first [`MAX_TEXT`] bytes of a text, cut between two characters.
fn shortened(text: &str) -> String {
    let end = text.floor_char_boundary(MAX_TEXT);
    text[..end].to_owned()
}

/// The directory of the history; `None` if the control path is a socket instead of a directory.
pub(crate) fn directory(control: &ControlPath) -> Option<PathBuf> {
    Some(control.directory()?.join(HISTORY))
}

/// Adds an entry. Nothing depends on the history, so errors are ignored, and the caller waits for
/// the file system no longer than [`WRITE_LIMIT`].
pub(crate) fn add(directory: Option<&Path>, finished: Finished) {
    let Some(directory) = directory.map(Path::to_owned) else {
        return;
    };
    let (written, wait) = channel();
    let spawned = start("history", move || {
        let _ = write(&directory, &finished);
        let _ = written.send(());
    });
    if spawned.is_ok() {
        let _ = wait.recv_timeout(WRITE_LIMIT);
    }
}

fn write(directory: &Path, finished: &Finished) -> io::Result<()> {
    let mut entries = entries(directory)?;
    // The names sort by time. Entries of the same millisecond differ in the process ID.
    let name = format!("{:015}-{}.json", finished.ended_ms, std::process::id());
    let mut options = OpenOptions::new();
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(0o640)
        .open(directory.join(name))?;
    file.write_all(&serde_json::to_vec(finished)?)?;
    entries.sort();
    let old = (entries.len() + 1).saturating_sub(MAX_ENTRIES);
    for entry in entries.drain(..old) {
        // Another process may remove the same entry.
        let _ = fs::remove_file(entry);
    }
    Ok(())
}

fn entries(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let found = fs::read_dir(directory)?;
    let paths = found.map(|entry| entry.map(|entry| entry.path()));
    paths
        .filter(
            |path| !matches!(path, Ok(path) if path.extension().is_none_or(|one| one != "json")),
        )
        .collect()
}

/// The newest [`MAX_ENTRIES`] entries, each with its file's name; the newest is the last.
pub(crate) fn read(directory: &Path) -> Vec<(String, Finished)> {
    // Without a directory, there are no entries.
    let mut paths = entries(directory).unwrap_or_default();
    paths.sort();
    let newest = paths.len().saturating_sub(MAX_ENTRIES);
    let paths = paths.drain(newest..);
    let entry = |path: PathBuf| {
        let name = path.file_name()?.to_str()?.to_owned();
        let mut text = String::new();
        let file = fs::File::open(&path).ok()?;
        file.take(ENTRY_LIMIT_BYTES)
            .read_to_string(&mut text)
            .ok()?;
        Some((name, serde_json::from_str(&text).ok()?))
    };
    paths.filter_map(entry).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use dunlin_test_base::Scratch;

    use super::*;

    fn finished(ended_ms: u64) -> Finished {
        Finished {
            ended_ms,
            ..Finished::now("source", "web", "b.test", 1.0)
        }
    }

    #[test]
    fn the_newest_hundred_entries_are_kept_and_damaged_ones_are_ignored() {
        let scratch = Scratch::new();
        for ended_ms in 0..MAX_ENTRIES as u64 + 5 {
            write(scratch.path(), &finished(ended_ms)).unwrap();
        }
        let found = read(scratch.path());
        assert_eq!(found.len(), MAX_ENTRIES);
        assert_eq!(found[0].1.ended_ms, 5);
        assert_eq!(found[99].1.ended_ms, 104);
        fs::write(
            scratch.join("000000000000200-1.json"),
            b"{\"ended_ms\":1,\"ro",
        )
        .unwrap();
        fs::write(scratch.join("000000000000201-1.json"), vec![b' '; 20_000]).unwrap();
        let found = read(scratch.path());
        assert_eq!(found.last().unwrap().1.ended_ms, 104);
        write(scratch.path(), &finished(300)).unwrap();
        assert_eq!(entries(scratch.path()).unwrap().len(), MAX_ENTRIES);
    }

    #[test]
    fn an_entry_with_the_longest_texts_can_be_read() {
        let scratch = Scratch::new();
        let long = "\u{1b}".repeat(3000);
        let failed = FailedLine {
            fault: long.clone(),
            at_fault: long.clone(),
            vm: long.clone(),
            text: long.clone(),
            code: 1,
        };
        let entry = Finished::now("source", &long, &long, f64::MAX).failed(&failed);
        write(scratch.path(), &entry).unwrap();
        assert_eq!(read(scratch.path()).len(), 1);
    }
}
