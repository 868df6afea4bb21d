//! A session's peer: the [`Principal`] that a later connection must match to
//! ask about the session, to settle it or to release it.
//!
//! A certificate may be renewed while a session is in doubt. If possible, a principal therefore
//! names what a renewal keeps: the pin that admitted the peer, or the peer's name together with the
//! authority that certified this name. The journal stores the principal in the *peer block* after
//! the two slots. Each attempt writes and syncs the block once, before the first record that a peer
//! may ask about. docs/journal/peer.md lists every byte.

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzz;

use std::fmt;

use super::{CHECKSUM_AT, RECORD_BYTES, SLOTS_BYTES, sealed};
use crate::limits::{MAX_PRINCIPAL_NAME_BYTES, SESSION_ID_BYTES};
use crate::negotiate::SessionId;
use crate::wire::{DecodeError, EncodeError, Reader};

/// Offset of the block in a journal file.
pub const PEER_BLOCK_AT: usize = SLOTS_BYTES;

/// Bytes of the block; the remaining bytes of the file are zero.
pub const PEER_BLOCK_BYTES: usize = RECORD_BYTES;

const MAGIC: [u8; 8] = *b"DUNLPEER";
const VERSION: u16 = 1;
/// Bytes of all fields except the name.
const FIXED_BYTES: usize = 8 + 2 + 1 + 5 + 16 + 32 + 32;

const _: () = assert!(FIXED_BYTES + 2 + MAX_PRINCIPAL_NAME_BYTES <= CHECKSUM_AT);

/// Identifies a session's peer by how the peer was authorised. If possible, a principal uses
/// properties that a renewed certificate keeps. Digests are SHA-256.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Principal {
    /// The holder of this certificate (digest of its DER encoding). The certificate was
    /// pinned, or its other properties cannot identify the peer after a renewal.
    Certificate([u8; 32]),
    /// The holder of this key (digest of the SubjectPublicKeyInfo, DER).
    Key([u8; 32]),
    /// The holder of this name, certified by this authority.
    Name {
        /// Digest of the trust anchor's SubjectPublicKeyInfo (DER).
        authority: [u8; 32],
        /// A DNS name, IP address or URI, as in a list of peers; at most
        /// [`MAX_PRINCIPAL_NAME_BYTES`].
        name: String,
    },
    /// The holder of a certificate that this authority has signed and that contains exactly these
    /// names. The journal has this variant if the policy did not require a single name.
    Names {
        /// Digest of the trust anchor's SubjectPublicKeyInfo (DER).
        authority: [u8; 32],
        /// Digest of the names; the crate that checks certificates defines how it is computed.
        names: [u8; 32],
    },
}

/// The peer according to a journal file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordedPeer {
    /// The file has no peer block, because an older release wrote it. Only the text in
    /// [`Record::peer`](super::Record::peer) names the peer.
    BeforeBlocks,
    /// The block is empty, damaged, of another session or of a newer release, so no peer matches.
    Unknown,
    /// The peer.
    Known(Principal),
}

impl Principal {
    /// Encodes the block for the file of `session`.
    ///
    /// # Errors
    /// The name exceeds its limit.
    pub fn encode(&self, session: SessionId) -> Result<[u8; PEER_BLOCK_BYTES], EncodeError> {
        const NONE: [u8; 32] = [0; 32];
        let (kind, authority, digest, name) = match self {
            Self::Certificate(digest) => (1, &NONE, digest, ""),
            Self::Key(digest) => (2, &NONE, digest, ""),
            Self::Name { authority, name } => (3, authority, &NONE, name.as_str()),
            Self::Names { authority, names } => (4, authority, names, ""),
        };
        sealed(|writer| {
            writer.bytes(&MAGIC);
            writer.u16(VERSION);
            writer.u8(kind);
            writer.bytes(&[0; 5]);
            writer.bytes(&session);
            writer.bytes(authority);
            writer.bytes(digest);
            writer.text("peer name", name, MAX_PRINCIPAL_NAME_BYTES)
        })
    }
}

impl fmt::Display for Principal {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digest = match self {
            Self::Certificate(digest) => {
                formatter.write_str("the certificate sha256:")?;
                digest
            }
            Self::Key(digest) => {
                formatter.write_str("the key spki-sha256:")?;
                digest
            }
            Self::Name { authority, name } => {
                write!(formatter, "{name}, certified by the authority spki-sha256:")?;
                authority
            }
            Self::Names { authority, .. } => {
                let text = "a host with other names, certified by the authority spki-sha256:";
                formatter.write_str(text)?;
                authority
            }
        };
        let mut bytes = digest.iter();
        bytes.try_for_each(|byte| write!(formatter, "{byte:02x}"))
    }
}

impl RecordedPeer {
    /// Reads the block of `session`'s file. A block that is not fully understood is
    /// [`RecordedPeer::Unknown`], because it is safer to reject a peer than to admit a wrong one.
    #[must_use]
    pub fn decode(bytes: &[u8; PEER_BLOCK_BYTES], session: SessionId) -> Self {
        let principal = read(bytes).ok().flatten();
        // A principal has exactly one encoding in a session, so this comparison also checks all
        // bytes that `read` has skipped.
        let is_known = |one: &Principal| one.encode(session).as_ref() == Ok(bytes);
        principal
            .filter(is_known)
            .map_or(Self::Unknown, Self::Known)
    }
}

/// Reads only the principal from a block; returns `None` if its kind is unknown.
fn read(bytes: &[u8; PEER_BLOCK_BYTES]) -> Result<Option<Principal>, DecodeError> {
    let mut reader = Reader::new(bytes);
    reader.bytes("magic and version", MAGIC.len() + 2)?;
    let kind = reader.u8("kind")?;
    reader.bytes("reserved and session", 5 + SESSION_ID_BYTES)?;
    let authority: [u8; 32] = reader.array("authority")?;
    let digest: [u8; 32] = reader.array("digest")?;
    let name = reader.text("peer name", MAX_PRINCIPAL_NAME_BYTES)?;
    Ok(match kind {
        1 => Some(Principal::Certificate(digest)),
        2 => Some(Principal::Key(digest)),
        3 => Some(Principal::Name {
            authority,
            name: name.into(),
        }),
        4 => Some(Principal::Names {
            authority,
            names: digest,
        }),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::super::checksum;
    use super::*;

    const SESSION: SessionId = [7; 16];

    pub(super) fn principals() -> [Principal; 4] {
        [
            Principal::Certificate([1; 32]),
            Principal::Key([2; 32]),
            Principal::Name {
                authority: [3; 32],
                name: "host-a.example".into(),
            },
            Principal::Names {
                authority: [4; 32],
                names: [5; 32],
            },
        ]
    }

    #[test]
    fn every_principal_survives_a_round_trip() {
        for principal in principals() {
            let block = principal.encode(SESSION).unwrap();
            let read = RecordedPeer::decode(&block, SESSION);
            assert_eq!(read, RecordedPeer::Known(principal));
        }
    }

    #[test]
    fn the_longest_name_fits_and_a_longer_one_is_rejected() {
        let named = |length| Principal::Name {
            authority: [3; 32],
            name: "n".repeat(length),
        };
        let longest = named(MAX_PRINCIPAL_NAME_BYTES);
        let block = longest.encode(SESSION).unwrap();
        assert_eq!(
            RecordedPeer::decode(&block, SESSION),
            RecordedPeer::Known(longest)
        );
        assert!(named(MAX_PRINCIPAL_NAME_BYTES + 1).encode(SESSION).is_err());
    }

    #[test]
    fn i1_a_changed_empty_or_foreign_block_names_no_peer() {
        let empty = [0; PEER_BLOCK_BYTES];
        let read = RecordedPeer::decode(&empty, SESSION);
        assert_eq!(read, RecordedPeer::Unknown, "never written");
        for principal in principals() {
            let block = principal.encode(SESSION).unwrap();
            let read = RecordedPeer::decode(&block, [8; 16]);
            assert_eq!(read, RecordedPeer::Unknown, "of another session");
            for position in 0..PEER_BLOCK_BYTES {
                let mut changed = block;
                changed[position] ^= 0x10;
                let read = RecordedPeer::decode(&changed, SESSION);
                assert_eq!(read, RecordedPeer::Unknown, "byte {position}");
                // With a recomputed checksum the block may name another peer. If so, the block must
                // be the only encoding of that peer.
                let sum = checksum(&changed[..CHECKSUM_AT]);
                changed[CHECKSUM_AT..].copy_from_slice(&sum.to_le_bytes());
                if let RecordedPeer::Known(other) = RecordedPeer::decode(&changed, SESSION) {
                    assert_eq!(other.encode(SESSION).unwrap(), changed, "byte {position}");
                }
            }
        }
    }
}
