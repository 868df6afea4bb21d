//! Why handshakes fail, in words for operators.

use std::io;

use dunlin_proto::fault::FaultCode;
use rustls::pki_types::UnixTime;
use rustls::{AlertDescription, CertificateError, HandshakeType};
use thiserror::Error;
use x509_parser::time::ASN1Time;

use super::super::kernel::Refused;
use super::super::peers::PeerRefused;
use super::super::record::{Alert, HEADER_BYTES};
use super::super::trust::{UntrustedReason, peer_refused, take_unissued};

/// The most that a peer may send before it is authenticated. A chain of four RSA-4096
/// certificates takes an eighth of it.
pub const FLIGHT_LIMIT_BYTES: usize = 64 << 10;

/// Why a handshake failed. Nothing but handshake messages has been sent.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum HandshakeError {
    /// Too slow. The fault is the peer's or the network's.
    #[error(
        "the TLS handshake was not finished at its deadline: the peer accepted the connection and then was too slow, or is no TLS server"
    )]
    Deadline,
    /// The connection broke.
    #[error("the connection failed during the TLS handshake: {0}")]
    Io(#[source] io::Error),
    /// The peer hung up.
    #[error(
        "the peer closed the connection during the TLS handshake: look into its log for the reason"
    )]
    PeerClosed,
    /// The peer's bytes are no TLS.
    #[error("the peer does not speak TLS (its first bytes are \"{}\"){}: check the port, and that both sides ask for TLS", start.escape_ascii(), known(start))]
    NotTls {
        /// What came instead of a record's header.
        start: [u8; HEADER_BYTES],
    },
    /// The peer speaks TLS, and another protocol in it.
    #[error(
        "the peer speaks TLS but is not Dunlin (it does not know the protocol \"dunlin\"): check the address and the port"
    )]
    NotDunlin,
    /// The peer says what a TLS client says first.
    #[error(
        "the peer answers with a TLS client's first words: it sends back what it gets, or connects itself; check the address and the port"
    )]
    Mirror,
    /// A record or the sum of them is too long.
    #[error(
        "the peer sent more than {FLIGHT_LIMIT_BYTES} bytes, or a record longer than allowed, before it was authenticated"
    )]
    TooLong,
    /// The peer gave up and said why.
    #[error("the peer ended the TLS handshake with the alert {0}")]
    PeerAlert(Alert),
    /// The peer has no certificate.
    #[error("the peer presented no certificate: lanes authenticate both sides, give it one")]
    NoCertificate,
    /// None of our authorities vouches for the peer's certificate.
    #[error("the peer's certificate is refused: {}", unissued(.0))]
    UnknownAuthority(Option<UntrustedReason>),
    /// The peer's certificate was taken back.
    #[error(
        "the peer's certificate, or an intermediate's, is revoked by its authority, as a revocation list on this host says: give the peer another certificate"
    )]
    Revoked,
    /// It cannot be known whether the peer's certificate was taken back.
    #[error(
        "this host's revocation list of the peer's authority is out of date ({detail}), so that nobody's certificate from there can be trusted: put its current list on this host"
    )]
    RevocationListOutdated {
        /// Since when.
        detail: String,
    },
    /// The peer's certificate is for something else.
    #[error(
        "the peer's certificate is not for its side of a connection (extended key usage): give a source one for TLS clients, a destination one for TLS servers"
    )]
    WrongPurpose,
    /// A signature does not verify.
    #[error(
        "a signature of the peer does not verify: most likely its authority bears the same name as one in this host's CA bundle and has another key; give both hosts certificates of one authority"
    )]
    BadSignature,
    /// The peer's certificate is out of date.
    #[error(
        "the peer's certificate has expired ({detail}): renew it on the peer, or correct this host's clock"
    )]
    Expired {
        /// When it did.
        detail: String,
    },
    /// The peer's certificate is not valid yet.
    #[error(
        "the peer's certificate is not valid yet ({detail}): correct the clock of one of the hosts"
    )]
    NotYetValid {
        /// When it will be.
        detail: String,
    },
    /// The peer's certificate is unfit for another reason.
    #[error("the peer's certificate is refused: {0}")]
    Certificate(CertificateError),
    /// The certificate is not of an allowed peer.
    #[error(transparent)]
    Peer(PeerRefused),
    /// Nothing in common.
    #[error(
        "the peer and this host have no TLS parameters in common ({0}): both must allow TLS 1.3 and share a suite and a key exchange"
    )]
    Incompatible(String),
    /// The kernel was to seal and open records, and did not take the keys. Nothing was sent with
    /// them; another connection may use them in the process.
    #[error("the connection is given up before any data: {0}")]
    Offload(#[from] Refused),
    /// Any other breach of the protocol.
    #[error("the peer broke the TLS protocol: {0}")]
    Protocol(#[source] rustls::Error),
    /// A local fault that no peer can cause.
    #[error("the TLS handshake could not be completed for a local reason: {0}")]
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
    /// What it means where a control lane was to be had.
    pub fn of_control_lane(&self) -> FaultCode {
        match self {
            Self::Deadline | Self::Io(_) | Self::PeerClosed => FaultCode::ControlLost,
            Self::NotTls { .. } | Self::NotDunlin | Self::Mirror | Self::Incompatible(_) => {
                FaultCode::NotDunlin
            }
            _ => FaultCode::Unauthorised,
        }
    }

    fn of_certificate(error: CertificateError) -> Self {
        match error {
            CertificateError::UnknownIssuer => Self::UnknownAuthority(take_unissued()),
            CertificateError::BadSignature => Self::BadSignature,
            CertificateError::Revoked => Self::Revoked,
            CertificateError::ExpiredContext { time, not_after } => Self::Expired {
                detail: at_odds("it was valid until", not_after, time),
            },
            CertificateError::NotValidYetContext { time, not_before } => Self::NotYetValid {
                detail: at_odds("it is valid from", not_before, time),
            },
            CertificateError::ExpiredRevocationListContext { time, next_update } => {
                Self::RevocationListOutdated {
                    detail: at_odds("the next one was due on", next_update, time),
                }
            }
            CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
                Self::WrongPurpose
            }
            error => Self::Certificate(error),
        }
    }
}

/// A date in a certificate, and the one that it was compared with.
fn at_odds(what: &str, date: UnixTime, now: UnixTime) -> String {
    let readable = |time: UnixTime| {
        i64::try_from(time.as_secs())
            .ok()
            .and_then(|seconds| ASN1Time::from_timestamp(seconds).ok())
            .map_or_else(|| time.as_secs().to_string(), |time| time.to_string())
    };
    format!(
        "{what} {}, and here it is {}",
        readable(date),
        readable(now)
    )
}

/// What is known to begin so.
fn known(start: &[u8; HEADER_BYTES]) -> &'static str {
    match start {
        b"SSH-2" | b"SSH-1" => ", as an SSH server does",
        b"HTTP/" => ", as an HTTP server does",
        b"GET /" | b"POST " | b"HEAD " | b"PUT /" => ", as an HTTP client does",
        _ => "",
    }
}

fn unissued(why: &Option<UntrustedReason>) -> String {
    match why {
        Some(why) => why.to_string(),
        None => "it comes from an unknown authority".to_owned(),
    }
}
