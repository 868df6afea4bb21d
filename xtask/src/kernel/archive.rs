//! The files of a guest, collected from several sources for an initramfs.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use dunlin_rig::guest::Initramfs;

/// Files by their path in the guest, without the leading slash. A new entry replaces an existing
/// one at the same path, except that a folder does not replace a link. Missing parents are added.
#[derive(Debug, Default)]
pub struct Archive {
    entries: BTreeMap<PathBuf, Entry>,
}

#[derive(Debug)]
enum Entry {
    Folder,
    Link(PathBuf),
    /// A file of the host, with its mode.
    Copy(PathBuf, u32),
    /// Generated contents, with their mode.
    Bytes(Vec<u8>, u32),
}

impl Archive {
    /// Adds a folder.
    pub fn folder(&mut self, path: impl AsRef<Path>) {
        self.add(path.as_ref(), Entry::Folder);
    }

    /// Adds a symbolic link to `target`.
    pub fn link(&mut self, path: impl AsRef<Path>, target: impl Into<PathBuf>) {
        self.add(path.as_ref(), Entry::Link(target.into()));
    }

    /// Adds the program `source` of the host.
    pub fn program(&mut self, path: impl AsRef<Path>, source: impl Into<PathBuf>) {
        self.add(path.as_ref(), Entry::Copy(source.into(), 0o755));
    }

    /// Adds a script or another file with these contents and this mode.
    pub fn bytes(&mut self, path: impl AsRef<Path>, bytes: impl Into<Vec<u8>>, mode: u32) {
        self.add(path.as_ref(), Entry::Bytes(bytes.into(), mode));
    }

    /// Whether the archive has an entry at `path`.
    #[must_use]
    pub fn holds(&self, path: impl AsRef<Path>) -> bool {
        self.entries.contains_key(path.as_ref())
    }

    /// Adds the host's folder `source` as `path`, with everything in it that `wanted` accepts;
    /// `wanted` receives paths relative to `source`. Devices, sockets and other special files are
    /// left out.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn tree(
        &mut self,
        path: impl AsRef<Path>,
        source: &Path,
        wanted: &impl Fn(&Path) -> bool,
    ) -> io::Result<()> {
        let mut folders = vec![PathBuf::new()];
        while let Some(below) = folders.pop() {
            for entry in fs::read_dir(source.join(&below))? {
                let entry = entry?;
                let below = below.join(entry.file_name());
                if !wanted(&below) {
                    continue;
                }
                let to = path.as_ref().join(&below);
                let kind = entry.file_type()?;
                if kind.is_dir() {
                    self.folder(to);
                    folders.push(below);
                } else if kind.is_symlink() {
                    self.link(to, fs::read_link(entry.path())?);
                } else if kind.is_file() {
                    let mode = entry.metadata()?.permissions().mode() & 0o7777;
                    self.add(&to, Entry::Copy(entry.path(), mode));
                }
            }
        }
        Ok(())
    }

    /// Returns the archive in the kernel's initramfs format.
    ///
    /// # Errors
    /// A file cannot be read, or a name is not UTF-8.
    pub fn finish(&self) -> io::Result<Vec<u8>> {
        let mut archive = Initramfs::default();
        for (path, entry) in &self.entries {
            let path = text(path)?;
            match entry {
                Entry::Folder => archive.folder(path),
                Entry::Link(target) => archive.link(path, text(target)?),
                Entry::Copy(source, mode) => archive.file(path, *mode, &fs::read(source)?),
                Entry::Bytes(bytes, mode) => archive.file(path, *mode, bytes),
            }
        }
        Ok(archive.finish())
    }

    fn add(&mut self, path: &Path, entry: Entry) {
        for parent in path.ancestors().skip(1) {
            if parent != Path::new("") {
                self.entries
                    .entry(parent.to_path_buf())
                    .or_insert(Entry::Folder);
            }
        }
        // Keep an existing link, such as `bin` to `usr/bin`, if a package contains a folder of the
        // same name. The folder's contents go to the link's target.
        if let (Entry::Folder, Some(Entry::Link(_))) = (&entry, self.entries.get(path)) {
            return;
        }
        self.entries.insert(path.to_path_buf(), entry);
    }
}

fn text(path: &Path) -> io::Result<&str> {
    path.to_str()
        .ok_or_else(|| io::Error::other(format!("{} is not UTF-8", path.display())))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;
    use std::process::{Command, Stdio};

    use dunlin_rig::{debian, need};
    use dunlin_test_base::Scratch;

    use super::*;

    #[test]
    fn another_cpio_unpacks_what_was_put_in() {
        let folder = Scratch::new();
        let mut archive = Archive::default();
        archive.link("bin", "usr/bin");
        archive.folder("bin");
        archive.bytes("usr/bin/hello", b"#!/bin/sh\n", 0o755);
        for length in 0..9_usize {
            archive.bytes(
                format!("sizes/{}", "x".repeat(length + 1)),
                vec![7; length],
                0o644,
            );
        }
        let bytes = archive.finish().unwrap();

        let fetched = need::fetched(debian::packages("trixie", &["busybox-static"]));
        let Some(busybox) = fetched else {
            return;
        };
        let mut cpio = Command::new(busybox.join("usr/bin/busybox"))
            .args(["cpio", "-id"])
            .current_dir(folder.path())
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        cpio.stdin.take().unwrap().write_all(&bytes).unwrap();
        assert!(cpio.wait().unwrap().success());

        assert_eq!(
            fs::read_link(folder.join("bin")).unwrap(),
            Path::new("usr/bin")
        );
        let hello = fs::metadata(folder.join("usr/bin/hello")).unwrap();
        assert_eq!(hello.permissions().mode() & 0o777, 0o755);
        for length in 0..9 {
            let file = folder.join(format!("sizes/{}", "x".repeat(length + 1)));
            assert_eq!(fs::read(file).unwrap(), vec![7; length]);
        }
    }
}
