//! The parts of an identity, and when they are valid.

use std::fmt;
use std::path::PathBuf;
use std::time::SystemTime;

/// What a file of an identity holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Item {
    /// This host's certificate.
    Certificate,
    /// An authority's certificate.
    Authority,
    /// A revocation list.
    RevocationList,
}

/// When something of an identity is valid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dated {
    /// What it is.
    pub item: Item,
    /// The file that it is in.
    pub path: PathBuf,
    /// Its position in that file, from zero.
    pub position: usize,
    /// The beginning of its validity; when it was made, for a revocation list.
    pub not_before: SystemTime,
    /// The end of its validity; when the next one is due, for a revocation list.
    pub not_after: SystemTime,
    /// The same, for people.
    pub until: String,
}

impl fmt::Display for Item {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Certificate => "certificate",
            Self::Authority => "authority's certificate",
            Self::RevocationList => "revocation list",
        })
    }
}
