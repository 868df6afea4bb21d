//! A fault inside a session, and the place of the VM after it.

use std::error::Error as StdError;
use std::io;

use dunlin_proto::fault::{AtFault, FaultCode};
use dunlin_proto::text::harmless;

use crate::lane::control::ControlError;
use crate::lane::handshake::HandshakeError;
use crate::lane::record::Alert;

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

/// A fault inside a session, before it is known where the VM ends up.
#[derive(Debug)]
pub(crate) struct Fault {
    pub(crate) code: FaultCode,
    pub(crate) at_fault: AtFault,
    pub(crate) what: String,
    pub(crate) source: Option<Box<dyn StdError + Send + Sync>>,
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

    pub(crate) fn because(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// A fault that the peer has told us of.
    pub(crate) fn told(code: FaultCode, text: String) -> Self {
        Self {
            code,
            at_fault: code.at_fault().seen_by_peer(),
            what: harmless(&text),
            source: None,
            told: true,
        }
    }

    /// What is said to people and to the peer. What a step failed for tells
    /// more than the step: a lane that could not be opened for want of a
    /// descriptor is no fault of the network's, though the session goes on as
    /// if it were ([`Fault::code`]).
    pub(crate) fn kind(&self) -> FaultCode {
        let cause = self.source.as_deref().filter(|_| !self.told);
        cause
            .and_then(|cause| fault_behind(cause))
            .unwrap_or(self.code)
    }

    /// What the peer is told: the fault with its causes, within the limit.
    pub(crate) fn for_peer(&self) -> String {
        let mut text = self.what.clone();
        let mut next: Option<&(dyn StdError + 'static)> = match &self.source {
            Some(source) => Some(&**source),
            None => None,
        };
        while let Some(cause) = next {
            let said = cause.to_string();
            // Some errors have their cause in their own words.
            if !text.contains(&said) {
                text.push_str(": ");
                text.push_str(&said);
            }
            next = cause.source();
        }
        let mut end = text.len().min(dunlin_proto::limits::MAX_TEXT_BYTES);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        text
    }
}

/// Turns an error into a [`Fault`] that has it as its cause.
pub(crate) trait OrFault<T> {
    /// The value, or a fault with this code and text.
    fn or_fault(self, code: FaultCode, what: &str) -> Result<T, Fault>;
}

impl<T, E: Into<Box<dyn StdError + Send + Sync>>> OrFault<T> for Result<T, E> {
    fn or_fault(self, code: FaultCode, what: &str) -> Result<T, Fault> {
        self.map_err(|error| Fault::new(code, what).because(error))
    }
}

/// The fault that an error or one of its causes amounts to wherever it is met:
/// no descriptor or no memory was left, or a certificate and a clock contradict
/// each other.
#[must_use]
pub fn fault_behind(error: &(dyn StdError + 'static)) -> Option<FaultCode> {
    const ENOMEM: i32 = 12;
    const ENFILE: i32 = 23;
    const EMFILE: i32 = 24;
    const CERTIFICATE_EXPIRED: Alert = Alert(45);
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(error) = error.downcast_ref::<io::Error>() {
            match error.raw_os_error() {
                Some(EMFILE | ENFILE) => return Some(FaultCode::DescriptorLimit),
                Some(ENOMEM) => return Some(FaultCode::NoMemory),
                _ => {}
            }
            // One that wraps another passes it over in its own chain.
            if let Some(inner) = error.get_ref() {
                return fault_behind(inner);
            }
        }
        if let Some(
            HandshakeError::Expired { .. }
            | HandshakeError::NotYetValid { .. }
            | HandshakeError::PeerAlert(CERTIFICATE_EXPIRED),
        ) = error.downcast_ref()
        {
            return Some(FaultCode::CertificateDate);
        }
        if let Some(ControlError::PeerAlert(CERTIFICATE_EXPIRED)) = error.downcast_ref() {
            return Some(FaultCode::CertificateDate);
        }
        next = error.source();
    }
    None
}
