//! What a destination reports to its caller: events while a VM arrives, and then the VM.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use dunlin_proto::control::Verdict;
use dunlin_proto::journal::DestinationRecord;

use super::super::vmm::{DestinationVm, Offered};
use super::answer::Answering;

/// An event at the destination.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum DestinationEvent {
    /// A source has connected, and version and features are negotiated.
    Connected {
        /// The source's names, from its certificate.
        peer: String,
    },
    /// The VM that the source offers.
    Offered(Offered),
    /// A data lane is established.
    LaneUp {
        /// The lane's number.
        lane: u16,
    },
    /// A connection or lane was rejected.
    Rejected {
        /// The connection or lane, and why it was rejected.
        reason: String,
    },
    /// A data lane is lost; the source sends the lane's unconfirmed pages again.
    LaneLost {
        /// The lane's number.
        lane: u16,
        /// The reason; empty if it is not known here.
        why: String,
    },
    /// The control lane is lost. For a limited time, the source may replace it.
    ControlLost {
        /// The reason.
        why: String,
    },
    /// The source has replaced the control lane.
    ControlResumed,
    /// The journal has synced this record to disk. Without a journal on disk, this event only means
    /// that the session has reached the record's state.
    Recorded(DestinationRecord),
    /// Memory and state have arrived; *ready* is about to be sent.
    Ready,
    /// *commit* has arrived; disks and devices are being acquired.
    Committed,
    /// The outcome of the migration is about to be sent to the source.
    Notified(Verdict),
    /// An inquiry about a session that is not in progress has arrived.
    Inquired {
        /// The names of the asking peer, from its certificate.
        peer: String,
    },
    /// This host has the VM.
    Running {
        /// Whether the guest runs. If not, it is paused, because the VM's owner had paused it.
        runs: bool,
    },
    /// A problem that does not end the session but that an operator should see.
    Warning(String),
}

/// A VM that has arrived.
#[non_exhaustive]
pub struct Received {
    /// The VM.
    pub vm: Arc<dyn DestinationVm>,
    /// The source's offer, with the VM's description.
    pub offered: Offered,
    /// Whether the guest runs. If not, it is paused, because the VM's owner had paused it.
    pub runs: bool,
    /// Downtime as the guest saw it, if known.
    pub guest_downtime: Option<Duration>,
    /// Bytes received on the data lanes, including the overhead of encryption.
    pub wire_bytes: u64,
    /// Pages received, including zero pages and repetitions.
    pub pages: u64,
    /// CPU time of this session's threads here.
    pub cpu: Duration,
    /// Answers the source's inquiries, on the listener, until the source confirms that it has
    /// released the VM. `None` if the source has already confirmed that. Also `None` if answering
    /// could not be started; a [`DestinationEvent::Warning`] has then reported the reason.
    pub answering: Option<Answering>,
}

impl fmt::Debug for Received {
    /// Omits the VM, because a [`DestinationVm`] may lack `Debug`.
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
