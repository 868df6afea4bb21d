//! OpenSSL's names of suites and groups. A toolstack uses them to specify what a hand-off may
//! offer.

use std::sync::Arc;

pub use dunlin_linux::ktls::Version as TlsVersion;
use rustls::crypto::CryptoProvider;
use rustls::{CipherSuite as Suite, NamedGroup, ProtocolVersion};
use thiserror::Error;

use super::{CipherSuite, Provider, ProviderError, handshake_provider, older};

/// All suites, first those of TLS 1.2, then those of TLS 1.3; best first within each version.
const SUITES: [(&str, Suite); 9] = [
    (
        "ECDHE-ECDSA-AES256-GCM-SHA384",
        Suite::TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384,
    ),
    (
        "ECDHE-RSA-AES256-GCM-SHA384",
        Suite::TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,
    ),
    (
        "ECDHE-ECDSA-AES128-GCM-SHA256",
        Suite::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,
    ),
    (
        "ECDHE-RSA-AES128-GCM-SHA256",
        Suite::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
    ),
    (
        "ECDHE-ECDSA-CHACHA20-POLY1305",
        Suite::TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256,
    ),
    (
        "ECDHE-RSA-CHACHA20-POLY1305",
        Suite::TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256,
    ),
    ("TLS_AES_256_GCM_SHA384", Suite::TLS13_AES_256_GCM_SHA384),
    ("TLS_AES_128_GCM_SHA256", Suite::TLS13_AES_128_GCM_SHA256),
    (
        "TLS_CHACHA20_POLY1305_SHA256",
        Suite::TLS13_CHACHA20_POLY1305_SHA256,
    ),
];

/// All groups, each with its names. Output uses the first name.
const GROUPS: [(&[&str], NamedGroup); 4] = [
    (&["X25519MLKEM768"], NamedGroup::X25519MLKEM768),
    (&["X25519"], NamedGroup::X25519),
    (&["secp256r1", "prime256v1", "P-256"], NamedGroup::secp256r1),
    (&["secp384r1", "P-384"], NamedGroup::secp384r1),
];

/// A hand-off cannot offer what the configuration asks for.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum OfferError {
    /// An empty list, or an empty name in a list.
    #[error(
        "the list of {what} {list:?} is empty or has an empty name: use at least one of {known}"
    )]
    Empty {
        /// Ciphers or curves.
        what: &'static str,
        /// The configured list.
        list: String,
        /// The supported names.
        known: String,
    },
    /// The name is not supported.
    #[error("{name:?} is not one of the {what} for {version}: {known}")]
    Unknown {
        /// Ciphers or curves.
        what: &'static str,
        /// The configured name.
        name: String,
        /// The TLS version.
        version: TlsVersion,
        /// The supported names.
        known: String,
    },
    /// The crypto library is not built in.
    #[error(transparent)]
    Provider(#[from] ProviderError),
}

/// What a hand-off offers or accepts: one version, its suites and its groups.
#[derive(Clone, Debug)]
pub struct Offer {
    pub(crate) version: TlsVersion,
    pub(crate) rustls: Arc<CryptoProvider>,
}

impl Offer {
    /// Parses the suites in `ciphers` and the groups in `curves`: lists separated by colons, best
    /// first.
    ///
    /// # Errors
    /// [`OfferError`]: every name must be known, because an unknown name might be the only one
    /// that the peer supports.
    pub fn new(
        version: TlsVersion,
        ciphers: &str,
        curves: &str,
        provider: Provider,
    ) -> Result<Self, OfferError> {
        let mut rustls = handshake_provider();
        let number = match version {
            TlsVersion::V1_2 => ProtocolVersion::TLSv1_2,
            TlsVersion::V1_3 => ProtocolVersion::TLSv1_3,
        };
        let mut suites = Vec::new();
        for suite in CipherSuite::ALL {
            let all = suite.rustls(provider)?.into_iter();
            suites.extend(all.filter(|suite| suite.version().version == number));
        }
        let known: Vec<_> = SUITES
            .iter()
            .filter_map(|(name, number)| {
                let suite = suites.iter().find(|suite| suite.suite() == *number)?;
                Some((vec![*name], *suite))
            })
            .collect();
        rustls.cipher_suites = chosen("ciphers", ciphers, version, &known)?;
        older::add_groups(&mut rustls);
        let known: Vec<_> = GROUPS
            .iter()
            .filter_map(|(names, named)| {
                let group = rustls
                    .kx_groups
                    .iter()
                    .find(|group| group.name() == *named && group.usable_for_version(number))?;
                Some((names.to_vec(), *group))
            })
            .collect();
        rustls.kx_groups = chosen("curves", curves, version, &known)?;
        Ok(Self {
            version,
            rustls: Arc::new(rustls),
        })
    }
}

fn chosen<T: Copy>(
    what: &'static str,
    list: &str,
    version: TlsVersion,
    known: &[(Vec<&str>, T)],
) -> Result<Vec<T>, OfferError> {
    let all = || {
        let names: Vec<_> = known.iter().map(|(names, _)| names[0]).collect();
        names.join(", ")
    };
    list.split(':')
        .map(|name| {
            if name.is_empty() {
                return Err(OfferError::Empty {
                    what,
                    list: list.to_owned(),
                    known: all(),
                });
            }
            known
                .iter()
                .find(|(names, _)| names.iter().any(|known| known.eq_ignore_ascii_case(name)))
                .map(|(_, value)| *value)
                .ok_or_else(|| OfferError::Unknown {
                    what,
                    name: name.to_owned(),
                    version,
                    known: all(),
                })
        })
        .collect()
}

/// The OpenSSL name of a suite. Hand-offs negotiate only suites that have an OpenSSL name.
pub fn suite_name(suite: Suite) -> &'static str {
    SUITES
        .iter()
        .find(|(_, number)| *number == suite)
        .map_or("unknown", |(name, _)| name)
}

/// The OpenSSL name of a group. Hand-offs negotiate only groups that have an OpenSSL name.
pub fn group_name(group: NamedGroup) -> &'static str {
    GROUPS
        .iter()
        .find(|(_, number)| *number == group)
        .map_or("unknown", |(names, _)| names[0])
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn offer(version: TlsVersion, ciphers: &str, curves: &str) -> Result<Offer, OfferError> {
        Offer::new(version, ciphers, curves, Provider::built_in()[0])
    }

    #[test]
    fn xapis_suites_and_groups_are_offered_in_their_order_and_no_others() {
        let ciphers = "ECDHE-RSA-AES256-GCM-SHA384:ECDHE-RSA-AES128-GCM-SHA256";
        let offer = offer(TlsVersion::V1_2, ciphers, "secp384r1").unwrap();
        let suites: Vec<_> = offer.rustls.cipher_suites.iter().collect();
        let names: Vec<_> = suites
            .iter()
            .map(|suite| suite_name(suite.suite()))
            .collect();
        assert_eq!(names.join(":"), ciphers);
        let groups: Vec<_> = offer.rustls.kx_groups.iter().collect();
        assert_eq!(groups.len(), 1);
        assert_eq!(group_name(groups[0].name()), "secp384r1");
    }

    #[test]
    fn an_unsupported_name_is_an_error_that_lists_the_supported_ones() {
        let good = "ECDHE-RSA-AES256-GCM-SHA384";
        let text = |ciphers: &str, curves: &str| {
            let error = offer(TlsVersion::V1_2, ciphers, curves).unwrap_err();
            error.to_string()
        };
        for (ciphers, curves, expected) in [
            ("", "P-256", "the list of ciphers \"\" is empty"),
            (good, "", "the list of curves \"\" is empty"),
            ("ECDHE-RSA-AES256-GCM-SHA384:", "P-256", "has an empty name"),
            (
                "AES128-SHA",
                "P-256",
                "\"AES128-SHA\" is not one of the ciphers",
            ),
            (
                "TLS_AES_256_GCM_SHA384",
                "P-256",
                "for TLSv1.2: ECDHE-ECDSA",
            ),
            (good, "P-521", "\"P-521\" is not one of the curves"),
            (good, "X25519MLKEM768", "for TLSv1.2: X25519, secp256r1"),
        ] {
            let text = text(ciphers, curves);
            assert!(text.contains(expected), "{text}");
        }
        let groups = offer(TlsVersion::V1_2, good, "p-384:PRIME256V1").unwrap();
        assert_eq!(groups.rustls.kx_groups.len(), 2);
    }

    #[test]
    fn tls_1_3_has_suites_of_its_own() {
        let suites = "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384";
        let offered = offer(TlsVersion::V1_3, suites, "X25519").unwrap();
        assert_eq!(offered.rustls.cipher_suites.len(), 2);
        assert!(offer(TlsVersion::V1_3, "ECDHE-RSA-AES256-GCM-SHA384", "X25519").is_err());
    }
}
