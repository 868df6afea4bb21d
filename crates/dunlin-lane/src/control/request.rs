//! Opens a control lane: connects, authenticates the peer and negotiates.

use std::io;
use std::time::Instant;

use dunlin_linux::socket::{Liveness, set_liveness};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::negotiate::{
    NotOffered, Offer, Opening, PRELUDE_BYTES, Prelude, Refusal, Selection,
};
use dunlin_proto::text::harmless;
use dunlin_proto::wire::{DecodeError, EncodeError};
use thiserror::Error;

use super::{ControlError, ControlStream, client};
use crate::dial::{Connector, DialCancel};
use crate::handshake::HandshakeError;
use crate::policy::ClientTls;

/// A request to open a control lane.
#[derive(Clone, Copy)]
pub struct ControlRequest<'a> {
    /// Host and port of the peer.
    pub endpoint: &'a str,
    /// Opens the TCP connection.
    pub connector: &'a dyn Connector,
    /// This side's certificate and the peers that it accepts.
    pub tls: &'a ClientTls,
    /// The terms to negotiate.
    pub offer: &'a Offer,
    /// The request fails at this time.
    pub deadline: Instant,
    /// Cancels the request from another thread. It covers the returned lane too, until
    /// [`DialCancel::release`].
    pub cancel: &'a DialCancel,
}

/// Why a control lane could not be opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The TCP connection failed.
    #[error("cannot reach {endpoint}")]
    Connect {
        /// Host and port.
        endpoint: String,
        /// The cause.
        source: io::Error,
    },
    /// The TLS handshake failed.
    #[error("cannot secure the control lane to {endpoint}")]
    Handshake {
        /// Host and port.
        endpoint: String,
        /// The cause.
        source: HandshakeError,
    },
    /// The control lane failed.
    #[error("the control lane was lost")]
    Control(#[from] ControlError),
    /// The offer cannot be encoded.
    #[error("cannot encode the offer")]
    Encode(#[from] EncodeError),
    /// The peer's answer cannot be decoded.
    #[error("malformed message from peer")]
    Malformed(#[from] DecodeError),
    /// The peer's answer is neither a selection nor a refusal.
    #[error("unexpected answer to the offer")]
    Unexpected,
    /// The peer selected something that was not offered.
    #[error("the peer's selection does not match the offer")]
    NotOffered(#[from] NotOffered),
    /// The peer refused the offer.
    #[error("refused by the peer: {}", harmless(&.0.text))]
    Refused(Refusal),
}

impl OpenError {
    /// The fault code. For [`OpenError::Refused`] it is the peer's.
    #[must_use]
    pub fn fault(&self) -> FaultCode {
        match self {
            // The peer rejects this side's certificate after this side's handshake has ended.
            Self::Control(ControlError::PeerAlert(_)) => FaultCode::Unauthorised,
            Self::Connect { .. } | Self::Control(_) => FaultCode::ControlLost,
            Self::Handshake { source, .. } => source.of_control_lane(),
            Self::Encode(_) => FaultCode::Internal,
            Self::Malformed(error) => error.fault(),
            Self::Unexpected => FaultCode::Malformed,
            Self::NotOffered(_) => FaultCode::SecurityNotAgreed,
            Self::Refused(refusal) => refusal.fault,
        }
    }
}

/// Connects a control lane, sends the offer and checks the peer's selection against it.
///
/// # Errors
/// [`OpenError`]; the connection is closed.
pub fn open(request: &ControlRequest<'_>) -> Result<(ControlStream, Selection), OpenError> {
    let ControlRequest {
        offer,
        deadline,
        cancel,
        ..
    } = *request;
    let endpoint = || request.endpoint.to_owned();
    let connect = || {
        let connector = request.connector;
        let stream = connector.connect(request.endpoint, deadline, cancel.wakeup())?;
        cancel.covers(&stream)?;
        set_liveness(&stream, &Liveness::default())?;
        Ok(stream)
    };
    let stream = connect().map_err(|source| OpenError::Connect {
        endpoint: endpoint(),
        source,
    })?;
    let control = client(stream, request.tls, deadline).map_err(|source| OpenError::Handshake {
        endpoint: endpoint(),
        source,
    })?;
    let mut bytes = Vec::new();
    offer.encode(&mut bytes)?;
    control.send(&bytes)?;
    match read_opening(&control, deadline)? {
        Opening::Select(selection) => {
            selection.confirm(offer)?;
            Ok((control, selection))
        }
        Opening::Refuse(_, refusal) => Err(OpenError::Refused(refusal)),
        _ => Err(OpenError::Unexpected),
    }
}

/// Reads the peer's answer to an offer.
fn read_opening(control: &ControlStream, deadline: Instant) -> Result<Opening, OpenError> {
    let mut bytes = [0; PRELUDE_BYTES];
    control.receive_exact(&mut bytes, deadline)?;
    let prelude = Prelude::decode(&bytes)?;
    let mut body = vec![0; prelude.body_bytes];
    control.receive_exact(&mut body, deadline)?;
    Ok(Opening::decode(&prelude, &body)?)
}
