//! How a migration can end other than well.

use std::error::Error as StdError;
use std::fmt;
use std::io;

use dunlin_proto::fault::{AtFault, FaultCode};
use dunlin_proto::text::harmless;
use thiserror::Error;

use super::source::Doubt;
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

/// A migration that failed: what happened, whose fault it is, what to do, and
/// where the VM is now.
#[derive(Debug, Error)]
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
    pub source: Option<Box<dyn StdError + Send + Sync>>,
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
                 you resume it here, or use `dunlin resolve`"
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

    pub(crate) fn into_error(self, vm: VmIs) -> MigrateError {
        let kind = self.kind();
        MigrateError {
            fault: kind,
            at_fault: if kind == self.code {
                self.at_fault
            } else {
                kind.at_fault()
            },
            vm,
            what: self.what,
            source: self.source,
            doubt: None,
        }
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn errno(number: i32) -> io::Error {
        io::Error::from_raw_os_error(number)
    }

    #[test]
    fn what_lies_behind_a_fault_says_whose_it_is() {
        let lane = || Fault::new(FaultCode::LaneLost, "lane 1 cannot reach host:1");
        for (fault, kind, at_fault) in [
            (lane(), FaultCode::LaneLost, AtFault::Network),
            (
                lane().because(errno(111)),
                FaultCode::LaneLost,
                AtFault::Network,
            ),
            (
                lane().because(errno(24)),
                FaultCode::DescriptorLimit,
                AtFault::Local,
            ),
            (
                lane().because(HandshakeError::Io(errno(23))),
                FaultCode::DescriptorLimit,
                AtFault::Local,
            ),
            (
                lane().because(io::Error::other(io::Error::other(errno(12)))),
                FaultCode::NoMemory,
                AtFault::Local,
            ),
            (
                lane().because(ControlError::PeerAlert(Alert(45))),
                FaultCode::CertificateDate,
                AtFault::Configuration,
            ),
        ] {
            // What the session does about it stays the same.
            assert_eq!(fault.code, FaultCode::LaneLost);
            assert_eq!(fault.kind(), kind);
            let error = fault.into_error(VmIs::AtSource);
            assert_eq!((error.fault, error.at_fault), (kind, at_fault), "{error}");
        }
        // A peer's word is taken as it comes, and seen from this side.
        let told = Fault::told(FaultCode::DescriptorLimit, "none left".into());
        assert_eq!(told.into_error(VmIs::AtSource).at_fault, AtFault::Peer);
    }

    #[test]
    fn i7_a_peers_text_steers_no_terminal_and_ends_no_line() {
        let text = "\u{1b}[2Jgone\r\nmoved \u{9b}31m\u{202e}\u{7f} \u{e9}";
        let fault = Fault::told(FaultCode::Internal, text.into());
        let said = fault.into_error(VmIs::AtSource).to_string();
        assert!(!said.contains(dunlin_proto::text::is_harmful), "{said:?}");
        let spelled = concat!(
            r"\u{1b}[2Jgone\r\nmoved \u{9b}31m\u{202e}\u{7f} ",
            "\u{e9} (internal"
        );
        assert!(said.starts_with(spelled), "{said}");
    }
}
