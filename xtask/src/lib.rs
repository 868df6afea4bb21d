//! The workspace's development tasks, as a library for its tests. `cargo xtask help` lists them.
//!
//! - [`mod@bench`]: benchmarks of Dunlin and other programs.
//! - [`book`]: checks the links of the pages and builds the book.
//! - [`kernel`]: runs tests under Debian's kernels, in virtual machines.
//! - [`package`]: builds a Debian package and an archive.
//! - [`programs`]: runs test programs in parallel.
//! - [`tables`]: writes the tables with measurements into the pages, from the kept results.
//! - [`words`]: finds retired words in code and pages.
#![forbid(unsafe_code)]
#![cfg(target_arch = "x86_64")]

pub mod bench;
pub mod book;
pub mod kernel;
pub mod package;
pub mod programs;
pub mod tables;
pub mod words;

use std::env;
use std::process::{Command, ExitCode};

use clap::Parser;
use dunlin_rig::debian::DebianError;

use self::bench::Bench;
use self::kernel::KernelOptions;
use self::package::PackageOptions;
use self::programs::TestOptions;
use self::tables::TablesOptions;
use self::tables::keep::KeepOptions;
use self::tables::report::ReportOptions;
use self::words::WordOptions;

/// The exit code if Debian's packages cannot be fetched: there is no network, or the host is
/// not Debian.
const NOT_FETCHED: u8 = 3;

/// Development tasks of Dunlin.
#[derive(Parser)]
#[command(bin_name = "cargo xtask")]
enum Chore {
    /// Runs the tests of tests/kernel inside virtual machines with Debian's kernels.
    Kernel(KernelOptions),
    /// Compares Dunlin with other programs; docs/benchmarking.md explains the output.
    #[command(subcommand)]
    Bench(Bench),
    /// Runs test programs in parallel. Programs that measure time run alone.
    Test(TestOptions),
    /// Builds a Debian package and an archive with the same files from the commit that is checked
    /// out.
    Package(PackageOptions),
    /// Checks the links of the pages, and builds the book of docs/ with mdBook.
    Book,
    /// Writes the tables with measurements into README and docs, from the kept results.
    Tables(TablesOptions),
    /// Keeps the output of a benchmark's `--json`, read from standard input, for the tables.
    Keep(KeepOptions),
    /// Writes a page with plots of JSON lines, as a benchmark's `--report` does.
    Report(ReportOptions),
    /// Lists retired words in code and pages; fails if there are any.
    Words(WordOptions),
}

/// Returns cargo with the environment of this program's caller. `cargo run` sets variables about
/// the package that it runs, xtask. If a build script reads these variables, as ring's does, cargo
/// would treat them as changed, and would rebuild every crate that depends on that script's crate.
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

/// Runs the task that the command line names.
#[must_use]
pub fn main() -> ExitCode {
    let done = match Chore::parse() {
        Chore::Kernel(options) => kernel::command(&options),
        Chore::Bench(bench) => bench::command(&bench),
        Chore::Test(options) => programs::command(&options),
        Chore::Package(options) => package::command(&options),
        Chore::Book => book::command(),
        Chore::Tables(options) => tables::command(&options),
        Chore::Keep(options) => tables::keep::command(&options),
        Chore::Report(options) => tables::report::command(&options),
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
