//! Replaces files that other processes may be reading.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;

use anyhow::{Context, Result};

/// Replaces a file in one step, so that a reader sees the old or the new text. Creates its
/// directory if necessary. If `path` is a symbolic link, replaces the file to which the link leads.
/// An existing file keeps its owner and mode; a new one gets `mode`.
pub(crate) fn replace(path: &Path, text: &str, mode: u32) -> Result<()> {
    let what = || format!("cannot write {}", path.display());
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).with_context(what)?;
    }
    let path = &fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let fresh = path.with_extension("new");
    fs::write(&fresh, text)
        .and_then(|()| match fs::metadata(path) {
            Ok(before) => {
                let owner = |file: &fs::Metadata| (file.uid(), file.gid());
                // Call chown only if it is necessary, because a service's seccomp filter may refuse
                // it.
                if owner(&fs::metadata(&fresh)?) != owner(&before) {
                    chown(&fresh, Some(before.uid()), Some(before.gid()))?;
                }
                fs::set_permissions(&fresh, before.permissions())
            }
            Err(_) => fs::set_permissions(&fresh, Permissions::from_mode(mode)),
        })
        .and_then(|()| fs::rename(&fresh, path))
        .with_context(what)
}
