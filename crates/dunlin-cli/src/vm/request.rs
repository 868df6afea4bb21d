//! Requests to a VM's process.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use dunlin::engine::source;
use serde::{Deserialize, Serialize};

use crate::control::Client;
use crate::identity::Common;
use crate::options::MigrateFlags;

/// Time limit for an answer that does not wait for a migration.
pub(crate) const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// A request to a VM's process.
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
        /// Whether to send the timeline after the migration. Clients of earlier releases leave this
        /// field out.
        #[serde(default)]
        timeline: bool,
    },
    /// Follow the migration under way.
    Watch,
    /// Change the rate limit of the migration under way.
    Set {
        rate: Option<u64>,
    },
    /// Cancel the migration under way. If this is the first request of a connection, the answer
    /// follows when the migration has ended. On the connection of `Migrate` it has no answer of its
    /// own.
    Cancel,
    /// Query the destination again about a VM in doubt, and act on its answer.
    AskDestination {
        session: [u8; 16],
        #[serde(flatten)]
        common: Common,
        doubt_limit: Duration,
    },
    /// Carry out the operator's decision about a VM in doubt.
    Resolve {
        session: [u8; 16],
        decision: Decision,
    },
}

impl Request {
    /// Sends the request to the process behind a control socket.
    pub(crate) fn ask(&self, socket: &Path) -> Result<Client> {
        let takes_long = matches!(self, Self::Migrate { .. } | Self::Watch | Self::Cancel);
        self.ask_within(socket, (!takes_long).then_some(ANSWER_LIMIT))
    }

    /// Sends the request to the process behind a control socket; `limit` applies to each line of
    /// the answer.
    pub(crate) fn ask_within(&self, socket: &Path, limit: Option<Duration>) -> Result<Client> {
        Client::ask(socket, "VM", self, limit)
    }
}

/// The operator's decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Decision {
    RunHere,
    Destroy,
}

/// Options for querying the destination for at most `doubt_limit`.
pub(crate) fn inquiry_options(doubt_limit: Duration) -> source::Options {
    source::Options::builder()
        .doubt_limit(doubt_limit)
        .connect_limit(Duration::from_secs(5))
        .build()
        .expect("a connect limit of five seconds is valid")
}
