//! `dunlin status`: every session in this host's journals, and every tunnel that runs here.

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Result;
use clap::Args;
use dunlin::engine::journal::{DestinationRecord, Entry, Record, Role, SourceRecord, State};
use dunlin::engine::vmm::FaultCode;
use serde_json::{Value, json};

use crate::code::{DONE, FAILED};
use crate::line::{FailedLine, Line, StatusLine};
use crate::options::{ControlPath, TUNNELS};
use crate::state::{StatePath, about, hex};
use crate::text::{chained, clean};
use crate::tunnel;
use crate::vm::{describe, status};

/// Time limit for the answer of a process. A stopped process does not answer.
const LIVE_LIMIT: Duration = Duration::from_secs(2);

#[derive(Debug, Args)]
pub(crate) struct Status {
    #[command(flatten)]
    state: StatePath,
    #[command(flatten)]
    control: ControlPath,
    /// Print one JSON object for each session and each tunnel.
    #[arg(long)]
    json: bool,
}

impl Status {
    pub(crate) fn run(&self) -> Result<i32> {
        let tunnels = self.control.sockets_in(TUNNELS);
        let mut code = DONE;
        let mut failures = Vec::new();
        let entries = match self.state.list() {
            Ok(entries) => {
                if entries.is_empty() && !self.json {
                    println!("no sessions in {}", self.state.directory()?.display());
                }
                entries
            }
            // The journals are unreadable. Show the tunnels anyway, because they have no journal.
            Err(error) => {
                code = FAILED;
                let error = error.context("cannot show sessions");
                failures.push(FailedLine::from(&error));
                eprintln!("dunlin: {}", clean(&chained(&error)));
                Vec::new()
            }
        };
        for entry in &entries {
            match &entry.record {
                Ok(Some(record)) => self.show(entry, record),
                // The session has just started, or ended before its first record.
                Ok(None) => {}
                Err(why) => {
                    code = FAILED;
                    let text = format!(
                        "the journal of session {} ({}) cannot be relied upon: {why}; keep the \
                         file, and find out where the VM is before you run the VM anywhere",
                        hex(&entry.session),
                        entry.role.name()
                    );
                    eprintln!("warning: {text}");
                    failures.push(FailedLine::new(FaultCode::Journal, "", text, code));
                }
            }
        }
        for socket in &tunnels {
            match tunnel::status_within(socket, LIVE_LIMIT) {
                Ok(line) if self.json => Line::Tunnel(Box::new(line)).print(),
                Ok(line) => tunnel::show(&line),
                Err(error) => eprintln!("warning: {}", clean(&chained(&error))),
            }
        }
        if self.json {
            for failed in failures {
                Line::Failed(failed).print();
            }
        }
        Ok(code)
    }

    fn show(&self, entry: &Entry, record: &Record) {
        let live = (entry.lives && !record.owner.is_empty())
            .then(|| status(Path::new(&record.owner), LIVE_LIMIT))
            .and_then(Result::ok);
        if self.json {
            Line::Session(session(entry, record, live)).print();
            return;
        }
        println!("{}  {}", hex(&entry.session), about(entry.role, record));
        let process = if entry.lives {
            "its process is alive"
        } else {
            "its process has died"
        };
        println!(
            "  {}, attempt {}, since {}; {process}",
            record.state,
            record.attempt,
            ago(record.written_ms)
        );
        match live
            .as_ref()
            .map(|status| (&status.migration, &status.state))
        {
            Some((Some(migration), _)) => println!("  {}", describe(migration)),
            Some((None, state)) => println!("  the VM is {} here", clean(state)),
            None => {}
        }
        if let Some(text) = meaning(record.state, entry.lives) {
            println!("  {text}");
        }
        if let Some(text) = to_do(entry, record) {
            println!("  {text}");
        }
    }
}

fn session(entry: &Entry, record: &Record, live: Option<StatusLine>) -> Value {
    let phase = match record.state {
        State::Source(state) => state.name(),
        State::Destination(state) => state.name(),
    };
    json!({
        "session": hex(&entry.session),
        "role": entry.role.name(),
        "phase": phase,
        "vm": record.vm_name,
        "uuid": hex(&record.vm_uuid),
        "peer": record.peer,
        "attempt": record.attempt,
        "process": if entry.lives { "lives" } else { "died" },
        // The control socket of the process that owns the VM.
        "owner": record.owner,
        "started_ms": record.started_ms,
        "recorded_ms": record.written_ms,
        // Whether `dunlin resolve` has a question to settle.
        "resolvable": to_do(entry, record).is_some(),
        // The status that the session's process reports, if it answers.
        "live": live,
    })
}

/// Explains what a record in this state means for the VM, unless the state's name already says so.
fn meaning(state: State, lives: bool) -> Option<&'static str> {
    match (state, lives) {
        (State::Source(SourceRecord::Migrating), false) => {
            Some("the VM was here when its process died, before commit")
        }
        (State::Source(SourceRecord::Committing), false) => {
            Some("the VM may run at the destination; check there")
        }
        (State::Source(SourceRecord::RanThenDied), _) => {
            Some("the VM ran at the destination and died there")
        }
        (State::Destination(DestinationRecord::Prepared), false) => Some("the VM never ran here"),
        (State::Destination(DestinationRecord::MovedOn), _) => {
            Some("the VM ran here and moved on; the source may keep an older paused copy")
        }
        (State::Destination(DestinationRecord::Running), false) => {
            Some("the VM ran here until it died; the source may keep an older paused copy")
        }
        _ => None,
    }
}

/// What the operator may do about the session.
pub(super) fn to_do(entry: &Entry, record: &Record) -> Option<String> {
    match record.state {
        State::Source(SourceRecord::Committing | SourceRecord::RanThenDied)
            if entry.role == Role::Source =>
        {
            Some(format!(
                "`dunlin resolve {}` settles it",
                &hex(&entry.session)[..8]
            ))
        }
        _ => None,
    }
}

/// Age of a time, by this host's clock.
pub(super) fn ago(ms: u64) -> String {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let seconds = now.saturating_sub(Duration::from_millis(ms)).as_secs();
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

/// Warnings to show before a VM with this name starts: the sessions in doubt that moved a VM with
/// this name and have no live process.
pub(crate) fn left_behind(state: &StatePath, name: &str) -> Result<Vec<String>> {
    let entries = state.list()?;
    Ok(entries
        .iter()
        .filter(|entry| !entry.lives)
        .filter_map(|entry| match &entry.record {
            Ok(Some(record)) if record.vm_name == name => {
                to_do(entry, record).map(|todo| format!("{}: {todo}", about(entry.role, record)))
            }
            _ => None,
        })
        .collect())
}
