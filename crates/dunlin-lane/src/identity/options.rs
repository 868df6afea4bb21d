//! How an identity is loaded.

use std::time::Duration;

use super::layout::{Layout, Role};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// How strictly files are looked at, and which.
#[derive(Clone, Copy, Debug)]
pub struct LoadOptions {
    /// How the files lie in the directory; told by what is there if none is given.
    pub layout: Option<Layout>,
    /// The side of a migration that it is for. Dunlin's own layout serves both.
    pub role: Option<Role>,
    /// Accept a key that every user of this host can read. For tests and broken file systems.
    pub allow_key_open_to_all: bool,
    /// How long ahead the end of a validity is warned of; no sooner, though, than in the last
    /// third of it, so that what is made to last a day is not always about to end.
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
