//! Verdicts, and helpers of several checks.

use std::fs;

use serde::{Deserialize, Serialize};

/// What a check found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Verdict {
    /// The name of the check; docs/reference/doctor.md lists all.
    pub(crate) check: String,
    /// The peer, if the check concerns one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) peer: Option<String>,
    pub(crate) state: State,
    /// What the check found. Two runs on an unchanged host find the same, except for speeds and
    /// times.
    pub(crate) value: String,
    /// What this means for migrations.
    pub(crate) means: String,
    /// The remedy; empty if the state is [`State::Ok`].
    pub(crate) fix: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    Ok,
    /// Could not be determined.
    Unknown,
    /// Migrations work, but slower or not in every mode.
    Warn,
    /// Migrations of some VMs fail, or are in the clear.
    Fail,
}

/// The remedy of checks that need privileges.
pub(super) const AS_ROOT: &str = "run as root";

impl Verdict {
    pub(super) fn ok(check: &str, value: impl Into<String>, means: impl Into<String>) -> Self {
        Self::new(State::Ok, check, value, means, "")
    }

    pub(super) fn warn(
        check: &str,
        value: impl Into<String>,
        means: impl Into<String>,
        fix: impl Into<String>,
    ) -> Self {
        Self::new(State::Warn, check, value, means, fix)
    }

    pub(super) fn fail(
        check: &str,
        value: impl Into<String>,
        means: impl Into<String>,
        fix: impl Into<String>,
    ) -> Self {
        Self::new(State::Fail, check, value, means, fix)
    }

    /// A verdict without a value.
    pub(super) fn unknown(check: &str, means: impl Into<String>, fix: impl Into<String>) -> Self {
        Self::new(State::Unknown, check, "", means, fix)
    }

    pub(super) fn with_value(self, value: String) -> Self {
        Self { value, ..self }
    }

    fn new(
        state: State,
        check: &str,
        value: impl Into<String>,
        means: impl Into<String>,
        fix: impl Into<String>,
    ) -> Self {
        Self {
            check: check.to_owned(),
            peer: None,
            state,
            value: value.into(),
            means: means.into(),
            fix: fix.into(),
        }
    }
}

impl State {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Unknown => "unknown",
            Self::Warn => "warn",
            Self::Fail => "fail",
        }
    }
}

/// The text of a file of /proc or /sys without spaces and line breaks at its end; `None` if the
/// file cannot be read.
pub(super) fn setting(path: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    Some(text.trim_end().to_owned())
}

/// Bytes per second, in GiB/s.
pub(super) fn gib_per_s(bytes_per_second: f64) -> String {
    format!("{:.2} GiB/s", bytes_per_second / f64::from(1 << 30))
}
