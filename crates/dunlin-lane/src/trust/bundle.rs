//! Whom a hand-off believes: the certificates of one file, as toolstacks keep it. Beside
//! authorities it may hold the peers' own certificates, signed with their own keys and without a
//! name in them that could be checked.
//!
//! ```text
//!   in the file itself? ── yes ──▶ in date? ──────────────▶ name demanded? ──▶ believed
//!      │ no                                                       ▲
//!      ▼                                                          │
//!   chain to an authority of the file (webpki) ───────────────────┘
//! ```

use std::path::Path;
use std::sync::Arc;

use rustls::client::danger::{ServerCertVerified, ServerCertVerifier};
use rustls::crypto::WebPkiSupportedAlgorithms;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{Error, RootCertStore};
use webpki::KeyUsage;
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;

use super::{Authorities, UNISSUED, in_date, refused, without_chain};
use crate::denied::Denied;
use crate::identity::error::IdentityError;
use crate::identity::files::certificates;
use crate::peers::{AuthorisedBy, PeerIdentity, Peers, Pin};

/// The certificates of one file.
#[derive(Debug)]
pub struct Bundle {
    certificates: Vec<CertificateDer<'static>>,
    authorities: Authorities,
}

/// Whom a hand-off believes.
#[derive(Clone, Debug)]
pub enum TrustPolicy {
    /// Whoever answers, which protects from nobody but listeners.
    Anybody,
    /// Whoever the file vouches for, with one of these names if any are demanded.
    Bundle(Arc<Bundle>, Peers),
}

impl Bundle {
    /// Reads a file with one certificate or more, as PEM.
    ///
    /// # Errors
    /// [`IdentityError`], which names the file and what to do.
    pub fn load(path: &Path) -> Result<Self, IdentityError> {
        let certificates = certificates(path)?;
        let mut anchors = RootCertStore::empty();
        for certificate in certificates.iter().filter(|it| is_authority(it)) {
            // One that webpki cannot read vouches for nobody, and may still be a peer's own.
            let _ = anchors.add(certificate.clone());
        }
        let authorities = Authorities {
            anchors,
            revocations: Vec::new(),
            denied: Denied::default(),
        };
        Ok(Self {
            certificates,
            authorities,
        })
    }
}

/// webpki takes whatever is called an anchor for an authority. Here that would let each host of a
/// pool vouch for others with its own key.
fn is_authority(certificate: &CertificateDer<'_>) -> bool {
    X509Certificate::from_der(certificate).is_ok_and(|(_, certificate)| certificate.is_ca())
}

impl TrustPolicy {
    /// Who the bearer of `leaf` is. A handshake must have believed it.
    pub fn identity(&self, leaf: &CertificateDer<'_>) -> Option<PeerIdentity> {
        let Self::Bundle(bundle, peers) = self else {
            return None;
        };
        let by = match peers.authorise(leaf).ok()? {
            AuthorisedBy::Authority if bundle.has(leaf) => {
                AuthorisedBy::Pin(Pin::of_certificate(leaf))
            }
            by => by,
        };
        Some(PeerIdentity::of(leaf, &[], by, None))
    }
}

impl Bundle {
    fn has(&self, leaf: &CertificateDer<'_>) -> bool {
        self.certificates.iter().any(|own| own == leaf)
    }
}

/// The check of the server's certificate.
#[derive(Debug)]
pub(crate) struct Believing {
    pub(crate) trust: TrustPolicy,
    /// The keys that our identity denies.
    pub(crate) denied: Denied,
    pub(crate) algorithms: WebPkiSupportedAlgorithms,
}

impl ServerCertVerifier for Believing {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        // It chooses the server's certificate and is in none of them.
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        UNISSUED.set(None);
        self.denied
            .check(end_entity, intermediates)
            .map_err(refused)?;
        let TrustPolicy::Bundle(bundle, peers) = &self.trust else {
            return Ok(ServerCertVerified::assertion());
        };
        if bundle.has(end_entity) {
            in_date(end_entity, now)?;
        } else {
            let usage = KeyUsage::server_auth();
            let authority = bundle
                .authorities
                .verify(end_entity, intermediates, now, usage, &self.algorithms)
                .map_err(|error| without_chain(end_entity, intermediates, error))?;
            self.denied.check_authority(&authority).map_err(refused)?;
        }
        peers.authorise(end_entity).map_err(refused)?;
        Ok(ServerCertVerified::assertion())
    }

    signatures_by_its_algorithms!();
}
