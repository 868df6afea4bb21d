//! The opening messages as one type, for a receiver that expects any of them.

use super::lane::LaneOpen;
use super::terms::VersionRange;
use super::{Offer, OpeningKind, Prelude, Refusal, Selection};
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
    /// [`DecodeError`], also if the body's length is not the announced one.
    pub fn decode(prelude: &Prelude, body: &[u8]) -> Result<Self, DecodeError> {
        let reader = Reader::over_body(body, prelude.body_bytes)?;
        match prelude.kind {
            OpeningKind::Offer => Offer::decode(prelude.versions, reader).map(Self::Offer),
            OpeningKind::Select => Selection::decode(prelude.versions, reader).map(Self::Select),
            OpeningKind::Refuse => {
                Refusal::decode(reader).map(|refusal| Self::Refuse(prelude.versions, refusal))
            }
            OpeningKind::Lane => LaneOpen::decode(prelude.versions, reader).map(Self::Lane),
        }
    }

    /// Appends the message with its prelude.
    ///
    /// # Errors
    /// A text exceeds its limit, or the version range is empty; `out` is then
    /// unchanged.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        match self {
            Self::Offer(offer) => offer.encode(out),
            Self::Select(selection) => selection.encode(out),
            Self::Refuse(versions, refusal) => refusal.encode(*versions, out),
            Self::Lane(lane) => lane.encode(out),
        }
    }
}
