//! Files that `enable` and `disable` replace.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, chown};
use std::path::Path;

use anyhow::{Context, Result};

/// The text of a file; `None` if it does not exist.
pub(super) fn read(file: &Path) -> Result<Option<String>> {
    match fs::read_to_string(file) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        other => other
            .map(Some)
            .with_context(|| format!("cannot read {}", file.display())),
    }
}

/// Replaces a file in one step. It keeps its owner and mode.
pub(super) fn write(file: &Path, text: &str) -> Result<()> {
    let what = || format!("cannot write {}", file.display());
    if let Some(directory) = file.parent() {
        fs::create_dir_all(directory).with_context(what)?;
    }
    // A link stays a link.
    let file = &fs::canonicalize(file).unwrap_or_else(|_| file.to_owned());
    let fresh = file.with_extension("new");
    fs::write(&fresh, text)
        .and_then(|()| match fs::metadata(file) {
            Ok(before) => {
                chown(&fresh, Some(before.uid()), Some(before.gid()))?;
                fs::set_permissions(&fresh, before.permissions())
            }
            Err(_) => Ok(()),
        })
        .and_then(|()| fs::rename(&fresh, file))
        .with_context(what)
}

/// Restores a file; `None` if it did not exist.
pub(super) fn put(file: &Path, text: Option<&str>) -> Result<()> {
    if read(file)?.as_deref() == text {
        return Ok(());
    }
    match text {
        Some(text) => write(file, text),
        None => fs::remove_file(file).with_context(|| format!("cannot remove {}", file.display())),
    }
}
