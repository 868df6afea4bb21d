//! The cache for everything fetched or built for the rig: `rig/` in cargo's target directory.
//! `cargo clean` removes it, and a clean clone starts empty.

use std::env;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// Returns the cache's directory, which does not necessarily exist.
///
/// The cache is in the target directory that contains the running program. Cargo marks that
/// directory with a CACHEDIR.TAG. If the program was copied elsewhere, the target directory is
/// CARGO_TARGET_DIR, or `target` in the workspace.
#[must_use]
pub fn directory() -> PathBuf {
    let marked = env::current_exe().ok().and_then(|program| {
        program
            .ancestors()
            .find(|folder| folder.join("CACHEDIR.TAG").is_file())
            .map(Path::to_path_buf)
    });
    let target = marked
        .or_else(|| env::var_os("CARGO_TARGET_DIR").map(PathBuf::from))
        .unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target"));
    target.join("rig")
}

/// An exclusive lock on a part of the cache, for all processes. The lock is released when this
/// value is dropped or its process is killed.
#[derive(Debug)]
pub struct Lock(#[expect(dead_code, reason = "held, not read")] File);

/// Waits for the lock `name` on the cache.
///
/// # Errors
/// The cache's directory cannot be written, or the lock cannot be acquired.
pub fn lock(name: &str) -> io::Result<Lock> {
    let directory = directory();
    fs::create_dir_all(&directory)?;
    let file = File::create(directory.join(format!("{name}.lock")))?;
    file.lock()?;
    Ok(Lock(file))
}
