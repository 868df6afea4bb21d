//! Chores of the workspace, as a library so that they can be tested. `cargo xtask help` lists them.
//!
//! - [`mod@bench`]: Dunlin beside other programs.
//! - [`kernel`]: tests under a real kernel.
//! - [`programs`]: test programs side by side.
//! - [`words`]: retired words in code and pages.
#![forbid(unsafe_code)]
#![cfg(target_arch = "x86_64")]

pub mod bench;
pub mod kernel;
pub mod programs;
pub mod words;

use std::env;
use std::process::{Command, ExitCode};

use clap::Parser;
use dunlin_rig::debian::DebianError;

use self::bench::Bench;
use self::kernel::KernelOptions;
use self::programs::TestOptions;
use self::words::WordOptions;

/// The exit code when something cannot be had from Debian: no network, or no Debian.
const NOT_FETCHED: u8 = 3;

/// Dunlin's own chores.
#[derive(Parser)]
#[command(bin_name = "cargo xtask")]
enum Chore {
    /// Runs the tests of tests/kernel inside virtual machines with Debian's kernels.
    Kernel(KernelOptions),
    /// Measures Dunlin beside other programs; docs/benchmarking.md says how to read it.
    #[command(subcommand)]
    Bench(Bench),
    /// Runs test programs side by side, each by itself when it is about time.
    Test(TestOptions),
    /// Lists retired words in code and pages; fails if there are any.
    Words(WordOptions),
}

/// Cargo, as whoever has called this program would call it. `cargo run` tells a program about its own
/// package, and a build script that looks at the same variables (ring's does) would take that
/// for a change, and build everything above it again.
fn cargo() -> Command {
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for (name, _) in env::vars_os() {
        let of_package = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_"];
        if of_package
            .iter()
            .any(|&of| name.to_string_lossy().starts_with(of))
        {
            cargo.env_remove(name);
        }
    }
    cargo
}

/// Does the chore that the command line names.
#[must_use]
pub fn main() -> ExitCode {
    let done = match Chore::parse() {
        Chore::Kernel(options) => kernel::command(&options),
        Chore::Bench(bench) => bench::command(&bench),
        Chore::Test(options) => programs::command(&options),
        Chore::Words(options) => words::command(&options),
    };
    match done {
        Ok(code) => code,
        Err(error) => {
            eprintln!("{error:#}");
            match error.downcast_ref() {
                Some(DebianError::Fetch { .. } | DebianError::NotDebian(_)) => {
                    ExitCode::from(NOT_FETCHED)
                }
                _ => ExitCode::FAILURE,
            }
        }
    }
}
