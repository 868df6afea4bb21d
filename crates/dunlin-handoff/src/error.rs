//! Why a hand-off fails, and the fault codes of its errors.

use std::io;
use std::net::SocketAddr;

use dunlin_lane::fault::{of_handshake, of_io};
use dunlin_lane::handshake::{HandshakeError, UntrustedReason};
use dunlin_lane::kernel::Refused;
use dunlin_lane::provider::TlsVersion;
use dunlin_proto::fault::FaultCode;
use thiserror::Error;

/// Why a connection was not established, why the kernel did not take over its TLS, or why an
/// acceptor did not start.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum HandoffError {
    /// The name does not resolve.
    #[error("cannot resolve {host}: {source}; correct the name or this host's resolver")]
    Unresolved {
        /// The name.
        host: String,
        /// The resolver's error.
        source: io::Error,
    },
    /// No address accepted the connection in time.
    #[error(
        "cannot reach {to}: {source}; check that the peer listens there and that no firewall blocks it"
    )]
    Unreachable {
        /// Name and port.
        to: String,
        /// The error of the last address.
        source: io::Error,
    },
    /// The CA bundle contains neither the peer's certificate nor its issuer.
    #[error("the certificate of {at} is not trusted: {}", untrusted(.why))]
    NotTrusted {
        /// The peer's address.
        at: SocketAddr,
        /// Why the peer's certificate has no chain to a trusted certificate; `None` if the peer's
        /// certificate cannot be decoded.
        why: Option<UntrustedReason>,
    },
    /// The handshake failed.
    #[error("TLS handshake with {at} failed: {source}")]
    Handshake {
        /// The peer's address.
        at: SocketAddr,
        /// The handshake's error.
        source: Box<HandshakeError>,
    },
    /// The peer supports no offered version, cipher or curve.
    #[error(
        "{at} rejected the offered TLS parameters ({reason}): it must allow {version}, one of the offered ciphers and one of the offered curves"
    )]
    Incompatible {
        /// The peer's address.
        at: SocketAddr,
        /// The version offered.
        version: TlsVersion,
        /// The peer's alert, or why this side ended the handshake.
        reason: String,
    },
    /// A socket operation failed.
    #[error("cannot set up the socket to {at}: {source}")]
    Socket {
        /// The peer's address.
        at: SocketAddr,
        /// The error.
        source: io::Error,
    },
    /// The caller cancelled the call.
    #[error("cancelled before the handshake was complete")]
    Cancelled,
    /// The kernel has no TLS, or refused the connection's keys.
    #[error(transparent)]
    Kernel(#[from] Refused),
    /// An acceptor could not be set up, for instance because no descriptors or threads are left.
    #[error("cannot start the acceptor: {0}")]
    Io(#[from] io::Error),
}

impl HandoffError {
    /// The fault code.
    #[must_use]
    pub fn code(&self) -> FaultCode {
        match self {
            Self::Unresolved { .. } | Self::Unreachable { .. } => FaultCode::ControlLost,
            Self::NotTrusted { .. } => FaultCode::Unauthorised,
            Self::Handshake { source, .. } => of_handshake(source),
            Self::Incompatible { .. } => FaultCode::SecurityNotAgreed,
            Self::Cancelled => FaultCode::Cancelled,
            Self::Kernel(refused) => refused.fault(),
            Self::Socket { source, .. } | Self::Io(source) => of_io(source),
        }
    }
}

fn untrusted(why: &Option<UntrustedReason>) -> String {
    match why {
        Some(UntrustedReason::SelfSigned { pin }) => {
            format!(
                "this certificate is self-signed, with the key {pin}; to trust it, append the \
                 certificate to the CA bundle"
            )
        }
        Some(UntrustedReason::UnknownRoot { authority }) => {
            format!(
                "this certificate was issued by {authority}; to trust that authority, append the \
                 authority's certificate to the CA bundle"
            )
        }
        Some(UntrustedReason::IncompleteChain { issuer }) => format!(
            "this certificate was issued by {issuer}, and the peer did not send that authority's \
             certificate; to trust the authority, append the authority's certificate to the CA \
             bundle"
        ),
        None => "its issuer is unknown; append that issuer to the CA bundle".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accept::Refusal;
    use dunlin_lane::accept::RejectReason;
    use dunlin_lane::record::Alert;

    const OUT_OF_MEMORY: i32 = 12;
    const OUT_OF_DESCRIPTORS: i32 = 24;
    const ACCESS_DENIED: i32 = 13;

    #[test]
    fn an_errors_code_depends_on_its_cause() {
        let at = SocketAddr::from(([192, 0, 2, 7], 443));
        let io = io::Error::from_raw_os_error;
        let incompatible = || HandshakeError::Incompatible(String::new());
        let expired = || HandshakeError::Expired {
            detail: String::new(),
        };
        for (cause, code) in [
            (HandshakeError::Deadline, FaultCode::ControlLost),
            (HandshakeError::Mirror, FaultCode::NotDunlin),
            (HandshakeError::Revoked, FaultCode::Unauthorised),
            (expired(), FaultCode::CertificateDate),
            (
                HandshakeError::PeerAlert(Alert(42)),
                FaultCode::Unauthorised,
            ),
            (
                HandshakeError::PeerAlert(Alert(45)),
                FaultCode::CertificateDate,
            ),
            (HandshakeError::TooLong, FaultCode::Malformed),
            (Refused::Absent.into(), FaultCode::Kernel),
            (incompatible(), FaultCode::SecurityNotAgreed),
        ] {
            let source = Box::new(cause);
            let error = HandoffError::Handshake { at, source };
            assert_eq!(error.code(), code, "{error}");
        }
        for (error, code) in [
            (HandoffError::from(Refused::Absent), FaultCode::Kernel),
            (Refused::Gone.into(), FaultCode::ControlLost),
            (io(ACCESS_DENIED).into(), FaultCode::Kernel),
            (io(OUT_OF_DESCRIPTORS).into(), FaultCode::DescriptorLimit),
            (io(OUT_OF_MEMORY).into(), FaultCode::NoMemory),
        ] {
            assert_eq!(error.code(), code, "{error}");
        }
        for (refusal, code) in [
            (Refusal::from(incompatible()), FaultCode::SecurityNotAgreed),
            (expired().into(), FaultCode::CertificateDate),
            (
                RejectReason::Io(io(ACCESS_DENIED)).into(),
                FaultCode::ControlLost,
            ),
            (Refusal::Evicted(7), FaultCode::LaneLimit),
            (Refusal::UnknownName, FaultCode::UnknownRoute),
            (Refusal::ReceiverBusy(7), FaultCode::TargetUnreachable),
            (io(OUT_OF_DESCRIPTORS).into(), FaultCode::DescriptorLimit),
        ] {
            assert_eq!(refusal.code(), code, "{refusal}");
        }
    }
}
