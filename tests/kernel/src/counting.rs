//! Counts the instructions and system calls of a piece of work, because times are meaningless in an
//! emulated machine.
//!
//! Under `cargo xtask kernel --icount` the machine's clock advances with the number of executed
//! instructions. Before each of five runs of the work, two loops of known lengths measure the
//! number of instructions per nanosecond. The result is the median of the five runs. Its error
//! combines the spread of the middle three runs of the work and of the loops. The count covers the
//! whole machine: the kernel's work for the test and also unrelated background work. Because of the
//! background work, the lowest and the highest run are dropped from the spread.
//!
//! The kernel's tracing (ftrace) counts system calls, with and without `--icount`.

use std::collections::BTreeMap;
use std::env;
use std::fmt;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{self, Command};
use std::thread;
use std::time::{Duration, Instant};

use crate::Guest;

const TRACING: &str = "/sys/kernel/tracing";

/// Two loop programs that build.rs assembles, and the difference of their instruction counts.
const SHORT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/short"));
const LONG: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/long"));
const DIFFERENCE: f64 = 2.0 * 25_000_000.0;

/// How long to wait until the kernel has finished its start. Without the wait, instructions of the
/// start would be counted too. With `--icount` the wait takes little real time, because the clock
/// of an idle machine jumps ahead.
const SETTLING: Duration = Duration::from_secs(5);

/// The number of runs of the work and of each loop.
const ROUNDS: usize = 5;

/// The cost of a piece of work.
#[derive(Clone, Debug)]
pub struct Count {
    what: String,
    /// `None` without `--icount`.
    pub instructions: Option<Instructions>,
    /// Number of system calls by system call number on x86-64, for this process and for threads and
    /// processes that the work starts.
    pub system_calls: BTreeMap<u32, u64>,
}

/// A number of instructions.
#[derive(Clone, Copy, Debug)]
pub struct Instructions {
    /// The median.
    pub count: f64,
    /// The error of `count`, in instructions, upwards and downwards.
    pub error: f64,
}

impl Guest {
    /// Counts the instructions and system calls of `work`, and prints the counts. Runs the work
    /// once for system calls. With `--icount`, runs it five more times for instructions, because
    /// tracing itself executes instructions.
    ///
    /// # Panics
    /// Tracing is unavailable, or its buffer is too small for the system calls.
    pub fn count(&self, what: &str, mut work: impl FnMut()) -> Count {
        let instructions = env::var_os("RIG_COUNTING").map(|_| instructions(&mut work));
        let mut system_calls = trace(&mut work);
        // Subtract the system calls that switch the tracing on and off.
        for (number, count) in trace(&mut || {}) {
            if let Some(of_work) = system_calls.get_mut(&number) {
                *of_work = of_work.saturating_sub(count);
            }
        }
        system_calls.retain(|_, count| *count > 0);
        let count = Count {
            what: what.to_owned(),
            instructions,
            system_calls,
        };
        println!("{count}");
        count
    }
}

impl fmt::Display for Count {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "count of {}: ", self.what)?;
        match self.instructions {
            Some(Instructions { count, error }) => {
                write!(out, "{count:.0} ± {error:.0} instructions, ")?;
            }
            None => write!(out, "no instructions (they need --icount), ")?,
        }
        let calls: u64 = self.system_calls.values().sum();
        write!(out, "{calls} system calls")
    }
}

fn instructions(work: &mut impl FnMut()) -> Instructions {
    thread::sleep(SETTLING);
    let mut rates = Vec::new();
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        rates.push(DIFFERENCE / (nanoseconds("long", LONG) - nanoseconds("short", SHORT)));
        let begun = Instant::now();
        work();
        times.push(begun.elapsed().as_nanos() as f64);
    }
    let (per_nanosecond, rate_error) = median(rates);
    let (nanoseconds, time_error) = median(times);
    let count = nanoseconds * per_nanosecond;
    Instructions {
        count,
        error: count * (rate_error + time_error),
    }
}

/// Returns the median, and the largest relative deviation of the middle three values from it.
fn median(mut values: Vec<f64>) -> (f64, f64) {
    values.sort_by(f64::total_cmp);
    let middle = ROUNDS / 2;
    let median = values[middle];
    let spread = (values[middle + 1] - median).max(median - values[middle - 1]);
    (median, spread / median)
}

/// Returns the run time of a program in nanoseconds, including its start and exit.
fn nanoseconds(name: &str, program: &[u8]) -> f64 {
    let path = Path::new("/tmp").join(name);
    if !path.exists() {
        fs::write(&path, program).expect("/tmp can be written");
        let mode = fs::Permissions::from_mode(0o755);
        fs::set_permissions(&path, mode).expect("/tmp can be written");
    }
    let begun = Instant::now();
    let status = Command::new(&path).status().expect("the program starts");
    let spent = begun.elapsed().as_nanos() as f64;
    assert!(status.success(), "{status}");
    spent
}

/// Counts the system calls that begin while `work` runs, by system call number.
fn trace(work: &mut impl FnMut()) -> BTreeMap<u32, u64> {
    // The buffer size in KiB, for each CPU. A traced system call takes about 40 bytes.
    set("buffer_size_kb", "8192");
    set("options/event-fork", "1");
    set("set_event_pid", &process::id().to_string());
    set("events/raw_syscalls/sys_enter/enable", "1");
    set("trace", "");
    set("tracing_on", "1");
    let traced = Traced;
    work();
    drop(traced);
    for cpu in fs::read_dir(tracing("per_cpu")).expect("the kernel has ftrace") {
        let stats = cpu.expect("the kernel has ftrace").path().join("stats");
        let text = fs::read_to_string(&stats).expect("the kernel has ftrace");
        assert!(
            text.lines().any(|line| line == "overrun: 0"),
            "the trace buffer overflowed:\n{text}"
        );
    }
    let mut calls = BTreeMap::new();
    let text = fs::read_to_string(tracing("trace")).expect("the kernel has ftrace");
    for line in text.lines() {
        // The format of a line: "NAME-PID [CPU] FLAGS TIME: sys_enter: NR 1 (…)"
        let number = line
            .split_once(": sys_enter: NR ")
            .and_then(|(_, rest)| rest.split(' ').next()?.parse().ok());
        if let Some(number) = number {
            *calls.entry(number).or_default() += 1;
        }
    }
    calls
}

/// Stops the tracing when it is dropped, also during a panic.
struct Traced;

impl Drop for Traced {
    fn drop(&mut self) {
        for (name, value) in [
            ("tracing_on", "0"),
            ("events/raw_syscalls/sys_enter/enable", "0"),
            ("set_event_pid", ""),
        ] {
            if let Err(error) = fs::write(tracing(name), value) {
                println!("{name}: {error}");
            }
        }
    }
}

fn tracing(name: &str) -> PathBuf {
    Path::new(TRACING).join(name)
}

fn set(name: &str, value: &str) {
    let path = tracing(name);
    fs::write(&path, value).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}
