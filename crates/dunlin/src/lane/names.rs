//! Who a peer is: the names in its certificate, and which of them are allowed to connect.
//!
//! A certificate chain proves that an authority we trust issued the certificate. Names decide
//! whether its bearer may migrate virtual machines to or from this host.

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzz;

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use rustls::client::verify_server_name;
use rustls::pki_types::{CertificateDer, DnsName, ServerName};
use rustls::server::ParsedCertificate;
use sha2::{Digest, Sha256};
use thiserror::Error;
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::FromDer;

/// One name as a certificate's subjectAltName carries it (RFC 5280, section 4.2.1.6). The common
/// name is never consulted (RFC 9525, section 2).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum PeerName {
    /// A DNS name. In a certificate it may begin with `*.`, which stands for one label.
    Dns(String),
    /// An IP address.
    Ip(IpAddr),
    /// A URI, compared byte for byte: `spiffe://site/host/7`, for instance.
    Uri(String),
}

/// The peers that may connect, or be connected to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerNames {
    /// Every bearer of a certificate from our CA bundle.
    AnyFromAuthority,
    /// Only bearers of one of these names.
    OneOf(Vec<PeerName>),
}

/// Why a peer was let in, for the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AuthorisedBy {
    /// Its certificate comes from the CA bundle, and no names were demanded.
    Authority,
    /// Its certificate carries this allowed name.
    Name(PeerName),
}

/// An authenticated peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerIdentity {
    /// SHA-256 of the leaf certificate (DER).
    pub fingerprint: [u8; 32],
    /// The names that the certificate carries, in its order.
    pub names: Vec<PeerName>,
    /// Why it was let in.
    pub authorised_by: AuthorisedBy,
}

/// Not a name that a certificate can carry. The fault is in the configuration.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[error(
    "{text:?} is no peer name: give a DNS name, an IP address or a URI such as spiffe://site/host"
)]
pub struct BadName {
    text: String,
}

/// A certificate of a trusted authority without an allowed name.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[error(
    "the peer's certificate is valid but carries none of the allowed names: it has {}, allowed {} \
     {}; correct the peer names on this host, or give the peer a certificate with the right name",
    list(.presented), if .allowed.len() == 1 { "is" } else { "are" }, list(.allowed)
)]
pub struct NameRefused {
    /// What the certificate carries.
    pub presented: Vec<PeerName>,
    /// What would have been accepted.
    pub allowed: Vec<PeerName>,
}

impl PeerNames {
    /// The reason why the bearer of `leaf`, whose chain is already verified, may connect.
    ///
    /// # Errors
    /// [`NameRefused`] when it may not. A certificate that cannot be read carries no names.
    pub fn authorise(&self, leaf: &CertificateDer<'_>) -> Result<AuthorisedBy, NameRefused> {
        match self {
            Self::AnyFromAuthority => Ok(AuthorisedBy::Authority),
            Self::OneOf(allowed) => allowed
                .iter()
                .find(|name| name.is_in(leaf))
                .map(|name| AuthorisedBy::Name(name.clone()))
                .ok_or_else(|| NameRefused {
                    presented: names(leaf),
                    allowed: allowed.clone(),
                }),
        }
    }

    /// The name to put into the ClientHello: the first that SNI can express.
    pub(super) fn server_name(&self) -> Option<ServerName<'static>> {
        let Self::OneOf(allowed) = self else {
            return None;
        };
        allowed.iter().find_map(PeerName::server_name)
    }
}

impl FromIterator<PeerName> for PeerNames {
    /// No names at all mean [`PeerNames::AnyFromAuthority`].
    fn from_iter<I: IntoIterator<Item = PeerName>>(names: I) -> Self {
        let names: Vec<_> = names.into_iter().collect();
        if names.is_empty() {
            Self::AnyFromAuthority
        } else {
            Self::OneOf(names)
        }
    }
}

impl PeerName {
    fn is_in(&self, leaf: &CertificateDer<'_>) -> bool {
        match self {
            Self::Uri(_) => names(leaf).contains(self),
            Self::Dns(_) | Self::Ip(_) => {
                let (Some(name), Ok(leaf)) =
                    (self.server_name(), ParsedCertificate::try_from(leaf))
                else {
                    return false;
                };
                verify_server_name(&leaf, &name).is_ok()
            }
        }
    }

    fn server_name(&self) -> Option<ServerName<'static>> {
        match self {
            Self::Dns(name) => DnsName::try_from(name.clone())
                .ok()
                .map(ServerName::DnsName),
            Self::Ip(address) => Some(ServerName::IpAddress((*address).into())),
            Self::Uri(_) => None,
        }
    }
}

impl PeerIdentity {
    /// What is kept of a verified peer.
    pub(super) fn of(leaf: &CertificateDer<'_>, authorised_by: AuthorisedBy) -> Self {
        Self {
            fingerprint: Sha256::digest(leaf).into(),
            names: names(leaf),
            authorised_by,
        }
    }

    /// Whether both are bearers of the very same certificate: what a later lane of a session must
    /// be to its control lane.
    pub fn same_certificate(&self, other: &Self) -> bool {
        self.fingerprint == other.fingerprint
    }
}

impl FromStr for PeerName {
    type Err = BadName;

    fn from_str(text: &str) -> Result<Self, BadName> {
        if let Ok(address) = text.parse() {
            return Ok(Self::Ip(address));
        }
        if text.contains(':') && text.is_ascii() && !text.contains(char::is_whitespace) {
            return Ok(Self::Uri(text.to_owned()));
        }
        match DnsName::try_from(text) {
            Ok(_) => Ok(Self::Dns(text.to_owned())),
            Err(_) => Err(BadName {
                text: text.to_owned(),
            }),
        }
    }
}

impl fmt::Display for PeerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // Escaped: a certificate may hold any bytes, and this goes into logs.
            Self::Dns(name) => write!(f, "DNS {}", name.escape_debug()),
            Self::Ip(address) => write!(f, "IP {address}"),
            Self::Uri(uri) => write!(f, "URI {}", uri.escape_debug()),
        }
    }
}

impl fmt::Display for AuthorisedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Authority => f.write_str("any certificate of the authority is allowed"),
            Self::Name(name) => write!(f, "the allowed name {name}"),
        }
    }
}

impl fmt::Display for PeerIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (sha256 ", list(&self.names))?;
        for byte in &self.fingerprint[..8] {
            write!(f, "{byte:02x}")?;
        }
        write!(f, "…, let in by {})", self.authorised_by)
    }
}

fn list(names: &[PeerName]) -> String {
    if names.is_empty() {
        return "no names".to_owned();
    }
    names
        .iter()
        .map(PeerName::to_string)
        .collect::<Vec<_>>()
        .join(", ")
}

/// The subjectAltNames of a certificate, without those that are of a kind not used here.
fn names(leaf: &CertificateDer<'_>) -> Vec<PeerName> {
    let Ok((_, certificate)) = X509Certificate::from_der(leaf) else {
        return Vec::new();
    };
    let Ok(Some(extension)) = certificate.subject_alternative_name() else {
        return Vec::new();
    };
    let of_general_name = |name: &GeneralName<'_>| match name {
        GeneralName::DNSName(name) => Some(PeerName::Dns((*name).to_owned())),
        GeneralName::URI(uri) => Some(PeerName::Uri((*uri).to_owned())),
        GeneralName::IPAddress(bytes) => {
            let address = <[u8; 4]>::try_from(*bytes)
                .map(IpAddr::from)
                .or_else(|_| <[u8; 16]>::try_from(*bytes).map(IpAddr::from));
            address.ok().map(PeerName::Ip)
        }
        _ => None,
    };
    extension
        .value
        .general_names
        .iter()
        .filter_map(of_general_name)
        .collect()
}
