//! `cargo xtask keep`: stores the output of a benchmark as the kept results, from which
//! `cargo xtask tables` writes the tables.

use std::fs;
use std::io::{self, Read};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, ensure};
use clap::Args;

use super::kept::{self, Header, Run};

/// Which results to keep, and the facts about the run that their lines do not contain.
#[derive(Args, Debug)]
pub struct KeepOptions {
    /// Name of the file in docs/benchmarking/results, without its extension.
    name: String,
    /// The command that produced the output on standard input, run with `--json`.
    #[arg(long)]
    command: String,
    /// Size of the guest, limits, and other load on the host.
    #[arg(long)]
    conditions: String,
    /// The host, as the pages name it [default: from /proc/cpuinfo].
    #[arg(long)]
    machine: Option<String>,
}

/// Checks the lines on standard input, and replaces the kept results with them.
pub(crate) fn command(options: &KeepOptions) -> Result<ExitCode> {
    let mut lines = String::new();
    let mut input = io::stdin().lock();
    input
        .read_to_string(&mut lines)
        .context("cannot read standard input")?;
    let run = Run {
        date: output("date", &["--utc", "+%F"])?,
        commit: Some(output(
            "git",
            &["describe", "--always", "--dirty", "--exclude", "*"],
        )?),
        machine: match &options.machine {
            Some(machine) => machine.clone(),
            None => {
                machine(&fs::read_to_string("/proc/cpuinfo").context("cannot read /proc/cpuinfo")?)?
            }
        },
        conditions: options.conditions.clone(),
        command: options.command.clone(),
        note: None,
    };
    let text = file(run, &lines)?;
    let path = kept::path(&options.name);
    fs::write(&path, text).with_context(|| format!("cannot write {path}"))?;
    println!("{path} is written; `cargo xtask tables` updates the pages");
    Ok(ExitCode::SUCCESS)
}

/// The text of the file: the description of the run, and the lines unchanged.
fn file(run: Run, lines: &str) -> Result<String> {
    let rows = kept::rows("standard input", lines, 0)?;
    ensure!(!rows.is_empty(), "standard input has no measurements");
    let header = serde_json::to_string(&Header { run })?;
    Ok(format!("{header}\n{}\n", lines.trim_end()))
}

/// The model of the processors, and their number.
fn machine(cpuinfo: &str) -> Result<String> {
    let models = cpuinfo.lines().filter_map(|line| {
        let (name, model) = line.split_once(':')?;
        (name.trim() == "model name").then(|| model.trim())
    });
    let models: Vec<_> = models.collect();
    let model = models.first().context("/proc/cpuinfo names no model")?;
    Ok(format!("{} CPUs ({model})", models.len()))
}

/// The first line of a program's output.
fn output(program: &str, arguments: &[&str]) -> Result<String> {
    let done = Command::new(program).args(arguments).output();
    let done = done.with_context(|| format!("cannot start {program}"))?;
    ensure!(done.status.success(), "{program} failed: {}", done.status);
    let text = String::from_utf8(done.stdout)?;
    Ok(text.lines().next().unwrap_or_default().to_owned())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::tables::kept::Kept;

    fn run() -> Run {
        Run {
            date: "2026-11-25".to_owned(),
            commit: Some("1829ebb0".to_owned()),
            machine: machine("processor : 0\nmodel name\t: A B\nmodel name\t: A B\n").unwrap(),
            conditions: "1 GiB".to_owned(),
            command: "dunlin bench lanes".to_owned(),
            note: None,
        }
    }

    #[test]
    fn the_output_of_a_benchmark_becomes_a_file_of_kept_results() {
        let mut results = dunlin_bench::Results::default();
        for value in [1.0, 2.0] {
            let line = results.line("lanes", "tls").with("lanes", 2);
            line.figure("gib_per_s", value).add();
        }
        let lines = format!("{}\n", results.json()[0]);
        let text = file(run(), &lines).unwrap();
        assert_eq!(text.lines().nth(1), lines.lines().next());
        let kept = Kept::parse("lanes", &text).unwrap();
        assert_eq!(kept.run.machine, "2 CPUs (A B)");
        assert_eq!(kept.rows.len(), 1);
    }

    #[test]
    fn other_lines_are_not_kept() {
        let error = |lines: &str| format!("{:#}", file(run(), lines).unwrap_err());
        assert!(error("a table\n").starts_with("standard input:1: not a JSON object"));
        assert_eq!(error(""), "standard input has no measurements");
    }
}
