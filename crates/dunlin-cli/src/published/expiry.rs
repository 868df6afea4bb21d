//! The expiry dates of a process's identity.

use std::time::UNIX_EPOCH;

use dunlin::lane::identity::Dated;
use serde::{Deserialize, Serialize};

/// Maximum number of items of identities in a status. Further items are left out.
const MAX_ITEMS: usize = 64;

/// The expiry date of one item of an identity.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct CertificateLine {
    /// `certificate`, `authority's certificate` or `revocation list`.
    pub(crate) item: String,
    pub(crate) path: String,
    /// The item's position in the file at `path`, from zero.
    pub(crate) position: usize,
    /// The end of the validity, in seconds since 1970.
    pub(crate) not_after_unix_s: u64,
}

/// The expiry dates of the items of one or several identities.
pub(crate) fn expiry(dates: &[Dated]) -> Vec<CertificateLine> {
    dates.iter().take(MAX_ITEMS).map(Into::into).collect()
}

impl From<&Dated> for CertificateLine {
    fn from(dated: &Dated) -> Self {
        let since = dated.not_after.duration_since(UNIX_EPOCH);
        Self {
            item: dated.item.to_string(),
            path: dated.path.display().to_string(),
            position: dated.position,
            not_after_unix_s: since.unwrap_or_default().as_secs(),
        }
    }
}
