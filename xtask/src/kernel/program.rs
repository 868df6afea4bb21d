//! The tests: each file of tests/kernel/src/bin is one program.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use dunlin_rig::cache;
use serde::Deserialize;

/// The package of the tests.
const PACKAGE: &str = "dunlin-kernel-tests";

/// A test that has been built.
#[derive(Clone, Debug)]
pub struct Program {
    /// The name of its file.
    pub name: String,
    /// The executable; it is linked statically, for any guest.
    pub path: PathBuf,
    /// Its requirements.
    pub needs: Needs,
}

/// A test's requirements, as printed by the test itself with `--describe`; see
/// tests/kernel/src/lib.rs.
#[derive(Clone, Debug, Deserialize)]
pub struct Needs {
    /// Virtual CPUs, 1 to 5.
    pub cpus: u32,
    /// Debian packages of trixie.
    pub packages: Vec<String>,
    /// Whether the guest needs the `dunlin` command.
    pub dunlin: bool,
    /// Whether the guest also needs the previous version's `dunlin`, if `DUNLIN_PREVIOUS` names
    /// one.
    pub previous: bool,
    /// Test programs of library crates.
    pub library_tests: Vec<String>,
    /// Its time limit.
    pub limit_seconds: u64,
    /// The kernels under which a run of all tests includes this test.
    pub under: Under,
}

/// The kernels under which a run of all tests includes a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Under {
    /// The newest kernel and the oldest supported one.
    Both,
    /// The newest kernel.
    Newest,
    /// The oldest supported kernel.
    Oldest,
    /// Any kernel, but only if the command names the test.
    Named,
    /// The kernel of the previous Debian release, which is older than the oldest supported
    /// one.
    Former,
}

impl Needs {
    /// The time limit.
    #[must_use]
    pub fn limit(&self) -> Duration {
        Duration::from_secs(self.limit_seconds)
    }
}

/// The name of each test, and the first line of its file.
///
/// # Errors
/// The folder of the tests cannot be read.
pub fn list() -> Result<Vec<(String, String)>> {
    let folder = workspace().join("tests/kernel/src/bin");
    let mut found = Vec::new();
    for entry in
        fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))?
    {
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
/// A test does not build or does not describe itself.
pub fn build(names: &[&str]) -> Result<Vec<Program>> {
    let mut programs = Vec::new();
    for (name, path) in names.iter().zip(build_some(PACKAGE, "--bin", names)?) {
        let described = Command::new(&path)
            .arg("--describe")
            .output()
            .with_context(|| format!("cannot run {}", path.display()))?;
        let needs: Needs = serde_json::from_slice(&described.stdout).with_context(|| {
            format!(
                "{name} --describe prints no requirements (dunlin_kernel_tests::run prints them)"
            )
        })?;
        if !(1..=5).contains(&needs.cpus) {
            bail!("{name} needs {} CPUs, out of range (1–5)", needs.cpus);
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
/// The command does not build.
pub fn build_dunlin() -> Result<PathBuf> {
    build_one("dunlin-cli", "--bin", "dunlin")
}

/// Builds a test program of a library crate for the guest. The crate is the one that has this
/// program in `tests`.
///
/// # Errors
/// No crate contains it, or it does not build.
pub fn build_library_tests(name: &str) -> Result<PathBuf> {
    let crates = fs::read_dir(workspace().join("crates")).context("cannot list the crates")?;
    for found in crates {
        let found = found?;
        if found
            .path()
            .join("tests")
            .join(format!("{name}.rs"))
            .exists()
        {
            let package = found.file_name().to_string_lossy().into_owned();
            return build_one(&package, "--test", name);
        }
    }
    bail!("no crate has tests/{name}.rs")
}

fn build_one(package: &str, kind: &str, name: &str) -> Result<PathBuf> {
    let built = build_some(package, kind, &[name])?;
    built.into_iter().next().context("cargo built no program")
}

/// Builds programs with a static C library, so that they do not depend on the guest's libraries,
/// and returns their paths. The flags for this apply only to crates of this workspace; dependencies
/// are built as usual and therefore shared with an ordinary build.
fn build_some(package: &str, kind: &str, names: &[&str]) -> Result<Vec<PathBuf>> {
    #[derive(Deserialize)]
    struct Message {
        target: Option<Target>,
        executable: Option<PathBuf>,
    }
    #[derive(Deserialize)]
    struct Target {
        name: String,
    }
    let mut command = crate::cargo();
    command.args(["build", "--locked", "--quiet", "--package", package]);
    for name in names {
        command.args([kind, name]);
    }
    let done = command
        .args(["--message-format", "json-render-diagnostics"])
        .env("RUSTC_WORKSPACE_WRAPPER", compiler()?)
        .current_dir(workspace())
        .stderr(Stdio::inherit())
        .output()
        .context("cannot start cargo")?;
    if !done.status.success() {
        bail!(
            "a program of {package} does not build: {}",
            names.join(", ")
        );
    }
    let said = String::from_utf8_lossy(&done.stdout);
    let built: BTreeMap<String, PathBuf> = said
        .lines()
        .filter_map(|line| {
            let said: Message = serde_json::from_str(line).ok()?;
            Some((said.target?.name, said.executable?))
        })
        .collect();
    let path = |name: &&str| {
        let path = built.get(*name).cloned();
        path.with_context(|| format!("cargo does not report the path of {name}"))
    };
    names.iter().map(path).collect()
}

/// Returns a wrapper of the compiler for this workspace's crates. The wrapper links programs with
/// the static C library. The alternative `cargo rustc -- FLAGS` builds one program at a time, and
/// takes a second to check a program that has not changed. Cargo uses the crate name `___` to query
/// the compiler's features; the wrapper does not change these calls.
fn compiler() -> Result<PathBuf> {
    const SCRIPT: &str = "#!/bin/sh
case \" $* \" in
*' --crate-name ___ '*) ;;
*' --crate-type bin '* | *' --test '*)
    exec \"$@\" -C target-feature=+crt-static -C strip=debuginfo ;;
esac
exec \"$@\"
";
    let _turn = cache::lock("compiler")?;
    let path = cache::directory().join("compiler");
    if fs::read_to_string(&path).is_ok_and(|known| known == SCRIPT) {
        return Ok(path);
    }
    let aside = path.with_extension("unfinished");
    fs::write(&aside, SCRIPT).with_context(|| format!("cannot write {}", aside.display()))?;
    fs::set_permissions(&aside, Permissions::from_mode(0o755))?;
    fs::rename(&aside, &path)?;
    Ok(path)
}

fn workspace() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}
