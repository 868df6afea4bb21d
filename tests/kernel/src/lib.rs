//! Helpers for kernel tests. Each file of `src/bin` is one test, which is a program that runs
//! inside a virtual machine. `cargo xtask kernel` builds the program, reads its requirements, boots
//! the machine and runs the program.
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
//! A test fails by panicking. It runs as root, in a network namespace of its own, in which only the
//! loopback interface is up. The kernel loads modules on request, as on an installed system. The
//! test's output is printed, and its files in [`Guest::folder`] are copied to the host.
//!
//! Tests probe for a kernel feature: they read `/proc/crypto` or a counter, or try to use the
//! feature. They do not check the kernel's version, because distributions backport features and
//! features move between releases. Only [`doctor`] compares its results by version. A test changes
//! settings of the machine through guards that restore them ([`Guest::set`],
//! [`Guest::without_module`]), because later tests run in the same machine.
//!
//! The machine is emulated, so times are meaningless. Tests assert on behaviour and counters.
#![forbid(unsafe_code)]

pub mod counting;
pub mod doctor;
pub mod handoff;
pub mod ipsec;
pub mod refusing;
pub mod sealed_lanes;
pub mod sessions;
pub mod systemd;
pub mod tls;
pub mod vm;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{self, Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;

/// The name of the previous version of `dunlin` in `PATH` (see [`Guest::versions`]).
pub const PREVIOUS: &str = "dunlin-previous";

/// The exit code for "skipped", as in automake.
const SKIPPED: i32 = 77;

/// What the machine must provide for a test.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Needs {
    /// Number of virtual CPUs, 1 to 5.
    pub cpus: u32,
    /// Packages of Debian trixie with programs that are added to the path. The packages are
    /// unpacked but not configured, so files that the installation would generate are missing.
    pub packages: &'static [&'static str],
    /// Whether the `dunlin` command is in the path.
    pub dunlin: bool,
    /// Whether the `dunlin` of the earlier commit that `DUNLIN_PREVIOUS` names is also in the path
    /// (see [`Guest::versions`]).
    pub previous: bool,
    /// The names of the crates' integration tests that are added to the path, as programs (see
    /// [`Guest::library_tests`]).
    pub library_tests: &'static [&'static str],
    /// The time limit in seconds. After it, the test is killed and counts as hung. In a soak test,
    /// each test has ten times this limit.
    pub limit_seconds: u64,
    /// The kernels under which a run of the whole suite includes this test. The soak test uses both
    /// kernels for every test that names at least one of them.
    pub under: Under,
}

/// The kernels under which a test runs as part of the whole suite. Long tests run under only one
/// kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Under {
    /// The newest kernel and the oldest supported kernel.
    Both,
    /// The newest kernel.
    Newest,
    /// The oldest supported kernel.
    Oldest,
    /// Any kernel, but only if the command names the test.
    Named,
    /// The kernel of Debian bookworm, which is older than the oldest supported kernel. For tests of
    /// behaviour that only such a kernel has.
    Former,
}

impl Needs {
    /// The default: two CPUs, busybox and a limit of one minute.
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

/// The `main` of a test: prints its `needs` if called with `--describe`, otherwise runs `test`.
#[must_use]
pub fn run(needs: &Needs, test: impl FnOnce(&Guest)) -> ExitCode {
    if env::args().nth(1).as_deref() == Some("--describe") {
        let mut needs = *needs;
        if is_soak() {
            needs.limit_seconds *= 10;
            if matches!(needs.under, Under::Newest | Under::Oldest) {
                needs.under = Under::Both;
            }
        }
        let text = serde_json::to_string(&needs).expect("numbers and texts have a JSON form");
        println!("{text}");
        return ExitCode::SUCCESS;
    }
    if !Path::new("/rig/tests").is_dir() {
        eprintln!("this test runs only inside a virtual machine: cargo xtask kernel --test NAME");
        return ExitCode::FAILURE;
    }
    test(&Guest(()));
    ExitCode::SUCCESS
}

fn is_soak() -> bool {
    env::var_os("DUNLIN_SOAK").is_some_and(|soak| soak == "1")
}

impl Guest {
    /// Whether this is the soak test, in which tests make more repetitions (docs/testing/soak.md).
    #[must_use]
    pub fn is_soak(&self) -> bool {
        is_soak()
    }

    /// The folder for files that are copied to the host, such as captures and logs. It is the
    /// initial working directory.
    #[must_use]
    pub fn folder(&self) -> PathBuf {
        env::current_dir().expect("the runner created the folder")
    }

    /// Ends the test as skipped. Skipped tests are counted and shown. Guards are not dropped, so a
    /// test must call this method before it changes the machine.
    pub fn skip(&self, reason: &str) -> ! {
        println!("skipped: {reason}");
        process::exit(SKIPPED)
    }

    /// Returns the names of the previous version's `dunlin` and of the current one, in both orders.
    /// Skips the test if `DUNLIN_PREVIOUS` is not set.
    ///
    /// # Panics
    /// `DUNLIN_PREVIOUS` is not set in the soak test.
    #[must_use]
    pub fn versions(&self) -> [[&'static str; 2]; 2] {
        if !Path::new("/usr/bin").join(PREVIOUS).exists() {
            let reason =
                "the previous version's dunlin is missing: DUNLIN_PREVIOUS=$(tools/previous)";
            assert!(!is_soak(), "{reason}");
            self.skip(reason);
        }
        [[PREVIOUS, "dunlin"], ["dunlin", PREVIOUS]]
    }

    /// Runs a program and returns its standard output.
    ///
    /// # Panics
    /// The program does not start or it fails. The message contains its output.
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

    /// Runs the library's test program `name` with kernel TLS, except the tests `skipped`. Runs one
    /// test at a time, because the machine is slow. Returns the output.
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

    /// Runs a program and ignores its output.
    ///
    /// # Panics
    /// The program does not start or it fails. The message contains its output.
    pub fn command(&self, program: &str, arguments: &[&str]) {
        let _ = self.output(program, arguments);
    }

    /// Unloads a module until the returned guard is dropped, also by a panic. The guard reloads the
    /// module only if it was loaded before.
    ///
    /// # Panics
    /// The module is still in use after half a minute. Sockets of an earlier test may use it for
    /// some time after that test has ended.
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

    /// Stops the kernel from loading modules automatically, until the returned guard is dropped.
    /// `modprobe` still works.
    #[must_use]
    pub fn without_loader(&self) -> Setting {
        self.set("/proc/sys/kernel/modprobe", "/nowhere")
    }

    /// Writes a kernel setting, which is a file of `/proc/sys` or `/sys`. The returned guard
    /// restores the old value when it is dropped, also by a panic.
    ///
    /// # Panics
    /// The file cannot be read or written.
    #[must_use]
    pub fn set(&self, file: &str, value: &str) -> Setting {
        let before = fs::read_to_string(file).unwrap_or_else(|error| panic!("{file}: {error}"));
        // If the setting is one of several values, the file marks it with brackets: "always
        // [madvise] never".
        let chosen = before.split(['[', ']']).nth(1).unwrap_or(before.trim_end());
        let guard = Setting {
            file: file.to_owned(),
            before: chosen.to_owned(),
        };
        fs::write(file, value).unwrap_or_else(|error| panic!("{file}: {error}"));
        guard
    }

    /// Returns a counter from a file with lines of the form "NAME VALUE", for instance
    /// `/proc/net/tls_stat`.
    ///
    /// # Panics
    /// The file or the counter does not exist.
    #[must_use]
    pub fn counter(&self, file: &str, name: &str) -> u64 {
        let text = fs::read_to_string(file).unwrap_or_else(|error| panic!("{file}: {error}"));
        text.lines()
            .find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
            .unwrap_or_else(|| panic!("{file} has no {name}:\n{text}"))
    }
}

/// The guard of [`Guest::without_module`].
#[derive(Debug)]
pub struct WithoutModule {
    name: &'static str,
    was_loaded: bool,
}

// A panic during another panic would abort the process before other guards are dropped. A failing
// guard therefore only prints a message. The runner compares the machine's state before and after
// the test.
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

/// The guard of [`Guest::set`].
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
