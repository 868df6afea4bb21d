//! The error of a failed migration.

use std::error::Error as StdError;
use std::fmt;

use dunlin_proto::fault::{AtFault, FaultCode};
use thiserror::Error;

use super::fault::{Fault, VmIs};
use super::source::doubt::Doubt;

/// A failed migration: what failed, who is at fault, what to do, and where the VM is
/// now.
#[derive(Debug, Error)]
#[non_exhaustive]
pub struct MigrateError {
    pub(super) code: FaultCode,
    pub(super) at_fault: AtFault,
    /// Where the VM is.
    pub vm: VmIs,
    /// What happened.
    pub what: String,
    /// The cause.
    #[source]
    pub source: Option<Box<dyn StdError + Send + Sync>>,
    /// Set at the source if [`MigrateError::vm`] is [`VmIs::InDoubt`] or [`VmIs::RanThenDied`]: the
    /// handle with which an operator decides where the VM continues. Keep the handle while the VM
    /// is paused.
    pub doubt: Option<Box<Doubt>>,
}

impl MigrateError {
    /// The kind of fault, as seen from this side.
    #[must_use]
    pub fn code(&self) -> FaultCode {
        self.code
    }

    /// Who has to act, as seen from this side.
    #[must_use]
    pub fn at_fault(&self) -> AtFault {
        self.at_fault
    }
}

impl fmt::Display for MigrateError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let vm = match self.vm {
            VmIs::AtSource => "the VM stays at the source",
            VmIs::StuckAtSource => "the VM is paused at the source and could not be resumed",
            VmIs::InDoubt => {
                "the VM is paused at the source and may run at the destination: check there \
                 before you resume it here"
            }
            VmIs::RanThenDied => {
                "the VM was started at the destination and no longer runs there; the source \
                 keeps its copy, paused. If resumed, that copy continues from the moment of the \
                 pause, but everything that the VM has written to its disks since then remains"
            }
            VmIs::Gone => "the guest has ended",
        };
        write!(
            formatter,
            "{} ({}, at fault: {}); {vm}. {}",
            self.what,
            self.code,
            self.at_fault,
            self.code.advice()
        )
    }
}

impl Fault {
    pub(crate) fn into_error(self, vm: VmIs) -> MigrateError {
        let kind = self.kind();
        MigrateError {
            code: kind,
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
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io;

    use dunlin_lane::control::ControlError;
    use dunlin_lane::handshake::HandshakeError;
    use dunlin_lane::record::Alert;

    use super::*;
    use crate::engine::journal::{JournalError, Role};
    use crate::engine::source::ResolveError;

    fn errno(number: i32) -> io::Error {
        io::Error::from_raw_os_error(number)
    }

    #[test]
    fn the_cause_of_a_fault_decides_who_is_at_fault() {
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
            // Whatever the kind, the session handles the fault as a lost lane.
            assert_eq!(fault.code, FaultCode::LaneLost);
            assert_eq!(fault.kind(), kind);
            let error = fault.into_error(VmIs::AtSource);
            assert_eq!(
                (error.code(), error.at_fault()),
                (kind, at_fault),
                "{error}"
            );
        }
        // A fault that the peer reports keeps its code. The party at fault is converted to this
        // side's view: what is local to the peer is `AtFault::Peer` here.
        let reported = Fault::from_peer(Role::Destination, FaultCode::DescriptorLimit, "none left");
        assert_eq!(
            reported.into_error(VmIs::AtSource).at_fault(),
            AtFault::Peer
        );
    }

    #[test]
    fn the_code_of_an_error_is_the_shortage_behind_it_or_that_of_its_kind() {
        const EMFILE: i32 = 24;
        const ENOSPC: i32 = 28;
        let journal = |number| JournalError::Io {
            what: "written",
            path: "x".into(),
            source: errno(number),
        };
        let resume = |source: io::Error| ResolveError::Resume {
            what: "cannot resume",
            source: source.into(),
        };
        for (found, code) in [
            (journal(ENOSPC).code(), FaultCode::Journal),
            (journal(EMFILE).code(), FaultCode::DescriptorLimit),
            (
                ResolveError::Journal(journal(ENOSPC)).code(),
                FaultCode::Journal,
            ),
            (resume(io::Error::other("KVM")).code(), FaultCode::Internal),
            (resume(errno(EMFILE)).code(), FaultCode::DescriptorLimit),
        ] {
            assert_eq!(found, code);
        }
    }

    #[test]
    fn i7_a_peers_text_is_marked_as_its_own_and_its_control_characters_are_escaped() {
        let text = "\u{1b}[2Jgone\r\nmoved \u{9b}31m\u{202e}\u{7f} \u{e9}";
        let fault = Fault::from_peer(Role::Destination, FaultCode::Internal, text);
        let said = fault.into_error(VmIs::AtSource).to_string();
        assert!(!said.contains(dunlin_proto::text::is_harmful), "{said:?}");
        let spelled = concat!(
            r"the destination reports: \u{1b}[2Jgone\r\nmoved \u{9b}31m\u{202e}\u{7f} ",
            "\u{e9} (internal"
        );
        assert!(said.starts_with(spelled), "{said}");
    }
}
