//! The alert for a client after its handshake, if the keys cannot be installed in the kernel.

use rustls::crypto::CryptoProvider;
use rustls::crypto::cipher::{OutboundChunks, OutboundPlainMessage};
use rustls::{
    CipherSuite, ConnectionTrafficSecrets, ContentType, ProtocolVersion, SupportedCipherSuite,
};

/// Level fatal, description internal_error (RFC 8446, section 6).
const INTERNAL_ERROR: &[u8] = &[2, 80];

/// A record with *internal_error*, sealed with the sending key of a connection with the cipher
/// `suite`; `None` if `provider` lacks the suite or cannot seal the record. This function consumes
/// the key, because a second record would repeat the nonce.
pub(super) fn internal_error(
    (sequence, secrets): (u64, ConnectionTrafficSecrets),
    suite: CipherSuite,
    provider: &CryptoProvider,
) -> Option<Vec<u8>> {
    let (key, iv) = match secrets {
        ConnectionTrafficSecrets::Aes128Gcm { key, iv }
        | ConnectionTrafficSecrets::Aes256Gcm { key, iv }
        | ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => (key, iv),
        _ => return None,
    };
    let mut suites = provider.cipher_suites.iter();
    let mut encrypter = match suites.find(|one| one.suite() == suite)? {
        SupportedCipherSuite::Tls13(suite) => suite.aead_alg.encrypter(key, iv),
        SupportedCipherSuite::Tls12(suite) => {
            let fixed_bytes = suite.aead_alg.key_block_shape().fixed_iv_len;
            let (fixed, explicit) = iv.as_ref().split_at_checked(fixed_bytes)?;
            suite.aead_alg.encrypter(key, fixed, explicit)
        }
    };
    let alert = OutboundPlainMessage {
        typ: ContentType::Alert,
        version: ProtocolVersion::TLSv1_2,
        payload: OutboundChunks::from(INTERNAL_ERROR),
    };
    let record = encrypter.encrypt(alert, sequence).ok()?;
    Some(record.encode())
}
