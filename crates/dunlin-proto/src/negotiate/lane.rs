//! How a data lane proves which session it belongs to.

use super::terms::VersionRange;
use super::{OpeningKind, PRELUDE_BYTES, SessionId, append_opening};
use crate::limits::{LANE_MAC_BYTES, SESSION_ID_BYTES};
use crate::wire::codec::{Codec, NOT_ZERO, OneOf};
use crate::wire::{DecodeError, EncodeError, Reader, invalid};

/// Length of a *lane open* message of version 1. From version 2 on the message is one byte longer.
/// It has no variable part, so a listener reads a fixed number of bytes before it has authenticated
/// the lane.
pub const LANE_OPEN_BYTES: usize = PRELUDE_BYTES + SESSION_ID_BYTES + 2 + LANE_MAC_BYTES;

/// The direction in which a data lane carries frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaneDirection {
    /// From the side that dialled the lane's connection; the only direction in version 1.
    FromDialer,
    /// To the side that dialled the lane's connection.
    ToDialer,
}

const DIRECTION: OneOf<u8, LaneDirection> = OneOf {
    rows: &[(1, LaneDirection::FromDialer), (2, LaneDirection::ToDialer)],
    grows: false,
};

impl LaneDirection {
    /// Whether *lane open* of this version names the direction.
    fn is_named_in(version: u16) -> bool {
        version >= 2
    }
}

/// The first bytes of a data lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaneOpen {
    /// The version that was selected for the session.
    pub version: u16,
    /// The session.
    pub session: SessionId,
    /// The lane's number; 0 is the control lane. A migration uses each number once. A tunnel uses
    /// each number once in each direction of the trunk.
    pub lane: u16,
    /// The lane's direction. In version 1 it is not on the wire.
    pub direction: LaneDirection,
    /// HMAC-SHA-256 over [`LaneOpen::mac_input`], keyed with the session's secret.
    /// The receiver checks it in constant time before it uses the other fields.
    pub mac: [u8; LANE_MAC_BYTES],
}

impl LaneOpen {
    /// A message without its proof.
    #[must_use]
    pub fn unproved(version: u16, session: SessionId, lane: u16, direction: LaneDirection) -> Self {
        Self {
            version,
            session,
            lane,
            direction,
            mac: [0; LANE_MAC_BYTES],
        }
    }

    pub(super) fn decode(
        versions: VersionRange,
        reader: &mut Reader<'_>,
    ) -> Result<Self, DecodeError> {
        let version = versions.min;
        Ok(Self {
            version,
            session: reader.array("session")?,
            lane: NOT_ZERO.decode("lane", reader)?,
            direction: if LaneDirection::is_named_in(version) {
                DIRECTION.decode("lane direction", reader)?
            } else {
                LaneDirection::FromDialer
            },
            mac: reader.array("lane proof")?,
        })
    }

    /// Appends the message with its prelude.
    ///
    /// # Errors
    /// Lane 0, version 0, or a direction that the version lacks. On an error, `out` is unchanged.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let versions = VersionRange::only(self.version);
        append_opening(out, OpeningKind::Lane, versions, |writer| {
            writer.bytes(&self.session);
            NOT_ZERO.encode("lane", &self.lane, writer)?;
            if LaneDirection::is_named_in(self.version) {
                DIRECTION.encode("lane direction", &self.direction, writer)?;
            } else if self.direction != LaneDirection::FromDialer {
                return Err(invalid("lane direction", "invalid in version 1"));
            }
            writer.bytes(&self.mac);
            Ok(())
        })
    }

    /// The input of the lane's proof: a domain separator of 16 bytes, the session, the lane's
    /// number, and from version 2 on the direction as on the wire. Inputs of version 1 are shorter
    /// than those of later versions, so no proof is valid both in version 1 and in a later version.
    #[must_use]
    pub fn mac_input(&self) -> Vec<u8> {
        let mut input = LANE_MAC_DOMAIN.to_vec();
        input.extend_from_slice(&self.session);
        input.extend_from_slice(&self.lane.to_le_bytes());
        if LaneDirection::is_named_in(self.version) {
            let named = DIRECTION
                .rows
                .iter()
                .find(|(_, one)| *one == self.direction);
            input.extend(named.map(|(number, _)| number));
        }
        input
    }
}

const LANE_MAC_DOMAIN: [u8; 16] = *b"dunlin lane open";
