//! Counts of what a piece of work costs, where times mean nothing: instructions and system calls.
//!
//! Under `cargo xtask kernel --icount` the machine's clock goes by instructions. How many pass in
//! one of its nanoseconds is measured in the same boot by a loop of a known length, before each of
//! five runs of the work. The count is the median of the five, and its error the spread of the middle
//! three, of the work and of the loop together. It is a count of the whole machine: what the kernel
//! does for the work is in it, and what it does meanwhile for itself too, which is why the outermost
//! two are left out.
//!
//! System calls are counted by the kernel's own tracing (ftrace), with and without `--icount`.

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

/// The loops that build.rs assembles, and by how many instructions they differ.
const SHORT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/short"));
const LONG: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/long"));
const DIFFERENCE: f64 = 2.0 * 25_000_000.0;

/// In this time the kernel does what is left of its start, which would be counted too. Where the
/// clock goes by instructions nobody waits for it: an idle machine's clock jumps.
const SETTLING: Duration = Duration::from_secs(5);

/// How often the work is done for its instructions, and the loops with it.
const ROUNDS: usize = 5;

/// What a piece of work cost.
#[derive(Clone, Debug)]
pub struct Count {
    what: String,
    /// `None` without `--icount`.
    pub instructions: Option<Instructions>,
    /// By their numbers on x86-64; of this process, and of threads and processes that the work
    /// began.
    pub system_calls: BTreeMap<u32, u64>,
}

/// A number of instructions.
#[derive(Clone, Copy, Debug)]
pub struct Instructions {
    /// So many.
    pub count: f64,
    /// And so many more or less.
    pub error: f64,
}

impl Guest {
    /// Counts what `work` costs, and prints it. The work is done once for the system calls, since
    /// tracing costs instructions, and five times for the instructions.
    ///
    /// # Panics
    /// The kernel's tracing cannot be used, or had no room for all of the system calls.
    pub fn count(&self, what: &str, mut work: impl FnMut()) -> Count {
        let instructions = env::var_os("RIG_COUNTING").map(|_| instructions(&mut work));
        let mut system_calls = trace(&mut work);
        // What it takes to switch the tracing on and off.
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

/// The median, and as a fraction of it how far the middle three of the values deviate from it.
fn median(mut values: Vec<f64>) -> (f64, f64) {
    values.sort_by(f64::total_cmp);
    let middle = ROUNDS / 2;
    let median = values[middle];
    let spread = (values[middle + 1] - median).max(median - values[middle - 1]);
    (median, spread / median)
}

/// How long the machine takes for a program, its start and end included.
fn nanoseconds(name: &str, program: &[u8]) -> f64 {
    let path = Path::new("/tmp").join(name);
    if !path.exists() {
        fs::write(&path, program).expect("/tmp can be written");
        let mode = fs::Permissions::from_mode(0o755);
        fs::set_permissions(&path, mode).expect("/tmp can be written");
    }
    let begun = Instant::now();
    let status = Command::new(&path).status().expect("it starts");
    let spent = begun.elapsed().as_nanos() as f64;
    assert!(status.success(), "{status}");
    spent
}

/// System calls that begin while `work` is done.
fn trace(work: &mut impl FnMut()) -> BTreeMap<u32, u64> {
    // One buffer for each CPU; a system call takes about 40 bytes.
    set("buffer_size_kb", "8192");
    set("options/event-fork", "1");
    set("set_event_pid", &process::id().to_string());
    set("events/raw_syscalls/sys_enter/enable", "1");
    set("trace", "");
    set("tracing_on", "1");
    let traced = Traced;
    work();
    drop(traced);
    for cpu in fs::read_dir(tracing("per_cpu")).expect("ftrace is there") {
        let stats = cpu.expect("ftrace is there").path().join("stats");
        let text = fs::read_to_string(&stats).expect("ftrace is there");
        assert!(
            text.lines().any(|line| line == "overrun: 0"),
            "more system calls than there was room for:\n{text}"
        );
    }
    let mut calls = BTreeMap::new();
    let text = fs::read_to_string(tracing("trace")).expect("ftrace is there");
    for line in text.lines() {
        // "NAME-PID [CPU] FLAGS TIME: sys_enter: NR 1 (…)"
        let number = line
            .split_once(": sys_enter: NR ")
            .and_then(|(_, rest)| rest.split(' ').next()?.parse().ok());
        if let Some(number) = number {
            *calls.entry(number).or_default() += 1;
        }
    }
    calls
}

/// Ends the tracing, also when the work panics.
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
