//! The peers that may connect, or to which this host may connect. Each is allowed by a name that
//! an authority certifies, or by a pin, which needs no authority.
//!
//! A certificate chain proves that a trusted authority issued the certificate. The list of peers
//! decides whether the certificate's holder may migrate virtual machines to or from this host.

#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use dunlin_proto::fault::FaultCode;
pub use dunlin_proto::journal::peer::Principal;
use dunlin_proto::limits::MAX_PRINCIPAL_NAME_BYTES;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::ParsedCertificate;
use sha2::{Digest, Sha256};
use thiserror::Error;

use super::names::{BadName, PeerName, names};

/// A certificate or key, identified by its SHA-256.
///
/// Written as `sha256:` or `spki-sha256:` and 64 hexadecimal digits, with or without colons between
/// the bytes, as `openssl x509 -fingerprint -sha256` prints them. A pin of the key stays valid when
/// the certificate is renewed for the same key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pin {
    /// SHA-256 of the whole certificate (DER).
    Certificate([u8; 32]),
    /// SHA-256 of the certificate's SubjectPublicKeyInfo (RFC 5280, section 4.1.2.7; DER).
    Key([u8; 32]),
}

/// One allowed peer. Parsed from a pin (`sha256:…`, `spki-sha256:…`; see [`Pin`]), or else from a
/// name ([`PeerName`]): `"host-b.example".parse()?`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Peer {
    /// Any holder of a certificate with this name from an authority in the CA bundle.
    Name(PeerName),
    /// Any holder of this certificate or key, regardless of issuer and names.
    Pin(Pin),
}

/// The allowed peers. An iterator of [`Peer`] collects into [`Peers::OneOf`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Peers {
    /// Every holder of a certificate that an authority in the CA bundle issued.
    AnyFromAuthority,
    /// Only these peers; none if the list is empty.
    OneOf(Vec<Peer>),
}

/// Why a peer was admitted, for the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AuthorisedBy {
    /// An authority of the CA bundle issued the peer's certificate, and nothing else is required.
    Authority,
    /// An authority of the CA bundle issued the peer's certificate, which carries this allowed
    /// name.
    Name(PeerName),
    /// The peer's certificate or key is pinned.
    Pin(Pin),
}

/// An authenticated peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerIdentity {
    /// SHA-256 of the leaf certificate (DER).
    pub fingerprint: [u8; 32],
    /// The names in the certificate, in the certificate's order.
    pub names: Vec<PeerName>,
    /// Why the peer was admitted.
    pub authorised_by: AuthorisedBy,
    /// SHA-256 of the SubjectPublicKeyInfo (DER) of the trust anchor of the certificate's chain.
    /// `None` if only a pin admitted the peer, and for the server of a hand-off.
    pub authority: Option<[u8; 32]>,
    pub(super) leaf: CertificateDer<'static>,
    /// The intermediate certificates that the peer sent.
    pub(super) intermediates: Vec<CertificateDer<'static>>,
}

/// The text is not a valid peer. The fault is in the configuration.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
pub enum BadPeer {
    /// The text is neither a pin nor a name.
    #[error(transparent)]
    Name(#[from] BadName),
    /// The text begins like a pin, but is not a valid pin.
    #[error(
        "invalid pin {text:?}: use sha256: for a certificate or spki-sha256: for its key, followed by 64 hexadecimal digits, with or without colons"
    )]
    Pin {
        /// The text.
        text: String,
    },
}

/// Why an authenticated peer is not allowed.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
pub enum PeerRefused {
    /// The certificate has none of the allowed names and fits no allowed pin.
    #[error(
        "the certificate is valid but carries none of the allowed names: it has {}, allowed {} {}; correct the allowed names on the host that refuses, or give the other host a certificate with the right name",
        list(.presented), if .allowed.len() == 1 { "is" } else { "are" }, list(.allowed)
    )]
    Name {
        /// The names in the certificate.
        presented: Vec<PeerName>,
        /// The allowed peers.
        allowed: Vec<Peer>,
    },
    /// The peer's key, or the key of a certificate in its chain, is denied on this host.
    #[error(
        "the key {key} of {} is denied by {}: give the peer a certificate with another key{}",
        if *.issuer { "an issuer of the peer's certificate" } else { "the peer's certificate" },
        .list.display(),
        if *.issuer { ", and of another issuer" } else { "" }
    )]
    Denied {
        /// The denied key.
        key: Pin,
        /// Whether the denied key is that of an issuer: of an intermediate certificate that the
        /// peer sent, or of the trust anchor.
        issuer: bool,
        /// The file with the denied keys.
        list: PathBuf,
    },
    /// A revocation list of this host contains the certificate.
    #[error("the peer's certificate is revoked: give the peer another certificate")]
    Revoked,
    /// The certificate was valid when the peer was admitted, and has expired after that.
    #[error(
        "the peer's certificate has expired since it connected: renew it on the peer, or correct this host's clock"
    )]
    Expired,
    /// The certificate had a valid chain when the peer was admitted, and has none now.
    #[error(
        "the peer's certificate no longer has a valid chain on this host: {reason}; give both hosts certificates of one authority, and replace revocation lists that are out of date"
    )]
    Uncertified {
        /// What is wrong with the chain.
        reason: String,
    },
    /// Only pins are allowed, and none of them matches.
    #[error(
        "the peer's certificate is not the pinned one: the certificate is {certificate} and its key is {key}, but pinned {} {}; if the peer's certificate was replaced, pin the new one on this host; otherwise the peer is another host",
        if .allowed.len() == 1 { "is" } else { "are" }, list(.allowed)
    )]
    Pin {
        /// The pin of the certificate.
        certificate: Pin,
        /// The pin of the certificate's key.
        key: Pin,
        /// The allowed peers.
        allowed: Vec<Peer>,
    },
}

impl PeerRefused {
    /// The fault code.
    pub fn fault(&self) -> FaultCode {
        match self {
            Self::Expired => FaultCode::CertificateDate,
            _ => FaultCode::Unauthorised,
        }
    }
}

impl Pin {
    /// The pin of a certificate.
    pub fn of_certificate(leaf: &CertificateDer<'_>) -> Self {
        Self::Certificate(Sha256::digest(leaf).into())
    }

    /// The pin of the key in a certificate; `None` if the certificate cannot be parsed.
    pub fn of_key(leaf: &CertificateDer<'_>) -> Option<Self> {
        let key = ParsedCertificate::try_from(leaf)
            .ok()?
            .subject_public_key_info();
        Some(Self::Key(Sha256::digest(key).into()))
    }

    pub(super) fn fits(&self, leaf: &CertificateDer<'_>) -> bool {
        match self {
            Self::Certificate(_) => Self::of_certificate(leaf) == *self,
            Self::Key(_) => Self::of_key(leaf) == Some(*self),
        }
    }
}

impl Peers {
    /// Returns a pin in this list that allows the holder of `leaf`.
    pub(super) fn pinned(&self, leaf: &CertificateDer<'_>) -> Option<Pin> {
        // A pin of the key stays valid after a renewal, so it takes precedence.
        let is_key = |pin: &&Pin| matches!(pin, Pin::Key(_));
        let mut pins = self.pins().filter(is_key).chain(self.pins());
        pins.find(|pin| pin.fits(leaf)).copied()
    }

    /// Whether only pins are allowed, so that no authority is needed.
    pub(super) fn are_pins_alone(&self) -> bool {
        match self {
            Self::AnyFromAuthority => false,
            Self::OneOf(allowed) => allowed.iter().all(|peer| matches!(peer, Peer::Pin(_))),
        }
    }

    /// Whether the two lists have an entry in common, or one of them is
    /// [`Peers::AnyFromAuthority`]. A name and a pin of the same peer are different entries.
    #[cfg(feature = "unstable-internals")]
    pub fn share_one(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::OneOf(own), Self::OneOf(others)) => own.iter().any(|one| others.contains(one)),
            _ => true,
        }
    }

    pub(super) fn pins(&self) -> impl Iterator<Item = &Pin> {
        let allowed = match self {
            Self::AnyFromAuthority => &[][..],
            Self::OneOf(allowed) => allowed,
        };
        allowed.iter().filter_map(|peer| match peer {
            Peer::Pin(pin) => Some(pin),
            Peer::Name(_) => None,
        })
    }

    /// Returns the reason why the holder of `leaf` is allowed. The caller must have verified the
    /// chain of `leaf`, except if `leaf` is pinned.
    ///
    /// # Errors
    /// [`PeerRefused`] if the holder is not allowed. A certificate that cannot be parsed carries no
    /// names.
    pub(super) fn authorise(&self, leaf: &CertificateDer<'_>) -> Result<AuthorisedBy, PeerRefused> {
        let Self::OneOf(allowed) = self else {
            return Ok(AuthorisedBy::Authority);
        };
        // Check pins first, because possibly no authority certifies the names in a pinned
        // certificate.
        if let Some(pin) = self.pinned(leaf) {
            return Ok(AuthorisedBy::Pin(pin));
        }
        let name = |peer: &Peer| match peer {
            Peer::Name(name) if name.is_in(leaf) => Some(AuthorisedBy::Name(name.clone())),
            Peer::Name(_) | Peer::Pin(_) => None,
        };
        allowed
            .iter()
            .find_map(name)
            .ok_or_else(|| self.refuse(leaf, allowed))
    }

    /// Returns the reason why a peer that another list admitted is also allowed by this list.
    ///
    /// # Errors
    /// [`PeerRefused`] if this list does not allow the peer. Possibly no authority certifies the
    /// names of a peer that a pin admitted, so only a pin in this list can allow such a peer.
    #[cfg(feature = "unstable-internals")]
    pub fn authorise_further(&self, peer: &PeerIdentity) -> Result<AuthorisedBy, PeerRefused> {
        if !matches!(peer.authorised_by, AuthorisedBy::Pin(_)) {
            return self.authorise(&peer.leaf);
        }
        let pinned = self.pinned(&peer.leaf).map(AuthorisedBy::Pin);
        let allowed = self.pins().map(|pin| Peer::Pin(*pin)).collect::<Vec<_>>();
        pinned.ok_or_else(|| self.refuse(&peer.leaf, &allowed))
    }

    fn refuse(&self, leaf: &CertificateDer<'_>, allowed: &[Peer]) -> PeerRefused {
        let allowed = allowed.to_vec();
        match Pin::of_key(leaf) {
            Some(key) if self.are_pins_alone() => PeerRefused::Pin {
                certificate: Pin::of_certificate(leaf),
                key,
                allowed,
            },
            _ => PeerRefused::Name {
                presented: names(leaf),
                allowed,
            },
        }
    }

    /// The server's name for rustls: the first allowed DNS name, or else the first IP address.
    /// rustls sends only a DNS name as SNI.
    pub(super) fn server_name(&self) -> Option<ServerName<'static>> {
        let Self::OneOf(allowed) = self else {
            return None;
        };
        let names = || {
            allowed.iter().filter_map(|peer| match peer {
                Peer::Name(name) => name.server_name(),
                Peer::Pin(_) => None,
            })
        };
        let dns = names().find(|name| matches!(name, ServerName::DnsName(_)));
        dns.or_else(|| names().next())
    }
}

impl FromIterator<Peer> for Peers {
    /// An empty list allows no peer.
    fn from_iter<I: IntoIterator<Item = Peer>>(peers: I) -> Self {
        Self::OneOf(peers.into_iter().collect())
    }
}

impl PeerIdentity {
    /// The identity of a verified peer.
    pub(super) fn of(
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        authorised_by: AuthorisedBy,
        authority: Option<[u8; 32]>,
    ) -> Self {
        let owned = intermediates.iter().map(|one| one.clone().into_owned());
        Self {
            fingerprint: Sha256::digest(leaf).into(),
            names: names(leaf),
            authorised_by,
            authority,
            leaf: leaf.clone().into_owned(),
            intermediates: owned.collect(),
        }
    }

    /// Returns a name or pin that selects this peer in settings that apply to single peers. The
    /// result matches as few other peers as possible.
    pub fn selector(&self) -> Peer {
        match &self.authorised_by {
            AuthorisedBy::Pin(pin) => Peer::Pin(*pin),
            AuthorisedBy::Name(name) if !name.is_pattern() => Peer::Name(name.clone()),
            _ => match self.names.first() {
                Some(name) => Peer::Name(name.clone()),
                None => Peer::Pin(Pin::Certificate(self.fingerprint)),
            },
        }
    }

    /// Returns what identifies this peer on later connections: see [`PeerIdentity::is`].
    ///
    /// A peer admitted by a pin is identified by that pin. A peer admitted by name is identified by
    /// that name and the authority that certifies it. A peer admitted by `*.DOMAIN` or by any
    /// certificate of an authority is identified by all of its names, because other hosts may share
    /// one of them. A peer without names is identified by its key. The certificate identifies the
    /// peer if none of this is possible.
    pub fn principal(&self) -> Principal {
        let itself = || Principal::Certificate(self.fingerprint);
        match (&self.authorised_by, self.authority) {
            (AuthorisedBy::Pin(Pin::Certificate(digest)), _) => Principal::Certificate(*digest),
            (AuthorisedBy::Pin(Pin::Key(digest)), _) => Principal::Key(*digest),
            // A peer without an authority is the server of a hand-off. Hand-offs have no sessions,
            // so this principal is never compared with a later peer.
            (_, None) => itself(),
            (AuthorisedBy::Name(allowed), Some(authority)) if !allowed.is_pattern() => {
                match recorded(allowed) {
                    Some(name) => Principal::Name { authority, name },
                    None => itself(),
                }
            }
            (AuthorisedBy::Name(_) | AuthorisedBy::Authority, Some(authority)) => {
                match (all_names(&self.names), Pin::of_key(&self.leaf)) {
                    (Some(names), _) => Principal::Names { authority, names },
                    (None, Some(Pin::Key(key))) => Principal::Key(key),
                    (None, _) => itself(),
                }
            }
        }
    }

    /// Whether this peer is `principal`. Every privilege of a session's own peer depends on this
    /// comparison. Call this only for a peer that a handshake has admitted, so that its certificate
    /// is valid.
    pub fn is(&self, principal: &Principal) -> bool {
        match principal {
            Principal::Certificate(digest) => self.fingerprint == *digest,
            Principal::Key(digest) => Pin::Key(*digest).fits(&self.leaf),
            Principal::Name { authority, name } => {
                let name = name.parse::<PeerName>();
                self.authority == Some(*authority)
                    && name.is_ok_and(|name| !name.is_pattern() && name.is_in(&self.leaf))
            }
            Principal::Names { authority, names } => {
                self.authority == Some(*authority) && all_names(&self.names) == Some(*names)
            }
        }
    }

    /// Returns a list with only the name or pin that admitted this peer. If neither admitted it,
    /// returns [`Peers::AnyFromAuthority`]. The list also admits a renewed certificate that has the
    /// name or fits the pin, and it may admit other peers. After a handshake, check with
    /// [`PeerIdentity::is`] whether the admitted peer is this peer.
    #[cfg(feature = "unstable-internals")]
    pub fn alone(&self) -> Peers {
        match &self.authorised_by {
            AuthorisedBy::Authority => Peers::AnyFromAuthority,
            AuthorisedBy::Name(name) => Peers::OneOf(vec![Peer::Name(name.clone())]),
            AuthorisedBy::Pin(pin) => Peers::OneOf(vec![Peer::Pin(*pin)]),
        }
    }
}

/// Returns the text under which a principal records `name`. `None` if the text is too long, or if
/// parsing it would not return `name` again.
fn recorded(name: &PeerName) -> Option<String> {
    let text = name.text();
    let same = text.len() <= MAX_PRINCIPAL_NAME_BYTES && text.parse().as_ref() == Ok(name);
    same.then_some(text)
}

/// SHA-256 of all names of a certificate. The names are sorted without duplicates, DNS names are in
/// lower case, and the length of each name precedes it. `None` if there are no names.
fn all_names(names: &[PeerName]) -> Option<[u8; 32]> {
    let mut texts: Vec<String> = names
        .iter()
        .map(|name| match name {
            PeerName::Dns(name) => format!("DNS {}", name.to_ascii_lowercase()),
            PeerName::Ip(address) => format!("IP {address}"),
            PeerName::Uri(uri) => format!("URI {uri}"),
        })
        .collect();
    texts.sort_unstable();
    texts.dedup();
    if texts.is_empty() {
        return None;
    }
    let mut digest = Sha256::new();
    for text in texts {
        digest.update((text.len() as u64).to_be_bytes());
        digest.update(text);
    }
    Some(digest.finalize().into())
}

const CERTIFICATE_PREFIX: &str = "sha256:";
const KEY_PREFIX: &str = "spki-sha256:";

impl FromStr for Peer {
    type Err = BadPeer;

    fn from_str(text: &str) -> Result<Self, BadPeer> {
        let (digits, pin): (_, fn([u8; 32]) -> Pin) =
            if let Some(digits) = text.strip_prefix(CERTIFICATE_PREFIX) {
                (digits, Pin::Certificate)
            } else if let Some(digits) = text.strip_prefix(KEY_PREFIX) {
                (digits, Pin::Key)
            } else {
                return Ok(Self::Name(text.parse()?));
            };
        let digest = digest(digits).ok_or_else(|| BadPeer::Pin {
            text: text.to_owned(),
        })?;
        Ok(Self::Pin(pin(digest)))
    }
}

/// Parses 32 bytes of two hexadecimal digits each, separated by colons or not at all.
fn digest(digits: &str) -> Option<[u8; 32]> {
    let step = match digits.len() {
        64 => 2,
        95 => 3,
        _ => return None,
    };
    let mut digest = [0; 32];
    for (byte, pair) in digest.iter_mut().zip(digits.as_bytes().chunks(step)) {
        let (pair, colon) = pair.split_at_checked(2)?;
        if !matches!(colon, b"" | b":") || !pair.iter().all(u8::is_ascii_hexdigit) {
            return None;
        }
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(digest)
}

impl fmt::Display for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (prefix, digest) = match self {
            Self::Certificate(digest) => (CERTIFICATE_PREFIX, digest),
            Self::Key(digest) => (KEY_PREFIX, digest),
        };
        f.write_str(prefix)?;
        digest.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => name.fmt(f),
            Self::Pin(pin) => pin.fmt(f),
        }
    }
}

impl fmt::Display for AuthorisedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Authority => f.write_str("any certificate of the authority"),
            Self::Name(name) => write!(f, "the allowed name {name}"),
            Self::Pin(Pin::Certificate(_)) => f.write_str("the pin of its certificate"),
            Self::Pin(Pin::Key(_)) => f.write_str("the pin of its key"),
        }
    }
}

impl fmt::Display for PeerIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (sha256 ", list(&self.names))?;
        for byte in &self.fingerprint[..8] {
            write!(f, "{byte:02x}")?;
        }
        write!(f, "…, admitted by {})", self.authorised_by)
    }
}

fn list<T: fmt::Display>(all: &[T]) -> String {
    if all.is_empty() {
        return "no names".to_owned();
    }
    all.iter().map(T::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_servers_name_is_a_dns_name_if_one_is_allowed() {
        for (allowed, expected) in [
            (
                &["192.0.2.7", "b.example", "c.example"][..],
                Some("b.example"),
            ),
            (
                &["*.example", "192.0.2.7", "2001:db8::7"],
                Some("192.0.2.7"),
            ),
            (&["spiffe://site/host/7", "*.example"], None),
        ] {
            let peers: Peers = allowed
                .iter()
                .map(|one| one.parse::<Peer>().unwrap())
                .collect();
            let expected = expected.map(|name| ServerName::try_from(name).unwrap());
            assert_eq!(peers.server_name(), expected, "{allowed:?}");
        }
    }

    #[test]
    fn pins_parse_with_and_without_colons_and_print_without() {
        let digest: [u8; 32] = std::array::from_fn(|at| 0xA0 + at as u8);
        let plain: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        let colons = digest.map(|byte| format!("{byte:02X}")).join(":");
        for text in [&plain, &colons, &plain.to_uppercase()] {
            let pin = format!("sha256:{text}").parse();
            assert_eq!(pin, Ok(Peer::Pin(Pin::Certificate(digest))));
            let pin = format!("spki-sha256:{text}").parse();
            assert_eq!(pin, Ok(Peer::Pin(Pin::Key(digest))));
        }
        assert_eq!(Pin::Key(digest).to_string(), format!("spki-sha256:{plain}"));
        let colons_doubled = colons.replacen(':', "::", 1);
        let shifted = format!("{}:", &colons[..94]);
        for bad in [
            "",
            "00",
            &plain[1..],
            &format!("{plain}0"),
            &plain.replacen('a', "g", 1),
            &format!("+{}", &plain[1..]),
            &colons_doubled,
            &shifted,
            &colons.replacen(':', "-", 1),
            &format!("{}é", &plain[2..]),
        ] {
            let error = format!("sha256:{bad}").parse::<Peer>().unwrap_err();
            assert!(error.to_string().contains("64 hexadecimal digits"), "{bad}");
        }
    }

    #[test]
    fn i6_a_name_is_recorded_only_if_it_parses_back_to_itself() {
        for name in [
            PeerName::Dns("host.test".into()),
            PeerName::Ip([192, 0, 2, 1].into()),
            PeerName::Uri("spiffe://site/host".into()),
        ] {
            assert_eq!(recorded(&name).unwrap().parse(), Ok(name));
        }
        for name in [
            PeerName::Dns("192.0.2.1".into()),
            PeerName::Uri("host.test".into()),
            PeerName::Uri(format!("spiffe://{}", "n".repeat(MAX_PRINCIPAL_NAME_BYTES))),
        ] {
            assert_eq!(recorded(&name), None, "{name}");
        }
    }

    #[test]
    fn text_without_a_pin_prefix_is_a_name() {
        let name = |text: &str| Ok(Peer::Name(text.parse().unwrap()));
        for text in [
            "host.test",
            "192.0.2.1",
            "urn:sha256:00",
            "spiffe://sha256/1",
        ] {
            assert_eq!(text.parse(), name(text));
        }
    }

    #[test]
    fn i6_an_empty_list_allows_no_peer() {
        assert_eq!(Peers::from_iter([]), Peers::OneOf(Vec::new()));
    }
}
