//! Files that `enable` and `disable` replace.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context, Result};

use crate::file::replace;

/// The text of a file; `None` if it does not exist.
pub(super) fn read(file: &Path) -> Result<Option<String>> {
    match fs::read_to_string(file) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        other => other
            .map(Some)
            .with_context(|| format!("cannot read {}", file.display())),
    }
}

/// Replaces a file in one step, so that a reader sees the old or the new text.
pub(super) fn write(file: &Path, text: &str) -> Result<()> {
    replace(file, text, 0o644)
}

/// Restores a file to its earlier text. If `text` is `None`, the file did not exist, and is
/// deleted.
pub(super) fn put(file: &Path, text: Option<&str>) -> Result<()> {
    if read(file)?.as_deref() == text {
        return Ok(());
    }
    match text {
        Some(text) => write(file, text),
        None => delete(file),
    }
}

/// Deletes a file, if it exists.
pub(super) fn delete(file: &Path) -> Result<()> {
    match fs::remove_file(file) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", file.display()))
        }
        _ => Ok(()),
    }
}
