//! What a kernel test says and uses. Each file of `src/bin` is one test, a program that runs inside
//! a virtual machine: `cargo xtask kernel` builds it, asks it what it needs, boots and runs it.
//!
//! ```text
//! fn main() -> ExitCode {
//!     run(&Needs { packages: &["iproute2"], ..Needs::NOTHING }, |guest| {
//!         let known = guest.output("ip", &["link"]);
//!         assert!(known.contains("lo"), "{known}");
//!     })
//! }
//! ```
//!
//! A test fails by a panic. It runs as root, in a network namespace of its own in which only the
//! loopback is up. Modules come by themselves when something asks for them, as on an installed
//! system. What it prints is shown, and what it writes into its [`Guest::folder`] is brought back.
//!
//! Whether the kernel has something is found by looking for it (`/proc/crypto`, a counter, an
//! attempt), never by the kernel's version: distributions backport, and features move between
//! releases. What a test changes of the machine itself it changes through a guard
//! ([`Guest::set`], [`Guest::without_module`]): the tests after it run in the same machine.
//!
//! The machine is emulated: times mean nothing. Assert on behaviour and on counters.
#![forbid(unsafe_code)]

pub mod counting;
pub mod handoff;
pub mod ipsec;
pub mod refusing;
pub mod sealed_lanes;
pub mod sessions;
pub mod tls;
pub mod vm;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{self, Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;

/// The name of the earlier command in the path; see [`Guest::versions`].
pub const PREVIOUS: &str = "dunlin-previous";

/// "Skipped" as an exit code, as in automake.
const SKIPPED: i32 = 77;

/// What the machine must have for a test.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Needs {
    /// Virtual CPUs, 1 to 4.
    pub cpus: u32,
    /// Debian packages of trixie, whose programs are then in the path. None has been configured:
    /// what their installation would have set up is missing.
    pub packages: &'static [&'static str],
    /// Whether the `dunlin` command is in the path.
    pub dunlin: bool,
    /// Whether the command of an earlier commit, which `DUNLIN_PREVIOUS` names, is in the path too; see
    /// [`Guest::versions`].
    pub previous: bool,
    /// Test programs of the library that are in the path; see [`Guest::library_tests`].
    pub library_tests: &'static [&'static str],
    /// After so long the test is killed, and counts as hung; in the soak after ten times as long.
    pub limit_seconds: u64,
    /// Under which kernels a whole suite runs it. The soak leaves nothing to the newest or the oldest.
    pub under: Under,
}

/// The kernels of a whole suite. What takes long is left to one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Under {
    /// The newest and the oldest.
    Both,
    /// The newest.
    Newest,
    /// The oldest.
    Oldest,
    /// Bookworm's, older than everything works under: for what is said and done there.
    Former,
}

impl Needs {
    /// Two CPUs, busybox and a minute.
    pub const NOTHING: Self = Self {
        cpus: 2,
        packages: &[],
        dunlin: false,
        previous: false,
        library_tests: &[],
        limit_seconds: 60,
        under: Under::Both,
    };
}

/// The machine inside which a test runs.
#[derive(Debug)]
pub struct Guest(());

/// The whole of a test's `main`: says what it `needs` when it is asked, otherwise runs `test`.
#[must_use]
pub fn run(needs: &Needs, test: impl FnOnce(&Guest)) -> ExitCode {
    if env::args().nth(1).as_deref() == Some("--describe") {
        let mut needs = *needs;
        if is_soak() {
            needs.limit_seconds *= 10;
            if needs.under != Under::Former {
                needs.under = Under::Both;
            }
        }
        let text = serde_json::to_string(&needs).expect("numbers and texts have a JSON form");
        println!("{text}");
        return ExitCode::SUCCESS;
    }
    if !Path::new("/rig/tests").is_dir() {
        eprintln!("this runs inside a virtual machine: cargo xtask kernel --test NAME");
        return ExitCode::FAILURE;
    }
    test(&Guest(()));
    ExitCode::SUCCESS
}

fn is_soak() -> bool {
    env::var_os("DUNLIN_SOAK").is_some_and(|soak| soak == "1")
}

impl Guest {
    /// Whether more is to be done of the same (docs/testing.md).
    #[must_use]
    pub fn is_soak(&self) -> bool {
        is_soak()
    }

    /// Where files are put that are to be brought back: captures, logs. The working directory when
    /// the test begins.
    #[must_use]
    pub fn folder(&self) -> PathBuf {
        env::current_dir().expect("the runner has made it")
    }

    /// Ends the test as skipped, for something that this kernel does not have; it is counted and
    /// shown as such. Nothing is dropped: a test skips before it changes the machine.
    pub fn skip(&self, reason: &str) -> ! {
        println!("skipped: {reason}");
        process::exit(SKIPPED)
    }

    /// The names of the earlier command and of today's, in both orders. Without `DUNLIN_PREVIOUS` this
    /// skips the test.
    ///
    /// # Panics
    /// The soak runs without `DUNLIN_PREVIOUS`.
    #[must_use]
    pub fn versions(&self) -> [[&'static str; 2]; 2] {
        if !Path::new("/usr/bin").join(PREVIOUS).exists() {
            let reason = "the earlier command is missing: DUNLIN_PREVIOUS=$(tools/previous)";
            assert!(!is_soak(), "{reason}");
            self.skip(reason);
        }
        [[PREVIOUS, "dunlin"], ["dunlin", PREVIOUS]]
    }

    /// What a program prints.
    ///
    /// # Panics
    /// It does not start, or fails; with all that it said.
    #[must_use]
    pub fn output(&self, program: &str, arguments: &[&str]) -> String {
        let line = format!("{program} {}", arguments.join(" "));
        let done = Command::new(program)
            .args(arguments)
            .output()
            .unwrap_or_else(|error| panic!("{line}: {error}"));
        let text = String::from_utf8_lossy(&done.stdout).into_owned();
        assert!(
            done.status.success(),
            "{line}: {}\n{text}{}",
            done.status,
            String::from_utf8_lossy(&done.stderr)
        );
        text
    }

    /// Runs the library's test program with this name where the kernel seals and opens records, one
    /// test after the other, since times mean nothing here. What it printed is returned.
    ///
    /// # Panics
    /// A test fails.
    #[must_use]
    pub fn library_tests(&self, name: &str, skipped: &[&str]) -> String {
        let mut arguments = vec!["DUNLIN_OFFLOAD=kernel", name, "--test-threads=1"];
        for &test in skipped {
            arguments.extend(["--skip", test]);
        }
        let printed = self.output("env", &arguments);
        println!("{printed}");
        printed
    }

    /// Runs a program for what it does.
    ///
    /// # Panics
    /// It does not start, or fails; with all that it said.
    pub fn command(&self, program: &str, arguments: &[&str]) {
        let _ = self.output(program, arguments);
    }

    /// Unloads a module until the returned guard is dropped, also by a panic. A module that was not
    /// loaded is not loaded then either.
    ///
    /// # Panics
    /// The module is in use for half a minute: sockets of an earlier test release it some time after
    /// that test.
    #[must_use]
    pub fn without_module(&self, name: &'static str) -> WithoutModule {
        let guard = WithoutModule {
            name,
            was_loaded: Path::new("/sys/module").join(name).exists(),
        };
        let until = Instant::now() + Duration::from_secs(30);
        if !guard.was_loaded {
            return guard;
        }
        loop {
            let done = Command::new("rmmod").arg(name).output();
            let done = done.unwrap_or_else(|error| panic!("rmmod: {error}"));
            if done.status.success() {
                return guard;
            }
            let said = String::from_utf8_lossy(&done.stderr);
            assert!(Instant::now() < until, "rmmod {name}: {said}");
            thread::sleep(Duration::from_millis(100));
        }
    }

    /// The kernel loads no module by itself until the returned guard is dropped. `modprobe` still
    /// does.
    #[must_use]
    pub fn without_loader(&self) -> Setting {
        self.set("/proc/sys/kernel/modprobe", "/nowhere")
    }

    /// Writes a setting of the kernel, a file of `/proc/sys` or `/sys`, and writes its old value
    /// back when the returned guard is dropped, also by a panic.
    ///
    /// # Panics
    /// The file cannot be read or written.
    #[must_use]
    pub fn set(&self, file: &str, value: &str) -> Setting {
        let before = fs::read_to_string(file).unwrap_or_else(|error| panic!("{file}: {error}"));
        // A choice out of several is shown as "always [madvise] never".
        let chosen = before.split(['[', ']']).nth(1).unwrap_or(before.trim_end());
        let guard = Setting {
            file: file.to_owned(),
            before: chosen.to_owned(),
        };
        fs::write(file, value).unwrap_or_else(|error| panic!("{file}: {error}"));
        guard
    }

    /// A counter of a file of lines "NAME VALUE", `/proc/net/tls_stat` for instance.
    ///
    /// # Panics
    /// The file or the counter is not there.
    #[must_use]
    pub fn counter(&self, file: &str, name: &str) -> u64 {
        let text = fs::read_to_string(file).unwrap_or_else(|error| panic!("{file}: {error}"));
        text.lines()
            .find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
            .unwrap_or_else(|| panic!("{file} has no {name}:\n{text}"))
    }
}

/// See [`Guest::without_module`].
#[derive(Debug)]
pub struct WithoutModule {
    name: &'static str,
    was_loaded: bool,
}

// A second panic would end the process before the other guards are dropped, so a guard that fails
// only says so; the runner compares the machine with what it was before the test.
impl Drop for WithoutModule {
    fn drop(&mut self) {
        if self.was_loaded {
            let done = Command::new("modprobe").arg(self.name).status();
            if !done.as_ref().is_ok_and(process::ExitStatus::success) {
                println!("modprobe {}: {done:?}", self.name);
            }
        }
    }
}

/// See [`Guest::set`].
#[derive(Debug)]
pub struct Setting {
    file: String,
    before: String,
}

impl Drop for Setting {
    fn drop(&mut self) {
        if let Err(error) = fs::write(&self.file, &self.before) {
            println!("{}: {error}", self.file);
        }
    }
}
