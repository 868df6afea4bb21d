//! The output of results: a table or JSON lines, and a report.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
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
    ///
    /// # Errors
    /// The report could not be written after the run.
    pub fn progress(&self, steps: usize) -> Result<Progress> {
        if let Some(path) = &self.report {
            let shown = path.display();
            let parent = path
                .parent()
                .filter(|parent| !parent.as_os_str().is_empty());
            let parent = parent.unwrap_or(Path::new("."));
            ensure!(
                parent.is_dir(),
                "--report {shown}: there is no directory {}; create it",
                parent.display()
            );
            ensure!(
                !path.is_dir(),
                "--report {shown} is a directory; name a file"
            );
        }
        Ok(Progress::new(steps, self.json))
    }

    /// Writes the report if one was requested, and prints the results. It is not an error if the
    /// reader of standard output has closed it.
    ///
    /// # Errors
    /// The report or the results cannot be written.
    pub fn print(&self, results: &Results) -> Result<()> {
        let text = if self.json {
            let lines = results.json().into_iter().map(|line| format!("{line}\n"));
            lines.collect()
        } else {
            table::tables(results)
        };
        let report = self.report.as_ref().map(|path| {
            fs::write(path, report::page(results))
                .with_context(|| format!("cannot write the report {}", path.display()))
        });
        let printed = put(io::stdout().lock(), &text);
        report.transpose()?;
        printed.context("cannot write the results to standard output")
    }
}

/// Writes all of `text`, unless the reader of a pipe has closed it.
fn put(mut out: impl Write, text: &str) -> io::Result<()> {
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    match written {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn lost_results_are_an_error_but_not_if_the_reader_has_closed_the_pipe() {
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        assert!(put(full, "results").is_err());
        let (near, far) = std::os::unix::net::UnixStream::pair().unwrap();
        drop(far);
        put(near, "results").unwrap();
    }

    #[test]
    fn a_report_that_could_not_be_written_is_an_error_before_the_run() {
        let output = |report: &str| Output {
            json: true,
            report: Some(report.into()),
        };
        assert!(output("page.html").progress(1).is_ok());
        let missing = output("/proc/none/page.html").progress(1).unwrap_err();
        assert!(missing.to_string().contains("/proc/none;"), "{missing}");
        assert!(output("/proc").progress(1).is_err());
    }
}
