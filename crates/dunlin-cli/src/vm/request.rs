//! What can be asked of a VM's process.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use dunlin::engine::source;
use serde::{Deserialize, Serialize};

use crate::control::Client;
use crate::identity::Common;
use crate::options::MigrateFlags;

/// How long an answer may take that needs no migration.
pub(crate) const ANSWER_LIMIT: Duration = Duration::from_secs(10);

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
    /// Asks the process behind a control socket.
    pub(crate) fn ask(&self, socket: &Path) -> Result<Client> {
        let takes_long = matches!(self, Self::Migrate { .. } | Self::Watch | Self::Cancel);
        self.ask_within(socket, (!takes_long).then_some(ANSWER_LIMIT))
    }

    /// Asks the process behind a control socket, whose lines each come within `limit`.
    pub(crate) fn ask_within(&self, socket: &Path, limit: Option<Duration>) -> Result<Client> {
        Client::ask(socket, "VM", self, limit)
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
