//! Temporary directories. A killed process leaves its directories behind. The next process that
//! creates a temporary directory removes them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::maker::Maker;

/// The name of a file in a temporary directory. Its content identifies a child process. A later
/// process that removes the directory also kills the child.
const PROCESS: &str = "process";
/// A directory that is a tmpfs on most hosts.
const MEMORY: &str = "/dev/shm";

/// An empty directory, removed on drop.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    /// Creates a directory in the system's temporary directory.
    ///
    /// # Panics
    /// The temporary directory is not writable. [`Self::try_new`] returns an error instead.
    #[allow(clippy::new_without_default)]
    #[must_use]
    pub fn new() -> Self {
        match Self::try_new() {
            Ok(scratch) => scratch,
            Err(error) => panic!(
                "cannot create a directory in {}: {error}",
                std::env::temp_dir().display()
            ),
        }
    }

    /// Creates a directory in the system's temporary directory.
    ///
    /// # Errors
    /// The temporary directory is not writable.
    pub fn try_new() -> io::Result<Self> {
        Self::within(&std::env::temp_dir())
    }

    /// Creates a directory in `/dev/shm`, or in the temporary directory if that fails. Use it for
    /// tests with processes that sync often. Memory is enough, because a killed process loses no
    /// written data; a disk would only make the tests slower.
    ///
    /// # Panics
    /// Neither directory is writable.
    #[must_use]
    pub fn in_memory() -> Self {
        Self::within(Path::new(MEMORY)).unwrap_or_else(|_| Self::new())
    }

    fn within(parent: &Path) -> io::Result<Self> {
        static SWEPT: Once = Once::new();
        static NEXT: AtomicU32 = AtomicU32::new(0);
        SWEPT.call_once(|| {
            sweep(&std::env::temp_dir());
            sweep(Path::new(MEMORY));
        });
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("{}-{number}", Maker::this_process().prefix()));
        fs::create_dir(&path)?;
        Ok(Self(path))
    }

    /// The directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// A path in the directory.
    #[must_use]
    pub fn join(&self, name: impl AsRef<Path>) -> PathBuf {
        self.0.join(name)
    }

    /// Records the child process `id`. If this process is killed, the next process that uses this
    /// module kills the child when it removes the directory.
    ///
    /// # Errors
    /// The directory is not writable.
    pub fn record(&self, id: u32) -> io::Result<()> {
        // `Maker::of` parses only complete names, which end with a number.
        let name = Maker::process(id).map(|child| child.prefix() + "-0");
        fs::write(self.join(PROCESS), name.unwrap_or_default())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Removes the directories of dead processes from `parent`, and kills the processes recorded in
/// them.
fn sweep(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let stale = |name: &str| Maker::of(name).is_some_and(|maker| !maker.lives());
        if !name.to_str().is_some_and(stale) {
            continue;
        }
        let recorded = fs::read_to_string(entry.path().join(PROCESS)).unwrap_or_default();
        if let Some(process) = Maker::of(&recorded) {
            process.kill();
        }
        let _ = fs::remove_dir_all(entry.path());
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn directories_differ_are_empty_and_are_removed() {
        let (one, other) = (Scratch::new(), Scratch::in_memory());
        assert_ne!(one.path().file_name(), other.path().file_name());
        let paths = [&one, &other].map(|scratch| {
            assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);
            fs::write(scratch.join("file"), "x").unwrap();
            scratch.path().to_owned()
        });
        drop((one, other));
        for path in paths {
            assert!(!path.exists(), "{}", path.display());
        }
    }

    #[test]
    fn a_dead_processs_directories_and_children_are_removed_and_a_living_ones_stay() {
        let parent = Scratch::new();
        let sleeper = || {
            let mut command = Command::new("sleep");
            command.arg("600").stdout(Stdio::null()).spawn().unwrap()
        };
        // The directory `left` is that of a process that has ended, and `child` is recorded in it.
        let (mut child, mut dead, mut living) = (sleeper(), sleeper(), sleeper());
        let name = |id| Maker::process(id).unwrap().prefix() + "-0";
        let left = Scratch(parent.join(name(dead.id())));
        let held = Scratch(parent.join(name(living.id())));
        for scratch in [&left, &held] {
            fs::create_dir(scratch.path()).unwrap();
        }
        left.record(child.id()).unwrap();
        held.record(living.id()).unwrap();
        dead.kill().unwrap();
        dead.wait().unwrap();
        sweep(parent.path());
        assert!(!left.path().exists());
        assert!(held.path().exists());
        // wait() returns because the sweep has killed the child.
        assert!(!child.wait().unwrap().success());
        assert!(living.try_wait().unwrap().is_none());
        living.kill().unwrap();
        living.wait().unwrap();
    }
}
