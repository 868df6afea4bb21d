//! Admitting a lane that a peer has opened: the counterpart of [`dial`](super::dial).

use std::error::Error;
use std::io;

use dunlin_linux::socket::{Liveness, set_liveness};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::negotiate::LaneSecurity;
use thiserror::Error;

use super::accept::LaneSocket;
use super::data::{DataReceiver, PlainConsent, ReceiveError, STALL_LIMIT};
use super::peers::PeerIdentity;

/// Admits lanes of one kind: TLS, plain, or sealed below TCP.
pub trait LaneAcceptor: Send + Sync {
    /// Makes a lane of a connection whose first message has been read and has proved that it
    /// belongs to the session. `is_peer` recognises the session's peer.
    ///
    /// # Errors
    /// The lane is not protected as agreed, or not by this peer; the connection is closed then.
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
    /// Its certificate is an allowed peer's, but not that of the session's peer.
    #[error("it is not from the peer of this session")]
    OtherPeer,
    /// It is not protected as both sides agreed.
    #[error("{agreed} lanes were agreed")]
    OtherSecurity {
        /// What was agreed.
        agreed: LaneSecurity,
    },
    /// IPsec was agreed, and its packets are not protected by IPsec.
    #[error("it does not go over IPsec: {0}")]
    NotSealed(Box<dyn Error + Send + Sync>),
    /// Its socket cannot be set up.
    #[error("its socket cannot be set up")]
    Socket(#[from] io::Error),
    /// It failed before it was used.
    #[error(transparent)]
    Receive(#[from] ReceiveError),
}

impl AdmitError {
    /// The reason as a code.
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

/// Admits lanes in the clear, to which both sides have consented.
#[derive(Clone, Copy, Debug)]
pub struct PlainAcceptor(PlainConsent);

impl PlainAcceptor {
    /// An acceptor under this consent.
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
