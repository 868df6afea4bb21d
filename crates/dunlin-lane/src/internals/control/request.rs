//! Opens a control lane: connects, authenticates the peer and negotiates.

use std::io;
use std::time::Instant;

use dunlin_proto::fault::FaultCode;
use dunlin_proto::negotiate::{
    NotOffered, Offer, Opening, PRELUDE_BYTES, Prelude, Refusal, Selection,
};
use dunlin_proto::text::harmless;
use dunlin_proto::wire::DecodeError;
use thiserror::Error;

use super::{ControlError, ControlStream, client};
use crate::internals::dial::{Connector, DialCancel, DialError};
use crate::internals::policy::ClientTls;

/// Why a control lane could not be opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpenError {
    /// No authenticated connection could be opened.
    #[error(transparent)]
    Dial(#[from] DialError),
    /// The control lane failed.
    #[error("the control lane was lost")]
    Control(#[from] ControlError),
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
    /// The fault code. For [`OpenError::Refused`] it is the code that the peer sent.
    #[must_use]
    pub fn fault(&self) -> FaultCode {
        match self {
            // The peer rejects this side's certificate only after this side's handshake has ended,
            // so the peer's alert arrives on the lane.
            Self::Control(ControlError::PeerAlert(_)) => FaultCode::Unauthorised,
            Self::Dial(DialError::Handshake { source, .. }) => source.of_control_lane(),
            Self::Dial(_) | Self::Control(_) => FaultCode::ControlLost,
            Self::Malformed(error) => error.fault(),
            Self::Unexpected => FaultCode::Malformed,
            Self::NotOffered(_) => FaultCode::SecurityNotAgreed,
            Self::Refused(refusal) => refusal.fault,
        }
    }
}

/// Connects a control lane, sends `offer` and checks the peer's selection against it. Until
/// [`DialCancel::release`] is called, `cancel` also shuts down the returned lane.
///
/// # Errors
/// [`OpenError`]; the connection is closed.
pub fn open(
    endpoint: &str,
    connector: &dyn Connector,
    tls: &ClientTls,
    offer: &Offer,
    deadline: Instant,
    cancel: &DialCancel,
) -> Result<(ControlStream, Selection), OpenError> {
    let stream = cancel.connect(connector, endpoint, deadline)?;
    let control = client(stream, tls, deadline).map_err(|source| DialError::Handshake {
        endpoint: endpoint.to_owned(),
        source,
    })?;
    let mut bytes = Vec::new();
    // Encoding cannot fail, because every field has a fixed length.
    let encoded = offer.encode(&mut bytes).map_err(io::Error::other);
    encoded.map_err(ControlError::Io)?;
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
    control.receive_exact_by(&mut bytes, deadline)?;
    let prelude = Prelude::decode(&bytes)?;
    let mut body = vec![0; prelude.body_bytes];
    control.receive_exact_by(&mut body, deadline)?;
    Ok(Opening::decode(&prelude, &body)?)
}
