//! Builds the command with the compiler and the C library of Debian's packages.

use std::env;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use dunlin_test_base::Scratch;

use super::commit::{Version, workspace};
use super::programs::{output, run};

/// The Debian packages in the file system in which the build runs.
pub const PACKAGES: [&str; 14] = [
    "bash",
    "coreutils",
    "dash",
    "dpkg",
    "findutils",
    "gcc",
    "grep",
    "gzip",
    "libc6-dev",
    "mawk",
    "sed",
    "tar",
    "xz-utils",
    "zlib1g",
];
/// The script that mounts the file system of the build and runs a command in it.
const INSIDE: &str = include_str!("inside.sh");
/// The directory that replaces the paths of the build in the binary.
const SHOWN: &str = "/usr/src/dunlin";

/// Writes into `source` the files of the checked-out commit, and into `source/vendor` the sources
/// of the crates on which the command depends.
///
/// # Errors
/// git, tar or cargo fails, or `source` cannot be written.
pub fn export(source: &Path) -> Result<()> {
    match fs::remove_dir_all(source) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
        _ => fs::create_dir_all(source)?,
    }
    let mut git = Command::new("git");
    let mut archive = git
        .args(["archive", "HEAD"])
        .current_dir(workspace())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot run git")?;
    let files = archive.stdout.take().context("git has no stdout pipe")?;
    // With `--touch` the files get the current time. With the commit's time, cargo would not
    // rebuild them after a build of a later commit.
    let mut tar = Command::new("tar");
    let tar = tar
        .args(["--extract", "--touch", "--directory"])
        .arg(source);
    run(tar.stdin(files))?;
    ensure!(archive.wait()?.success(), "git archive failed");
    let mut vendor = crate::cargo();
    vendor.args(["vendor", "--locked", "--quiet", "--versioned-dirs"]);
    vendor.arg(source.join("vendor")).current_dir(source);
    output(&mut vendor).map(drop)
}

/// Builds the command from `source`, in the directory `target`, and returns its file.
///
/// # Errors
/// The build fails, or this process lacks the permission to create a mount namespace.
pub fn build(root: &Path, source: &Path, target: &Path, version: &Version) -> Result<PathBuf> {
    fs::create_dir_all(target)?;
    let mut rustc = Command::new("rustc");
    let toolchain = output(rustc.args(["--print", "sysroot"]).current_dir(workspace()))?;
    let scratch = Scratch::try_new()?;
    let mounts = [
        (source, "/build"),
        (target, "/target"),
        (Path::new(&toolchain), "/opt/rust"),
    ];
    let mut cargo = inside(root, scratch.path(), &mounts)?;
    cargo.current_dir(source);
    let maps = [
        ("/build", SHOWN.to_owned()),
        ("/target", format!("{SHOWN}/target")),
    ];
    let of_rust = maps
        .iter()
        .map(|(from, to)| format!(" --remap-path-prefix={from}={to}"));
    let of_c = maps
        .iter()
        .map(|(from, to)| format!(" -ffile-prefix-map={from}={to}"));
    let rust_flags: String = of_rust.collect();
    let c_flags: String = of_c.collect();
    let jobs = env::var("CARGO_BUILD_JOBS").map(|jobs| format!("CARGO_BUILD_JOBS={jobs}"));
    cargo.args([
        "/usr/bin/env",
        "--chdir=/build",
        "CC=gcc",
        "CARGO_HOME=/tmp/cargo",
        "CARGO_TARGET_DIR=/target",
        "CARGO_INCREMENTAL=0",
        &format!("CFLAGS={}", c_flags.trim_start()),
        &format!("RUSTFLAGS=-Clinker=gcc -Cstrip=symbols{rust_flags}"),
        &format!("SOURCE_DATE_EPOCH={}", version.epoch),
    ]);
    cargo.args(jobs);
    cargo.args(["cargo", "build", "--release", "--locked", "--offline"]);
    cargo.args(["--package", "dunlin-cli", "--bin", "dunlin"]);
    cargo.args(["--config", "source.crates-io.replace-with='vendored'"]);
    cargo.args(["--config", "source.vendored.directory='/build/vendor'"]);
    run(&mut cargo)?;
    Ok(target.join("release/dunlin"))
}

/// A command that runs in a file system made of Debian's packages in `root`, with the directories
/// `mounts` mounted. The caller adds the program and its arguments. The file system is mounted
/// below `scratch`, in a mount namespace of the command.
///
/// # Errors
/// `scratch` cannot be written.
pub fn inside(root: &Path, scratch: &Path, mounts: &[(&Path, &str)]) -> Result<Command> {
    let script = scratch.join("inside.sh");
    fs::write(&script, INSIDE)?;
    let place = scratch.join("root");
    fs::create_dir_all(&place)?;
    let mut unshare = Command::new("unshare");
    if fs::metadata("/proc/self")?.uid() != 0 {
        unshare.arg("--map-root-user");
    }
    unshare.args(["--mount", "--pid", "--fork", "--kill-child", "sh"]);
    unshare.arg(script).arg(root).arg(place);
    for (from, to) in mounts {
        unshare.arg(from).arg(to);
    }
    unshare.arg("--");
    Ok(unshare)
}
