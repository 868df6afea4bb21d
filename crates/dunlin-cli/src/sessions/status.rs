//! `dunlin status`: every session in this host's journals, and every tunnel that runs here. With
//! `--history`, the migrations that have ended.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail};
use clap::Args;
use dunlin::engine::journal::{DestinationRecord, Entry, Record, SourceRecord, State};

use crate::code::{DONE, FAILED};
use crate::line::{Line, print_json};
use crate::options::ControlPath;
use crate::published::history::{self, Finished};
use crate::state::{StatePath, about, hex};
use crate::text::clean;
use crate::tunnel;
use crate::vm::describe;
use crate::watch::{LIVE_LIMIT, Recorded, Session, Snapshot, is_resolvable};

#[derive(Debug, Args)]
pub(crate) struct Status {
    #[command(flatten)]
    state: StatePath,
    #[command(flatten)]
    control: ControlPath,
    /// Show the most recent ended migrations of `dunlin vm` on this host, the newest at the end,
    /// instead of sessions and tunnels.
    #[arg(long)]
    history: bool,
    /// Print one JSON object for each session and each tunnel, or for each ended migration.
    #[arg(long)]
    json: bool,
}

impl Status {
    pub(crate) fn run(&self) -> Result<i32> {
        if self.history {
            return self.show_history();
        }
        let snapshot = Snapshot::take(&self.state, &self.control, LIVE_LIMIT);
        if self.json {
            for session in snapshot.sessions {
                Line::Session(serde_json::to_value(session.line)?).print();
            }
            for line in snapshot.tunnels {
                Line::Tunnel(Box::new(line)).print();
            }
        } else {
            if snapshot.sessions.is_empty() && snapshot.failures.is_empty() {
                println!("no sessions in {}", self.state.directory()?.display());
            }
            snapshot.sessions.iter().for_each(show);
            snapshot.tunnels.iter().for_each(tunnel::show);
        }
        for silent in snapshot.silent.iter().filter(|one| one.kind == "tunnel") {
            eprintln!("warning: {}", clean(&silent.text));
        }
        for failed in &snapshot.failures {
            eprintln!("dunlin: {}", clean(&failed.text));
            if self.json {
                Line::Failed(failed.clone()).print();
            }
        }
        Ok(if snapshot.failures.is_empty() {
            DONE
        } else {
            FAILED
        })
    }

    fn show_history(&self) -> Result<i32> {
        let Some(directory) = history::directory(&self.control) else {
            bail!("--control must be a directory, because the history is in a subdirectory of it");
        };
        let finished = history::read(&directory);
        for (_, one) in &finished {
            if self.json {
                let mut object = serde_json::to_value(one)?;
                object["event"] = "history".into();
                print_json(&object);
            } else {
                println!("{}", ended(one));
            }
        }
        if finished.is_empty() && !self.json {
            println!("no ended migrations in {}", directory.display());
        }
        Ok(DONE)
    }
}

/// A migration that has ended, for people.
fn ended(one: &Finished) -> String {
    let way = match &*one.role {
        "source" => "to",
        _ => "from",
    };
    let how = match (&*one.result, one.guest_downtime_ms) {
        ("moved", Some(ms)) => format!("moved, downtime {ms:.1} ms as the guest saw it"),
        ("moved", None) => "moved".to_owned(),
        (result, _) => format!("{result}: {} [{}]", one.text, one.fault),
    };
    clean(&format!(
        "{} {way} {}, {:.1} s, ended {} ago: {how}",
        one.vm,
        one.peer,
        one.total_s,
        ago(one.ended_ms)
    ))
}

/// Prints a session for people.
fn show(session: &Session) {
    let line = &session.line;
    let Some(Recorded { entry, record }) = &session.recorded else {
        return;
    };
    println!("{}  {}", line.session, about(entry.role, record));
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
    match line
        .live
        .as_ref()
        .map(|live| (&live.migration, &live.state))
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

/// Explains what a record in this state means for the VM, unless the state's name already says so.
pub(crate) fn meaning(state: State, lives: bool) -> Option<&'static str> {
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

/// What the operator can do about the session.
pub(crate) fn to_do(entry: &Entry, record: &Record) -> Option<String> {
    is_resolvable(entry, record)
        .then(|| format!("`dunlin resolve {}` settles it", &hex(&entry.session)[..8]))
}

/// The time that has passed since `ms` (milliseconds since 1970) by this host's clock, as text.
pub(crate) fn ago(ms: u64) -> String {
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
