//! Whether a certificate is believed: the one check that both roles make, called by rustls during
//! a handshake.
//!
//! ```text
//!   key denied? ──▶ in a local list of revocations? ──▶ pinned? ── yes ──▶ in date? ──▶ believed
//!                                                          │ no
//!                                                          ▼
//!        chain to an authority (webpki) ──▶ revoked or denied? ──▶ name allowed? ──▶ believed
//! ```
//!
//! A revocation weighs more than a pin. A chain leads only through the certificates that the peer
//! sends, so its own certificate is looked up in the local lists by issuer and serial number
//! first, with no chain at all. What makes a certificate unfit decides the alert that the
//! peer gets, so it travels in rustls's own words where it has them. For more than those say,
//! [`take_unissued`] has the rest.

/// What every verifier has besides its own check of certificates: signatures, by the
/// algorithms that it holds.
macro_rules! signatures_by_its_algorithms {
    () => {
        fn verify_tls12_signature(
            &self,
            message: &[u8],
            certificate: &rustls::pki_types::CertificateDer<'_>,
            signed: &rustls::DigitallySignedStruct,
        ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
            rustls::crypto::verify_tls12_signature(message, certificate, signed, &self.algorithms)
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            certificate: &rustls::pki_types::CertificateDer<'_>,
            signed: &rustls::DigitallySignedStruct,
        ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
            rustls::crypto::verify_tls13_signature(message, certificate, signed, &self.algorithms)
        }

        fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
            self.algorithms.supported_schemes()
        }
    };
}

pub(super) mod bundle;

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;

use rustls::client::danger::{ServerCertVerified, ServerCertVerifier};
use rustls::crypto::WebPkiSupportedAlgorithms;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{CertificateError, DistinguishedName, Error, OtherError, RootCertStore};
use sha2::{Digest, Sha256};
use webpki::{
    CertRevocationList, EndEntityCert, ExpirationPolicy, ExtendedKeyUsageValidator, KeyUsage,
    RevocationOptionsBuilder, UnknownStatusPolicy,
};
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;

use super::denied::Denied;
use super::peers::{AuthorisedBy, PeerIdentity, PeerRefused, Peers, Pin};

/// Certificates that a chain is followed through, at most, to say where it ends.
const CHAIN_LIMIT: usize = 8;

/// The authorities of a host, what they have revoked, and the keys that this host denies.
#[derive(Debug)]
pub(super) struct Authorities {
    pub(super) anchors: RootCertStore,
    pub(super) revocations: Vec<CertRevocationList<'static>>,
    pub(super) denied: Denied,
}

/// Why no authority vouches for a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UntrustedReason {
    /// It is signed with its own key.
    SelfSigned {
        /// What to allow it by, if it is the right one.
        pin: Pin,
    },
    /// The chain leads to this authority, which is not trusted here.
    ByStranger {
        /// The authority's name.
        authority: String,
    },
    /// The chain breaks off: this issuer is no authority here, and its certificate was not sent.
    BrokenOff {
        /// The issuer's name.
        issuer: String,
    },
}

/// The check of the other side's certificate, for either role.
#[derive(Debug)]
pub(super) struct Trust {
    authorities: Arc<Authorities>,
    algorithms: WebPkiSupportedAlgorithms,
    peers: Peers,
    /// What a peer's certificate must be for.
    usage: KeyUsage,
    /// Sent to clients, so that one with several certificates can choose.
    hints: Vec<DistinguishedName>,
}

impl Authorities {
    /// Follows a chain from `leaf` to one of the authorities, in which nothing is revoked. Returns
    /// the SHA-256 of that authority's SubjectPublicKeyInfo (DER).
    ///
    /// A certificate whose authority has no revocation list here is taken: the file layouts do not
    /// say which authorities must have one. One whose list is out of date is not.
    pub(super) fn verify(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
        usage: impl ExtendedKeyUsageValidator,
        algorithms: &WebPkiSupportedAlgorithms,
    ) -> Result<[u8; 32], webpki::Error> {
        let lists: Vec<&CertRevocationList<'_>> = self.revocations.iter().collect();
        let revocation = RevocationOptionsBuilder::new(&lists).ok().map(|options| {
            options
                .with_status_policy(UnknownStatusPolicy::Allow)
                .with_expiration_policy(ExpirationPolicy::Enforce)
                .build()
        });
        EndEntityCert::try_from(leaf)?
            .verify_for_usage(
                algorithms.all,
                &self.anchors.roots,
                intermediates,
                now,
                usage,
                revocation,
                None,
            )
            .map(|path| key_digest(&path.anchor().subject_public_key_info))
    }

    /// Looks `leaf` up in every local list by its issuer and serial number: whichever certificates
    /// the peer has sent along, and whatever the list's own date. A newer list does not outweigh an
    /// older one here: two authorities may bear the same name, such as before and after a new key.
    ///
    /// # Errors
    /// [`webpki::Error::CertRevoked`]; or `leaf` or a list cannot be read.
    fn check_listed(&self, leaf: &CertificateDer<'_>) -> Result<(), webpki::Error> {
        let leaf = EndEntityCert::try_from(leaf)?;
        for list in &self.revocations {
            if list.issuer() == leaf.issuer() && list.find_serial(leaf.serial())?.is_some() {
                return Err(webpki::Error::CertRevoked);
            }
        }
        Ok(())
    }
}

impl Authorities {
    /// Looks a peer up that was admitted earlier, perhaps before the lists were read again.
    ///
    /// # Errors
    /// [`PeerRefused::Denied`] or [`PeerRefused::Revoked`].
    pub(super) fn check_admitted(&self, peer: &PeerIdentity) -> Result<(), PeerRefused> {
        self.denied.check(&peer.leaf, &peer.intermediates)?;
        if let Some(authority) = &peer.authority {
            self.denied.check_authority(authority)?;
        }
        // The certificate was readable when it was admitted, and the lists when they were loaded.
        self.check_listed(&peer.leaf)
            .map_err(|_| PeerRefused::Revoked)
    }
}

/// SHA-256 of a SubjectPublicKeyInfo (DER), of which webpki keeps what is inside the SEQUENCE.
fn key_digest(content: &[u8]) -> [u8; 32] {
    const SEQUENCE: u8 = 0x30;
    let length = content.len().to_be_bytes();
    let significant = &length[length.iter().take_while(|byte| **byte == 0).count()..];
    let mut digest = Sha256::new_with_prefix([SEQUENCE]);
    if content.len() >= 0x80 {
        // The long form of a length (X.690, section 8.1.3.5).
        digest.update([0x80 | significant.len() as u8]);
        digest.update(significant);
    } else {
        digest.update([content.len() as u8]);
    }
    digest.update(content);
    digest.finalize().into()
}

impl Trust {
    /// The check of peers whose certificates are for `usage`.
    pub(super) fn new(
        authorities: Arc<Authorities>,
        algorithms: WebPkiSupportedAlgorithms,
        peers: Peers,
        usage: KeyUsage,
    ) -> Self {
        // A client that heeds them would keep back a certificate that is pinned.
        let hints = if peers.pins().next().is_none() {
            authorities.anchors.subjects()
        } else {
            Vec::new()
        };
        Self {
            authorities,
            algorithms,
            peers,
            usage,
            hints,
        }
    }

    /// The identity of a peer whose handshake has passed this check.
    ///
    /// # Errors
    /// The list of peers does not have it, or a certificate has expired since the check.
    pub(super) fn identify(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
    ) -> Result<PeerIdentity, Error> {
        let authorised_by = self.peers.authorise(leaf).map_err(refused)?;
        let now = UnixTime::now();
        let authority =
            self.authorities
                .verify(leaf, intermediates, now, self.usage, &self.algorithms);
        let authority = match (authority, &authorised_by) {
            (Ok(authority), _) => Some(authority),
            (Err(_), AuthorisedBy::Pin(_)) => None,
            (Err(error), _) => return Err(in_rustls_words(error).into()),
        };
        Ok(PeerIdentity::of(
            leaf,
            intermediates,
            authorised_by,
            authority,
        ))
    }

    fn verify(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), Error> {
        UNISSUED.set(None);
        let denied = &self.authorities.denied;
        denied.check(leaf, intermediates).map_err(refused)?;
        self.authorities
            .check_listed(leaf)
            .map_err(in_rustls_words)?;
        let chain = self
            .authorities
            .verify(leaf, intermediates, now, self.usage, &self.algorithms);
        // Its certificate need not be sent.
        if let Ok(authority) = &chain {
            denied.check_authority(authority).map_err(refused)?;
        }
        if self.peers.pinned(leaf).is_some() {
            if let Err(error @ webpki::Error::CertRevoked) = chain {
                return Err(in_rustls_words(error).into());
            }
            return in_date(leaf, now).map_err(Into::into);
        }
        if self.peers.are_pins_alone() {
            self.peers.authorise(leaf).map_err(refused)?;
        }
        chain.map_err(|error| without_chain(leaf, intermediates, error))?;
        self.peers.authorise(leaf).map_err(refused)?;
        Ok(())
    }
}

/// A refusal of ours, for rustls; [`peer_refused`] finds it again.
fn refused(refused: PeerRefused) -> CertificateError {
    CertificateError::Other(OtherError(Arc::new(refused)))
}

thread_local! {
    /// rustls's error for an unknown issuer has no room for more, and another error would have
    /// another alert. Both the check and whoever asks for its result run on the thread that
    /// drives the handshake.
    static UNISSUED: Cell<Option<UntrustedReason>> = const { Cell::new(None) };
}

/// What there is to say about the [`CertificateError::UnknownIssuer`] that the last check on this
/// thread ended with.
pub(super) fn take_unissued() -> Option<UntrustedReason> {
    UNISSUED.take()
}

/// Why a chain leads nowhere, for rustls; the rest is for [`take_unissued`].
fn without_chain(
    leaf: &CertificateDer<'_>,
    intermediates: &[CertificateDer<'_>],
    error: webpki::Error,
) -> CertificateError {
    let unissued = UntrustedReason::of(leaf, intermediates, &error);
    let error = match &unissued {
        Some(_) => CertificateError::UnknownIssuer,
        None => in_rustls_words(error),
    };
    UNISSUED.set(unissued);
    error
}

/// The refusal inside a handshake's error, if the list of peers is the reason.
pub(super) fn peer_refused(error: &Error) -> Option<&PeerRefused> {
    match error {
        Error::InvalidCertificate(CertificateError::Other(OtherError(inner))) => {
            inner.downcast_ref()
        }
        _ => None,
    }
}

impl UntrustedReason {
    /// Where the chain ends that was sent; none if `error` is about something else.
    pub(super) fn of(
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        error: &webpki::Error,
    ) -> Option<Self> {
        let (_, mut last) = X509Certificate::from_der(leaf).ok()?;
        let is_own_issuer = |certificate: &X509Certificate<'_>| {
            certificate.issuer().as_raw() == certificate.subject().as_raw()
        };
        // As `openssl req -x509` makes one, it is an authority's too, and webpki says that first.
        if is_own_issuer(&last)
            && matches!(
                error,
                webpki::Error::UnknownIssuer | webpki::Error::CaUsedAsEndEntity
            )
        {
            let pin = Pin::of_certificate(leaf);
            return Some(Self::SelfSigned { pin });
        }
        if *error != webpki::Error::UnknownIssuer {
            return None;
        }
        for _ in 0..CHAIN_LIMIT {
            if is_own_issuer(&last) {
                return Some(Self::ByStranger {
                    authority: readable(&last.subject().to_string()),
                });
            }
            let issuer = last.issuer().as_raw().to_vec();
            let next = intermediates
                .iter()
                .filter_map(|sent| X509Certificate::from_der(sent).ok())
                .find(|(_, sent)| sent.subject().as_raw() == issuer);
            match next {
                Some((_, certificate)) => last = certificate,
                None => break,
            }
        }
        Some(Self::BrokenOff {
            issuer: readable(&last.issuer().to_string()),
        })
    }
}

/// A certificate may hold any bytes and any number of them, and this goes into logs.
pub(super) fn readable(name: &str) -> String {
    const CHARACTERS: usize = 200;
    name.chars()
        .take(CHARACTERS)
        .flat_map(char::escape_debug)
        .collect()
}

impl fmt::Display for UntrustedReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SelfSigned { pin } => write!(
                f,
                "it is signed with its own key, by no authority, and is not pinned here: if it is \
                 the right one, allow it on this host as {pin}, else give both hosts certificates \
                 of one authority"
            ),
            Self::ByStranger { authority } => write!(
                f,
                "it comes from an unknown authority, {authority}: give both hosts certificates of \
                 one authority, or add that one to this host's CA bundle"
            ),
            Self::BrokenOff { issuer } => write!(
                f,
                "it comes from an unknown authority, {issuer}, whose certificate the peer did not \
                 send along: if that is an intermediate of an authority in this host's CA bundle, \
                 append its certificate to the peer's; if it is an authority of its own, add it \
                 to this host's CA bundle, or give both hosts certificates of one authority"
            ),
        }
    }
}

fn in_date(leaf: &CertificateDer<'_>, now: UnixTime) -> Result<(), CertificateError> {
    let (_, certificate) =
        X509Certificate::from_der(leaf).map_err(|_| CertificateError::BadEncoding)?;
    let validity = certificate.validity();
    let seconds = |time: x509_parser::time::ASN1Time| {
        let seconds = u64::try_from(time.timestamp()).unwrap_or(0);
        UnixTime::since_unix_epoch(std::time::Duration::from_secs(seconds))
    };
    let (not_before, not_after) = (seconds(validity.not_before), seconds(validity.not_after));
    if now > not_after {
        return Err(CertificateError::ExpiredContext {
            time: now,
            not_after,
        });
    }
    if now < not_before {
        return Err(CertificateError::NotValidYetContext {
            time: now,
            not_before,
        });
    }
    Ok(())
}

/// webpki's error as rustls's, which decides the alert for the peer.
fn in_rustls_words(error: webpki::Error) -> CertificateError {
    use webpki::Error as Chain;
    match error {
        Chain::CertExpired { time, not_after } => {
            CertificateError::ExpiredContext { time, not_after }
        }
        Chain::CertNotValidYet { time, not_before } => {
            CertificateError::NotValidYetContext { time, not_before }
        }
        Chain::CertRevoked => CertificateError::Revoked,
        Chain::CrlExpired { time, next_update } => {
            CertificateError::ExpiredRevocationListContext { time, next_update }
        }
        Chain::UnknownIssuer => CertificateError::UnknownIssuer,
        Chain::InvalidSignatureForPublicKey => CertificateError::BadSignature,
        Chain::BadDer | Chain::BadDerTime | Chain::TrailingData(_) => CertificateError::BadEncoding,
        Chain::RequiredEkuNotFoundContext(_) | Chain::EmptyEkuExtension => {
            CertificateError::InvalidPurpose
        }
        error => CertificateError::Other(OtherError(Arc::new(error))),
    }
}

impl ServerCertVerifier for Trust {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        // Not looked at: the list of peers may hold several names, URIs and pins, which a
        // ServerName cannot express.
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.verify(end_entity, intermediates, now)?;
        Ok(ServerCertVerified::assertion())
    }

    signatures_by_its_algorithms!();
}

impl ClientCertVerifier for Trust {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &self.hints
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.verify(end_entity, intermediates, now)?;
        Ok(ClientCertVerified::assertion())
    }

    signatures_by_its_algorithms!();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_digest_of_a_key_is_over_its_der() {
        for (length, header) in [
            (0x7f, &[0x30, 0x7f][..]),
            (0x80, &[0x30, 0x81, 0x80]),
            (0xff, &[0x30, 0x81, 0xff]),
            (0x100, &[0x30, 0x82, 0x01, 0x00]),
            (0x1_0000, &[0x30, 0x83, 0x01, 0x00, 0x00]),
        ] {
            let content = vec![7; length];
            let der = [header, &content].concat();
            let expected: [u8; 32] = Sha256::digest(der).into();
            assert_eq!(key_digest(&content), expected, "{length}");
        }
    }
}
