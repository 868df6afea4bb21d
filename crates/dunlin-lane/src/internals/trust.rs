//! Verification of certificates: one check for both roles, called by rustls during a handshake.
//!
//! ```text
//!   key denied? ──▶ in a local revocation list? ──▶ pinned? ── yes ──▶ in date? ──▶ trusted
//!                                                      │ no
//!                                                      ▼
//!        chain to an authority (webpki) ──▶ revoked or denied? ──▶ name allowed? ──▶ trusted
//! ```
//!
//! Revocation takes precedence over a pin. A pinned peer could withhold its intermediates; webpki
//! would then find no chain and check no list. The peer's own certificate is therefore first looked
//! up in the local lists by issuer and serial number, without a chain. rustls derives the alert
//! from the error, so the verifier returns rustls's own error if one exists; [`take_untrusted`]
//! returns details that those errors cannot carry.

/// The signature checks that all verifiers share, using the verifier's `algorithms`.
macro_rules! verify_signatures_with_own_algorithms {
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
use std::sync::Arc;

use rustls::client::danger::{ServerCertVerified, ServerCertVerifier};
use rustls::crypto::WebPkiSupportedAlgorithms;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{CertificateError, DistinguishedName, OtherError, RootCertStore};
use sha2::{Digest, Sha256};
use thiserror::Error;
use webpki::{
    CertRevocationList, EndEntityCert, ExpirationPolicy, ExtendedKeyUsageValidator,
    KeyPurposeIdIter, KeyUsage, RevocationOptionsBuilder, UnknownStatusPolicy,
};
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;

use super::denied::Denied;
use super::peers::{AuthorisedBy, PeerIdentity, PeerRefused, Peers, Pin};
use super::provider::handshake_algorithms;

/// Maximum number of certificates followed to find where a chain ends.
const CHAIN_LIMIT: usize = 8;

/// A host's trust anchors, their revocation lists, and the keys that this host denies.
#[derive(Debug)]
pub(super) struct Authorities {
    pub(super) anchors: RootCertStore,
    pub(super) revocations: Vec<CertRevocationList<'static>>,
    pub(super) denied: Denied,
}

/// Why a certificate has no chain to a trusted authority.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum UntrustedReason {
    /// The certificate names itself as its issuer.
    #[error(
        "it is self-signed and not pinned here: if it is the right certificate, allow it on this host \
         as {pin}; otherwise give both hosts certificates of one authority"
    )]
    SelfSigned {
        /// The pin that would allow the certificate.
        pin: Pin,
    },
    /// The chain is complete, but this host does not trust the root authority at its end.
    #[error(
        "it was issued by an unknown authority, {authority}: give both hosts certificates of one \
         authority, or add that authority to this host's CA bundle"
    )]
    UnknownRoot {
        /// The authority's name.
        authority: String,
    },
    /// The chain is incomplete: this issuer is not trusted here, and the peer did not send the
    /// issuer's certificate.
    #[error(
        "it was issued by an unknown authority, {issuer}, and the peer did not send that authority's \
         certificate: if the unknown authority is an intermediate of an authority in this host's \
         CA bundle, append the intermediate's certificate to the peer's certificate file; if the \
         unknown authority is a root, add its certificate to this host's CA bundle, or give both hosts \
         certificates of one authority"
    )]
    IncompleteChain {
        /// The issuer's name.
        issuer: String,
    },
}

/// The check of the peer's certificate, for either role.
#[derive(Debug)]
pub(super) struct Trust {
    authorities: Arc<Authorities>,
    algorithms: WebPkiSupportedAlgorithms,
    peers: Peers,
    /// The required extended key usage of a peer's certificate.
    usage: KeyUsage,
    /// Names of authorities. The server sends them, so that a client with several certificates can
    /// choose one.
    hints: Vec<DistinguishedName>,
}

impl Authorities {
    /// Builds a chain from `leaf` to a trust anchor, in which no certificate is revoked. Returns
    /// the SHA-256 of the anchor's SubjectPublicKeyInfo (DER).
    ///
    /// A certificate is accepted if its authority has no revocation list here, because no layout of
    /// an identity's files defines which authorities need a list. A certificate is refused if its
    /// authority's list is out of date.
    pub(super) fn verify(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
        usage: impl ExtendedKeyUsageValidator,
        algorithms: &WebPkiSupportedAlgorithms,
    ) -> Result<[u8; 32], webpki::Error> {
        self.verify_with(
            &self.revocations,
            leaf,
            intermediates,
            now,
            usage,
            algorithms,
        )
    }

    /// Like [`Self::verify`], but with `lists` instead of the revocation lists of these
    /// authorities.
    pub(super) fn verify_with(
        &self,
        lists: &[CertRevocationList<'static>],
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
        usage: impl ExtendedKeyUsageValidator,
        algorithms: &WebPkiSupportedAlgorithms,
    ) -> Result<[u8; 32], webpki::Error> {
        let lists: Vec<&CertRevocationList<'_>> = lists.iter().collect();
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

    /// Looks up `leaf` in every local list by issuer and serial number, regardless of the
    /// certificates that the peer sent and of the list's date. In this check a newer list does not
    /// override an older one, because two authorities may have the same name, for example before
    /// and after a key change.
    ///
    /// # Errors
    /// [`webpki::Error::CertRevoked`], or a parse error of `leaf` or of a list.
    fn check_listed(&self, leaf: &CertificateDer<'_>) -> Result<(), webpki::Error> {
        let leaf = EndEntityCert::try_from(leaf)?;
        for list in &self.revocations {
            if list.issuer() == leaf.issuer() && list.find_serial(leaf.serial())?.is_some() {
                return Err(webpki::Error::CertRevoked);
            }
        }
        Ok(())
    }

    /// Checks a peer that was admitted earlier, perhaps before the lists were reloaded or its
    /// certificate expired.
    ///
    /// # Errors
    /// [`PeerRefused::Denied`], [`PeerRefused::Revoked`] or [`PeerRefused::Expired`].
    pub(super) fn check_admitted(&self, peer: &PeerIdentity) -> Result<(), PeerRefused> {
        self.denied.check(&peer.leaf, &peer.intermediates)?;
        if let Some(authority) = &peer.authority {
            self.denied.check_authority(authority)?;
        }
        // The certificate was parsed on admission, and the lists when they were loaded, so parsing
        // does not fail here.
        self.check_listed(&peer.leaf)
            .map_err(|_| PeerRefused::Revoked)?;
        in_date(&peer.leaf, UnixTime::now()).map_err(|_| PeerRefused::Expired)
    }

    /// Checks the chain of a peer that was admitted earlier: an authority may have been removed
    /// since then, and an intermediate revoked. A peer that a pin admitted needs no chain.
    ///
    /// # Errors
    /// [`PeerRefused::Revoked`] or [`PeerRefused::Uncertified`].
    pub(super) fn check_peer_chain(&self, peer: &PeerIdentity) -> Result<(), PeerRefused> {
        let chain = self.verify(
            &peer.leaf,
            &peer.intermediates,
            UnixTime::now(),
            AnyUsage,
            &handshake_algorithms(),
        );
        match chain {
            Ok(_) => Ok(()),
            Err(webpki::Error::CertRevoked) => Err(PeerRefused::Revoked),
            Err(_) if matches!(peer.authorised_by, AuthorisedBy::Pin(_)) => Ok(()),
            Err(error) => Err(PeerRefused::Uncertified {
                reason: match error {
                    webpki::Error::UnknownIssuer => {
                        "this host trusts no authority that issued it".to_owned()
                    }
                    other => to_rustls_error(other).to_string(),
                },
            }),
        }
    }
}

/// Accepts every extended key usage. The handshake has checked it, and it depends on the role that
/// the peer had there.
struct AnyUsage;

impl ExtendedKeyUsageValidator for AnyUsage {
    fn validate(&self, _: KeyPurposeIdIter<'_, '_>) -> Result<(), webpki::Error> {
        Ok(())
    }
}

/// SHA-256 of a SubjectPublicKeyInfo (DER). webpki keeps only the content of its SEQUENCE, so this
/// function adds the header.
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
    /// Returns a check that requires certificates for `usage`.
    pub(super) fn new(
        authorities: Arc<Authorities>,
        algorithms: WebPkiSupportedAlgorithms,
        peers: Peers,
        usage: KeyUsage,
    ) -> Self {
        // Send hints only if no certificate is pinned: a client that honours hints might withhold a
        // pinned certificate that none of these authorities issued.
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

    /// Returns the identity of a peer after its handshake passed this check.
    ///
    /// # Errors
    /// The list of peers does not allow this peer, or a certificate has expired since the check.
    pub(super) fn identify(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
    ) -> Result<PeerIdentity, rustls::Error> {
        let authorised_by = self.peers.authorise(leaf).map_err(refused)?;
        let now = UnixTime::now();
        let authority =
            self.authorities
                .verify(leaf, intermediates, now, self.usage, &self.algorithms);
        let authority = match (authority, &authorised_by) {
            (Ok(authority), _) => Some(authority),
            (Err(_), AuthorisedBy::Pin(_)) => None,
            (Err(error), _) => return Err(to_rustls_error(error).into()),
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
    ) -> Result<(), rustls::Error> {
        UNTRUSTED.set(None);
        let denied = &self.authorities.denied;
        denied.check(leaf, intermediates).map_err(refused)?;
        self.authorities
            .check_listed(leaf)
            .map_err(to_rustls_error)?;
        let chain = self
            .authorities
            .verify(leaf, intermediates, now, self.usage, &self.algorithms);
        // The peer need not send the trust anchor's certificate, so check the anchor's key
        // separately.
        if let Ok(authority) = &chain {
            denied.check_authority(authority).map_err(refused)?;
        }
        if self.peers.pinned(leaf).is_some() {
            if let Err(error @ webpki::Error::CertRevoked) = chain {
                return Err(to_rustls_error(error).into());
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

/// Wraps a refusal for rustls; [`peer_refused`] unwraps it.
fn refused(refused: PeerRefused) -> CertificateError {
    CertificateError::Other(OtherError(Arc::new(refused)))
}

thread_local! {
    /// Holds the details of an unknown issuer: rustls's error has no field for them, and any other
    /// error would change the alert. The check and the code that reads its result both run on the
    /// thread that drives the handshake, so a variable of the thread is sufficient.
    static UNTRUSTED: Cell<Option<UntrustedReason>> = const { Cell::new(None) };
}

/// Returns details of the [`CertificateError::UnknownIssuer`] that ended the last check on this
/// thread.
pub(super) fn take_untrusted() -> Option<UntrustedReason> {
    UNTRUSTED.take()
}

/// The rustls error for a certificate without a chain; [`take_untrusted`] returns the details.
fn without_chain(
    leaf: &CertificateDer<'_>,
    intermediates: &[CertificateDer<'_>],
    error: webpki::Error,
) -> CertificateError {
    let untrusted = UntrustedReason::of(leaf, intermediates, &error);
    let error = match &untrusted {
        Some(_) => CertificateError::UnknownIssuer,
        None => to_rustls_error(error),
    };
    UNTRUSTED.set(untrusted);
    error
}

/// The refusal inside a handshake's error, if the list of peers or the list of denied keys caused
/// the error.
pub(super) fn peer_refused(error: &rustls::Error) -> Option<&PeerRefused> {
    match error {
        rustls::Error::InvalidCertificate(CertificateError::Other(OtherError(inner))) => {
            inner.downcast_ref()
        }
        _ => None,
    }
}

impl UntrustedReason {
    /// Returns the reason why the chain ends without a trust anchor; `None` if `error` has another
    /// cause.
    pub(super) fn of(
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        error: &webpki::Error,
    ) -> Option<Self> {
        let (_, mut last) = X509Certificate::from_der(leaf).ok()?;
        let is_own_issuer = |certificate: &X509Certificate<'_>| {
            certificate.issuer().as_raw() == certificate.subject().as_raw()
        };
        // `openssl req -x509` marks a self-signed certificate as a CA. webpki then reports
        // `CaUsedAsEndEntity` instead of `UnknownIssuer`.
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
                return Some(Self::UnknownRoot {
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
        Some(Self::IncompleteChain {
            issuer: readable(&last.issuer().to_string()),
        })
    }
}

/// Escapes and truncates a name for logs, because a name in a certificate may be long and hold any
/// bytes.
pub(super) fn readable(name: &str) -> String {
    const CHARACTERS: usize = 200;
    name.chars()
        .take(CHARACTERS)
        .flat_map(char::escape_debug)
        .collect()
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

/// Converts an error of webpki to an error of rustls, which determines the alert for the peer.
fn to_rustls_error(error: webpki::Error) -> CertificateError {
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
        // Unused: the list of peers may hold several names, URIs and pins, which a ServerName
        // cannot express.
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.verify(end_entity, intermediates, now)?;
        Ok(ServerCertVerified::assertion())
    }

    verify_signatures_with_own_algorithms!();
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
    ) -> Result<ClientCertVerified, rustls::Error> {
        self.verify(end_entity, intermediates, now)?;
        Ok(ClientCertVerified::assertion())
    }

    verify_signatures_with_own_algorithms!();
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
