//! How a data lane proves which session it belongs to.

use super::terms::VersionRange;
use super::{OpeningKind, PRELUDE_BYTES, SessionId, append_opening};
use crate::limits::{LANE_MAC_BYTES, SESSION_ID_BYTES};
use crate::wire::codec::{Codec, NOT_ZERO};
use crate::wire::{DecodeError, EncodeError, Reader};

/// Length of a *lane open* message. It has no variable part, so a listener reads
/// exactly this number of bytes before it has authenticated the lane.
pub const LANE_OPEN_BYTES: usize = PRELUDE_BYTES + LANE_OPEN_BODY_BYTES;

const LANE_OPEN_BODY_BYTES: usize = SESSION_ID_BYTES + 2 + LANE_MAC_BYTES;

/// The first bytes of a data lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaneOpen {
    /// The version that was selected for the session.
    pub version: u16,
    /// The session.
    pub session: SessionId,
    /// The lane's number, never used before in the session. 0 is the control lane.
    pub lane: u16,
    /// HMAC-SHA-256 over [`lane_mac_input`], keyed with the session's secret.
    /// The receiver checks it in constant time before it uses the other fields.
    pub mac: [u8; LANE_MAC_BYTES],
}

impl LaneOpen {
    pub(super) fn decode(
        versions: VersionRange,
        reader: &mut Reader<'_>,
    ) -> Result<Self, DecodeError> {
        Ok(Self {
            version: versions.min,
            session: reader.array("session")?,
            lane: NOT_ZERO.decode("lane", reader)?,
            mac: reader.array("lane proof")?,
        })
    }

    /// Appends the message with its prelude, [`LANE_OPEN_BYTES`] in all.
    ///
    /// # Errors
    /// Lane 0 or version 0; `out` is then unchanged.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let versions = VersionRange::only(self.version);
        append_opening(out, OpeningKind::Lane, versions, |writer| {
            writer.bytes(&self.session);
            NOT_ZERO.encode("lane", &self.lane, writer)?;
            writer.bytes(&self.mac);
            Ok(())
        })
    }
}

const LANE_MAC_DOMAIN: [u8; 16] = *b"dunlin lane open";

/// Length of the input of a lane's proof.
pub const LANE_MAC_INPUT_BYTES: usize = LANE_MAC_DOMAIN.len() + SESSION_ID_BYTES + 2;

/// The input of a lane's proof: a domain separator of 16 bytes, the session,
/// and the lane's number.
#[must_use]
pub fn lane_mac_input(session: &SessionId, lane: u16) -> [u8; LANE_MAC_INPUT_BYTES] {
    let mut input = [0; LANE_MAC_INPUT_BYTES];
    let (domain, rest) = input.split_at_mut(LANE_MAC_DOMAIN.len());
    let (identity, number) = rest.split_at_mut(SESSION_ID_BYTES);
    domain.copy_from_slice(&LANE_MAC_DOMAIN);
    identity.copy_from_slice(session);
    number.copy_from_slice(&lane.to_le_bytes());
    input
}
