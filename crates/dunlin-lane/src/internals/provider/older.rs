//! TLS parameters that a relay offers beyond those of lanes, for peers that are not Dunlin.

use std::sync::Arc;

use rustls::crypto::CryptoProvider;

use super::{Crypto, ProviderError};

/// The oldest TLS version that a relay accepts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OldestTls {
    /// TLS 1.2 (RFC 5246) with the suites of RFC 5289 and RFC 7905: ephemeral key exchange and
    /// authenticated encryption only.
    V1_2,
    /// TLS 1.3 only.
    #[default]
    V1_3,
}

impl Crypto {
    /// Like [`Crypto::rustls`], with P-256 and P-384 after the key exchange groups of lanes, and
    /// with the TLS 1.2 suites if `oldest` allows them.
    ///
    /// # Errors
    /// [`ProviderError::NotBuiltIn`] and [`ProviderError::NoSuite`].
    pub(crate) fn rustls_for_relay(
        &self,
        oldest: OldestTls,
    ) -> Result<Arc<CryptoProvider>, ProviderError> {
        let mut provider = Arc::unwrap_or_clone(self.rustls_for_lanes()?);
        add_groups(&mut provider);
        if oldest == OldestTls::V1_2 {
            for &suite in &self.suites {
                let [_, older @ ..] = suite.rustls(self.provider)?;
                provider.cipher_suites.extend(older);
            }
        }
        Ok(Arc::new(provider))
    }
}

/// Adds the key exchange groups that lanes do not use.
pub(super) fn add_groups(provider: &mut CryptoProvider) {
    #[cfg(feature = "aws-lc-rs")]
    use rustls::crypto::aws_lc_rs::kx_group;
    #[cfg(not(feature = "aws-lc-rs"))]
    use rustls::crypto::ring::kx_group;
    provider
        .kx_groups
        .extend([kx_group::SECP256R1, kx_group::SECP384R1]);
}
