//! The parts of an identity and their validity.

use std::fmt;
use std::path::PathBuf;
use std::time::SystemTime;

/// A kind of item in an identity's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Item {
    /// This host's certificate.
    Certificate,
    /// An authority's certificate.
    Authority,
    /// A revocation list.
    RevocationList,
}

/// The validity of one item of an identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dated {
    /// The kind of item.
    pub item: Item,
    /// The file that contains the item.
    pub path: PathBuf,
    /// The item's position in that file, from zero.
    pub position: usize,
    /// The beginning of the item's validity; for a revocation list, the date of the list.
    pub not_before: SystemTime,
    /// The end of the item's validity; for a revocation list, the date on which the next list is
    /// due.
    pub not_after: SystemTime,
    /// The end of the item's validity, for display.
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
