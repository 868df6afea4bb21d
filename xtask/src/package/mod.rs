//! Builds a Debian package and an archive with the same files, from the commit that is checked out.
//!
//! ```text
//!  commit ─▶ source, vendored crates ─▶ build: the command, with Debian's compiler and C library
//!                                                  │
//!  units, scripts, pages, licences ──────────▶ content: a tree ─▶ archive: .deb, .tar.xz
//! ```
//!
//! The C compiler, the C library and the programs that write the archives come from Debian's
//! packages. They run in a file system of their own in which every path is fixed. A build therefore
//! depends on the commit, the Rust compiler and Debian's release, but not on the host or the
//! directory.

pub mod archive;
pub mod build;
pub mod commit;
pub mod content;
pub mod licences;
pub mod pages;
mod programs;
pub mod symbols;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::Args;
use dunlin_rig::debian::packages;

use self::archive::{Files, Tools};
use self::commit::{git, version};
use self::content::Parts;

/// The oldest Debian release on which the command must run. The build uses its C library.
pub const RELEASE: &str = "bookworm";

/// Options of `cargo xtask package`.
#[derive(Debug, Args)]
pub struct PackageOptions {
    /// The directory for the packages, and for the files of the build.
    #[arg(long, value_name = "DIR", default_value = "target/package")]
    out: PathBuf,
}

/// Builds the packages of the commit that is checked out.
///
/// # Errors
/// The working tree has changes, Debian's packages cannot be fetched, or the build fails.
pub fn command(options: &PackageOptions) -> Result<ExitCode> {
    let changed = git(&["status", "--porcelain", "--untracked-files=no"])?;
    ensure!(
        changed.is_empty(),
        "the packages are built from a commit, and these files differ from it: commit them\n{changed}"
    );
    let pages = options.out.join("pages");
    pages::write(&pages)?;
    let made = make(&options.out, &pages)?;
    for file in [&made.package, &made.archive] {
        println!("{}", file.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// Builds the packages of the checked-out commit, with these pages, and writes them to `out`.
///
/// # Errors
/// See [`command`].
pub fn make(out: &Path, pages: &Path) -> Result<Files> {
    let version = version()?;
    fs::create_dir_all(out).with_context(|| format!("cannot create {}", out.display()))?;
    let out = &fs::canonicalize(out)?;
    let root = packages(RELEASE, &build::PACKAGES)?;
    let source = out.join("source");
    build::export(&source)?;
    let binary = build::build(&root, &source, &out.join("build"), &version)?;
    let parts = Parts {
        binary: &binary,
        source: &source,
        pages,
        licences: &licences::of_the_command()?,
        version: &version,
    };
    let tree = out.join("tree");
    parts.lay_out(&tree)?;
    archive::write(&Tools::Of(&root), &tree, out, &version)
}
