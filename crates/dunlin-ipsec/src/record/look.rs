//! Reads the records of living and of dead processes without taking them over.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::{IpsecError, Record, RecordDirectory, Scope, header, io_error, is_locked, unless_gone};

/// How many times to open a record that its process rewrites at the same time.
const TRIES: usize = 4;

/// A record, and whether a process has locked it.
pub(crate) type Seen = Result<(Record, bool), IpsecError>;

impl RecordDirectory {
    /// Returns the directory if it exists; neither creates nor checks it.
    pub(crate) fn existing(directory: &Path) -> Option<Self> {
        let directory = directory.to_owned();
        directory.is_dir().then_some(Self { directory })
    }

    /// Reads all records in this namespace, and checks for each whether a process has locked it.
    /// The caller must hold the directory's [lock](RecordDirectory::lock), because this call locks
    /// each record for a moment. Without the directory's lock, another process could see that
    /// short lock and consider a dead owner alive, or could fail to create a record.
    pub(crate) fn all(&self) -> Result<Vec<Seen>, IpsecError> {
        let header = header()?;
        let paths = self.paths()?.into_iter();
        Ok(paths
            .filter_map(|path| look(&path, &header).transpose())
            .collect())
    }
}

/// Reads a record, and checks whether a process has locked it. Returns `None` if the record is
/// gone, belongs to another namespace or an earlier boot, has an incomplete header, or was replaced
/// at each of [`TRIES`] attempts.
fn look(path: &Path, header: &str) -> Result<Option<(Record, bool)>, IpsecError> {
    for _ in 0..TRIES {
        let Some(file) = unless_gone(File::open(path), path)? else {
            return Ok(None);
        };
        let is_kept = !is_locked(file.try_lock_shared(), path)?;
        if !is_kept {
            file.unlock().map_err(io_error("locked", path))?;
        }
        // The file may have been replaced in the meantime.
        if file.metadata().map_err(io_error("read", path))?.nlink() > 0 {
            let mut record = Record::new(file, path.to_owned());
            let (scope, _) = record.read(header)?;
            return Ok(matches!(scope, Scope::Here).then_some((record, is_kept)));
        }
    }
    Ok(None)
}
