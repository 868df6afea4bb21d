//! A bare Debian, as on a new machine: its packages are configured, and dpkg can install others.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use super::apt::{mirror, output};
use super::{DebianError, at};
use crate::cache;

/// Returns the root of a Debian of `release` with the packages `names`, and makes it with
/// debootstrap if it is not in the cache. Do not write into it: mount another file system over it.
///
/// # Errors
/// There is no network, debootstrap is missing, or this process is not root; see [`DebianError`].
pub fn bare(release: &str, names: &[&str]) -> Result<PathBuf, DebianError> {
    let folder = cache::directory().join("debian/bare");
    let root = folder.join(format!("{release}-{}", names.join(",")));
    if root.is_dir() {
        return Ok(root);
    }
    let _turn = cache::lock("bare").map_err(at(cache::directory()))?;
    if root.is_dir() {
        return Ok(root);
    }
    let unfinished = folder.join("unfinished");
    if unfinished.exists() {
        fs::remove_dir_all(&unfinished).map_err(at(&unfinished))?;
    }
    fs::create_dir_all(&folder).map_err(at(&folder))?;
    let mut debootstrap = Command::new("debootstrap");
    debootstrap
        .arg("--variant=minbase")
        .arg(format!("--include={}", names.join(",")))
        .arg(release)
        .arg(&unfinished)
        .arg(mirror()?.uri)
        // Not every user has the directories of administrators in the path.
        .env(
            "PATH",
            "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        );
    output(&mut debootstrap)?;
    let archives = unfinished.join("var/cache/apt/archives");
    fs::remove_dir_all(&archives).map_err(at(&archives))?;
    fs::create_dir_all(&archives).map_err(at(&archives))?;
    fs::rename(&unfinished, &root).map_err(at(&root))?;
    Ok(root)
}
