//! `dunlin vm migrate`, `watch`, `set`, `status` and `ask`: requests to a VM's process.

use std::fs::File;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use dunlin::engine::vmm::FaultCode;
use dunlin_linux::signals::EndSignals;
use serde_json::json;

use super::control_service::Command;
use super::request::{ANSWER_LIMIT, Request};
use crate::code::{DONE, FAILED, IN_DOUBT, SIGNAL};
use crate::control::Client;
use crate::display::{Display, MIB, pace};
use crate::identity::Common;
use crate::line::{FailedLine, Line, MigrationLine, MovedLine, StatusLine};
use crate::log;
use crate::options::{ControlPath, MigrateFlags, parse_rate};
use crate::service::start;
use crate::text::clean;

/// The VM to address, and the output format.
#[derive(Debug, Args)]
pub(crate) struct Target {
    /// The VM's name.
    #[arg(long)]
    name: String,
    #[command(flatten)]
    control: ControlPath,
    /// Print one JSON object per line.
    #[arg(long)]
    json: bool,
}

impl Target {
    fn socket(&self) -> Result<PathBuf> {
        self.control.socket(&self.name)
    }

    pub(super) fn watch(&self) -> Result<i32> {
        let client = Request::Watch.ask(&self.socket()?)?;
        let mut display = Display::new(self.json);
        Ok(code(until_end(client, None, &mut |line| {
            display.show(line)
        })?))
    }

    pub(super) fn status(&self) -> Result<i32> {
        let status = status(&self.socket()?, ANSWER_LIMIT)?;
        if self.json {
            Line::Status(Box::new(status)).print();
            return Ok(DONE);
        }
        println!(
            "{}: {} (process {})",
            clean(&status.name),
            clean(&status.state),
            status.pid
        );
        println!(
            "  pages checked by the guest: {}, full passes: {}, beats: {}",
            status.pages_checked, status.full_passes, status.beats
        );
        println!(
            "  longest gap between beats {:.1} ms",
            status.largest_gap_ms
        );
        if let Some(downtime) = status.downtime_ms {
            println!("  downtime of the last move {downtime:.1} ms");
        }
        if let Some(migration) = &status.migration {
            println!("  {}", describe(migration));
        }
        Ok(DONE)
    }

    /// Sends a request that is answered by success or failure; returns the exit code.
    fn order(&self, request: &Request) -> Result<i32> {
        request.ask(&self.socket()?)?.done(self.json)
    }
}

#[derive(Debug, Args)]
pub(crate) struct Migrate {
    #[command(flatten)]
    target: Target,
    #[command(flatten)]
    flags: MigrateFlags,
    #[command(flatten)]
    common: Common,
    /// Write a timeline of the migration to this file, in Chrome's trace format, for Perfetto or
    /// about:tracing.
    #[arg(long, value_name = "FILE")]
    timeline: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct Set {
    #[command(flatten)]
    target: Target,
    /// Rate limit for all data lanes together, such as 500M (bytes per second), or `none`. The last
    /// pass keeps its own limit.
    #[arg(long, value_name = "BYTES_PER_S", value_parser = parse_cap)]
    rate: Cap,
}

/// A rate limit, or none.
type Cap = Option<u64>;

fn parse_cap(text: &str) -> Result<Cap, String> {
    if text == "none" {
        return Ok(None);
    }
    parse_rate(text)
        .map(Some)
        .map_err(|error| format!("{error}; or write none for no limit"))
}

#[derive(Debug, Args)]
pub(crate) struct Ask {
    #[command(flatten)]
    target: Target,
    /// What to ask of the VM.
    #[arg(value_enum)]
    what: Command,
}

/// How a migration ended.
pub(crate) type Ended = Result<Box<MovedLine>, FailedLine>;

fn code(ended: Ended) -> i32 {
    ended.map_or_else(|failed| failed.code, |_| DONE)
}

/// Requests a migration and shows it until it ends. The first signal cancels the migration; a
/// second signal ends this process. With `timeline`, writes the timeline to that file.
pub(crate) fn follow(
    socket: &Path,
    common: &Common,
    flags: &MigrateFlags,
    signals: Option<EndSignals>,
    timeline: Option<&Path>,
    show: &mut dyn FnMut(&Line),
) -> Result<Ended> {
    let created = timeline.map(|path| {
        File::create(path).with_context(|| format!("cannot create {}", path.display()))
    });
    let timeline = created.transpose()?;
    let directory = &common.identity;
    let identity = directory
        .canonicalize()
        .with_context(|| format!("cannot find the identity directory {}", directory.display()))?;
    let request = Request::Migrate {
        common: Common {
            identity,
            ..common.clone()
        },
        flags: flags.clone(),
        timeline: timeline.is_some(),
    };
    let client = request.ask(socket)?;
    if let Some(signals) = signals {
        let more = client.more()?;
        start("signals", move || cancel_at_signal(&signals, more))?;
    }
    until_end(client, timeline, show)
}

fn cancel_at_signal(signals: &EndSignals, mut migration: UnixStream) {
    if let (Ok(signal), Ok(cancel)) = (signals.wait(), serde_json::to_string(&Request::Cancel)) {
        eprintln!(
            "{}: cancelling, and waiting until the VM runs at the source again; a second signal \
             stops waiting and leaves the rest to the VM's process",
            signal.name()
        );
        if let Err(error) = writeln!(migration, "{cancel}") {
            eprintln!("warning: cannot ask the VM's process to cancel: {error}");
        }
    }
    if let Ok(signal) = signals.wait() {
        std::process::exit(SIGNAL + signal.number());
    }
}

/// Shows a migration until it ends.
fn until_end(
    mut client: Client,
    mut timeline: Option<File>,
    show: &mut dyn FnMut(&Line),
) -> Result<Ended> {
    let mut committing = false;
    while let Some(line) = client.next()? {
        if let Line::Timeline { events } = &line {
            if let Some(mut file) = timeline.take()
                && let Err(error) = file.write_all(json!(events).to_string().as_bytes())
            {
                // Only warn, because the migration has already succeeded or failed.
                log::warn([format!("cannot write the timeline: {error}")]);
            }
            continue;
        }
        show(&line);
        match line {
            Line::Committing => committing = true,
            Line::Moved(moved) => return Ok(Ok(moved)),
            Line::Failed(failed) => return Ok(Err(failed)),
            _ => {}
        }
    }
    // The process or its guest died. A *committing* line is the only evidence of how far the
    // migration had progressed.
    let failed = if committing {
        let text = "the VM's process died after it began to send commit to the destination: check \
                    whether the VM runs there";
        FailedLine::new(FaultCode::Internal, "in-doubt", text, IN_DOUBT)
    } else {
        let text = "the VM's process died, and the VM with it";
        FailedLine::new(FaultCode::Internal, "gone", text, FAILED)
    };
    show(&Line::Failed(failed.clone()));
    Ok(Err(failed))
}

impl Migrate {
    pub(crate) fn run(self) -> Result<i32> {
        let signals = EndSignals::block()?;
        let mut display = Display::new(self.target.json);
        let ended = follow(
            &self.target.socket()?,
            &self.common,
            &self.flags,
            Some(signals),
            self.timeline.as_deref(),
            &mut |line| display.show(line),
        )?;
        Ok(code(ended))
    }
}

impl Set {
    pub(crate) fn run(self) -> Result<i32> {
        self.target.order(&Request::Set { rate: self.rate })
    }
}

/// A migration under way, in one line.
pub(crate) fn describe(migration: &MigrationLine) -> String {
    let direction = if migration.role == "source" {
        "moves to"
    } else {
        "comes from"
    };
    let mut text = format!(
        "{direction} {}: {} for {:.0} s",
        clean(&migration.peer),
        clean(&migration.phase),
        migration.seconds
    );
    if let Some(progress) = &migration.progress {
        text.push_str(&format!(", {}", pace(progress, ", ")));
    }
    if let Some(rate) = migration.rate {
        text.push_str(&format!(", capped at {:.0} MiB/s", rate as f64 / MIB));
    }
    if migration.throttle != 0 {
        text.push_str(&format!(", guest slowed down by {} %", migration.throttle));
    }
    text
}

/// Status of the VM behind a control socket, answered within `limit`.
pub(crate) fn status(socket: &Path, limit: Duration) -> Result<StatusLine> {
    let mut client = Request::Status.ask_within(socket, Some(limit))?;
    client.expect(|line| match line {
        Line::Status(status) => Some(*status),
        _ => None,
    })
}

impl Ask {
    pub(crate) fn run(self) -> Result<i32> {
        self.target.order(&match self.what {
            Command::Pause => Request::Pause,
            Command::Resume => Request::Resume,
            Command::PowerOff => Request::PowerOff,
        })
    }
}
