//! The destination of a migration: takes one VM in.
//!
//! [`receive`] runs on the caller's thread until a VM has come, or one that
//! tried has failed; call it again for the next. Until *commit* the VM lives
//! at the source, and every way out drops what was built here.

mod answer;
pub(super) mod barrier;
mod decide;
mod intake;
mod lane;
mod options;
mod resume;
mod session;
mod set_up;
mod switchover;

use std::fmt;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

pub use dunlin_proto::control::Verdict;
use dunlin_proto::journal::DestinationRecord;

pub use answer::{Answering, answer};
pub use options::{Options, OptionsBuilder};

use super::control::FromPeer;
use super::error::MigrateError;
use super::fault::Fault;
use super::host::{Cancel, Host};
use super::vmm::{Builder, DestinationVm, Offered};
use crate::lane::accept::Arrival;
use crate::lane::policy::ServerTls;

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

/// Accepts on `listener` and takes in one VM, which `builder` builds. For the
/// next one call it again: a listener that shall stay open meanwhile is cloned
/// ([`TcpListener::try_clone`]). Strangers are turned away
/// ([`DestinationEvent::Rejected`]) and waited past.
///
/// # Errors
/// [`MigrateError`] says what failed, whose fault it is, and where the VM is.
pub fn receive(
    listener: TcpListener,
    tls: &ServerTls,
    options: &Options,
    builder: &mut dyn Builder,
    host: &Arc<dyn Host>,
    observer: &(dyn Fn(&DestinationEvent) + Send + Sync),
    cancel: &Cancel,
) -> Result<Received, MigrateError> {
    session::run(listener, tls, options, builder, host, observer, cancel)
}

/// What the session's thread waits for.
pub(super) enum SessionEvent {
    Arrived(Box<Arrival>),
    /// The listener has failed.
    AcceptorEnded(std::io::Error),
    /// From the control lane of this epoch.
    Control(u32, FromPeer),
    LaneEnded {
        lane: u16,
        result: Result<(), Fault>,
        wire_bytes: u64,
        cpu: Duration,
    },
    /// Something was done that whoever waits may have to see.
    Tended,
    /// There are chunks to acknowledge.
    Acks,
    Cancelled,
}
