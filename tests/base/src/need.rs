//! Requirements of tests. If one is missing, the test fails in CI. Elsewhere it reports what
//! is missing and is skipped.

use std::fmt::Display;
use std::process::{Command, Stdio};

/// Returns the value, or prints what is missing and returns `None`.
///
/// # Panics
/// The value is missing, and the environment has `CI=true`.
pub fn or_skip<T, E: Display>(what: &str, found: Result<T, E>) -> Option<T> {
    match found {
        Ok(value) => Some(value),
        Err(error) if std::env::var_os("CI").is_some_and(|ci| ci == "true") => {
            panic!("CI must have {what}: {error}")
        }
        Err(error) => {
            println!("not tested, no {what}: {error}");
            None
        }
    }
}

/// Whether the programs are installed.
///
/// # Panics
/// A program is missing, and the environment has `CI=true`.
#[must_use]
pub fn are_here(programs: &[&str]) -> bool {
    programs.iter().all(|program| {
        let started = Command::new(program)
            .arg("--version")
            .stdin(Stdio::null())
            .output();
        or_skip(program, started).is_some()
    })
}
