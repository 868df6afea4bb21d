//! Makes the archives from a tree of files.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use dunlin_test_base::Scratch;

use super::build::inside;
use super::commit::Version;
use super::programs::run;

const SCRIPT: &str = include_str!("archive.sh");

/// Where the programs that write the archives come from.
#[derive(Clone, Copy, Debug)]
pub enum Tools<'a> {
    /// From Debian's packages in this directory, so that the archives are the same on every host.
    Of(&'a Path),
    /// From this host, for tests. The archives are not compressed.
    Machine,
}

/// The files that were written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    /// The Debian package.
    pub package: PathBuf,
    /// The archive of the same files.
    pub archive: PathBuf,
}

/// Writes the archives of `tree` into the directory `out`. Compresses the manual and some documents
/// in the tree, and adds the installed size and the checksums.
///
/// # Errors
/// A file cannot be written, a program fails, or this process lacks the permission to create a
/// mount namespace.
pub fn write(tools: &Tools, tree: &Path, out: &Path, version: &Version) -> Result<Files> {
    let scratch = Scratch::try_new()?;
    let script = out.join("archive.sh");
    fs::write(&script, SCRIPT).with_context(|| format!("cannot write {}", script.display()))?;
    let mut command = match tools {
        Tools::Of(root) => {
            let mut command = inside(root, scratch.path(), &[(out, "/out"), (tree, "/tree")])?;
            command.args(["/usr/bin/sh", "/out/archive.sh", "/tree", "/out", "xz"]);
            command
        }
        Tools::Machine => {
            let mut command = Command::new("sh");
            command.arg(&script).args([tree, out]).arg("none");
            command
        }
    };
    let name = format!("dunlin_{}_amd64", version.text);
    command.args([&name, &version.epoch.to_string()]);
    run(&mut command)?;
    fs::remove_file(script)?;
    let kind = match tools {
        Tools::Of(_) => "tar.xz",
        Tools::Machine => "tar",
    };
    Ok(Files {
        package: out.join(format!("{name}.deb")),
        archive: out.join(format!("{name}.{kind}")),
    })
}
