//! Runs test programs in parallel. Most of them spend most of their time waiting: for a silent
//! peer, for a timeout, or for a guest that counts. If they ran one after the other, the host would
//! be idle most of the time.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use dunlin_test_base::Scratch;
use serde::Deserialize;

/// The number of programs that run simultaneously, for a host with two cores.
const AT_A_TIME: usize = 2;
/// Programs that assert or compare times and rates. Each runs alone.
const ALONE: &[&str] = &[
    "conformance",
    "control",
    "hosts",
    "namespaces",
    "receive_budgets",
];
/// A package with guests that have to keep their rates, so each of its programs runs alone.
const GUESTS: &str = "crates/dunlin-microvm";
/// Packages of the test infrastructure.
const RIG: [&str; 2] = ["tests/rig", "xtask"];
/// The name prefixes of the test programs of the tunnel and of evacuations, in any package. Most of
/// the programs with real hypervisors are among them.
const TUNNEL: [&str; 2] = ["tunnel", "evacuate"];
/// The name prefix of the hand-off's test programs.
const HANDOFF: &str = "handoff";
/// The arguments with which [`built`] selects packages. It builds them with one call of cargo,
/// because calls for different packages would build many crates twice.
pub(crate) const BUILT: [&str; 3] = ["--workspace", "--exclude", "dunlin-kernel-tests"];
/// The number of longest-running programs that the summary lists.
const LONGEST: usize = 8;

/// Options of `cargo xtask test`.
#[derive(Debug, Args)]
pub struct TestOptions {
    /// The suite to run. If none is given, the test programs are built but not run.
    suite: Option<Suite>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Suite {
    /// The crates' own tests.
    Spine,
    /// The test infrastructure.
    Rig,
    /// The tunnel and evacuations, with real hypervisors.
    Tunnel,
    /// The hand-off.
    Handoff,
}

/// Cargo's message about an artifact.
#[derive(Deserialize)]
struct Message {
    reason: String,
    manifest_path: Option<PathBuf>,
    executable: Option<PathBuf>,
    target: Option<Target>,
    profile: Option<Profile>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

struct Program {
    name: String,
    file: PathBuf,
    /// The directory of the program's package, in which cargo also runs the program.
    directory: PathBuf,
}

impl Program {
    /// A name for the output. It contains the package, because programs of several packages are
    /// called `it`.
    fn label(&self) -> String {
        let package = self.directory.file_name().unwrap_or_default();
        format!("{} {}", package.display(), self.name)
    }

    fn is_alone(&self) -> bool {
        ALONE.contains(&self.name.as_str()) || self.directory.ends_with(GUESTS)
    }

    fn suite(&self) -> Suite {
        if TUNNEL.iter().any(|prefix| self.name.starts_with(prefix)) {
            Suite::Tunnel
        } else if self.name.starts_with(HANDOFF) {
            Suite::Handoff
        } else if RIG.iter().any(|end| self.directory.ends_with(end)) {
            Suite::Rig
        } else {
            Suite::Spine
        }
    }
}

struct Ran {
    name: String,
    took: Duration,
    passed: bool,
}

/// Builds all test programs, and runs those of the chosen suite. A failing program does not stop
/// the others.
///
/// # Errors
/// The programs cannot be built or started, a name in `ALONE` is not the name of a program, or the
/// suite has no programs.
pub fn command(options: &TestOptions) -> Result<ExitCode> {
    let mut programs = built()?;
    // Check the names, because a renamed program would otherwise run in parallel with others,
    // without an error.
    let is_there = |name: &&str| programs.iter().any(|program| program.name == **name);
    if let Some(gone) = ALONE.iter().find(|name| !is_there(name)) {
        bail!("{gone} must run alone, but no test program has this name");
    }
    let Some(suite) = options.suite else {
        return Ok(ExitCode::SUCCESS);
    };
    programs.retain(|program| program.suite() == suite);
    if programs.is_empty() {
        bail!("the suite has no test programs");
    }
    let (alone, others): (Vec<_>, Vec<_>) = programs.into_iter().partition(Program::is_alone);
    let mut ran = run(others, AT_A_TIME)?;
    ran.extend(run(alone, 1)?);
    ran.sort_by_key(|one| std::cmp::Reverse(one.took));
    let longest: Vec<String> = ran
        .iter()
        .take(LONGEST)
        .map(|one| format!("{} {:.0} s", one.name, one.took.as_secs_f64()))
        .collect();
    println!("{} programs; longest: {}", ran.len(), longest.join(", "));
    let failed: Vec<&str> = ran
        .iter()
        .filter(|one| !one.passed)
        .map(|one| one.name.as_str())
        .collect();
    if failed.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    println!("FAILED: {}", failed.join(", "));
    Ok(ExitCode::FAILURE)
}

/// Builds the test programs.
fn built() -> Result<Vec<Program>> {
    let mut cargo = crate::cargo()
        .args(["test", "--locked", "--no-run"])
        .arg("--message-format=json-render-diagnostics")
        .args(BUILT)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start cargo")?;
    let mut programs = Vec::new();
    if let Some(said) = cargo.stdout.take() {
        for line in BufReader::new(said).lines() {
            programs.extend(program(&line?)?);
        }
    }
    if !cargo.wait()?.success() {
        bail!("the tests cannot be built");
    }
    Ok(programs)
}

/// Parses one line of cargo's output. Returns the program if the line reports a test program.
fn program(line: &str) -> Result<Option<Program>> {
    let message: Message = serde_json::from_str(line)
        .with_context(|| format!("cannot parse this line of cargo's output: {line}"))?;
    if message.reason != "compiler-artifact" || !message.profile.is_some_and(|one| one.test) {
        return Ok(None);
    }
    let (Some(file), Some(target), Some(manifest)) =
        (message.executable, message.target, message.manifest_path)
    else {
        return Ok(None);
    };
    let directory = manifest.parent().unwrap_or(Path::new("/")).to_owned();
    Ok(Some(Program {
        name: target.name,
        file,
        directory,
    }))
}

/// Runs programs, `at_a_time` simultaneously; prints the output of each when it has ended.
fn run(programs: Vec<Program>, at_a_time: usize) -> Result<Vec<Ran>> {
    let waiting = Mutex::new(VecDeque::from(programs));
    let ran = Mutex::new(Vec::new());
    let next = || {
        let mut waiting = waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.pop_front()
    };
    let work = || -> Result<()> {
        while let Some(program) = next() {
            let one = run_one(&program)?;
            ran.lock().unwrap_or_else(PoisonError::into_inner).push(one);
        }
        Ok(())
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..at_a_time).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| {
            worker
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    })?;
    Ok(ran.into_inner().unwrap_or_else(PoisonError::into_inner))
}

fn run_one(program: &Program) -> Result<Ran> {
    // Write the output to a file, not to a pipe. A process that a test leaves behind would keep the
    // pipe open, and reading the pipe would not end.
    let scratch = Scratch::try_new()?;
    let output = scratch.join("output");
    let file = File::create(&output)?;
    let began = Instant::now();
    let mut command = Command::new(&program.file);
    if std::env::var_os("DUNLIN_SOAK").is_some_and(|soak| soak == "1") {
        // The soak test also prints the output of passed tests, such as seeds and crash counts.
        command.arg("--show-output");
    }
    let status = command
        .current_dir(&program.directory)
        .env("CARGO_MANIFEST_DIR", &program.directory)
        .stdin(Stdio::null())
        .stdout(file.try_clone()?)
        .stderr(file)
        .status()
        .with_context(|| format!("cannot run {}", program.file.display()))?;
    let took = began.elapsed();
    let text = fs::read(&output)?;
    let mut stdout = std::io::stdout().lock();
    let name = program.label();
    writeln!(stdout, "-- {name}, {:.1} s: {status}", took.as_secs_f64())?;
    stdout.write_all(&text)?;
    stdout.flush()?;
    Ok(Ran {
        name,
        took,
        passed: status.success(),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn failures_differ_from_passes() {
        let named = |name: &str| Program {
            name: name.to_owned(),
            file: Path::new("/bin").join(name),
            directory: PathBuf::from("/usr"),
        };
        let mut ran = run(vec![named("false"), named("true")], AT_A_TIME).unwrap();
        ran.sort_by(|one, other| one.name.cmp(&other.name));
        let passed: Vec<_> = ran.iter().map(|one| (&*one.name, one.passed)).collect();
        assert_eq!(passed, [("usr false", false), ("usr true", true)]);
        assert!(run(vec![named("none-of-that-name")], 1).is_err());
    }

    #[test]
    fn programs_are_those_that_cargo_says_are_tests() {
        let line = |test: bool, manifest: &str, name: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"{manifest}/Cargo.toml",
                "executable":"/x","target":{{"name":"{name}"}},"profile":{{"test":{test}}}}}"#
            )
        };
        assert!(
            program(&line(false, "/w/xtask", "xtask"))
                .unwrap()
                .is_none()
        );
        assert!(program(r#"{"reason":"build-finished"}"#).unwrap().is_none());
        for (manifest, name, suite, is_alone) in [
            ("/w/crates/dunlin", "engine_moves", Suite::Spine, false),
            ("/w/crates/dunlin-microvm", "moves", Suite::Spine, true),
            ("/w/tests/rig", "hosts", Suite::Rig, true),
            ("/w/tests/rig", "tunnel", Suite::Tunnel, false),
            ("/w/crates/dunlin-lane", "it", Suite::Spine, false),
        ] {
            let found = program(&line(true, manifest, name)).unwrap().unwrap();
            assert_eq!(found.suite(), suite, "{name}");
            assert_eq!(found.is_alone(), is_alone, "{name}");
        }
    }
}
