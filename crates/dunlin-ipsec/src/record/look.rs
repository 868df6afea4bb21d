//! Records as somebody finds them who does not take them over: of processes that live, and of
//! those that have died.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::{IpsecError, Record, RecordDirectory, Scope, header, io_error, is_locked, unless_gone};

/// How often a record may be written anew just while it is opened.
const TRIES: usize = 4;

/// A record, and whether a process keeps it.
pub(crate) type Seen = Result<(Record, bool), IpsecError>;

impl RecordDirectory {
    /// The directory, if it is there; it is neither made nor looked at.
    pub(crate) fn standing(directory: &Path) -> Option<Self> {
        let directory = directory.to_owned();
        directory.is_dir().then_some(Self { directory })
    }

    /// All records in this namespace, and whether a process keeps each. Whoever calls has the
    /// directory's [lock](RecordDirectory::lock): a record that is looked at is locked for a moment, so that
    /// others would take its process for alive, or not be able to make it.
    pub(crate) fn all(&self) -> Result<Vec<Seen>, IpsecError> {
        let header = header()?;
        let paths = self.paths()?.into_iter();
        Ok(paths
            .filter_map(|path| look(&path, &header).transpose())
            .collect())
    }
}

/// A record and whether a process keeps it; none where it has gone or is of another namespace.
fn look(path: &Path, header: &str) -> Result<Option<(Record, bool)>, IpsecError> {
    for _ in 0..TRIES {
        let Some(file) = unless_gone(File::open(path), path)? else {
            return Ok(None);
        };
        let is_kept = !is_locked(file.try_lock_shared(), path)?;
        if !is_kept {
            file.unlock().map_err(io_error("locked", path))?;
        }
        // Another may have been put in its place just now.
        if file.metadata().map_err(io_error("read", path))?.nlink() > 0 {
            let mut record = Record::new(file, path.to_owned());
            let (scope, _) = record.read(header)?;
            return Ok(matches!(scope, Scope::Here).then_some((record, is_kept)));
        }
    }
    Ok(None)
}
