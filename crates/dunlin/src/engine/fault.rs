//! A fault inside a session, and the location of the VM after the fault.

use std::error::Error as StdError;

use dunlin_lane::fault::fault_behind;
use dunlin_proto::fault::{AtFault, FaultCode, seen_by_peer};
use dunlin_proto::limits::MAX_TEXT_BYTES;
use dunlin_proto::text::{harmless, with_causes};

use super::journal::Role;

/// Where the VM is after a failed migration, and what its VMM has to do. The destination
/// reports only [`VmIs::AtSource`], [`VmIs::InDoubt`] and [`VmIs::RanThenDied`], as far as it
/// can tell. It has discarded its copy, so its VMM has nothing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VmIs {
    /// The VM continues at the source, or is paused there because its owner had paused it. The VMM
    /// has nothing to do, and another migration may follow.
    AtSource,
    /// The VM is paused at the source: its VMM's `reactivate` or `resume` failed. The VM exists
    /// nowhere else, so its VMM may repair the cause and resume it.
    StuckAtSource,
    /// The source began to send *commit*, and no answer showed which side has the VM. The VM is
    /// paused at the source and possibly runs at the destination. Keep the source's copy paused,
    /// keep the process alive, and use [`MigrateError::doubt`](super::MigrateError::doubt).
    InDoubt,
    /// The VM ran, or may have run, at the destination and no longer does. The source has its
    /// copy, paused as it was at the switchover. An operator decides whether to resume
    /// that copy, through [`MigrateError::doubt`](super::MigrateError::doubt).
    RanThenDied,
    /// The guest has ended: it powered off or stopped. The source may free the VM.
    Gone,
}

/// A fault inside a session, before the final location of the VM is known.
#[derive(Debug)]
pub(crate) struct Fault {
    pub(crate) code: FaultCode,
    pub(crate) at_fault: AtFault,
    pub(crate) what: String,
    pub(crate) source: Option<Box<dyn StdError + Send + Sync>>,
    /// Whether the peer reported the fault, with *cancel* or *refuse*.
    pub(crate) from_peer: bool,
}

impl Fault {
    pub(crate) fn new(code: FaultCode, what: impl Into<String>) -> Self {
        Self {
            code,
            at_fault: code.at_fault(),
            what: what.into(),
            source: None,
            from_peer: false,
        }
    }

    pub(crate) fn because(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    pub(crate) fn cancelled() -> Self {
        Self::new(FaultCode::Cancelled, "cancelled by the operator")
    }

    /// A fault that the peer reports; `peer` is its role. The text names the peer, because a
    /// malicious peer may send any text.
    pub(crate) fn from_peer(peer: Role, code: FaultCode, text: &str) -> Self {
        Self {
            code,
            at_fault: seen_by_peer(code.at_fault()),
            what: format!("the {} reports: {}", peer.name(), harmless(text)),
            source: None,
            from_peer: true,
        }
    }

    /// The code that is reported to people and to the peer. It is the code of the cause, if the
    /// cause has one, because that is more precise than the code of the step that failed. Example:
    /// a lane cannot be opened because no descriptor is left. The session handles this as a lost
    /// lane ([`Fault::code`]), but the network is not at fault.
    pub(crate) fn kind(&self) -> FaultCode {
        let cause = self.source.as_deref().filter(|_| !self.from_peer);
        cause
            .and_then(|cause| fault_behind(cause))
            .unwrap_or(self.code)
    }

    /// The text for the peer: the fault with its causes, cut to [`MAX_TEXT_BYTES`].
    pub(crate) fn for_peer(&self) -> String {
        let cause = self.source.as_deref().map(|source| source as _);
        let mut text = with_causes(self.what.clone(), cause);
        text.truncate(text.floor_char_boundary(MAX_TEXT_BYTES));
        text
    }
}

/// Turns an error into a [`Fault`] with the error as its cause.
pub(crate) trait OrFault<T> {
    /// Returns the value, or a fault with this code and text.
    fn or_fault(self, code: FaultCode, what: &str) -> Result<T, Fault>;
}

impl<T, E: Into<Box<dyn StdError + Send + Sync>>> OrFault<T> for Result<T, E> {
    fn or_fault(self, code: FaultCode, what: &str) -> Result<T, Fault> {
        self.map_err(|error| Fault::new(code, what).because(error))
    }
}
