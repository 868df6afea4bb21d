//! What a destination reports: events while a VM comes in, and the VM.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use dunlin_proto::control::Verdict;
use dunlin_proto::journal::DestinationRecord;

use super::super::vmm::{DestinationVm, Offered};
use super::answer::Answering;

/// Something that happened at the destination.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum DestinationEvent {
    /// A source has connected and agreed on version and features.
    Connected {
        /// Who it is, by certificate.
        peer: String,
    },
    /// The VM that it wants to move here.
    Offered(Offered),
    /// A data lane stands.
    LaneUp {
        /// Its number.
        lane: u16,
    },
    /// A connection or lane was turned away.
    Rejected {
        /// What came, and why it was turned away.
        reason: String,
    },
    /// A data lane is lost; the source sends again what it took along.
    LaneLost {
        /// Its number.
        lane: u16,
        /// Why, as far as it is known here.
        why: String,
    },
    /// The control lane is lost, and the source has a while to make it anew.
    ControlLost {
        /// Why.
        why: String,
    },
    /// The source has made a new control lane.
    ControlResumed,
    /// The journal holds this, and it is on the disk. Where no journal was
    /// given, nothing is; the session has come that far.
    Recorded(DestinationRecord),
    /// Memory and state are here; *ready* goes out.
    Ready,
    /// *commit* has come; disks and devices are being taken.
    Committed,
    /// The source is being told what became of its VM.
    Told(Verdict),
    /// An inquiry about a session that is not under way is being answered.
    Inquired {
        /// Who asks, by certificate.
        peer: String,
    },
    /// The VM runs here, or stays paused as its owner left it.
    Running {
        /// Whether it runs.
        runs: bool,
    },
    /// Something that does no harm but should be known.
    Warning(String),
}

/// A VM that has arrived.
#[non_exhaustive]
pub struct Received {
    /// The VM.
    pub vm: Arc<dyn DestinationVm>,
    /// What it is.
    pub offered: Offered,
    /// Whether it runs, or is paused as its owner left it.
    pub runs: bool,
    /// How long the guest stood still as it saw it itself, where known.
    pub guest_downtime: Option<Duration>,
    /// Bytes that the data lanes brought, security included.
    pub wire_bytes: u64,
    /// Pages that came, zero pages and repetitions included.
    pub pages: u64,
    /// CPU time of this session's threads here.
    pub cpu: Duration,
    /// Where the source has not confirmed that it let go: who answers it, on
    /// the listener, until it does.
    pub answering: Option<Answering>,
}

impl fmt::Debug for Received {
    /// Without the VM, which need not have it.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Received")
            .field("offered", &self.offered)
            .field("runs", &self.runs)
            .field("guest_downtime", &self.guest_downtime)
            .field("wire_bytes", &self.wire_bytes)
            .field("pages", &self.pages)
            .field("cpu", &self.cpu)
            .field("answering", &self.answering)
            .finish_non_exhaustive()
    }
}
