//! Options for loading an identity.

use std::time::Duration;

use super::layout::{Layout, Role};

pub(super) const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Which files of an identity to load, and how strictly to check them.
#[derive(Clone, Copy, Debug)]
pub struct LoadOptions {
    /// The layout of the directory; if `None`, the files that exist determine it.
    pub layout: Option<Layout>,
    /// The side of a migration that the identity is for. An identity in Dunlin's own layout serves
    /// both sides.
    pub role: Option<Role>,
    /// Accepts a key that every user of this host can read. For tests and for file systems without
    /// permissions.
    pub allow_key_open_to_all: bool,
    /// A warning is issued if an item expires within this time and is in the last third of its
    /// validity. The second condition avoids permanent warnings for short-lived items.
    pub warn_before: Duration,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            layout: None,
            role: None,
            allow_key_open_to_all: false,
            warn_before: 30 * DAY,
        }
    }
}
