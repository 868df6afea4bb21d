//! The names in certificates, and how they match allowed names.
//!
//! | allowed | matches a certificate with |
//! | --- | --- |
//! | `host.example` | that DNS name, or `*.example` |
//! | `*.example` | any DNS name with one more label, or `*.example` itself |
//! | `192.0.2.7`, `2001:db8::7` | that IP address |
//! | `spiffe://site/host/7` | that URI, byte for byte |

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use rustls::client::verify_server_name;
use rustls::pki_types::{CertificateDer, DnsName, ServerName};
use rustls::server::ParsedCertificate;
use thiserror::Error;
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::FromDer;

/// Wildcard prefix of a DNS name; matches exactly one label (RFC 9525, section 6.3).
const ANY_LABEL: &str = "*.";

/// One name in a certificate's subjectAltName (RFC 5280, section 4.2.1.6). The common name is never
/// consulted (RFC 9525, section 2).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum PeerName {
    /// A DNS name. A leading `*.` matches exactly one label. In a certificate it covers every
    /// host name in that domain, as the authority certified. In a list of allowed names it allows
    /// every host in that domain.
    Dns(String),
    /// An IP address.
    Ip(IpAddr),
    /// A URI, compared byte for byte, such as `spiffe://site/host/7`.
    Uri(String),
}

/// The text is not a name that a certificate can carry. The fault is in the configuration.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[error(
    "invalid peer name {text:?}: give a DNS name or an IP address, without a port, or a URI such as \
     spiffe://site/host"
)]
pub struct BadName {
    text: String,
}

impl PeerName {
    /// Whether `leaf` carries this name.
    pub(super) fn is_in(&self, leaf: &CertificateDer<'_>) -> bool {
        match self {
            Self::Uri(_) => names(leaf).contains(self),
            Self::Dns(allowed) if allowed.starts_with(ANY_LABEL) => {
                names(leaf).iter().any(|name| match name {
                    Self::Dns(presented) => is_under(presented, &allowed[ANY_LABEL.len()..]),
                    Self::Ip(_) | Self::Uri(_) => false,
                })
            }
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

    /// Whether this is a pattern for the names of several hosts.
    pub(super) fn is_pattern(&self) -> bool {
        matches!(self, Self::Dns(name) if name.starts_with(ANY_LABEL))
    }

    /// The name in the form that [`FromStr`] parses.
    pub(super) fn text(&self) -> String {
        match self {
            Self::Dns(name) => name.clone(),
            Self::Ip(address) => address.to_string(),
            Self::Uri(uri) => uri.clone(),
        }
    }

    /// The name for rustls; `None` for a pattern or a URI. rustls sends only a DNS name as SNI.
    pub(super) fn server_name(&self) -> Option<ServerName<'static>> {
        match self {
            Self::Dns(name) => DnsName::try_from(name.clone())
                .ok()
                .map(ServerName::DnsName),
            Self::Ip(address) => Some(ServerName::IpAddress((*address).into())),
            Self::Uri(_) => None,
        }
    }
}

/// Whether `text` is the address of a service, such as `host.example:4444`, and not a URI.
fn has_port(text: &str) -> bool {
    let is_service = |(host, port): (&str, &str)| port.parse::<u16>().is_ok() && is_host(host);
    text.parse::<SocketAddr>().is_ok() || text.rsplit_once(':').is_some_and(is_service)
}

/// Whether `text` is a DNS name or a wildcard pattern.
fn is_host(text: &str) -> bool {
    DnsName::try_from(text.strip_prefix(ANY_LABEL).unwrap_or(text)).is_ok()
}

/// Whether a presented DNS name is `domain` with exactly one label before it.
fn is_under(presented: &str, domain: &str) -> bool {
    presented
        .split_once('.')
        .is_some_and(|(label, rest)| !label.is_empty() && rest.eq_ignore_ascii_case(domain))
}

impl FromStr for PeerName {
    type Err = BadName;

    fn from_str(text: &str) -> Result<Self, BadName> {
        if let Ok(address) = text.parse() {
            return Ok(Self::Ip(address));
        }
        let is_uri = text.contains(':') && text.is_ascii() && !text.contains(char::is_whitespace);
        let text = text.to_owned();
        if has_port(&text) {
            Err(BadName { text })
        } else if is_uri {
            Ok(Self::Uri(text))
        } else if is_host(&text) {
            Ok(Self::Dns(text))
        } else {
            Err(BadName { text })
        }
    }
}

impl fmt::Display for PeerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // Escape the name, because a certificate may hold any bytes, and logs print them.
            Self::Dns(name) => write!(f, "DNS {}", name.escape_debug()),
            Self::Ip(address) => write!(f, "IP {address}"),
            Self::Uri(uri) => write!(f, "URI {}", uri.escape_debug()),
        }
    }
}

/// The subjectAltNames of a certificate, except kinds that Dunlin does not use. Empty if the
/// certificate cannot be parsed.
pub(super) fn names(leaf: &CertificateDer<'_>) -> Vec<PeerName> {
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_to_their_kind() {
        let name = |text: &str| text.parse::<PeerName>();
        assert_eq!(name("a.b"), Ok(PeerName::Dns("a.b".into())));
        assert_eq!(name("*.a.b"), Ok(PeerName::Dns("*.a.b".into())));
        assert_eq!(
            name("2001:db8::1"),
            Ok(PeerName::Ip("2001:db8::1".parse().unwrap()))
        );
        assert_eq!(name("urn:uuid:1"), Ok(PeerName::Uri("urn:uuid:1".into())));
        for bad in ["", "a b", "-", "x y://z", "*", "*.", "a.*.b", "**.a"] {
            assert!(name(bad).is_err(), "{bad}");
        }
        for service in ["a.b:4444", "*.a.b:1", "192.0.2.1:80", "[2001:db8::1]:80"] {
            assert!(name(service).is_err(), "{service}");
        }
    }

    #[test]
    fn a_wildcard_is_one_label() {
        for (presented, fits) in [
            ("a.hosts.test", true),
            ("A.HOSTS.test", true),
            ("*.hosts.test", true),
            ("a.b.hosts.test", false),
            ("hosts.test", false),
            (".hosts.test", false),
            ("a.hosts.test.", false),
            ("", false),
        ] {
            assert_eq!(is_under(presented, "hosts.test"), fits, "{presented}");
        }
    }
}
