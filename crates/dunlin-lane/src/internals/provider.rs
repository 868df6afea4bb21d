//! The crypto library that seals and opens records, and the rustls provider for handshakes.
//!
//! ring and aws-lc-rs use different vector extensions. Which of them is faster depends on the
//! processor, and one can be twice as fast as the other. [`fastest`](super::fastest) measures both
//! for a few milliseconds. If built in, aws-lc-rs provides key exchange and signatures for the
//! handshake, because ring has no X25519MLKEM768. The library of the handshake does not affect the
//! speed of records.

mod named;
mod older;

use std::fmt;
use std::sync::{Arc, Once};

use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms};
use rustls::pki_types::PrivateKeyDer;
use rustls::{ConnectionTrafficSecrets, SupportedCipherSuite};
use thiserror::Error;

pub use self::named::{Offer, OfferError, TlsVersion};
pub use self::named::{group_name, suite_name};
pub use self::older::OldestTls;
use super::offload::Offload;

#[cfg(not(any(feature = "ring", feature = "aws-lc-rs")))]
compile_error!("no crypto library: enable the feature `ring`, `aws-lc-rs` or both");

/// A crypto library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provider {
    /// The library ring.
    Ring,
    /// The library aws-lc-rs.
    AwsLcRs,
}

/// A cipher suite of TLS 1.3.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CipherSuite {
    /// `TLS_AES_256_GCM_SHA384`, the default.
    Aes256Gcm,
    /// `TLS_AES_128_GCM_SHA256`.
    Aes128Gcm,
    /// `TLS_CHACHA20_POLY1305_SHA256`, for processors without AES instructions.
    ChaCha20Poly1305,
}

/// Why a provider, a suite or a key cannot be used.
#[derive(Debug, Error, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProviderError {
    /// The library is not compiled in.
    #[error("crypto provider {0} is not built in: choose another provider")]
    NotBuiltIn(Provider),
    /// No suite was given.
    #[error("no cipher suite: specify at least one of aes-256-gcm, aes-128-gcm, chacha20-poly1305")]
    NoSuite,
    /// The key's length does not match the suite.
    #[error("invalid key length {bytes} for {suite}")]
    KeyLength {
        /// The suite.
        suite: CipherSuite,
        /// The length of the key in bytes.
        bytes: usize,
    },
    /// The name is unknown.
    #[error(
        "unknown name: providers are ring and aws-lc-rs; suites are aes-256-gcm, aes-128-gcm and chacha20-poly1305"
    )]
    UnknownName,
}

/// The crypto of one session: the library for records and the cipher suites.
#[derive(Clone, Debug)]
pub struct Crypto {
    /// The library that seals and opens records.
    pub provider: Provider,
    /// Offered and accepted suites, best first.
    pub suites: Vec<CipherSuite>,
    /// Whether the kernel seals and opens records instead of the library.
    pub offload: Offload,
}

impl Crypto {
    /// Returns settings with `provider` and all suites, AES-256-GCM first.
    ///
    /// If aws-lc-rs is built in, the first call seeds its random generator, which takes about 45 ms
    /// of CPU time. Make this call before a migration starts, so that the migration does not take
    /// longer.
    pub fn with(provider: Provider) -> Self {
        seed();
        Self {
            provider,
            suites: CipherSuite::ALL.to_vec(),
            offload: Offload::Auto,
        }
    }

    /// Returns a rustls provider for TLS 1.3 with the suites of [`Crypto::suites`]. The library
    /// [`Crypto::provider`] seals records; key exchange uses X25519MLKEM768 (if built in) or
    /// X25519.
    ///
    /// # Errors
    /// [`ProviderError::NotBuiltIn`] and [`ProviderError::NoSuite`].
    #[cfg(feature = "unstable-internals")]
    pub fn rustls(&self) -> Result<Arc<CryptoProvider>, ProviderError> {
        self.rustls_for_lanes()
    }

    pub(super) fn rustls_for_lanes(&self) -> Result<Arc<CryptoProvider>, ProviderError> {
        if self.suites.is_empty() {
            return Err(ProviderError::NoSuite);
        }
        let mut base = handshake_provider();
        base.cipher_suites.clear();
        for suite in &self.suites {
            let [newest, ..] = suite.rustls(self.provider)?;
            base.cipher_suites.push(newest);
        }
        Ok(Arc::new(base))
    }
}

impl Provider {
    /// The libraries that are compiled in; never empty.
    pub const fn built_in() -> &'static [Self] {
        &[
            #[cfg(feature = "ring")]
            Self::Ring,
            #[cfg(feature = "aws-lc-rs")]
            Self::AwsLcRs,
        ]
    }
}

/// Returns the suites of a cipher. This is a macro because each library has its own module with its
/// own constants. The constants have the same names in both modules.
macro_rules! suites {
    ($library:ident, $suite:expr) => {{
        use rustls::crypto::$library::cipher_suite as suites;
        match $suite {
            CipherSuite::Aes256Gcm => [
                suites::TLS13_AES_256_GCM_SHA384,
                suites::TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384,
                suites::TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,
            ],
            CipherSuite::Aes128Gcm => [
                suites::TLS13_AES_128_GCM_SHA256,
                suites::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,
                suites::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
            ],
            CipherSuite::ChaCha20Poly1305 => [
                suites::TLS13_CHACHA20_POLY1305_SHA256,
                suites::TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256,
                suites::TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256,
            ],
        }
    }};
}

impl CipherSuite {
    /// Every suite, best first.
    pub const ALL: [Self; 3] = [Self::Aes256Gcm, Self::Aes128Gcm, Self::ChaCha20Poly1305];

    /// The length of the suite's key in bytes.
    pub(super) const fn key_bytes(self) -> usize {
        match self {
            Self::Aes128Gcm => 16,
            Self::Aes256Gcm | Self::ChaCha20Poly1305 => 32,
        }
    }

    /// The cipher of a negotiated suite of any TLS version.
    pub(super) fn of(negotiated: rustls::CipherSuite) -> Option<Self> {
        // A suite has the same number in every library, so any of the libraries can be searched.
        let provider = Provider::built_in()[0];
        Self::ALL.into_iter().find(|cipher| {
            let suites = cipher.rustls(provider);
            suites.is_ok_and(|suites| suites.iter().any(|suite| suite.suite() == negotiated))
        })
    }

    /// The suites with this cipher: the TLS 1.3 suite, then the TLS 1.2 suites for each kind of
    /// certificate.
    fn rustls(self, provider: Provider) -> Result<[SupportedCipherSuite; 3], ProviderError> {
        match provider {
            #[cfg(feature = "ring")]
            Provider::Ring => Ok(suites!(ring, self)),
            #[cfg(feature = "aws-lc-rs")]
            Provider::AwsLcRs => Ok(suites!(aws_lc_rs, self)),
            #[allow(unreachable_patterns)]
            other => Err(ProviderError::NotBuiltIn(other)),
        }
    }
}

/// Converts a private key to the form that the handshake uses.
pub(super) fn load_key(
    key: PrivateKeyDer<'static>,
) -> Result<Arc<dyn rustls::sign::SigningKey>, rustls::Error> {
    handshake_provider().key_provider.load_private_key(key)
}

/// The signature algorithms that certificates may use.
pub(super) fn handshake_algorithms() -> WebPkiSupportedAlgorithms {
    handshake_provider().signature_verification_algorithms
}

/// Seeds the random generator of the handshake's library. At its first use in a process, the
/// generator of aws-lc-rs collects entropy from the jitter of the processor's timing.
fn seed() {
    static SEEDED: Once = Once::new();
    SEEDED.call_once(|| {
        // A generator that fails here also fails in the handshake, which reports the error.
        let _ = handshake_provider().secure_random.fill(&mut [0]);
    });
}

/// The rustls provider for handshakes. Each caller replaces its cipher suites or does not use them,
/// so the library of this provider does not affect the speed of records.
fn handshake_provider() -> CryptoProvider {
    #[cfg(feature = "aws-lc-rs")]
    {
        use rustls::crypto::aws_lc_rs::{default_provider, kx_group};
        let kx_groups = vec![kx_group::X25519MLKEM768, kx_group::X25519];
        CryptoProvider {
            kx_groups,
            ..default_provider()
        }
    }
    #[cfg(all(feature = "ring", not(feature = "aws-lc-rs")))]
    {
        use rustls::crypto::ring::{default_provider, kx_group};
        CryptoProvider {
            kx_groups: vec![kx_group::X25519],
            ..default_provider()
        }
    }
}

/// An AEAD key in one of the two libraries. The caller must never use a nonce twice.
pub(super) enum AeadKey {
    // Boxed, because the key of ring contains the whole key schedule, so it is large. The key of
    // aws-lc-rs has a pointer to the schedule.
    #[cfg(feature = "ring")]
    Ring(Box<ring::aead::LessSafeKey>),
    #[cfg(feature = "aws-lc-rs")]
    AwsLcRs(aws_lc_rs::aead::LessSafeKey),
}

/// Makes a key. This is a macro because the libraries' types differ; their names and signatures
/// match.
macro_rules! new_key {
    ($library:ident, $wrap:expr, $suite:expr, $key:expr) => {{
        use $library::aead;
        let algorithm = match $suite {
            CipherSuite::Aes256Gcm => &aead::AES_256_GCM,
            CipherSuite::Aes128Gcm => &aead::AES_128_GCM,
            CipherSuite::ChaCha20Poly1305 => &aead::CHACHA20_POLY1305,
        };
        aead::UnboundKey::new(algorithm, $key)
            .map(|key| $wrap(aead::LessSafeKey::new(key)))
            .map_err(|_| ProviderError::KeyLength {
                suite: $suite,
                bytes: $key.len(),
            })
    }};
}

macro_rules! seal {
    ($library:ident, $key:expr, $nonce:expr, $header:expr, $inner:expr) => {{
        use $library::aead::{Aad, Nonce};
        let nonce = Nonce::assume_unique_for_key($nonce);
        let tag = $key
            .seal_in_place_separate_tag(nonce, Aad::from($header), $inner)
            .ok()?;
        tag.as_ref().try_into().ok()
    }};
}

macro_rules! open {
    ($library:ident, $key:expr, $nonce:expr, $header:expr, $body:expr) => {{
        use $library::aead::{Aad, Nonce};
        let nonce = Nonce::assume_unique_for_key($nonce);
        $key.open_in_place(nonce, Aad::from($header), $body)
            .ok()
            .map(|inner| &*inner)
    }};
}

/// The header of a TLS record; the tag authenticates it.
type RecordHeader = [u8; 5];

impl AeadKey {
    pub(super) fn new(
        provider: Provider,
        suite: CipherSuite,
        key: &[u8],
    ) -> Result<Self, ProviderError> {
        match provider {
            #[cfg(feature = "ring")]
            Provider::Ring => new_key!(ring, |key| Self::Ring(Box::new(key)), suite, key),
            #[cfg(feature = "aws-lc-rs")]
            Provider::AwsLcRs => new_key!(aws_lc_rs, Self::AwsLcRs, suite, key),
            #[allow(unreachable_patterns)]
            other => Err(ProviderError::NotBuiltIn(other)),
        }
    }

    /// Encrypts `inner` in place and returns the tag over it and `header`; `None` if the library
    /// fails.
    #[inline]
    pub(super) fn seal(
        &self,
        nonce: [u8; 12],
        header: RecordHeader,
        inner: &mut [u8],
    ) -> Option<[u8; 16]> {
        match self {
            #[cfg(feature = "ring")]
            Self::Ring(key) => seal!(ring, key, nonce, header, inner),
            #[cfg(feature = "aws-lc-rs")]
            Self::AwsLcRs(key) => seal!(aws_lc_rs, key, nonce, header, inner),
        }
    }

    /// Encrypts `content` and the byte `content_type` into `sealed`, followed by the tag over them
    /// and `header`; `None` if the library fails. `sealed` must be 17 bytes longer than `content`.
    #[inline]
    pub(super) fn seal_from(
        &self,
        nonce: [u8; 12],
        header: RecordHeader,
        content: &[u8],
        content_type: u8,
        sealed: &mut [u8],
    ) -> Option<()> {
        match self {
            #[cfg(feature = "ring")]
            Self::Ring(_) => {
                let (inner, tag) = sealed.split_at_mut_checked(content.len() + 1)?;
                let (last, copy) = inner.split_last_mut()?;
                *last = content_type;
                copy.copy_from_slice(content);
                tag.copy_from_slice(&self.seal(nonce, header, inner)?);
                Some(())
            }
            #[cfg(feature = "aws-lc-rs")]
            Self::AwsLcRs(key) => {
                use aws_lc_rs::aead::{Aad, Nonce};
                let nonce = Nonce::assume_unique_for_key(nonce);
                let (inner, end) = sealed.split_at_mut_checked(content.len())?;
                let aad = Aad::from(header);
                key.seal_out_of_place_scatter(nonce, aad, content, inner, &[content_type], end)
                    .ok()
            }
        }
    }

    /// Verifies the tag at the end of `body` and decrypts the bytes before it into `inner`, which
    /// must be 16 bytes shorter; `None` if the tag is invalid. `inner` then holds undefined bytes.
    #[inline]
    pub(super) fn open_into(
        &self,
        nonce: [u8; 12],
        header: RecordHeader,
        body: &mut [u8],
        inner: &mut [u8],
    ) -> Option<()> {
        match self {
            #[cfg(feature = "ring")]
            Self::Ring(_) => {
                inner.copy_from_slice(self.open(nonce, header, body)?);
                Some(())
            }
            #[cfg(feature = "aws-lc-rs")]
            Self::AwsLcRs(key) => {
                use aws_lc_rs::aead::{Aad, Nonce};
                let nonce = Nonce::assume_unique_for_key(nonce);
                let (sealed, tag) = body.split_at_checked(inner.len())?;
                key.open_separate_gather(nonce, Aad::from(header), sealed, tag, inner)
                    .ok()
            }
        }
    }

    /// Verifies the tag at the end of `body` and decrypts the bytes before it in place; `None` if
    /// the tag is invalid.
    #[inline]
    pub(super) fn open<'a>(
        &self,
        nonce: [u8; 12],
        header: RecordHeader,
        body: &'a mut [u8],
    ) -> Option<&'a [u8]> {
        match self {
            #[cfg(feature = "ring")]
            Self::Ring(key) => open!(ring, key, nonce, header, body),
            #[cfg(feature = "aws-lc-rs")]
            Self::AwsLcRs(key) => open!(aws_lc_rs, key, nonce, header, body),
        }
    }
}

#[cfg(feature = "aws-lc-sys")]
pub(super) use dunlin_linux::aead::{GuestOpener, GuestSealer};

/// Takes the place of `GuestOpener` and `GuestSealer` in a build without aws-lc-sys. The type has
/// no values, because ring and aws-lc-rs work only on references, not on guest memory.
#[cfg(not(feature = "aws-lc-sys"))]
mod without {
    use vm_memory::VolatileSlice;

    pub(in super::super) enum Guest {}

    impl Guest {
        pub(in super::super) fn new(_: &[u8]) -> Option<Self> {
            None
        }

        pub(in super::super) fn seal(
            &mut self,
            _: &[u8; 12],
            _: &[u8],
            _: &[VolatileSlice<'_>],
            _: u8,
            _: &mut [u8],
        ) -> Option<()> {
            match *self {}
        }

        pub(in super::super) fn open(
            &mut self,
            _: &[u8; 12],
            _: &[u8],
            _: &[u8],
            _: &[VolatileSlice<'_>],
        ) -> Option<u8> {
            match *self {}
        }
    }
}
#[cfg(not(feature = "aws-lc-sys"))]
pub(super) use without::{Guest as GuestOpener, Guest as GuestSealer};

/// Whether this library can, with this suite, seal records straight from guest memory and open
/// records straight into guest memory.
pub(super) fn reaches_guest(provider: Provider, suite: CipherSuite) -> bool {
    cfg!(feature = "aws-lc-sys")
        && provider == Provider::AwsLcRs
        && suite != CipherSuite::ChaCha20Poly1305
}

impl fmt::Display for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ring => "ring",
            Self::AwsLcRs => "aws-lc-rs",
        })
    }
}

impl fmt::Display for CipherSuite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Aes256Gcm => "aes-256-gcm",
            Self::Aes128Gcm => "aes-128-gcm",
            Self::ChaCha20Poly1305 => "chacha20-poly1305",
        })
    }
}

#[cfg(feature = "unstable-internals")]
impl std::str::FromStr for Provider {
    type Err = ProviderError;

    fn from_str(name: &str) -> Result<Self, ProviderError> {
        [Self::Ring, Self::AwsLcRs]
            .into_iter()
            .find(|provider| provider.to_string() == name)
            .ok_or(ProviderError::UnknownName)
    }
}

#[cfg(feature = "unstable-internals")]
impl std::str::FromStr for CipherSuite {
    type Err = ProviderError;

    fn from_str(name: &str) -> Result<Self, ProviderError> {
        Self::ALL
            .into_iter()
            .find(|suite| suite.to_string() == name)
            .ok_or(ProviderError::UnknownName)
    }
}

/// Returns the suite, key and IV of one direction.
///
/// # Errors
/// [`ProviderError::NoSuite`] if lanes do not use the suite.
pub fn parts(
    secrets: &ConnectionTrafficSecrets,
) -> Result<(CipherSuite, &[u8], [u8; 12]), ProviderError> {
    use ConnectionTrafficSecrets as Secrets;
    let (suite, key, iv) = match secrets {
        Secrets::Aes256Gcm { key, iv } => (CipherSuite::Aes256Gcm, key, iv),
        Secrets::Aes128Gcm { key, iv } => (CipherSuite::Aes128Gcm, key, iv),
        Secrets::Chacha20Poly1305 { key, iv } => (CipherSuite::ChaCha20Poly1305, key, iv),
        _ => return Err(ProviderError::NoSuite),
    };
    let iv = iv.as_ref().try_into().map_err(|_| ProviderError::NoSuite)?;
    // rustls stores every key in 32 bytes, whatever the suite's key length.
    let key = key
        .as_ref()
        .get(..suite.key_bytes())
        .ok_or(ProviderError::NoSuite)?;
    Ok((suite, key, iv))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn suites_keep_the_given_order_and_key_exchange_prefers_the_hybrid() {
        for &provider in Provider::built_in() {
            let crypto = Crypto {
                provider,
                suites: vec![CipherSuite::ChaCha20Poly1305, CipherSuite::Aes128Gcm],
                offload: Offload::Process,
            };
            let rustls = crypto.rustls().unwrap();
            let names: Vec<_> = rustls
                .cipher_suites
                .iter()
                .map(|suite| suite.suite())
                .collect();
            assert_eq!(
                names,
                [
                    rustls::CipherSuite::TLS13_CHACHA20_POLY1305_SHA256,
                    rustls::CipherSuite::TLS13_AES_128_GCM_SHA256
                ]
            );
            let groups: Vec<_> = rustls.kx_groups.iter().map(|group| group.name()).collect();
            let expected: &[rustls::NamedGroup] = if cfg!(feature = "aws-lc-rs") {
                &[
                    rustls::NamedGroup::X25519MLKEM768,
                    rustls::NamedGroup::X25519,
                ]
            } else {
                &[rustls::NamedGroup::X25519]
            };
            assert_eq!(groups, expected);
        }
        let none = Crypto {
            provider: Provider::built_in()[0],
            suites: Vec::new(),
            offload: Offload::Process,
        };
        assert_eq!(none.rustls().unwrap_err(), ProviderError::NoSuite);
    }

    #[test]
    fn names_parse_back() {
        for provider in [Provider::Ring, Provider::AwsLcRs] {
            assert_eq!(provider.to_string().parse::<Provider>().unwrap(), provider);
        }
        for suite in CipherSuite::ALL {
            assert_eq!(suite.to_string().parse::<CipherSuite>().unwrap(), suite);
        }
        assert!("openssl".parse::<Provider>().is_err());
    }
}
