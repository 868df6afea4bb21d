//! The records of a relay: a TLS connection to some other program, carried by two threads.
//!
//! [`session`] has rustls seal and open them in this process; in [`in_kernel`] the kernel does,
//! and what is left to do here are the messages of TLS itself. A lane speaks to Dunlin alone and
//! needs neither: it never renews a key and takes nothing but data.

#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
pub mod in_kernel;
pub mod session;

use thiserror::Error;

use self::in_kernel::{LATE_RUN_LIMIT, MESSAGE_LIMIT_BYTES};
use self::session::Session;
use super::record::{Alert, OpenError, RECORD_LIMIT, SealError};

/// What seals and opens a connection's records.
pub enum Records {
    /// rustls, in this process.
    Process(Session),
    /// The kernel: what is written to the socket is sealed, what is read is opened.
    Kernel(in_kernel::Sealing, in_kernel::Opening),
}

/// Why the TLS side of a relay is at its end.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RelayError {
    /// rustls has ended the connection.
    #[error("{0}")]
    Tls(rustls::Error),
    /// The kernel could not open a record, or the record breaks the protocol.
    #[error(transparent)]
    Open(OpenError),
    /// A record could not be sealed.
    #[error(transparent)]
    Seal(SealError),
    /// The keys of TLS 1.2 are worn.
    #[error(
        "this connection has carried {RECORD_LIMIT} records in one direction, the most that one \
         key may seal, and TLS 1.2 cannot renew it: let both sides speak TLS 1.3, or carry the \
         route as a stripe"
    )]
    Worn,
    /// The peer gave up and said why.
    #[error("the peer ended the connection with the alert {0}")]
    PeerAlert(Alert),
    /// A handshake message that is not allowed after the handshake.
    #[error("the peer sent handshake message {0} after the handshake, which breaks the protocol")]
    Late(u8),
    /// Too much that is no data.
    #[error(
        "the peer sent more than {LATE_RUN_LIMIT} messages of TLS itself in a row, or one of more \
         than {MESSAGE_LIMIT_BYTES} bytes"
    )]
    LateRun,
    /// The next keys could not be made.
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
