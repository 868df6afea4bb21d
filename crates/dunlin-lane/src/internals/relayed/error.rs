//! Why the TLS connection of a relay ended.

use thiserror::Error;

use crate::internals::record::{Alert, OpenError, RECORD_LIMIT, SealError};

/// Maximum length of a handshake message, without its header of four bytes. rustls has the same
/// limit. The format allows longer session tickets, but common implementations do not send them.
pub(super) const MESSAGE_LIMIT_BYTES: usize = 0xffff;
/// Maximum number of TLS messages without data in between. A longer sequence is an attack or a
/// fault.
pub(super) const LATE_RUN_LIMIT: u32 = 32;

/// Why the TLS connection of a relay ended.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RelayError {
    /// rustls ended the connection.
    #[error("{0}")]
    Tls(rustls::Error),
    /// A record could not be opened, or violates the protocol.
    #[error(transparent)]
    Open(OpenError),
    /// A record could not be sealed.
    #[error(transparent)]
    Seal(SealError),
    /// The keys have reached their record limit, and TLS 1.2 cannot renew them.
    #[error(
        "the limit of {RECORD_LIMIT} records per key is reached, and TLS 1.2 cannot renew keys: use \
         TLS 1.3 on both sides, or stripe mode for this route"
    )]
    UsedUp,
    /// The peer sent an alert.
    #[error("the peer ended the connection with alert {0}")]
    PeerAlert(Alert),
    /// A handshake message that is not allowed after the handshake.
    #[error("the peer sent handshake message {0} after the handshake, which violates the protocol")]
    Late(u8),
    /// Too many messages without data in between, or a message that is too long.
    #[error(
        "the peer sent more than {LATE_RUN_LIMIT} TLS messages in a row without data, or a TLS message \
         of more than {MESSAGE_LIMIT_BYTES} bytes"
    )]
    LateRun,
    /// The next keys could not be derived or installed.
    #[error("the connection's keys could not be renewed: {0}")]
    Renewal(String),
}

impl From<OpenError> for RelayError {
    fn from(error: OpenError) -> Self {
        match error {
            OpenError::Alert { alert } => Self::PeerAlert(alert),
            error => Self::Open(error),
        }
    }
}
