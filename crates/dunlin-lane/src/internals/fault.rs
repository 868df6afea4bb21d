//! Fault codes that depend only on the error, not on the context in which it occurs.

use std::error::Error;
use std::io;

use dunlin_proto::fault::FaultCode;

use super::accept::reading::RejectReason;
use super::control::ControlError;
use super::handshake::HandshakeError;
use super::identity::IdentityError;
use super::record::Alert;

/// A TLS alert about a certificate that has expired or is not valid yet.
const CERTIFICATE_EXPIRED: Alert = Alert(45);

/// Returns the fault code of an error or of one of its causes, if the code is the same in every
/// context. This is so if descriptors or memory ran out, or if a certificate has expired or is not
/// valid yet.
#[must_use]
pub fn fault_behind(error: &(dyn Error + 'static)) -> Option<FaultCode> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(error) = error.downcast_ref::<io::Error>() {
            let shortage = of_shortage(error);
            if shortage.is_some() {
                return shortage;
            }
            // If an `io::Error` wraps an error, its `source` returns the source of the wrapped
            // error, so the wrapped error itself is checked here.
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
        if error.downcast_ref().is_some_and(IdentityError::is_of_date) {
            return Some(FaultCode::CertificateDate);
        }
        next = error.source();
    }
    None
}

/// The fault code of a failed system call.
#[must_use]
pub fn of_io(error: &io::Error) -> FaultCode {
    fault_behind(error).unwrap_or(FaultCode::Kernel)
}

/// The fault code of a failed handshake with a peer that need not be Dunlin.
pub fn of_handshake(error: &HandshakeError) -> FaultCode {
    match error {
        // 70 and 71 are protocol_version and insufficient_security. handshake_failure is not
        // included, because a TLS 1.2 server also sends it to a client without a certificate.
        HandshakeError::Incompatible(_) | HandshakeError::PeerAlert(Alert(70 | 71)) => {
            FaultCode::SecurityNotAgreed
        }
        error => fault_behind(error).unwrap_or_else(|| error.of_control_lane()),
    }
}

impl RejectReason {
    /// The fault code.
    #[must_use]
    pub fn fault(&self) -> FaultCode {
        match self {
            Self::Handshake(error) => of_handshake(error),
            Self::Deadline | Self::Io(_) => FaultCode::ControlLost,
            Self::Evicted => FaultCode::LaneLimit,
            Self::Shortage(error) => of_io(error),
            Self::Opening(error) => error.fault(),
            Self::Unknown(_) => FaultCode::NotDunlin,
        }
    }
}

/// The fault code for an error of `dunlin_linux::socket::Accepted::Shortage`. The code names the
/// resource that ran out.
fn of_shortage(error: &io::Error) -> Option<FaultCode> {
    const ENOMEM: i32 = 12;
    const ENFILE: i32 = 23;
    const EMFILE: i32 = 24;
    const ENOBUFS: i32 = 105;
    match error.raw_os_error()? {
        EMFILE | ENFILE => Some(FaultCode::DescriptorLimit),
        ENOMEM | ENOBUFS => Some(FaultCode::NoMemory),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_errors_code_names_what_ran_out_or_the_date() {
        let alert = |number| HandshakeError::PeerAlert(Alert(number));
        let io = |number| HandshakeError::Io(io::Error::from_raw_os_error(number));
        for (error, code) in [
            (io(12), Some(FaultCode::NoMemory)),
            (io(23), Some(FaultCode::DescriptorLimit)),
            (io(24), Some(FaultCode::DescriptorLimit)),
            (io(105), Some(FaultCode::NoMemory)),
            (io(13), None),
            (alert(45), Some(FaultCode::CertificateDate)),
            (alert(42), None),
        ] {
            assert_eq!(fault_behind(&error), code, "{error}");
            let others = code.unwrap_or_else(|| error.of_control_lane());
            assert_eq!(of_handshake(&error), others, "{error}");
        }
        let incompatible = HandshakeError::Incompatible("NoCipherSuitesInCommon".to_owned());
        for error in [alert(70), alert(71), incompatible] {
            let fault = of_handshake(&error);
            assert_eq!(fault, FaultCode::SecurityNotAgreed, "{error}");
        }
    }
}
