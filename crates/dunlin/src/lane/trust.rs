//! Whether a certificate is believed: the one check that both roles make, called by rustls during
//! a handshake.
//!
//! ```text
//!   pinned? ── yes ──▶ in date? ───────────────────────────────▶ believed
//!      │ no
//!      ▼
//!   chain to an authority (webpki) ──▶ revoked? ──▶ name allowed? ──▶ believed
//! ```
//!
//! A revocation weighs more than a pin. What makes a certificate unfit decides the alert that the
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
use webpki::{
    CertRevocationList, EndEntityCert, ExpirationPolicy, ExtendedKeyUsageValidator, KeyUsage,
    RevocationOptionsBuilder, UnknownStatusPolicy,
};
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;

use super::peers::{PeerRefused, Peers, Pin};

/// Certificates that a chain is followed through, at most, to say where it ends.
const CHAIN_LIMIT: usize = 8;

/// The authorities of a host, and what they have revoked.
#[derive(Debug)]
pub(super) struct Authorities {
    pub(super) anchors: RootCertStore,
    pub(super) revocations: Vec<CertRevocationList<'static>>,
}

/// Why no authority vouches for a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unissued {
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
    /// Sent to clients, so that one with several certificates can choose.
    hints: Vec<DistinguishedName>,
}

impl Authorities {
    /// Whether a chain leads from `leaf` to one of the authorities, and nothing in it is revoked.
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
    ) -> Result<(), webpki::Error> {
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
            .map(|_| ())
    }
}

impl Trust {
    pub(super) fn new(
        authorities: Arc<Authorities>,
        algorithms: WebPkiSupportedAlgorithms,
        peers: Peers,
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
            hints,
        }
    }

    fn verify(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
        usage: KeyUsage,
    ) -> Result<(), Error> {
        UNISSUED.set(None);
        let chain = self
            .authorities
            .verify(leaf, intermediates, now, usage, &self.algorithms);
        if self.peers.pinned(leaf).is_some() {
            return match chain {
                Err(error @ webpki::Error::CertRevoked) => Err(in_rustls_words(error).into()),
                _ => in_date(leaf, now).map_err(Into::into),
            };
        }
        let refused = |refused| CertificateError::Other(OtherError(Arc::new(refused)));
        if self.peers.are_pins_alone() {
            self.peers.authorise(leaf).map_err(refused)?;
        }
        chain.map_err(|error| without_chain(leaf, intermediates, error))?;
        self.peers.authorise(leaf).map_err(refused)?;
        Ok(())
    }
}

thread_local! {
    /// rustls's error for an unknown issuer has no room for more, and another error would have
    /// another alert. Both the check and whoever asks for its result run on the thread that
    /// drives the handshake.
    static UNISSUED: Cell<Option<Unissued>> = const { Cell::new(None) };
}

/// What there is to say about the [`CertificateError::UnknownIssuer`] that the last check on this
/// thread ended with.
pub(super) fn take_unissued() -> Option<Unissued> {
    UNISSUED.take()
}

/// Why a chain leads nowhere, for rustls; the rest is for [`take_unissued`].
fn without_chain(
    leaf: &CertificateDer<'_>,
    intermediates: &[CertificateDer<'_>],
    error: webpki::Error,
) -> CertificateError {
    let unissued = Unissued::of(leaf, intermediates, &error);
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

impl Unissued {
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

impl fmt::Display for Unissued {
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
        self.verify(end_entity, intermediates, now, KeyUsage::server_auth())?;
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
        self.verify(end_entity, intermediates, now, KeyUsage::client_auth())?;
        Ok(ClientCertVerified::assertion())
    }

    signatures_by_its_algorithms!();
}
