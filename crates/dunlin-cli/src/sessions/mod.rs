//! `dunlin status`, `cancel` and `resolve`: what the sessions of this host are
//! at, by their journals and by the processes that have them, and what an
//! operator does about it.

mod cancel;
mod resolve;
mod status;

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;
use dunlin::engine::journal::{Entry, Journal, Record, Role};

pub(crate) use cancel::Cancel;
pub(crate) use resolve::{Decision, Resolve, asking};
pub(crate) use status::Status;

/// Where sessions are remembered.
#[derive(Clone, Debug, Args)]
pub(crate) struct StatePath {
    /// Directory of what this host remembers: journals of migrations, and records
    /// of what IPsec has installed [default: /var/lib/dunlin for root, else
    /// $XDG_STATE_HOME/dunlin or ~/.local/state/dunlin].
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
}

impl StatePath {
    pub(crate) fn directory(&self) -> Result<PathBuf> {
        use std::os::unix::fs::MetadataExt;
        if let Some(directory) = &self.state_dir {
            return Ok(directory.clone());
        }
        // The kernel lets a process's own entry belong to its effective user.
        if std::fs::metadata("/proc/self").is_ok_and(|entry| entry.uid() == 0) {
            return Ok("/var/lib/dunlin".into());
        }
        let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        set("XDG_STATE_HOME")
            .map(PathBuf::from)
            .or_else(|| set("HOME").map(|home| PathBuf::from(home).join(".local/state")))
            .map(|state| state.join("dunlin"))
            .context("neither $XDG_STATE_HOME nor $HOME is set: give --state-dir")
    }

    /// The journal, made if it is not there.
    pub(crate) fn open(&self) -> Result<Journal> {
        Ok(Journal::open(&self.directory()?)?)
    }

    /// What somebody has to know who starts a VM of this name anew: sessions
    /// that moved one, and whose process died before anybody knew where it is.
    pub(crate) fn left_behind(&self, name: &str) -> Result<Vec<String>> {
        let entries = self.list()?;
        Ok(entries
            .iter()
            .filter(|entry| !entry.lives)
            .filter_map(|entry| match &entry.record {
                Ok(Some(record)) if record.vm_name == name => status::to_do(entry, record)
                    .map(|todo| format!("{}: {todo}", about(entry.role, record))),
                _ => None,
            })
            .collect())
    }

    /// Every session that is remembered. Looking makes no directory.
    fn list(&self) -> Result<Vec<Entry>> {
        let directory = self.directory()?;
        let is_there = directory
            .try_exists()
            .with_context(|| format!("{} cannot be looked at", directory.display()))?;
        if !is_there {
            return Ok(Vec::new());
        }
        Ok(self.open()?.list()?)
    }

    /// The one session whose name begins with `prefix`: its source's side,
    /// where both sides are on this host.
    fn find(&self, prefix: &str) -> Result<(Entry, Record)> {
        let prefix = prefix.to_ascii_lowercase();
        let mut found: Vec<Entry> = self
            .list()?
            .into_iter()
            .filter(|entry| hex(&entry.session).starts_with(&prefix))
            .collect();
        found.sort_by_key(|entry| entry.role);
        let Some(first) = found.first() else {
            bail!(
                "no session {prefix} is remembered in {}: see `dunlin status`, and is --state-dir \
                 the same?",
                self.directory()?.display()
            );
        };
        if found.iter().any(|entry| entry.session != first.session) {
            bail!("several sessions begin with {prefix}: give more of it");
        }
        let entry = found.swap_remove(0);
        match &entry.record {
            Ok(Some(record)) => {
                let record = record.clone();
                Ok((entry, record))
            }
            Ok(None) => bail!("the session has recorded nothing: it has just begun, or never did"),
            Err(why) => bail!("the journal of this session cannot be relied upon: {why}"),
        }
    }
}

fn parse_session(text: &str) -> Result<String, String> {
    let digits = text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if digits && (4..=32).contains(&text.len()) {
        Ok(text.into())
    } else {
        Err("a session has 32 hexadecimal digits, of which 4 may do: see `dunlin status`".into())
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Which session, in a few words.
fn about(role: Role, record: &Record) -> String {
    let way = match role {
        Role::Source => "to",
        Role::Destination => "from",
    };
    format!(
        "VM {} {way} {}",
        crate::display::clean(&record.vm_name),
        crate::display::clean(&record.peer)
    )
}
