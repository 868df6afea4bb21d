//! TLS 1.2 records in the process, for relays to peers that speak nothing newer: what
//! [`record`](super::record) is for TLS 1.3.
//!
//! ```text
//!   AES-GCM (RFC 5288):            type, version, length | 8 bytes of nonce | content | tag
//!   ChaCha20-Poly1305 (RFC 7905):  type, version, length |                    content | tag
//! ```
//!
//! The type stands in the clear, and nothing is padded. The nonce is made as in TLS 1.3, from the
//! record's number and the key block's IV, of which AES-GCM keeps four bytes secret and sends the
//! rest. There is no key update: at [`RECORD_LIMIT`] the connection is at its end.

use std::ops::Range;

use super::provider::{AeadKey, CipherSuite, Provider, ProviderError};
use super::record::{
    ALERT_ROOM, CONTENT_BYTES, HEADER_BYTES, LEGACY_VERSION, OpenError, RECORD_LIMIT, SealError,
    TAG_BYTES, nonce,
};

/// The part of the nonce that AES-GCM sends.
const EXPLICIT_BYTES: usize = 8;

/// One direction's key, and how its records are laid out.
struct Half {
    key: AeadKey,
    iv: [u8; 12],
    /// The header, and what of the nonce follows it.
    lead: usize,
    sequence: u64,
}

/// The sending half.
pub(super) struct Seal12(Half);

/// The receiving half.
pub(super) struct Open12(Half);

impl Half {
    fn new(
        provider: Provider,
        suite: CipherSuite,
        key: &[u8],
        iv: [u8; 12],
        sequence: u64,
    ) -> Result<Self, ProviderError> {
        let explicit = match suite {
            CipherSuite::Aes256Gcm | CipherSuite::Aes128Gcm => EXPLICIT_BYTES,
            CipherSuite::ChaCha20Poly1305 => 0,
        };
        Ok(Self {
            key: AeadKey::new(provider, suite, key)?,
            iv,
            lead: HEADER_BYTES + explicit,
            sequence,
        })
    }

    /// What the tag vouches for beside the content (RFC 5246, section 6.2.3.3).
    fn associated(&self, content_type: u8, content_bytes: usize) -> [u8; 13] {
        let mut data = [0; 13];
        data[..8].copy_from_slice(&self.sequence.to_be_bytes());
        data[8] = content_type;
        data[9..11].copy_from_slice(&LEGACY_VERSION);
        let length = u16::try_from(content_bytes)
            .expect("a record's content is at most 16,384 bytes, checked by every caller");
        data[11..].copy_from_slice(&length.to_be_bytes());
        data
    }
}

impl Seal12 {
    pub(super) fn new(
        provider: Provider,
        suite: CipherSuite,
        key: &[u8],
        iv: [u8; 12],
        sequence: u64,
    ) -> Result<Self, ProviderError> {
        Half::new(provider, suite, key, iv, sequence).map(Self)
    }

    /// What stands before a record's content.
    pub(super) fn lead(&self) -> usize {
        self.0.lead
    }

    /// Seals one record in place: [`Self::lead`] bytes to be written, the content, 16 bytes to be
    /// written. Alerts have room behind the last data record.
    ///
    /// # Errors
    /// [`SealError`]; nothing of the record may be sent then.
    pub(super) fn seal(
        &mut self,
        content_type: u8,
        limit: u64,
        record: &mut [u8],
    ) -> Result<(), SealError> {
        let half = &mut self.0;
        let bytes = record.len();
        let content_bytes = bytes
            .checked_sub(half.lead + TAG_BYTES)
            .filter(|&content| content <= CONTENT_BYTES)
            .ok_or(SealError::Length { bytes })?;
        if half.sequence >= limit {
            return Err(SealError::Limit);
        }
        let nonce = nonce(&half.iv, half.sequence);
        let associated = half.associated(content_type, content_bytes);
        let (lead, body) = record.split_at_mut(half.lead);
        let (content, tag) = body.split_at_mut(content_bytes);
        let sealed = half
            .key
            .seal(nonce, associated, content)
            .ok_or(SealError::Cipher)?;
        tag.copy_from_slice(&sealed);
        let length = (bytes - HEADER_BYTES) as u16;
        lead[0] = content_type;
        lead[1..3].copy_from_slice(&LEGACY_VERSION);
        lead[3..HEADER_BYTES].copy_from_slice(&length.to_be_bytes());
        let explicit = &nonce[nonce.len() - (half.lead - HEADER_BYTES)..];
        lead[HEADER_BYTES..].copy_from_slice(explicit);
        half.sequence += 1;
        Ok(())
    }
}

impl Open12 {
    pub(super) fn new(
        provider: Provider,
        suite: CipherSuite,
        key: &[u8],
        iv: [u8; 12],
        sequence: u64,
    ) -> Result<Self, ProviderError> {
        Half::new(provider, suite, key, iv, sequence).map(Self)
    }

    /// The length of the whole record that begins with `header`.
    ///
    /// # Errors
    /// [`OpenError::Unprotected`] for what is no record of TLS 1.2, and [`OpenError::Length`].
    pub(super) fn record_bytes(&self, header: [u8; HEADER_BYTES]) -> Result<usize, OpenError> {
        let [content_type, major, minor, high, low] = header;
        if !(20..=23).contains(&content_type) || [major, minor] != LEGACY_VERSION {
            return Err(OpenError::Unprotected {
                content_type,
                major,
                minor,
            });
        }
        let bytes = usize::from(u16::from_be_bytes([high, low]));
        let least = self.0.lead - HEADER_BYTES + TAG_BYTES;
        if !(least..=least + CONTENT_BYTES).contains(&bytes) {
            return Err(OpenError::Length { bytes });
        }
        Ok(HEADER_BYTES + bytes)
    }

    /// Opens one whole record in place; returns its type, and where its content stands.
    ///
    /// # Errors
    /// [`OpenError`]; nothing behind a bad record may be looked at.
    pub(super) fn open(&mut self, record: &mut [u8]) -> Result<(u8, Range<usize>), OpenError> {
        let bytes = record.len();
        let header = *record
            .first_chunk::<HEADER_BYTES>()
            .ok_or(OpenError::Length { bytes })?;
        if self.record_bytes(header)? != bytes {
            return Err(OpenError::Length { bytes });
        }
        let half = &mut self.0;
        if half.sequence >= RECORD_LIMIT + ALERT_ROOM {
            return Err(OpenError::Limit);
        }
        let content_type = header[0];
        let content_bytes = bytes - half.lead - TAG_BYTES;
        let (lead, body) = record.split_at_mut(half.lead);
        let mut nonce = nonce(&half.iv, half.sequence);
        let explicit = &lead[HEADER_BYTES..];
        let secret = nonce.len() - explicit.len();
        if !explicit.is_empty() {
            nonce[..secret].copy_from_slice(&half.iv[..secret]);
            nonce[secret..].copy_from_slice(explicit);
        }
        let associated = half.associated(content_type, content_bytes);
        half.key
            .open(nonce, associated, body)
            .ok_or(OpenError::Authentication)?;
        half.sequence += 1;
        Ok((content_type, half.lead..half.lead + content_bytes))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::record::APPLICATION_DATA;

    fn halves(provider: Provider, suite: CipherSuite) -> (Seal12, Open12) {
        let key = vec![7; suite.key_bytes()];
        let iv = *b"0123456789ab";
        (
            Seal12::new(provider, suite, &key, iv, 1).unwrap(),
            Open12::new(provider, suite, &key, iv, 1).unwrap(),
        )
    }

    fn sealed(seal: &mut Seal12, content: &[u8]) -> Vec<u8> {
        let mut record = vec![0; seal.lead() + content.len() + TAG_BYTES];
        let lead = seal.lead();
        record[lead..lead + content.len()].copy_from_slice(content);
        seal.seal(APPLICATION_DATA, RECORD_LIMIT, &mut record)
            .unwrap();
        record
    }

    #[test]
    fn what_is_sealed_is_opened_in_order_and_nothing_else() {
        for &provider in Provider::built_in() {
            for suite in CipherSuite::ALL {
                let (mut seal, mut open) = halves(provider, suite);
                for content in [&b""[..], b"x", &[9; CONTENT_BYTES]] {
                    let mut record = sealed(&mut seal, content);
                    let header = *record.first_chunk().unwrap();
                    assert_eq!(open.record_bytes(header), Ok(record.len()));
                    let (content_type, at) = open.open(&mut record).unwrap();
                    assert_eq!(content_type, APPLICATION_DATA);
                    assert!(record[at] == *content, "{provider:?} {suite:?}");
                }
                let (_, mut second) = (sealed(&mut seal, b"1"), sealed(&mut seal, b"2"));
                let skipped = open.open(&mut second);
                assert_eq!(skipped, Err(OpenError::Authentication), "{suite:?}");
            }
        }
    }

    #[test]
    fn i7_a_changed_bit_is_found_wherever_it_is() {
        let provider = Provider::built_in()[0];
        let whole = sealed(&mut halves(provider, CipherSuite::Aes256Gcm).0, b"memory");
        for at in 0..whole.len() {
            let mut record = whole.clone();
            record[at] ^= 1;
            let (_, mut open) = halves(provider, CipherSuite::Aes256Gcm);
            assert!(open.open(&mut record).is_err(), "byte {at}");
        }
    }

    #[test]
    fn i7_lengths_that_no_record_has_are_refused_before_anything_is_read() {
        let provider = Provider::built_in()[0];
        let (_, open) = halves(provider, CipherSuite::Aes128Gcm);
        for (bytes, fits) in [
            (0, false),
            (23, false),
            (24, true),
            (16_408, true),
            (16_409, false),
        ] {
            let [high, low] = u16::to_be_bytes(bytes);
            let known = open.record_bytes([APPLICATION_DATA, 3, 3, high, low]);
            assert_eq!(known.is_ok(), fits, "{bytes}");
        }
        assert!(open.record_bytes([0x47, 3, 3, 1, 0]).is_err());
        assert!(open.record_bytes([APPLICATION_DATA, 3, 1, 1, 0]).is_err());
    }

    #[test]
    fn a_key_seals_no_more_records_than_it_may() {
        let suite = CipherSuite::Aes256Gcm;
        let provider = Provider::built_in()[0];
        let mut seal = Seal12::new(provider, suite, &[1; 32], [0; 12], RECORD_LIMIT).unwrap();
        let mut record = [0; 64];
        let refused = seal.seal(APPLICATION_DATA, RECORD_LIMIT, &mut record);
        assert_eq!(refused, Err(SealError::Limit));
    }
}
