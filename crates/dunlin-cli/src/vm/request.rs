//! What can be asked of a VM's process.

use std::time::Duration;

use dunlin::engine::source;
use serde::{Deserialize, Serialize};

use crate::identity::Common;
use crate::options::MigrateFlags;

/// What can be asked of a VM's process.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case")]
pub(crate) enum Request {
    Status,
    Pause,
    Resume,
    PowerOff,
    Migrate {
        #[serde(flatten)]
        common: Common,
        flags: MigrateFlags,
    },
    /// Follow the migration under way.
    Watch,
    /// Change it.
    Set {
        rate: Option<u64>,
    },
    /// End it. Alone, the answer comes when it has ended.
    Cancel,
    /// Ask the destination once more what became of a VM in doubt, and do what
    /// follows from its answer.
    AskDestination {
        session: [u8; 16],
        #[serde(flatten)]
        common: Common,
        doubt_limit: Duration,
    },
    /// Carry out what the operator has decided about a VM in doubt.
    Resolve {
        session: [u8; 16],
        decision: Decision,
    },
}

impl Request {
    /// Whether the answer may take as long as a migration does.
    pub(crate) fn takes_long(&self) -> bool {
        matches!(self, Self::Migrate { .. } | Self::Watch | Self::Cancel)
    }
}

/// What the operator decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Decision {
    RunHere,
    Destroy,
}

/// Options with which the destination is asked for `doubt_limit`.
pub(crate) fn inquiry_options(doubt_limit: Duration) -> source::Options {
    source::Options::builder()
        .doubt_limit(doubt_limit)
        .connect_limit(Duration::from_secs(5))
        .build()
        .expect("five seconds are a valid limit")
}
