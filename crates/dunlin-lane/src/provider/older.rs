//! What a relay offers beyond the lanes' own TLS, for peers that are not Dunlin.

use std::sync::Arc;

use rustls::SupportedCipherSuite;
use rustls::crypto::CryptoProvider;

use super::{CipherSuite, Crypto, Provider, ProviderError};

/// The oldest TLS that a relay speaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OldestTls {
    /// TLS 1.2 (RFC 5246), with the suites of RFC 5289 and RFC 7905: ephemeral key exchange and
    /// authenticated encryption.
    V1_2,
    /// TLS 1.3 alone.
    #[default]
    V1_3,
}

/// The two libraries' suites have the same names.
macro_rules! suites {
    ($library:ident, $suite:expr) => {{
        use rustls::crypto::$library::cipher_suite as suites;
        match $suite {
            CipherSuite::Aes256Gcm => [
                suites::TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384,
                suites::TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,
            ],
            CipherSuite::Aes128Gcm => [
                suites::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,
                suites::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
            ],
            CipherSuite::ChaCha20Poly1305 => [
                suites::TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256,
                suites::TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256,
            ],
        }
    }};
}

impl Crypto {
    /// As [`Crypto::rustls`], with P-256 and P-384 behind the usual key exchange, and with the
    /// suites of TLS 1.2 where that is spoken.
    ///
    /// # Errors
    /// [`ProviderError::NotBuiltIn`] and [`ProviderError::NoSuite`].
    pub(crate) fn rustls_for_relay(
        &self,
        oldest: OldestTls,
    ) -> Result<Arc<CryptoProvider>, ProviderError> {
        let mut provider = Arc::unwrap_or_clone(self.rustls()?);
        add_groups(&mut provider);
        if oldest == OldestTls::V1_2 {
            for &suite in &self.suites {
                provider.cipher_suites.extend(older(self.provider, suite)?);
            }
        }
        Ok(Arc::new(provider))
    }
}

/// The key exchange that lanes do without.
pub(super) fn add_groups(provider: &mut CryptoProvider) {
    #[cfg(feature = "aws-lc-rs")]
    use rustls::crypto::aws_lc_rs::kx_group;
    #[cfg(not(feature = "aws-lc-rs"))]
    use rustls::crypto::ring::kx_group;
    provider
        .kx_groups
        .extend([kx_group::SECP256R1, kx_group::SECP384R1]);
}

/// A suite's twins in TLS 1.2, one for each kind of certificate.
pub(super) fn older(
    provider: Provider,
    suite: CipherSuite,
) -> Result<[SupportedCipherSuite; 2], ProviderError> {
    match provider {
        #[cfg(feature = "ring")]
        Provider::Ring => Ok(suites!(ring, suite)),
        #[cfg(feature = "aws-lc-rs")]
        Provider::AwsLcRs => Ok(suites!(aws_lc_rs, suite)),
        #[allow(unreachable_patterns)]
        other => Err(ProviderError::NotBuiltIn(other)),
    }
}
