//! Fuzz entry for the peer block.

use super::super::{CHECKSUM_AT, checksum};
use super::{PEER_BLOCK_BYTES, RecordedPeer};

/// Offset of the session in the block.
const SESSION_AT: usize = 16;

/// Decodes a peer block as given and with a corrected checksum. A decoded peer
/// encodes to the same block and matches only its own session.
pub fn fuzz_peer_block(bytes: &[u8]) {
    let mut block = [0; PEER_BLOCK_BYTES];
    let length = bytes.len().min(PEER_BLOCK_BYTES);
    block[..length].copy_from_slice(&bytes[..length]);
    peer_block(&block);
    let sum = checksum(&block[..CHECKSUM_AT]);
    block[CHECKSUM_AT..].copy_from_slice(&sum.to_le_bytes());
    peer_block(&block);
}

fn peer_block(block: &[u8; PEER_BLOCK_BYTES]) {
    let mut session = [0; 16];
    session.copy_from_slice(&block[SESSION_AT..SESSION_AT + 16]);
    match RecordedPeer::decode(block, session) {
        RecordedPeer::Known(principal) => {
            let again = principal.encode(session);
            assert_eq!(again.as_ref(), Ok(block), "encoding of {principal:?}");
            session[0] ^= 1;
            let foreign = RecordedPeer::decode(block, session);
            assert_eq!(foreign, RecordedPeer::Unknown, "of another session");
        }
        RecordedPeer::Unknown => {}
        RecordedPeer::BeforeBlocks => panic!("decode reported a missing block"),
    }
}

#[cfg(test)]
pub(crate) fn seeds() -> Vec<(String, Vec<u8>)> {
    super::tests::principals()
        .into_iter()
        .zip(["certificate", "key", "name", "names"])
        .map(|(principal, name)| {
            let block = principal.encode([7; 16]).expect("its name is short");
            (name.to_owned(), block.to_vec())
        })
        .collect()
}
