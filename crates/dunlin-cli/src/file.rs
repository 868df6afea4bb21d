//! Replaces files that other processes may be reading.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result};

/// Replaces a file in one step, so that a reader sees the old or the new text. Creates its
/// directory if necessary. If `path` is a symbolic link, replaces the file to which the link leads.
/// An existing file keeps its owner and mode; a new one gets `mode`. If several processes or threads
/// replace the same file, the last one wins.
pub(crate) fn replace(path: &Path, text: &str, mode: u32) -> Result<()> {
    let what = || format!("cannot write {}", path.display());
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).with_context(what)?;
    }
    let path = &fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    // Each writer has its own file. With a shared one, a writer could rename the file of another.
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let fresh = path.with_extension(format!("new-{}-{number}", process::id()));
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
        .inspect_err(|_| drop(fs::remove_file(&fresh)))
        .with_context(what)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::thread;

    use dunlin_test_base::Scratch;

    use super::*;

    #[test]
    fn several_writers_replace_a_file_without_errors() {
        let scratch = Scratch::new();
        let path = scratch.join("state.json");
        thread::scope(|scope| {
            for text in ["one", "the other"] {
                let path = &path;
                scope.spawn(move || {
                    for _ in 0..500 {
                        replace(path, text, 0o644).unwrap();
                        let found = fs::read_to_string(path).unwrap();
                        assert!(["one", "the other"].contains(&&*found), "{found:?}");
                    }
                });
            }
        });
        let left: Vec<_> = fs::read_dir(path.parent().unwrap()).unwrap().collect();
        assert_eq!(left.len(), 1, "{left:?}");
    }
}
