//! The output of results: a table or JSON lines, and a report.

use std::fs;
use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;

use crate::progress::Progress;
use crate::results::Results;
use crate::{report, table};

/// The command-line flags of every benchmark.
#[derive(Args, Clone, Debug, Default)]
#[non_exhaustive]
pub struct Output {
    /// Print one JSON object per line instead of a table.
    #[arg(long)]
    pub json: bool,
    /// Also write the results as one self-contained HTML page.
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
}

impl Output {
    /// Creates the progress of a run with `steps` calls of [`Progress::step`].
    #[must_use]
    pub fn progress(&self, steps: usize) -> Progress {
        Progress::new(steps, self.json)
    }

    /// Prints the results, and writes the report if one was requested. A closed standard output is
    /// not an error.
    ///
    /// # Errors
    /// The report cannot be written.
    pub fn print(&self, results: &Results) -> Result<()> {
        let text = if self.json {
            let lines = results.json().into_iter().map(|line| format!("{line}\n"));
            lines.collect()
        } else {
            table::tables(results)
        };
        let mut out = std::io::stdout().lock();
        let _ = out.write_all(text.as_bytes());
        let _ = out.flush();
        if let Some(path) = &self.report {
            fs::write(path, report::page(results))
                .with_context(|| format!("cannot write the report {}", path.display()))?;
        }
        Ok(())
    }
}
