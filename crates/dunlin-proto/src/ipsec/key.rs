//! The derivation of an SA's key.
//!
//! Both ends derive 36 bytes from the TLS exporter (RFC 8446, section 7.5) of their control lane.
//! These bytes are an AES-256 key and the 4-byte salt of RFC 4106. The exporter's inputs are
//! [`EXPORTER_LABEL`] and a context of [`CONTEXT_BYTES`]:
//!
//! | offset | bytes | field |
//! | --- | --- | --- |
//! | 0 | 16 | session |
//! | 16 | 1 | direction: 1 from the initiator, 2 from the responder |
//! | 17 | 4 | index of the SA in its direction |
//! | 21 | 4 | epoch |
//!
//! The nonces of an SA count its packets. The count starts anew when the SA is installed, so a
//! context must never repeat. Within a session an index is never reused, and an SA is installed
//! once. Another session has another connection, and therefore another exporter secret.

use crate::limits::SESSION_ID_BYTES;
use crate::negotiate::SessionId;

/// The length of an AES-256 key with its salt (RFC 4106, section 8.1).
pub const KEY_BYTES: usize = 36;

/// The length of the context.
pub const CONTEXT_BYTES: usize = SESSION_ID_BYTES + 9;

/// The exporter label. It is not registered with IANA, so it starts as RFC 5705, section 4,
/// requires for private use.
pub const EXPORTER_LABEL: &[u8] = b"EXPERIMENTAL dunlin ipsec";

/// The role of a side on the control lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// The side that opened the connection.
    Initiator,
    /// The side that accepted the connection.
    Responder,
}

impl Role {
    /// Returns the other role.
    #[must_use]
    pub fn peer(self) -> Self {
        match self {
            Self::Initiator => Self::Responder,
            Self::Responder => Self::Initiator,
        }
    }
}

/// Returns the context for the key of an SA with which `sender` seals.
#[must_use]
pub fn context(session: &SessionId, sender: Role, index: u32, epoch: u32) -> [u8; CONTEXT_BYTES] {
    let mut context = [0; CONTEXT_BYTES];
    let (id, rest) = context.split_at_mut(SESSION_ID_BYTES);
    id.copy_from_slice(session);
    rest[0] = match sender {
        Role::Initiator => 1,
        Role::Responder => 2,
    };
    rest[1..5].copy_from_slice(&index.to_le_bytes());
    rest[5..9].copy_from_slice(&epoch.to_le_bytes());
    context
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contexts_differ_by_session_direction_index_and_epoch() {
        let session: SessionId = std::array::from_fn(|at| at as u8);
        let context = |session, sender, index, epoch| context(session, sender, index, epoch);
        let one = context(&session, Role::Initiator, 0x0102, 3);
        assert_eq!(one[..16], session);
        assert_eq!(one[16..], [1, 2, 1, 0, 0, 3, 0, 0, 0]);
        let others = [
            context(&[0; 16], Role::Initiator, 0x0102, 3),
            context(&session, Role::Responder, 0x0102, 3),
            context(&session, Role::Initiator, 0x0103, 3),
            context(&session, Role::Initiator, 0x0102, 4),
        ];
        assert!(others.iter().all(|other| *other != one));
    }
}
