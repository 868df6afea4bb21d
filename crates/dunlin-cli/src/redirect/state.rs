//! Whether the rules in force are those of the configuration.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::table::{Counters, Record, Table};

/// The result of a comparison, as JSON for programs and for the tunnel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct State {
    /// The digest in the table in force; empty if there is no table.
    pub(super) digest: String,
    pub(super) state: Verdict,
    /// What differs.
    pub(super) difference: Option<String>,
    pub(super) checked_unix_s: u64,
    /// The counters, by the name of the redirect.
    pub(super) counters: BTreeMap<String, Counters>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Verdict {
    /// The rules in force are those of the configuration.
    Applied,
    /// The rules differ from the record of the last `apply` or from the configuration, there is no
    /// such record, or the configuration is invalid.
    Different,
    /// There is no table.
    Missing,
}

/// What the configuration asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    /// Rules with this digest.
    Digest(String),
    /// Unknown for now, because a name has no address; the text says which.
    Unresolved(String),
    /// Unknown, because of a mistake in the configuration.
    Invalid(String),
}

impl State {
    /// Compares the table with the record of the last `apply`, and with the configuration.
    pub(super) fn of(table: Option<&Table>, record: Option<&Record>, wanted: &Wanted) -> Self {
        let difference = match (table, record) {
            (None, _) => Some(match wanted {
                Wanted::Invalid(text) => format!("there is no table inet dunlin, and {text}"),
                _ => "there is no table inet dunlin".to_owned(),
            }),
            (Some(_), None) => Some("there is no record of the last apply".to_owned()),
            (Some(table), Some(record)) => record
                .difference(&table.record())
                .or_else(|| differs(table, wanted)),
        };
        let state = match (table, &difference) {
            (None, _) => Verdict::Missing,
            (_, Some(_)) => Verdict::Different,
            (_, None) => Verdict::Applied,
        };
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            digest: table.and_then(Table::digest).unwrap_or_default().to_owned(),
            state,
            difference,
            checked_unix_s: since.map_or(0, |since| since.as_secs()),
            counters: table.map(Table::counters).unwrap_or_default(),
        }
    }

    pub(super) fn is_applied(&self) -> bool {
        self.state == Verdict::Applied
    }

    /// The verdict with what differs and the remedy, in one line.
    pub(super) fn text(&self) -> String {
        match &self.difference {
            None => "the rules in force are those of the configuration".to_owned(),
            Some(difference) => format!(
                "the rules in force are not those of the configuration (at fault: this side): \
                 {difference}; run `dunlin redirect apply`"
            ),
        }
    }
}

fn differs(table: &Table, wanted: &Wanted) -> Option<String> {
    match wanted {
        Wanted::Digest(digest) if table.digest() == Some(digest) => None,
        Wanted::Digest(_) => {
            Some("the configuration or an address of a peer was changed".to_owned())
        }
        Wanted::Unresolved(_) => None,
        Wanted::Invalid(text) => Some(text.clone()),
    }
}
