//! Why handshakes fail, for operators.

use std::io;

use dunlin_proto::fault::FaultCode;
use rustls::pki_types::UnixTime;
use rustls::{AlertDescription, CertificateError, HandshakeType};
use thiserror::Error;
use x509_parser::time::ASN1Time;

use super::super::kernel::Refused;
use super::super::peers::PeerRefused;
use super::super::record::{Alert, HEADER_BYTES};
use super::super::trust::{UntrustedReason, peer_refused, take_untrusted};

/// Maximum number of bytes from a peer before it is authenticated. A chain of four RSA-4096
/// certificates needs an eighth of this.
pub const FLIGHT_LIMIT_BYTES: usize = 64 << 10;

/// Why a handshake failed. Until the failure, only handshake messages have been sent.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum HandshakeError {
    /// The deadline passed. The peer or the network is at fault.
    #[error(
        "TLS handshake timed out: the peer accepted the connection but was too slow, or is not a TLS server"
    )]
    Deadline,
    /// The connection failed.
    #[error("the connection failed during the TLS handshake: {0}")]
    Io(#[source] io::Error),
    /// The peer closed the connection.
    #[error(
        "the peer closed the connection during the TLS handshake: see the peer's log for the reason"
    )]
    PeerClosed,
    /// The peer's bytes are not TLS.
    #[error("the peer does not speak TLS (it began with \"{}\"{}): check the port, and that both sides use TLS", start.escape_ascii(), resembles(start))]
    NotTls {
        /// The bytes received in place of a record header.
        start: [u8; HEADER_BYTES],
    },
    /// The peer speaks TLS, but another application protocol.
    #[error(
        "the peer speaks TLS but is not Dunlin (it does not support the ALPN protocol \"dunlin\"): check the address and the port"
    )]
    NotDunlin,
    /// The peer, which should be a server, sent a ClientHello.
    #[error(
        "the peer answered with a ClientHello: it echoes its input, or is a TLS client itself; check the address and the port"
    )]
    Mirror,
    /// A record, or the sum of all records, is too long.
    #[error(
        "the peer sent more than {FLIGHT_LIMIT_BYTES} bytes, or an oversized record, before authentication"
    )]
    TooLong,
    /// The peer sent an alert.
    #[error("the peer ended the TLS handshake with alert {0}")]
    PeerAlert(Alert),
    /// The peer presented no certificate.
    #[error(
        "the peer presented no certificate, but both sides must authenticate: configure a certificate on the peer"
    )]
    NoCertificate,
    /// No trusted authority issued the peer's certificate.
    #[error("the peer's certificate is refused: {}", untrusted(.0))]
    UnknownAuthority(Option<UntrustedReason>),
    /// The peer's certificate is revoked.
    #[error(
        "the peer's certificate, or an intermediate certificate, is revoked according to a revocation list on this host: give the peer another certificate"
    )]
    Revoked,
    /// The local revocation list is too old to tell whether the peer's certificate is revoked.
    #[error(
        "this host's revocation list of the peer's authority is out of date ({detail}), so no certificate of that authority can be trusted: install the current list on this host"
    )]
    RevocationListOutdated {
        /// When the list expired.
        detail: String,
    },
    /// The peer's certificate has the wrong extended key usage.
    #[error(
        "the peer's certificate is not for its side of the connection (extended key usage): the side that connects needs a certificate for TLS clients, and the side that accepts needs one for TLS servers"
    )]
    WrongPurpose,
    /// A signature is invalid.
    #[error(
        "invalid signature from the peer: most likely the peer's authority has the same name as an authority in this host's CA bundle, but another key; give both hosts certificates of one authority"
    )]
    BadSignature,
    /// The peer's certificate has expired.
    #[error(
        "the peer's certificate has expired ({detail}): renew it on the peer, or correct this host's clock"
    )]
    Expired {
        /// When the certificate expired.
        detail: String,
    },
    /// The peer's certificate is not valid yet.
    #[error(
        "the peer's certificate is not valid yet ({detail}): correct the clock of one of the hosts"
    )]
    NotYetValid {
        /// When the certificate becomes valid.
        detail: String,
    },
    /// The peer's certificate is invalid for another reason.
    #[error("the peer's certificate is refused: {0}")]
    Certificate(CertificateError),
    /// The certificate does not belong to an allowed peer.
    #[error(transparent)]
    Peer(PeerRefused),
    /// The two sides have no TLS parameters in common.
    #[error(
        "the peer and this host have no TLS parameters in common ({0}): both must allow the same version (lanes need TLS 1.3), suite and key exchange"
    )]
    Incompatible(String),
    /// The kernel rejected the connection's keys, or kernel TLS is required and the kernel cannot
    /// do it. No data was sent with the keys. On another connection the process may seal and open
    /// the records itself.
    #[error("the connection was closed before any data was sent: {0}")]
    Offload(#[from] Refused),
    /// Any other protocol violation.
    #[error("the peer violated the TLS protocol: {0}")]
    Protocol(#[source] rustls::Error),
    /// A local failure.
    #[error("local failure during the TLS handshake: {0}")]
    Local(String),
}

impl From<rustls::Error> for HandshakeError {
    fn from(error: rustls::Error) -> Self {
        use rustls::Error as Tls;
        if let Some(refused) = peer_refused(&error) {
            return Self::Peer(refused.clone());
        }
        match error {
            Tls::AlertReceived(AlertDescription::NoApplicationProtocol)
            | Tls::NoApplicationProtocol => Self::NotDunlin,
            Tls::AlertReceived(alert) => Self::PeerAlert(Alert(alert.into())),
            Tls::InappropriateHandshakeMessage {
                got_type: HandshakeType::ClientHello,
                ..
            } => Self::Mirror,
            Tls::NoCertificatesPresented => Self::NoCertificate,
            Tls::InvalidCertificate(error) => Self::of_certificate(error),
            Tls::PeerIncompatible(reason) => Self::Incompatible(format!("{reason:?}")),
            error => Self::Protocol(error),
        }
    }
}

impl HandshakeError {
    /// The fault code of this error on a control lane.
    pub fn of_control_lane(&self) -> FaultCode {
        match self {
            Self::Deadline | Self::Io(_) | Self::PeerClosed => FaultCode::ControlLost,
            Self::NotTls { .. }
            | Self::NotDunlin
            | Self::Mirror
            | Self::Incompatible(_)
            // Alert 70 is protocol_version. A Dunlin peer supports TLS 1.3 and never sends 70.
            | Self::PeerAlert(Alert(70)) => FaultCode::NotDunlin,
            Self::TooLong | Self::Protocol(_) => FaultCode::Malformed,
            Self::Offload(refused) => refused.fault(),
            Self::Local(_) => FaultCode::Internal,
            _ => FaultCode::Unauthorised,
        }
    }

    fn of_certificate(error: CertificateError) -> Self {
        match error {
            CertificateError::UnknownIssuer => Self::UnknownAuthority(take_untrusted()),
            CertificateError::BadSignature => Self::BadSignature,
            CertificateError::Revoked => Self::Revoked,
            CertificateError::ExpiredContext { time, not_after } => Self::Expired {
                detail: compared("it was valid until", not_after, time),
            },
            CertificateError::NotValidYetContext { time, not_before } => Self::NotYetValid {
                detail: compared("it is valid from", not_before, time),
            },
            CertificateError::ExpiredRevocationListContext { time, next_update } => {
                Self::RevocationListOutdated {
                    detail: compared("the next one was due on", next_update, time),
                }
            }
            CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
                Self::WrongPurpose
            }
            error => Self::Certificate(error),
        }
    }
}

/// Formats a certificate's date and the current time that it was compared with.
fn compared(what: &str, date: UnixTime, now: UnixTime) -> String {
    let readable = |time: UnixTime| {
        i64::try_from(time.as_secs())
            .ok()
            .and_then(|seconds| ASN1Time::from_timestamp(seconds).ok())
            .map_or_else(|| time.as_secs().to_string(), |time| time.to_string())
    };
    format!(
        "{what} {}, this host's clock reads {}",
        readable(date),
        readable(now)
    )
}

/// Names the protocol that begins with these bytes.
fn resembles(start: &[u8; HEADER_BYTES]) -> &'static str {
    match start {
        b"SSH-2" | b"SSH-1" => ", as an SSH server does",
        b"HTTP/" => ", as an HTTP server does",
        b"GET /" | b"POST " | b"HEAD " | b"PUT /" => ", as an HTTP client does",
        _ => "",
    }
}

fn untrusted(why: &Option<UntrustedReason>) -> String {
    match why {
        Some(why) => why.to_string(),
        None => "it was issued by an unknown authority".to_owned(),
    }
}
