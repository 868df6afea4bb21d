//! Derives the outcome of each test from the record of a boot: passed, skipped, or failed with a
//! cause. Performs no I/O.

use std::fmt;
use std::time::Duration;

/// A test's exit code for "skipped", as in automake.
const SKIPPED: &str = "77";

/// The bits of /proc/sys/kernel/tainted that a kernel sets after a fault: machine check, bad
/// page, died (oops), warning, soft lock-up
/// (Documentation/admin-guide/tainted-kernels.rst).
const TROUBLE: u64 = 1 << 4 | 1 << 5 | 1 << 7 | 1 << 9 | 1 << 14;

/// The record of one boot.
#[derive(Debug, Default)]
pub struct Record {
    /// The prefix of the runner's own lines.
    pub token: String,
    /// The lines of the kernel's console.
    pub console: Vec<String>,
    /// The lines of the runner's report.
    pub said: Vec<Said>,
    /// Set if the runner reported nothing for this long and the machine was killed.
    pub hung: Option<Duration>,
}

/// A line of the report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Said {
    /// The guest is up, with this kernel.
    Ready(String),
    /// A test begins.
    Begin(String),
    /// A test's own output.
    Output(String),
    /// A test has ended.
    End {
        /// Its name.
        name: String,
        /// The test's exit code, "late" if it was killed at its time limit, or "changed" if it
        /// passed or was skipped, but left the machine changed.
        code: String,
        /// The kernel's taint flags.
        taint: u64,
    },
    /// This boot runs no more tests: either all have run, or one of them has left the
    /// machine changed.
    Done,
}

/// The outcome of a test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The name of the test, or "boot" for events outside every test.
    pub name: String,
    /// Whether it passed.
    pub verdict: Verdict,
    /// Its output.
    pub output: Vec<String>,
}

/// Passed, skipped or failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The test exited with 0, and the kernel logged no fault.
    Passed,
    /// The test reports that this kernel lacks the tested feature.
    Skipped,
    /// See [`Failure`].
    Failed(Failure),
}

/// The cause of a failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The test ended with this exit code.
    Test(String),
    /// The test exceeded its limit.
    TestHung,
    /// The test left the machine changed; its output lists the changes.
    LeftChanged,
    /// The kernel logged this warning.
    KernelWarning(String),
    /// The kernel stopped at this oops.
    KernelOops(String),
    /// The kernel reported this stall of a task or a CPU.
    KernelStall(String),
    /// The runner reported nothing for this long.
    MachineHung(Duration),
    /// The machine ended without a report.
    MachineEnded,
}

/// Returns every test's outcome in the order in which they ran, and the names of those in `asked`
/// that did not start.
#[must_use]
pub fn judge(asked: &[&str], record: &Record) -> (Vec<Outcome>, Vec<String>) {
    let mut rest = asked.to_vec();
    let mut outcomes: Vec<Outcome> = Vec::new();
    let mut boot = Vec::new();
    let mut running: Option<Outcome> = None;
    let mut taint_before = 0;
    let mut done = false;
    for said in &record.said {
        match said {
            Said::Ready(_) => {}
            Said::Output(line) => match &mut running {
                Some(test) => test.output.push(line.clone()),
                None => boot.push(line.clone()),
            },
            Said::Begin(name) => {
                rest.retain(|asked| *asked != name);
                running = Some(Outcome {
                    name: name.clone(),
                    verdict: Verdict::Failed(Failure::MachineEnded),
                    output: Vec::new(),
                });
            }
            Said::End { name, code, taint } => {
                let Some(mut test) = running.take_if(|test| test.name == *name) else {
                    continue;
                };
                test.verdict = match trouble(record, Some(name)) {
                    // At the time limit, the runner lets the kernel log blocked tasks. Such a log
                    // line is not a separate fault.
                    _ if code == "late" => Verdict::Failed(Failure::TestHung),
                    Some(failure) => Verdict::Failed(failure),
                    None if (taint & !taint_before) & TROUBLE != 0 => {
                        Verdict::Failed(Failure::KernelWarning(format!("taint flags {taint:#x}")))
                    }
                    None if code == "0" => Verdict::Passed,
                    None if code == "changed" => Verdict::Failed(Failure::LeftChanged),
                    None if code == SKIPPED => Verdict::Skipped,
                    None => Verdict::Failed(Failure::Test(code.clone())),
                };
                taint_before = *taint;
                outcomes.push(test);
            }
            Said::Done => done = true,
        }
    }
    let silence = || match record.hung {
        Some(limit) => Failure::MachineHung(limit),
        None => Failure::MachineEnded,
    };
    let outside = trouble(record, None);
    if let Some(mut test) = running {
        let failure = trouble(record, Some(&test.name));
        test.verdict = Verdict::Failed(failure.unwrap_or_else(silence));
        outcomes.push(test);
    } else if !done || outside.is_some() {
        outcomes.push(Outcome {
            name: "boot".to_owned(),
            verdict: Verdict::Failed(outside.unwrap_or_else(silence)),
            output: boot,
        });
    }
    (outcomes, rest.into_iter().map(str::to_owned).collect())
}

/// The most severe fault that the kernel logged during the test `of`. If `of` is `None`: outside
/// all tests.
fn trouble(record: &Record, of: Option<&str>) -> Option<Failure> {
    let mut running: Option<&str> = None;
    let mut worst: Option<Failure> = None;
    for line in &record.console {
        if let Some((_, words)) = line.split_once(&record.token) {
            let mut words = words.split_whitespace();
            running = match (words.next(), words.next()) {
                (Some("begin"), name) => name,
                (Some("end"), _) => None,
                _ => running,
            };
            continue;
        }
        if running != of {
            continue;
        }
        match (complaint(line), &worst) {
            // An oops outranks an earlier warning. Otherwise report the first fault, because later
            // ones may be its consequences.
            (Some(failure @ Failure::KernelOops(_)), None | Some(Failure::KernelWarning(_)))
            | (Some(failure), None) => worst = Some(failure),
            _ => {}
        }
    }
    worst
}

/// The fault that a line of the kernel's log reports.
fn complaint(line: &str) -> Option<Failure> {
    // A line begins with a time such as "[ 12.345678] ". With CONFIG_PRINTK_CALLER, "[ T123] "
    // follows.
    let mut text = line;
    while let Some((_, rest)) = text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        text = rest.trim_start();
    }
    let stalls = ["blocked for more than", "soft lockup", "detected stall"];
    let oopses = [
        "BUG:",
        "Oops:",
        "Kernel panic",
        "kernel BUG at",
        "general protection fault",
        "invalid opcode:",
        "stack segment:",
        "divide error:",
    ];
    let begins = |words: &[&str]| words.iter().any(|word| text.starts_with(word));
    if stalls.iter().any(|words| text.contains(words)) {
        Some(Failure::KernelStall(text.to_owned()))
    } else if begins(&oopses) {
        Some(Failure::KernelOops(text.to_owned()))
    } else if begins(&["WARNING:", "UBSAN:", "KASAN:", "refcount_t:"]) {
        Some(Failure::KernelWarning(text.to_owned()))
    } else {
        None
    }
}

impl Said {
    /// Parses a line of the report port. If a test's output does not end with a newline, the
    /// runner's part follows it in the same line.
    pub(super) fn parse(line: &str, token: &str) -> Vec<Self> {
        let line = line.trim_end_matches(['\n', '\r']);
        let Some((output, words)) = line.split_once(token) else {
            return vec![Self::Output(line.to_owned())];
        };
        let mut said = Vec::new();
        if !output.is_empty() {
            said.push(Self::Output(output.to_owned()));
        }
        let words: Vec<&str> = words.split_whitespace().collect();
        match *words.as_slice() {
            ["ready", version] => said.push(Self::Ready(version.to_owned())),
            ["begin", name] => said.push(Self::Begin(name.to_owned())),
            ["end", name, code, taint] => said.push(Self::End {
                name: name.to_owned(),
                code: code.to_owned(),
                // Unreadable flags count as a fault.
                taint: taint.parse().unwrap_or(u64::MAX),
            }),
            ["done"] => said.push(Self::Done),
            _ => said.push(Self::Output(line.to_owned())),
        }
        said
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Test(code) => write!(out, "exit code {code}"),
            Self::TestHung => write!(out, "hung: killed at its limit"),
            Self::LeftChanged => write!(out, "left the machine changed"),
            Self::KernelWarning(line) => write!(out, "the kernel warned: {line}"),
            Self::KernelOops(line) => write!(out, "the kernel stopped: {line}"),
            Self::KernelStall(line) => write!(out, "the kernel stalled: {line}"),
            Self::MachineHung(limit) => {
                write!(out, "the machine hung: no report for {} s", limit.as_secs())
            }
            Self::MachineEnded => write!(out, "the machine ended without a report"),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const TOKEN: &str = "T:";

    fn record(report: &str, console: &str) -> Record {
        Record {
            token: TOKEN.to_owned(),
            console: console.lines().map(str::to_owned).collect(),
            said: report
                .lines()
                .flat_map(|line| Said::parse(line, TOKEN))
                .collect(),
            hung: None,
        }
    }

    fn verdicts(asked: &[&str], record: &Record) -> Vec<(String, Verdict)> {
        let (outcomes, _) = judge(asked, record);
        outcomes
            .into_iter()
            .map(|outcome| (outcome.name, outcome.verdict))
            .collect()
    }

    #[test]
    fn exit_codes_differ() {
        let report = "T: ready 7.3\nT: begin a\nhello\nT: end a 0 0\nT: begin b\nnoT: end b 1 0\n\
                      T: begin c\nT: end c 77 0\nT: begin d\nT: end d late 0\nT: done";
        let record = record(report, "");
        let (outcomes, rest) = judge(&["a", "b", "c", "d"], &record);
        assert!(rest.is_empty());
        assert_eq!(outcomes[0].output, ["hello"]);
        assert_eq!(outcomes[1].output, ["no"]);
        let found: Vec<_> = outcomes.into_iter().map(|test| test.verdict).collect();
        let failed = Verdict::Failed;
        assert_eq!(
            found,
            [
                Verdict::Passed,
                failed(Failure::Test("1".to_owned())),
                Verdict::Skipped,
                failed(Failure::TestHung),
            ]
        );
    }

    #[test]
    fn a_warning_fails_the_test_in_which_it_came() {
        let report = "T: ready 7\nT: begin a\nT: end a 0 0\nT: begin b\nT: end b 0 512\nT: done";
        for warning in [
            "[    2.5] WARNING: CPU: 0 PID: 1 at kernel/x.c:1 y+0x1/0x2",
            "[    2.5][   T12] WARNING: kernel/x.c:1 at y+0x1/0x2, CPU#1: sh/12",
        ] {
            let console = format!(
                "[ 1.0] T: begin a\n[ 1.1] T: end a 0 0\n[ 2.0] T: begin b\n{warning}\n\
                 [ 3.0] T: end b 0 512"
            );
            let found = verdicts(&["a", "b"], &record(report, &console));
            assert_eq!(found[0].1, Verdict::Passed);
            let Verdict::Failed(Failure::KernelWarning(line)) = &found[1].1 else {
                panic!("{:?}", found[1]);
            };
            assert!(line.starts_with("WARNING: "), "{line}");
        }
    }

    #[test]
    fn a_taint_alone_fails_the_test_that_brought_it_and_not_the_next() {
        let report = "T: ready 7\nT: begin a\nT: end a 0 512\nT: begin b\nT: end b 0 512\nT: done";
        let found = verdicts(&["a", "b"], &record(report, ""));
        assert!(matches!(
            found[0].1,
            Verdict::Failed(Failure::KernelWarning(_))
        ));
        assert_eq!(found[1].1, Verdict::Passed);
    }

    #[test]
    fn an_oops_ends_the_boot_and_leaves_the_rest() {
        let report = "T: ready 7\nT: begin a\nabout to die";
        let console = "[ 1.0] T: begin a\n[ 1.1] WARNING: x\n\
                       [ 1.2] BUG: kernel NULL pointer dereference, address: 0\n\
                       [ 1.3] Kernel panic - not syncing: Fatal exception";
        let record = record(report, console);
        let (outcomes, rest) = judge(&["a", "b"], &record);
        assert_eq!(outcomes.len(), 1);
        assert_eq!(outcomes[0].output, ["about to die"]);
        let Verdict::Failed(Failure::KernelOops(line)) = &outcomes[0].verdict else {
            panic!("{outcomes:?}");
        };
        assert!(line.starts_with("BUG: "), "{line}");
        assert_eq!(rest, ["b"]);
    }

    #[test]
    fn silence_is_a_hang_of_what_was_running() {
        let mut silent = record("T: ready 7\nT: begin a", "");
        silent.hung = Some(Duration::from_secs(9));
        let hung = Verdict::Failed(Failure::MachineHung(Duration::from_secs(9)));
        assert_eq!(verdicts(&["a"], &silent), [("a".to_owned(), hung.clone())]);
        let mut unborn = record("", "");
        unborn.hung = Some(Duration::from_secs(9));
        assert_eq!(verdicts(&["a"], &unborn), [("boot".to_owned(), hung)]);
    }

    #[test]
    fn a_warning_outside_of_every_test_is_the_boots() {
        let report = "T: ready 7\nT: begin a\nT: end a 0 0\nT: done";
        let console = "[ 0.5] WARNING: arch/x86/kernel/smpboot.c:1 at z\n[ 1.0] T: begin a\n\
                       [ 1.1] T: end a 0 0";
        let found = verdicts(&["a"], &record(report, console));
        assert_eq!(found[0].1, Verdict::Passed);
        assert_eq!(found[1].0, "boot");
        assert!(matches!(
            found[1].1,
            Verdict::Failed(Failure::KernelWarning(_))
        ));
    }
}
