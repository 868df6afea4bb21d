//! The tests: one program each, from one file each of tests/kernel/src/bin.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

/// The package of the tests.
const PACKAGE: &str = "dunlin-kernel-tests";

/// A test that can be run.
#[derive(Clone, Debug)]
pub struct Program {
    /// Its file's name.
    pub name: String,
    /// The program, which needs no library of the guest.
    pub path: PathBuf,
    /// What it needs.
    pub needs: Needs,
}

/// What a test needs, as it says itself when asked with `--describe`; see tests/kernel/src/lib.rs.
#[derive(Clone, Debug, Deserialize)]
pub struct Needs {
    /// Virtual CPUs, 1 to 4.
    pub cpus: u32,
    /// Debian packages of trixie.
    pub packages: Vec<String>,
    /// Whether the `dunlin` command is to be in the guest.
    pub dunlin: bool,
    /// Test programs of the library.
    pub library_tests: Vec<String>,
    /// How long it may take.
    pub limit_seconds: u64,
    /// Under which kernels a whole suite runs it.
    pub under: Under,
}

/// The kernels of a whole suite, as a test says them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Under {
    /// The newest and the oldest.
    Both,
    /// The newest.
    Newest,
    /// The oldest.
    Oldest,
    /// The former release's, in the soak too.
    Former,
}

impl Needs {
    /// How long it may take.
    #[must_use]
    pub fn limit(&self) -> Duration {
        Duration::from_secs(self.limit_seconds)
    }
}

/// A test's name, and what the first line of its file says of it.
///
/// # Errors
/// The folder of the tests cannot be read.
pub fn list() -> Result<Vec<(String, String)>> {
    let folder = workspace().join("tests/kernel/src/bin");
    let mut found = Vec::new();
    for entry in fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.extension().is_none_or(|kind| kind != "rs") {
            continue;
        }
        let text = fs::read_to_string(&path)?;
        let about = text
            .lines()
            .next()
            .and_then(|line| line.strip_prefix("//! "))
            .unwrap_or_default();
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        found.push((name.into_owned(), about.to_owned()));
    }
    found.sort();
    Ok(found)
}

/// Builds the tests with these names.
///
/// # Errors
/// One does not build, or does not describe itself.
pub fn build(names: &[&str]) -> Result<Vec<Program>> {
    let mut programs = Vec::new();
    for name in names {
        let path = build_one(PACKAGE, "--bin", name)?;
        let described = Command::new(&path)
            .arg("--describe")
            .output()
            .with_context(|| format!("cannot run {}", path.display()))?;
        let needs: Needs = serde_json::from_slice(&described.stdout).with_context(|| {
            format!("tests/kernel/src/bin/{name}.rs does not go through dunlin_kernel_tests::run")
        })?;
        if !(1..=4).contains(&needs.cpus) {
            bail!("{name} asks for {} CPUs: there are 1 to 4", needs.cpus);
        }
        programs.push(Program {
            name: (*name).to_owned(),
            path,
            needs,
        });
    }
    Ok(programs)
}

/// Builds the `dunlin` command for the guest.
///
/// # Errors
/// It does not build.
pub fn build_dunlin() -> Result<PathBuf> {
    build_one("dunlin-cli", "--bin", "dunlin")
}

/// Builds a test program of the library for the guest.
///
/// # Errors
/// It does not build.
pub fn build_library_tests(name: &str) -> Result<PathBuf> {
    build_one("dunlin", "--test", name)
}

/// Builds one program with the C library in it, so that it runs beside any other. The flag goes to
/// this program alone, and the libraries are those of an ordinary build.
fn build_one(package: &str, kind: &str, name: &str) -> Result<PathBuf> {
    #[derive(Deserialize)]
    struct Message {
        executable: Option<PathBuf>,
    }
    let done = Command::new(env!("CARGO"))
        .args(["rustc", "--locked", "--quiet", "--package", package])
        .args([kind, name, "--message-format", "json-render-diagnostics"])
        .args(["--", "-C", "target-feature=+crt-static"])
        .args(["-C", "strip=debuginfo"])
        .current_dir(workspace())
        .stderr(std::process::Stdio::inherit())
        .output()
        .context("cannot start cargo")?;
    if !done.status.success() {
        bail!("{name} of {package} does not build");
    }
    String::from_utf8_lossy(&done.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str::<Message>(line).ok()?.executable)
        .next_back()
        .with_context(|| format!("cargo does not say where it has put {name}"))
}

fn workspace() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}
