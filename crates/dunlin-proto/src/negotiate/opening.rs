//! The opening messages as one type, for a receiver that expects any of them.

use super::lane::LaneOpen;
use super::terms::VersionRange;
use super::{Offer, OpeningKind, Prelude, Refusal, Selection};
use crate::wire::codec::Layout;
use crate::wire::{DecodeError, EncodeError, Reader};

/// Any opening message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Opening {
    /// See [`Offer`].
    Offer(Offer),
    /// See [`Selection`].
    Select(Selection),
    /// See [`Refusal`]; the versions are those of the refusing side.
    Refuse(VersionRange, Refusal),
    /// See [`LaneOpen`].
    Lane(LaneOpen),
}

impl Opening {
    /// Reads the body that follows `prelude`.
    ///
    /// # Errors
    /// [`DecodeError`], including when the body does not have the announced length.
    pub fn decode(prelude: &Prelude, body: &[u8]) -> Result<Self, DecodeError> {
        let mut body = Reader::over_body(body, prelude.body_bytes)?;
        let (versions, reader) = (prelude.versions, &mut body);
        let opening = match prelude.kind {
            OpeningKind::Offer => Self::Offer(Offer::decode(versions, reader)?),
            OpeningKind::Select => Self::Select(Selection::decode(versions, reader)?),
            OpeningKind::Refuse => Self::Refuse(versions, Refusal::decode_fields(reader)?),
            OpeningKind::Lane => Self::Lane(LaneOpen::decode(versions, reader)?),
        };
        match prelude.kind {
            OpeningKind::Lane => body.finish("lane open")?,
            _ => body.fields(|_, _| Ok(false))?,
        }
        Ok(opening)
    }

    /// Appends the message with its prelude.
    ///
    /// # Errors
    /// The message has a value that a peer would reject; `out` is then unchanged.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        match self {
            Self::Offer(offer) => offer.encode(out),
            Self::Select(selection) => selection.encode(out),
            Self::Refuse(versions, refusal) => refusal.encode(*versions, out),
            Self::Lane(lane) => lane.encode(out),
        }
    }
}
