//! The pages of the manual and the shell completions for `dunlin`. To write them, this module runs
//! a test of the command (crates/dunlin-cli/src/pages.rs).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde::Deserialize;

use super::commit::workspace;
use super::programs::{output, run};
use crate::programs::BUILT;

#[derive(Deserialize)]
struct Message {
    executable: Option<PathBuf>,
    target: Option<Target>,
    profile: Option<Profile>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

/// Writes the pages into `directory`: `man` and `completions`.
///
/// # Errors
/// The tests of the command cannot be built, or the test that writes the pages fails.
pub fn write(directory: &Path) -> Result<()> {
    let mut cargo = crate::cargo();
    cargo.args([
        "test",
        "--locked",
        "--no-run",
        "--message-format=json-render-diagnostics",
    ]);
    // Build with the arguments of `cargo xtask test`, so that no crate is built a second time with
    // other features.
    cargo.args(BUILT).args(["--bin", "dunlin"]);
    let built = output(cargo.current_dir(workspace()))?;
    let program = built.lines().find_map(program);
    let program = program.context("cargo has built no tests of dunlin")?;
    if directory.exists() {
        fs::remove_dir_all(directory)?;
    }
    fs::create_dir_all(directory)?;
    let directory = fs::canonicalize(directory)?;
    let mut write = Command::new(program);
    write.args(["--quiet", "--exact", "pages::written"]);
    // This test does not need the variables that cargo sets for tests, such as CARGO_MANIFEST_DIR.
    run(write.env("DUNLIN_PAGES", &directory))?;
    let is_written = directory.join("man/dunlin.1").exists();
    is_written.then_some(()).context(
        "the test pages::written has not written man/dunlin.1; check that this test exists",
    )
}

/// The file with the tests of the binary `dunlin`, if the line of cargo's output reports it.
fn program(line: &str) -> Option<PathBuf> {
    let message: Message = serde_json::from_str(line).ok()?;
    let target = message.target?;
    let is_ours = target.name == "dunlin" && target.kind == ["bin"] && message.profile?.test;
    message.executable.filter(|_| is_ours)
}
