//! Tests inside virtual machines with Debian's kernels: `cargo xtask kernel`.
//!
//! The host's own kernel may lack kernel TLS or ESP. The tests run in an emulated machine, by
//! default under the newest and the oldest supported kernel of Debian.
//! docs/testing/kernel-tests.md explains how to add a test.
//!
//! - [`program`]: builds the tests and asks each for its requirements
//! - [`initramfs`], [`archive`]: the guest's files; `init.sh` runs in the guest
//! - [`machine`]: runs one boot and records its output
//! - [`verdict`]: derives each test's outcome from the record
//! - [`known`]: kernel versions under which the tests have passed on this host

pub mod archive;
pub mod initramfs;
pub mod known;
pub mod machine;
pub mod program;
pub mod verdict;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use dunlin_rig::cache;
use dunlin_rig::debian::{self, Kernel, Qemu, Which};

use self::machine::Machine;
use self::program::{Program, Under};
use self::verdict::{Outcome, Said, Verdict};

/// The number of boots for which logs and files are kept.
const RESULTS_KEPT: usize = 30;

/// Options of `cargo xtask kernel`.
#[derive(Args, Clone, Debug, Default)]
pub struct KernelOptions {
    /// Runs only this test; may be given several times.
    #[arg(long = "test", value_name = "NAME")]
    tests: Vec<String>,
    /// Runs only the tests of this suite.
    #[arg(long, conflicts_with = "tests")]
    suite: Option<Suite>,
    /// Lists the tests without running them.
    #[arg(long)]
    list: bool,
    /// Fetches and builds everything the tests need, without running them.
    #[arg(long)]
    no_run: bool,
    /// Runs only under this kernel: newest, oldest, former, a version as printed by `uname -r`, or
    /// a prefix of a version. May be given several times. Former is the kernel of the previous
    /// Debian release. Default: newest and oldest, and former for the tests that require it.
    #[arg(long = "kernel", value_name = "VERSION")]
    kernels: Vec<String>,
    /// Boots the first kernel of --kernel (default: newest), with the tests in the guest, and opens
    /// a shell.
    #[arg(long)]
    shell: bool,
    /// Runs the guest's clock by the number of executed instructions instead of by time.
    #[arg(long)]
    icount: bool,
    /// Prints the output of all tests, including those that passed.
    #[arg(long)]
    verbose: bool,
}

impl KernelOptions {
    /// Whether a test that is meant for the kernels `under` runs under the kernel `which`.
    ///
    /// - A test with [`Under::Named`] runs under every kernel if tests were named, and otherwise
    ///   under none.
    /// - If kernels were named, all tests without [`Under::Named`] run under each of these kernels.
    /// - Otherwise the tests with [`Under::Former`] run only under the kernel of the previous
    ///   Debian release, and the remaining tests under the newest and the oldest kernel. A test for
    ///   only one of these two kernels runs under both if tests were named.
    fn has(&self, which: &Which, under: Under) -> bool {
        match (which, under) {
            (_, Under::Named) => !self.tests.is_empty(),
            _ if !self.kernels.is_empty() => true,
            (Which::Former, _) => under == Under::Former,
            (_, Under::Former) => false,
            _ if !self.tests.is_empty() => true,
            (Which::Newest, _) => under != Under::Oldest,
            (Which::Oldest, _) => under != Under::Newest,
            (Which::Version(_), _) => true,
        }
    }
}

/// Tests that share a time budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Suite {
    /// The test infrastructure, and every test outside the other suites.
    Rig,
    /// Kernel TLS.
    Tls,
    /// IPsec.
    Ipsec,
}

impl Suite {
    /// The suite of a test, by its name. Tests of kernel TLS are named `tls_…`, or `k` and the
    /// number of a pitfall. Tests of IPsec are named `ipsec_…`, or `p` and the number of a pitfall.
    fn of(name: &str) -> Self {
        let is_pitfall = |rest: &str| rest.starts_with(|first: char| first.is_ascii_digit());
        let is_of = |suite, pitfall| {
            name.starts_with(suite) || name.strip_prefix(pitfall).is_some_and(is_pitfall)
        };
        if is_of("tls_", 'k') {
            Self::Tls
        } else if is_of("ipsec_", 'p') {
            Self::Ipsec
        } else {
            Self::Rig
        }
    }
}

/// How many tests under one kernel had each outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Tests that passed.
    pub passed: usize,
    /// Tests that failed or did not start, and boots that failed outside every test.
    pub failed: usize,
    /// Tests that were skipped.
    pub skipped: usize,
}

/// Runs the command. Prints one line for each kernel at the end.
///
/// # Errors
/// A download, a build or the start of a program fails. Failing tests are not an error; they set
/// exit code 1.
pub fn command(options: &KernelOptions) -> Result<ExitCode> {
    let all = program::list()?;
    if options.list {
        for (name, about) in &all {
            println!("{name:20} {about}");
        }
        return Ok(ExitCode::SUCCESS);
    }
    let mut names: Vec<&str> = Vec::new();
    for (name, _) in &all {
        let in_suite = options.suite.is_none_or(|suite| suite == Suite::of(name));
        if in_suite && options.tests.is_empty() || options.tests.contains(name) {
            names.push(name);
        }
    }
    if let Some(unknown) = options
        .tests
        .iter()
        .find(|asked| !names.contains(&asked.as_str()))
    {
        bail!("unknown test {unknown} (--list shows the tests)");
    }
    let named = |kernel: &String| match kernel.as_str() {
        "newest" => Which::Newest,
        "oldest" => Which::Oldest,
        "former" => Which::Former,
        version => Which::Version(version.to_owned()),
    };
    let kernels = match &options.kernels[..] {
        [] if options.shell => vec![Which::Newest],
        [] => vec![Which::Newest, Which::Oldest, Which::Former],
        kernels => kernels.iter().map(named).collect(),
    };
    let programs = program::build(&names)?;
    let rig = Rig {
        qemu: debian::qemu()?,
        counting: options.icount,
        verbose: options.verbose,
    };
    if options.shell {
        return rig.shell(&debian::kernel(&kernels[0])?, &programs);
    }
    let mut runs = Vec::new();
    for which in kernels {
        let mut programs = programs.clone();
        programs.retain(|program| options.has(&which, program.needs.under));
        if !programs.is_empty() {
            runs.push((debian::kernel(&which)?, which, programs));
        }
    }
    if options.no_run {
        for (kernel, _, programs) in &runs {
            rig.prepare(kernel, programs)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    // Run the kernels in parallel, because a boot uses little more than one core.
    let rig = &rig;
    let tallies = thread::scope(|scope| {
        let runs: Vec<_> = runs
            .iter()
            .map(|(kernel, _, programs)| scope.spawn(move || rig.run(kernel, programs)))
            .collect();
        runs.into_iter()
            .map(|run| run.join().expect("the thread does not panic"))
            .collect::<Result<Vec<_>>>()
    })?;
    let mut lines = Vec::new();
    let mut failed = false;
    for ((kernel, which, programs), tally) in runs.iter().zip(tallies) {
        lines.push(line(kernel, tally));
        if tally.failed == 0 {
            if options.tests.is_empty() {
                known::record_passed(kernel)?;
            }
            continue;
        }
        failed = true;
        if let Some(previous) = known::previous(which, kernel)? {
            lines.push(known::new_kernel(kernel, previous.as_ref()));
            if let Some(previous) = previous {
                lines.push(line(&previous, rig.run(&previous, programs)?));
            }
        }
    }
    for line in lines {
        println!("{line}");
    }
    Ok(if failed {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

/// The summary line.
fn line(kernel: &Kernel, tally: Tally) -> String {
    format!(
        "{}: {} passed, {} failed, {} skipped",
        kernel.version, tally.passed, tally.failed, tally.skipped
    )
}

/// The result of one boot.
#[derive(Debug)]
pub struct Boot {
    /// Outcomes of the tests that started, in the order in which they ran.
    pub outcomes: Vec<Outcome>,
    /// Names of the tests that did not start.
    pub rest: Vec<String>,
    /// The folder with the console log, and with a folder for each test that left files.
    pub folder: PathBuf,
}

/// Runs the tests.
#[derive(Debug)]
pub struct Rig {
    /// The emulator.
    pub qemu: Qemu,
    /// Whether the guest's clock counts executed instructions.
    pub counting: bool,
    /// Whether to print the output of every test.
    pub verbose: bool,
}

impl Rig {
    /// Runs every test under `kernel` and prints each outcome. Tests that need the same number of
    /// CPUs share a boot. If a boot ends early, another boot runs the remaining tests.
    ///
    /// # Errors
    /// The guest's files cannot be assembled, or QEMU does not start.
    pub fn run(&self, kernel: &Kernel, programs: &[Program]) -> Result<Tally> {
        let mut tally = Tally::default();
        let mut groups: BTreeMap<u32, Vec<Program>> = BTreeMap::new();
        for test in programs {
            groups
                .entry(test.needs.cpus)
                .or_default()
                .push(test.clone());
        }
        for (cpus, mut group) in groups {
            while !group.is_empty() {
                let Boot { outcomes, rest, .. } = self.boot(kernel, &group, cpus, |_| {})?;
                for outcome in &outcomes {
                    tally.add(outcome);
                }
                // If no test started in this boot, another boot would give the same result.
                if rest.len() == group.len() {
                    tally.failed += rest.len();
                    break;
                }
                group.retain(|test| rest.contains(&test.name));
            }
        }
        Ok(tally)
    }

    /// Runs one boot of a machine that `adjust` may change.
    ///
    /// # Errors
    /// See [`Rig::run`].
    pub fn boot(
        &self,
        kernel: &Kernel,
        programs: &[Program],
        cpus: u32,
        adjust: impl FnOnce(&mut Machine<'_>),
    ) -> Result<Boot> {
        let first = programs.first().context("no tests to run")?;
        let folder = results(kernel, &first.name)?;
        let initramfs = folder.join("initramfs");
        initramfs::write(kernel, programs, &initramfs)?;
        let mut machine = Machine::new(&self.qemu, kernel, &initramfs, &folder, cpus);
        machine.counting = self.counting;
        adjust(&mut machine);
        let limit = |name: &str| {
            let test = programs.iter().find(|test| test.name == name);
            test.map(|test| test.needs.limit()).unwrap_or_default()
        };
        let begun = Instant::now();
        let record = machine.run(limit, |said| progress(kernel, said, begun))?;
        fs::remove_file(&initramfs)?;

        let asked: Vec<&str> = programs.iter().map(|test| test.name.as_str()).collect();
        let (outcomes, rest) = verdict::judge(&asked, &record);
        print!("{}", described(kernel, &outcomes, &folder, self.verbose));
        Ok(Boot {
            outcomes,
            rest,
            folder,
        })
    }

    /// Fetches, unpacks and builds everything.
    fn prepare(&self, kernel: &Kernel, programs: &[Program]) -> Result<()> {
        let folder = results(kernel, "prepared")?;
        initramfs::write(kernel, programs, &folder.join("initramfs"))?;
        Ok(fs::remove_dir_all(folder)?)
    }

    fn shell(&self, kernel: &Kernel, programs: &[Program]) -> Result<ExitCode> {
        let folder = results(kernel, "shell")?;
        let initramfs = folder.join("initramfs");
        initramfs::write(kernel, programs, &initramfs)?;
        let mut machine = Machine::new(&self.qemu, kernel, &initramfs, &folder, 2);
        machine.counting = self.counting;
        machine.kernel_arguments.push("rig.shell".to_owned());
        let left = machine.shell();
        fs::remove_dir_all(folder)?;
        left.map(|()| ExitCode::SUCCESS)
    }
}

/// Creates a folder for the results of a boot, and removes the oldest such folders.
fn results(kernel: &Kernel, name: &str) -> Result<PathBuf> {
    let all = cache::directory().join("results");
    let new = all.join(format!("{}-{name}-{}", kernel.version, std::process::id()));
    fs::create_dir_all(&new)?;
    let mut known = Vec::new();
    for entry in fs::read_dir(&all)? {
        let entry = entry?;
        // A concurrent run may have removed the folder.
        if let Ok(changed) = entry.metadata().and_then(|data| data.modified()) {
            known.push((changed, entry.path()));
        }
    }
    known.sort();
    for (_, path) in known.iter().rev().skip(RESULTS_KEPT) {
        let _ = fs::remove_dir_all(path);
    }
    Ok(new)
}

impl Tally {
    fn add(&mut self, outcome: &Outcome) {
        match outcome.verdict {
            Verdict::Passed => self.passed += 1,
            Verdict::Skipped => self.skipped += 1,
            Verdict::Failed(_) => self.failed += 1,
        }
    }
}

/// Prints progress, because a run takes minutes.
fn progress(kernel: &Kernel, said: &Said, begun: Instant) {
    let now = begun.elapsed().as_secs_f32();
    let what = match said {
        Said::Ready(_) => "up",
        Said::Begin(name) => name,
        Said::Done => "done",
        Said::Output(_) | Said::End { .. } => return,
    };
    println!("{now:6.1} s  {}  {what}", short(kernel));
}

/// Formats a boot's tests and their output as one block, because boots run in parallel.
fn described(kernel: &Kernel, outcomes: &[Outcome], folder: &Path, all: bool) -> String {
    let mut text = String::new();
    for test in outcomes {
        let verdict = match &test.verdict {
            Verdict::Passed => "passed".to_owned(),
            Verdict::Skipped => "skipped".to_owned(),
            Verdict::Failed(failure) => format!("FAILED: {failure}"),
        };
        text += &format!("{} {}: {verdict}\n", short(kernel), test.name);
        // If a test passed and `all` is not set, print only the test's measurements.
        let shown = |line: &&String| {
            all || test.verdict != Verdict::Passed || line.starts_with("count of ")
        };
        for line in test.output.iter().filter(shown) {
            text += &format!("    {line}\n");
        }
    }
    let failed = |test: &Outcome| matches!(test.verdict, Verdict::Failed(_));
    if outcomes.iter().any(failed) {
        text += &format!(
            "the console's log and the tests' files: {}\n",
            folder.display()
        );
    }
    text
}

/// The version without Debian's suffix: 7.3.4 for 7.3.4+deb13-cloud-amd64.
fn short(kernel: &Kernel) -> &str {
    kernel.version.split('+').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tests_suite_is_in_its_name() {
        for (name, suite) in [
            ("tls_lanes", Suite::Tls),
            ("k01_no_kernel_tls", Suite::Tls),
            ("ipsec_up", Suite::Ipsec),
            ("p14_cpu_counts", Suite::Ipsec),
            ("pagemap", Suite::Rig),
            ("esp", Suite::Rig),
        ] {
            assert_eq!(Suite::of(name), suite, "{name}");
        }
    }
}
