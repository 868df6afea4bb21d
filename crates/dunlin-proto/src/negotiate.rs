//! How a connection opens: both sides agree on a version, and a data lane names
//! its session.
//!
//! ```text
//!  control lane                       data lane
//!  source            destination      source            destination
//!    │ offer ───────────▶ │             │ lane open ───────▶ │
//!    │ ◀─── select/refuse │             │ frames ──────────▶ │
//!    │ control messages ▶ │
//! ```
//!
//! A data lane gets no answer. If the destination refuses it, a message on the control lane says so.
//!
//! Every opening message starts with a prelude of 16 bytes. Its format never
//! changes, so a receiver can read the versions without decoding the body. The
//! fixed parts of *offer*, *select* and *refuse* never change either: otherwise
//! an old destination could not select an old version from a newer source's
//! offer. Later releases add extension fields.

mod lane;
mod opening;
mod secret;
mod select;
mod terms;

use thiserror::Error;

pub use lane::{LANE_OPEN_BYTES, LaneDirection, LaneOpen};
pub use opening::Opening;
pub use secret::SessionSecret;
pub use select::{NotOffered, Supported, select};
pub use terms::{Features, LaneSecurity, TUNNEL_VERSIONS, VERSIONS, VersionRange};

use crate::fault::FaultCode;
use crate::limits::{MAX_OPENING_BODY_BYTES, MAX_TEXT_BYTES, SESSION_ID_BYTES};
use crate::wire::codec::{Codec, Fields, Layout, OneOf, Text, layout};
use crate::wire::{
    DecodeError, EncodeError, Reader, Writer, bounded, inconsistent, invalid, wide, within,
};
use terms::LANE_SECURITY;

/// Bytes of the prelude.
pub const PRELUDE_BYTES: usize = 16;

/// The first eight bytes of every opening message. The line end exposes a network path that
/// rewrites line ends. It also makes a server of a line-based protocol answer immediately.
pub const MAGIC: [u8; 8] = *b"DUNLIN\r\n";

/// Identifies one migration of one VM: random, chosen by the source.
pub type SessionId = [u8; SESSION_ID_BYTES];

/// Kinds of opening messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpeningKind {
    /// The source's [`Offer`].
    Offer,
    /// The destination's [`Selection`].
    Select,
    /// The destination's [`Refusal`].
    Refuse,
    /// A data lane's [`LaneOpen`].
    Lane,
}

const KIND: OneOf<u16, OpeningKind> = OneOf {
    rows: &[
        (1, OpeningKind::Offer),
        (2, OpeningKind::Select),
        (3, OpeningKind::Refuse),
        (4, OpeningKind::Lane),
    ],
    grows: false,
};

/// The first 16 bytes of an opening message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prelude {
    /// The kind of the message.
    pub kind: OpeningKind,
    /// In *offer*, the source's versions. In *refuse*, the destination's versions. In *select* and
    /// *lane open*, the one version that was selected.
    pub versions: VersionRange,
    /// Length of the body, at most [`MAX_OPENING_BODY_BYTES`].
    pub body_bytes: usize,
}

impl Prelude {
    /// Reads a prelude. Versions that this release does not support are not an error here, because
    /// [`select`] refuses them with a reason.
    ///
    /// # Errors
    /// Wrong magic, an unknown kind, an empty version range or one that includes version 0, a
    /// *select* or *lane open* with more than one version, or a body over the limit.
    pub fn decode(bytes: &[u8; PRELUDE_BYTES]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(bytes);
        if reader.array::<8>("magic")? != MAGIC {
            let why = "the peer does not speak Dunlin's protocol";
            return Err(inconsistent("magic", why, 0));
        }
        let kind = KIND.decode("opening kind", &mut reader)?;
        let offset = reader.offset();
        let versions = VersionRange {
            min: reader.u16("oldest version")?,
            max: reader.u16("newest version")?,
        };
        let one_version = matches!(kind, OpeningKind::Select | OpeningKind::Lane);
        if versions.min == 0
            || versions.min > versions.max
            || (one_version && versions.min != versions.max)
        {
            return Err(inconsistent("versions", "invalid version range", offset));
        }
        let offset = reader.offset();
        let body_bytes = usize::from(reader.u16("body length")?);
        within(
            "body length",
            wide(body_bytes),
            wide(MAX_OPENING_BODY_BYTES),
            offset,
        )?;
        Ok(Self {
            kind,
            versions,
            body_bytes,
        })
    }
}

/// Appends a prelude and the body that `write` appends.
fn append_opening(
    out: &mut Vec<u8>,
    kind: OpeningKind,
    versions: VersionRange,
    write: impl FnOnce(&mut Writer<'_>) -> Result<(), EncodeError>,
) -> Result<(), EncodeError> {
    if versions.min == 0 || versions.min > versions.max {
        return Err(invalid("versions", "invalid version range"));
    }
    Writer::append(out, |writer| {
        writer.bytes(&MAGIC);
        KIND.encode("opening kind", &kind, writer)?;
        writer.u16(versions.min);
        writer.u16(versions.max);
        let length_at = writer.position();
        writer.u16(0);
        let body_at = writer.position();
        write(writer)?;
        let body_bytes = writer.position() - body_at;
        let length: u16 = bounded("body length", body_bytes, MAX_OPENING_BODY_BYTES)?;
        writer.patch(length_at, &length.to_le_bytes());
        Ok(())
    })
}

/// The source's first message on the control lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The source's versions.
    pub versions: VersionRange,
    /// Supported features that the destination may leave out.
    pub optional: Features,
    /// Features that the destination must select.
    pub required: Features,
    /// Requested security of the data lanes.
    pub security: LaneSecurity,
    /// The session.
    pub session: SessionId,
    /// The migration attempt within this session, counted from 1.
    pub attempt: u32,
    /// The number of the control lane within this attempt, counted from 1. A control lane with a
    /// higher epoch replaces the earlier control lanes.
    pub epoch: u32,
}

impl Offer {
    fn decode(versions: VersionRange, reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self {
            versions,
            optional: Features::from_bits(reader.u64("optional features")?),
            required: Features::from_bits(reader.u64("required features")?),
            session: reader.array("session")?,
            attempt: reader.u32("attempt")?,
            epoch: reader.u32("epoch")?,
            security: LANE_SECURITY.decode("lane security", reader)?,
        })
    }

    /// Appends the offer with its prelude.
    ///
    /// # Errors
    /// The version range is empty or includes version 0; `out` is then unchanged.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        append_opening(out, OpeningKind::Offer, self.versions, |writer| {
            writer.u64(self.optional.bits());
            writer.u64(self.required.bits());
            writer.bytes(&self.session);
            writer.u32(self.attempt);
            writer.u32(self.epoch);
            LANE_SECURITY.encode("lane security", &self.security, writer)
        })
    }
}

/// The destination's choice from an offer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    /// The version that both sides use from now on.
    pub version: u16,
    /// The features that both sides use.
    pub features: Features,
    /// What protects the data lanes.
    pub security: LaneSecurity,
}

impl Selection {
    fn decode(versions: VersionRange, reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self {
            version: versions.min,
            features: Features::from_bits(reader.u64("features")?),
            security: LANE_SECURITY.decode("lane security", reader)?,
        })
    }

    /// Appends the selection with its prelude.
    ///
    /// # Errors
    /// The version is 0; `out` is then unchanged.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let versions = VersionRange::only(self.version);
        append_opening(out, OpeningKind::Select, versions, |writer| {
            writer.u64(self.features.bits());
            LANE_SECURITY.encode("lane security", &self.security, writer)
        })
    }
}

/// The destination's refusal of an offer.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{fault}: {text}")]
pub struct Refusal {
    /// The reason as a code.
    pub fault: FaultCode,
    /// The reason as text for the operator, at most [`MAX_TEXT_BYTES`].
    pub text: String,
}

layout! { Refusal { fault: "fault" as Fields, text: "text" as Text(MAX_TEXT_BYTES) } }

impl Refusal {
    /// Appends the refusal with its prelude; `versions` are the versions that this side supports.
    ///
    /// # Errors
    /// The text exceeds its limit, or the version range is empty or includes version 0; `out` is
    /// then unchanged.
    fn encode(&self, versions: VersionRange, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        append_opening(out, OpeningKind::Refuse, versions, |writer| {
            self.encode_fields(writer)
        })
    }
}

#[cfg(test)]
mod tests;
