//! Admission of lanes that a peer opens: the counterpart of [`dial`](super::dial).

use std::error::Error;
use std::io;

use dunlin_linux::socket::{Liveness, set_liveness};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::negotiate::LaneSecurity;
use thiserror::Error;

use super::accept::LaneSocket;
use super::data::{DataReceiver, PlainConsent, ReceiveError, STALL_LIMIT};
use super::peers::PeerIdentity;

/// Admits lanes of one kind: TLS, plain, or protected by IPsec.
pub trait LaneAcceptor: Send + Sync {
    /// Turns a connection into a lane. The connection's first message has already been read and
    /// proves that the connection belongs to the session. `is_peer` returns true for the session's
    /// peer.
    ///
    /// # Errors
    /// [`AdmitError`], for example if the lane does not have the agreed security or is not from the
    /// session's peer. The connection is closed.
    fn admit(
        &self,
        socket: LaneSocket,
        is_peer: &dyn Fn(&PeerIdentity) -> bool,
    ) -> Result<DataReceiver, AdmitError>;
}

/// Why a lane was not admitted.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum AdmitError {
    /// The peer's certificate is allowed, but the peer is not the session's peer.
    #[error("the lane is not from the session's peer")]
    OtherPeer,
    /// The lane does not have the security on which the two hosts agreed.
    #[error("the lane does not use the agreed security, {agreed}")]
    OtherSecurity {
        /// The agreed security.
        agreed: LaneSecurity,
    },
    /// The two hosts agreed on IPsec, but IPsec does not protect the lane's packets, or the lane's
    /// connection cannot be checked.
    #[error("IPsec does not protect the lane: {0}")]
    NotSealed(Box<dyn Error + Send + Sync>),
    /// The lane's socket cannot be set up.
    #[error("cannot set up the lane's socket")]
    Socket(#[from] io::Error),
    /// The lane failed before its first use.
    #[error(transparent)]
    Receive(#[from] ReceiveError),
}

impl AdmitError {
    /// The fault code for this error.
    #[must_use]
    pub fn fault(&self) -> FaultCode {
        match self {
            Self::OtherPeer => FaultCode::WrongIdentity,
            Self::OtherSecurity { .. } | Self::NotSealed(_) => FaultCode::SecurityNotAgreed,
            Self::Socket(_) | Self::Receive(_) => FaultCode::LaneLost,
        }
    }
}

/// Admits TLS lanes.
#[derive(Clone, Copy, Debug, Default)]
pub struct TlsAcceptor;

impl LaneAcceptor for TlsAcceptor {
    fn admit(
        &self,
        socket: LaneSocket,
        is_peer: &dyn Fn(&PeerIdentity) -> bool,
    ) -> Result<DataReceiver, AdmitError> {
        let LaneSocket::Tls(secured) = socket else {
            let agreed = LaneSecurity::Tls;
            return Err(AdmitError::OtherSecurity { agreed });
        };
        if !is_peer(&secured.peer) {
            return Err(AdmitError::OtherPeer);
        }
        set_liveness(&secured.stream, &Liveness::default())?;
        Ok(DataReceiver::tls(*secured, STALL_LIMIT)?)
    }
}

/// Admits unencrypted lanes, to which both hosts have consented.
#[derive(Clone, Copy, Debug)]
pub struct PlainAcceptor(PlainConsent);

impl PlainAcceptor {
    /// Returns an acceptor. `consent` proves that both hosts allow unencrypted lanes.
    #[must_use]
    pub fn new(consent: PlainConsent) -> Self {
        Self(consent)
    }
}

impl LaneAcceptor for PlainAcceptor {
    fn admit(
        &self,
        socket: LaneSocket,
        _: &dyn Fn(&PeerIdentity) -> bool,
    ) -> Result<DataReceiver, AdmitError> {
        let LaneSocket::Plain(stream) = socket else {
            let agreed = LaneSecurity::Plain;
            return Err(AdmitError::OtherSecurity { agreed });
        };
        set_liveness(&stream, &Liveness::default())?;
        Ok(DataReceiver::plain(stream, self.0, STALL_LIMIT)?)
    }
}
