//! Packages unpacked together with their dependencies.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::apt::{Apt, output};
use super::{DebianError, at};
use crate::cache;

/// Returns the folder with the packages `names` of `suite` ("trixie", "bookworm-backports") and all
/// their dependencies, down to the C library. `/bin`, `/lib` and similar folders are links into
/// `/usr`. The packages are not configured: files that maintainer scripts would generate are
/// missing.
///
/// Fetches packages that are not in the cache. Never updates packages in the cache.
///
/// # Errors
/// There is no network, or no such package; see [`DebianError`].
pub fn packages(suite: &str, names: &[&str]) -> Result<PathBuf, DebianError> {
    let mut sorted = names.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    let folder = cache::directory().join("debian/roots");
    let root = folder.join(format!("{suite}-{}", sorted.join(",")));
    if root.is_dir() {
        return Ok(root);
    }
    let _turn = cache::lock("debian").map_err(at(cache::directory()))?;
    if root.is_dir() {
        return Ok(root);
    }
    let apt = Apt::new(suite)?;
    let had_lists = apt.has_lists();
    if !had_lists {
        apt.refresh()?;
    }
    build(&root, |archives| {
        match apt.download_all(&sorted, archives) {
            // The lists may name a version that the mirror no longer has.
            Err(DebianError::Fetch { .. }) if had_lists => {
                apt.refresh()?;
                apt.download_all(&sorted, archives)
            }
            other => other,
        }
    })?;
    Ok(root)
}

/// Unpacks archives to `root`. `download` is called with a folder and puts the archives there. If
/// `root` exists, it is complete, because it is built in a temporary folder that is then renamed.
/// The caller must hold the lock on the cache.
pub(super) fn build(
    root: &Path,
    download: impl FnOnce(&Path) -> Result<(), DebianError>,
) -> Result<(), DebianError> {
    let aside = cache::directory().join("debian/unfinished");
    remove(&aside)?;
    let archives = aside.join("archives");
    download(&archives)?;
    let tree = aside.join("root");
    // Every Debian release since bookworm has these links into `/usr`. Older packages contain paths
    // with and without `/usr`.
    for part in ["bin", "sbin", "lib", "lib64"] {
        let folder = tree.join("usr").join(part);
        fs::create_dir_all(&folder).map_err(at(&folder))?;
        let link = tree.join(part);
        std::os::unix::fs::symlink(format!("usr/{part}"), &link).map_err(at(&link))?;
    }
    for entry in fs::read_dir(&archives).map_err(at(&archives))? {
        let path = entry.map_err(at(&archives))?.path();
        if path.extension().is_some_and(|kind| kind == "deb") {
            unpack(&path, &tree)?;
        }
    }
    let parent = root.parent().expect("the root is inside the cache");
    fs::create_dir_all(parent).map_err(at(parent))?;
    remove(root)?;
    fs::rename(&tree, root).map_err(at(root))?;
    remove(&aside)
}

fn remove(folder: &Path) -> Result<(), DebianError> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(DebianError::Cache(folder.to_path_buf(), error))
        }
        _ => Ok(()),
    }
}

/// Unpacks an archive. `dpkg-deb --extract` is not used because, before trixie, it replaces a link
/// to a folder with a folder.
fn unpack(archive: &Path, tree: &Path) -> Result<(), DebianError> {
    let mut source = Command::new("dpkg-deb")
        .arg("--fsys-tarfile")
        .arg(archive)
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| DebianError::NotDebian(format!("dpkg-deb: {error}")))?;
    let pipe = source.stdout.take().expect("the command has a stdout pipe");
    let unpacked = output(
        Command::new("tar")
            .args(["--extract", "--keep-directory-symlink", "--no-same-owner"])
            .arg("--directory")
            .arg(tree)
            .stdin(pipe),
    );
    let read = source.wait().map_err(at(archive))?;
    unpacked?;
    if !read.success() {
        return Err(DebianError::Tool {
            command: format!("dpkg-deb --fsys-tarfile {}", archive.display()),
            output: read.to_string(),
        });
    }
    Ok(())
}

/// Returns a command that runs the program `name` of `root` with the loader and the libraries of
/// `root`. Absolute paths that the program opens are still paths of the machine.
///
/// # Errors
/// The root has no such program, or no loader (a static program needs none; run it directly).
pub fn program(root: &Path, name: &str) -> Result<Command, DebianError> {
    let find = |candidates: &[String]| {
        candidates
            .iter()
            .map(|candidate| root.join(candidate))
            .find(|path| path.is_file())
            .ok_or_else(|| DebianError::Missing(candidates.join(" or "), root.to_path_buf()))
    };
    let loader = find(&[
        "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2".to_owned(),
        "usr/lib64/ld-linux-x86-64.so.2".to_owned(),
    ])?;
    let program = find(&[format!("usr/bin/{name}"), format!("usr/sbin/{name}")])?;
    let mut command = Command::new(loader);
    command
        .args(["--argv0", name, "--library-path"])
        .arg(root.join("usr/lib/x86_64-linux-gnu"))
        .arg(program);
    Ok(command)
}
