//! Records as somebody finds them who does not take them over: of processes that live, and of
//! those that have died.

use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use dunlin_proto::ipsec::object::NotAnObject;

use super::{EXTENSION, FORMAT, IpsecError, MOST_BYTES, Record, Shelf, header, io_error};

/// How often a record may be written anew just while it is opened.
const TRIES: usize = 4;

/// A record, and whether a process keeps it.
pub(crate) type Seen = Result<(Record, bool), IpsecError>;

impl Shelf {
    /// The directory, if it is there; it is neither made nor looked at.
    pub(crate) fn standing(directory: &Path) -> Option<Self> {
        let directory = directory.to_owned();
        directory.is_dir().then_some(Self { directory })
    }

    /// All records in this namespace, and whether a process keeps each. Whoever calls has the
    /// shelf's [lock](Shelf::lock): a record that is looked at is locked for a moment, so that
    /// others would take its process for alive, or not be able to make it.
    pub(crate) fn all(&self) -> Result<Vec<Seen>, IpsecError> {
        let header = header()?;
        let mut all = Vec::new();
        let entries = fs::read_dir(&self.directory).map_err(io_error("read", &self.directory))?;
        for entry in entries {
            let path = entry.map_err(io_error("read", &self.directory))?.path();
            let kind = path.extension();
            if kind.is_some_and(|kind| kind == EXTENSION) {
                all.extend(look(&path, &header).transpose());
            }
        }
        Ok(all)
    }
}

/// A record and whether a process keeps it; none where it has gone or is of another namespace.
fn look(path: &Path, header: &str) -> Result<Option<(Record, bool)>, IpsecError> {
    for _ in 0..TRIES {
        let file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(io_error("opened", path)(error)),
        };
        let is_kept = match file.try_lock_shared() {
            Ok(()) => {
                let freed = file.unlock();
                freed.map_err(io_error("locked", path))?;
                false
            }
            Err(TryLockError::WouldBlock) => true,
            Err(TryLockError::Error(error)) => return Err(io_error("locked", path)(error)),
        };
        // Another may have been put in its place just now.
        let data = file.metadata().map_err(io_error("read", path))?;
        if data.nlink() > 0 {
            let record = read(file, data.len(), path.to_owned(), header)?;
            return Ok(record.map(|record| (record, is_kept)));
        }
    }
    Ok(None)
}

fn read(file: File, bytes: u64, path: PathBuf, header: &str) -> Result<Option<Record>, IpsecError> {
    if bytes > MOST_BYTES {
        return Err(IpsecError::TooLarge { path });
    }
    let mut text = Vec::new();
    let read = (&file).take(bytes).read_to_end(&mut text);
    read.map_err(io_error("read", &path))?;
    // What follows the last line's end is being written, or was never synced.
    let last = text.iter().rposition(|byte| *byte == b'\n');
    let text = String::from_utf8_lossy(&text[..last.unwrap_or(0)]);
    let mut lines = (1..).zip(text.lines());
    let unreadable = |line, path: &Path| IpsecError::Unreadable {
        path: path.to_owned(),
        line,
        source: NotAnObject,
    };
    match lines.next() {
        Some((_, found)) if found == header => {}
        Some((line, found)) if !found.starts_with(FORMAT) => return Err(unreadable(line, &path)),
        _ => return Ok(None),
    }
    let mut record = Record::new(file, path);
    for (line, text) in lines.filter(|(_, text)| !text.is_empty()) {
        let is_known = record.take_in(text);
        is_known.map_err(|_| unreadable(line, &record.path))?;
    }
    Ok(Some(record))
}
