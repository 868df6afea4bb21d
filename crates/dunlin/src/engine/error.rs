//! How a migration can end other than well.

use std::fmt;

use dunlin_proto::fault::{AtFault, FaultCode};
use thiserror::Error;

use super::source::Doubt;

/// Where the VM is after a migration that did not go through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VmIs {
    /// It goes on at the source, or is paused there as its owner left it.
    AtSource,
    /// It is paused at the source and could not be resumed.
    StuckAtSource,
    /// *commit* was sent and not answered: it is paused at the source, and
    /// may run at the destination.
    InDoubt,
    /// It was started at the destination and does not run there any more; the
    /// source has its copy, paused as it was at the switchover. An operator
    /// decides whether it goes back to that.
    RanThenDied,
    /// The guest ended by itself.
    Gone,
}

/// A migration that failed: what happened, whose fault it is, what to do, and
/// where the VM is now.
#[derive(Debug, Error)]
#[non_exhaustive]
pub struct MigrateError {
    /// The kind of fault, as seen from this side.
    pub fault: FaultCode,
    /// Who has to change something, as seen from this side.
    pub at_fault: AtFault,
    /// Where the VM is.
    pub vm: VmIs,
    /// What happened.
    pub what: String,
    /// What lay underneath.
    #[source]
    pub source: Option<Box<dyn std::error::Error + Send + Sync>>,
    /// At the source, where [`MigrateError::vm`] is [`VmIs::InDoubt`] or
    /// [`VmIs::RanThenDied`]: what an operator resolves it with. Keep it as
    /// long as the VM is held paused.
    pub doubt: Option<Box<Doubt>>,
}

impl fmt::Display for MigrateError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let vm = match self.vm {
            VmIs::AtSource => "the VM goes on at the source",
            VmIs::StuckAtSource => "the VM is paused at the source and could not be resumed",
            VmIs::InDoubt => {
                "the VM is paused at the source and may run at the destination: ask there before \
                 you resume it here"
            }
            VmIs::RanThenDied => {
                "the VM was started at the destination and does not run there; the source keeps \
                 its copy, paused. Shall it run there again, from the moment of the pause? What \
                 it wrote to its disks since then stays written"
            }
            VmIs::Gone => "the guest has ended by itself",
        };
        write!(
            formatter,
            "{} ({}, at fault: {}); {vm}. {}",
            self.what,
            self.fault,
            self.at_fault,
            self.fault.advice()
        )
    }
}

/// A fault inside a session, before it is known where the VM ends up.
#[derive(Debug)]
pub(crate) struct Fault {
    pub(crate) code: FaultCode,
    pub(crate) at_fault: AtFault,
    pub(crate) what: String,
    pub(crate) source: Option<Box<dyn std::error::Error + Send + Sync>>,
    /// Whether the peer has said so, by *cancel* or *refuse*.
    pub(crate) told: bool,
}

impl Fault {
    pub(crate) fn new(code: FaultCode, what: impl Into<String>) -> Self {
        Self {
            code,
            at_fault: code.at_fault(),
            what: what.into(),
            source: None,
            told: false,
        }
    }

    pub(crate) fn because(
        mut self,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        self.source = Some(source.into());
        self
    }

    /// A fault that the peer has told us of.
    pub(crate) fn told(code: FaultCode, text: String) -> Self {
        Self {
            code,
            at_fault: code.at_fault().seen_by_peer(),
            what: text,
            source: None,
            told: true,
        }
    }

    pub(crate) fn into_error(self, vm: VmIs) -> MigrateError {
        MigrateError {
            fault: self.code,
            at_fault: self.at_fault,
            vm,
            what: self.what,
            source: self.source,
            doubt: None,
        }
    }

    /// What the peer is told: the fault with its cause, within the limit.
    pub(crate) fn for_peer(&self) -> String {
        let mut text = self.what.clone();
        if let Some(source) = &self.source {
            text.push_str(": ");
            text.push_str(&source.to_string());
        }
        let mut end = text.len().min(dunlin_proto::limits::MAX_TEXT_BYTES);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        text
    }
}
