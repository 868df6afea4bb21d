//! The state directory: journals and IPsec records of this host.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;
use dunlin::engine::journal::{Entry, Journal, Record, Role};

use crate::text::clean;

/// Subdirectory of the IPsec records.
pub(crate) const IPSEC_RECORDS: &str = "ipsec";

/// Location of the state directory.
#[derive(Clone, Debug, Args)]
pub(crate) struct StatePath {
    /// Directory of persistent state: journals of migrations and records of installed IPsec state
    /// [default: /var/lib/dunlin for root, else $XDG_STATE_HOME/dunlin or ~/.local/state/dunlin].
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
}

impl StatePath {
    pub(crate) fn directory(&self) -> Result<PathBuf> {
        use std::os::unix::fs::MetadataExt;
        if let Some(directory) = &self.state_dir {
            return Ok(directory.clone());
        }
        // The owner of /proc/self is the effective user.
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

    /// The directory on the command line, to pass on to another command.
    pub(crate) fn given(&self) -> Option<&std::path::Path> {
        self.state_dir.as_deref()
    }

    pub(crate) fn ipsec_records(&self) -> Result<PathBuf> {
        Ok(self.directory()?.join(IPSEC_RECORDS))
    }

    /// Opens the journal and creates it if necessary.
    pub(crate) fn open(&self) -> Result<Journal> {
        Ok(Journal::open(&self.directory()?)?)
    }

    /// Every session in the journal. Creates no directory.
    pub(crate) fn list(&self) -> Result<Vec<Entry>> {
        let directory = self.directory()?;
        let is_there = directory
            .try_exists()
            .with_context(|| format!("cannot access {}", directory.display()))?;
        if !is_there {
            return Ok(Vec::new());
        }
        Ok(self.open()?.list()?)
    }

    /// The only session with an identifier that begins with `prefix`. If both sides are on this
    /// host, the entry is that of the source.
    pub(crate) fn find(&self, prefix: &str) -> Result<(Entry, Record)> {
        let prefix = prefix.to_ascii_lowercase();
        let mut found: Vec<Entry> = self
            .list()?
            .into_iter()
            .filter(|entry| hex(&entry.session).starts_with(&prefix))
            .collect();
        found.sort_by_key(|entry| entry.role);
        let Some(first) = found.first() else {
            bail!(
                "no session {prefix} in {}: see `dunlin status`, and check that --state-dir is \
                 that of the session's process",
                self.directory()?.display()
            );
        };
        if found.iter().any(|entry| entry.session != first.session) {
            bail!("several sessions begin with {prefix}: give more digits");
        }
        let entry = found.swap_remove(0);
        match &entry.record {
            Ok(Some(record)) => {
                let record = record.clone();
                Ok((entry, record))
            }
            Ok(None) => bail!(
                "the session has no record: it has just started, or ended before its first record; \
                 try again"
            ),
            Err(why) => {
                Err(why.clone()).context("the journal of this session cannot be relied upon")
            }
        }
    }
}

pub(crate) fn parse_session(text: &str) -> Result<String, String> {
    let digits = text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if digits && (4..=32).contains(&text.len()) {
        Ok(text.into())
    } else {
        Err(
            "invalid session: give 4 to 32 hexadecimal digits, as `dunlin status` shows them"
                .into(),
        )
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Short description of a session.
pub(crate) fn about(role: Role, record: &Record) -> String {
    let direction = match role {
        Role::Source => "to",
        Role::Destination => "from",
    };
    format!(
        "VM {} {direction} {}",
        clean(&record.vm_name),
        clean(&record.peer)
    )
}
