//! The certificates that a hand-off trusts. Toolstacks provide them in one file. In addition to
//! authorities, the file may hold the peers' own self-signed certificates, which often have no name
//! to check.
//!
//! ```text
//!   in the file itself? ── yes ──▶ in date? ──────────────▶ name required? ──▶ trusted
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

use super::{Authorities, UNTRUSTED, in_date, refused, to_rustls_error, without_chain};
use crate::internals::denied::Denied;
use crate::internals::identity::error::IdentityError;
use crate::internals::identity::files::certificates;
use crate::internals::peers::{AuthorisedBy, PeerIdentity, Peers, Pin};

/// The certificates of one file.
#[derive(Debug)]
pub struct Bundle {
    certificates: Vec<CertificateDer<'static>>,
    authorities: Authorities,
}

/// Which servers a hand-off trusts.
#[derive(Clone, Debug)]
pub enum TrustPolicy {
    /// Servers with any certificate that this host's identity does not deny or revoke. The
    /// connection is protected against eavesdroppers, but not against an attacker that takes the
    /// server's place.
    AnyCertificate,
    /// Servers with a certificate that is in the bundle or was issued by an authority in it. If
    /// names are required, the certificate must have one of them.
    Bundle(Arc<Bundle>, Peers),
}

impl Bundle {
    /// Reads a PEM file with one or more certificates.
    ///
    /// # Errors
    /// [`IdentityError`], which names the file and the remedy.
    pub fn load(path: &Path) -> Result<Self, IdentityError> {
        let certificates = certificates(path)?;
        let mut anchors = RootCertStore::empty();
        for certificate in certificates.iter().filter(|it| is_authority(it)) {
            // A certificate that webpki cannot parse is not a trust anchor, but it may be a peer's
            // own certificate.
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

    /// Whether the file contains an authority. If so, the bundle trusts more certificates than the
    /// file contains.
    pub fn has_authority(&self) -> bool {
        !self.authorities.anchors.is_empty()
    }

    fn has(&self, leaf: &CertificateDer<'_>) -> bool {
        self.certificates.iter().any(|own| own == leaf)
    }
}

/// Whether a certificate is that of an authority. webpki trusts every anchor as an authority.
/// Without this check, each host of a pool could use its own key to issue certificates for the
/// other hosts.
fn is_authority(certificate: &CertificateDer<'_>) -> bool {
    X509Certificate::from_der(certificate).is_ok_and(|(_, certificate)| certificate.is_ca())
}

impl TrustPolicy {
    /// Returns the identity of the peer that presented `leaf`. A handshake must have verified
    /// `leaf`. Returns `None` with [`TrustPolicy::AnyCertificate`].
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

/// Verifies the server's certificate against a [`TrustPolicy`].
#[derive(Debug)]
pub(crate) struct PolicyVerifier {
    pub(crate) trust: TrustPolicy,
    /// The revocation lists of this host's identity, and the keys that this host denies.
    pub(crate) own: Option<Arc<Authorities>>,
    pub(crate) algorithms: WebPkiSupportedAlgorithms,
}

impl ServerCertVerifier for PolicyVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        // Unused: the name was only sent as SNI to select the server's certificate, which need not
        // contain the name.
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        UNTRUSTED.set(None);
        let mut lists = &[][..];
        if let Some(own) = &self.own {
            own.denied
                .check(end_entity, intermediates)
                .map_err(refused)?;
            own.check_listed(end_entity).map_err(to_rustls_error)?;
            lists = &own.revocations;
        }
        let TrustPolicy::Bundle(bundle, peers) = &self.trust else {
            return Ok(ServerCertVerified::assertion());
        };
        if bundle.has(end_entity) {
            in_date(end_entity, now)?;
        } else {
            let usage = KeyUsage::server_auth();
            let authority = bundle
                .authorities
                .verify_with(
                    lists,
                    end_entity,
                    intermediates,
                    now,
                    usage,
                    &self.algorithms,
                )
                .map_err(|error| without_chain(end_entity, intermediates, error))?;
            if let Some(own) = &self.own {
                own.denied.check_authority(&authority).map_err(refused)?;
            }
        }
        peers.authorise(end_entity).map_err(refused)?;
        Ok(ServerCertVerified::assertion())
    }

    verify_signatures_with_own_algorithms!();
}
