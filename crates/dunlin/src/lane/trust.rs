//! The certificate checks that rustls calls during a handshake: the chain by webpki, then our
//! list of names. A refusal by name travels inside rustls's error, so that the handshake can
//! report which names were presented.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, RootCertStore,
    SignatureScheme,
};

use super::names::{NameRefused, PeerNames};

/// The source's check of a destination.
#[derive(Debug)]
pub(super) struct ServerNames {
    authorities: Arc<RootCertStore>,
    algorithms: WebPkiSupportedAlgorithms,
    names: PeerNames,
}

/// The destination's check of a source.
#[derive(Debug)]
pub(super) struct ClientNames {
    chain: Arc<dyn ClientCertVerifier>,
    names: PeerNames,
}

impl ServerNames {
    pub(super) fn new(
        authorities: Arc<RootCertStore>,
        algorithms: WebPkiSupportedAlgorithms,
        names: PeerNames,
    ) -> Self {
        Self {
            authorities,
            algorithms,
            names,
        }
    }
}

impl ClientNames {
    /// `chain` verifies the certificate chain and the signatures.
    pub(super) fn new(chain: Arc<dyn ClientCertVerifier>, names: PeerNames) -> Self {
        Self { chain, names }
    }
}

/// The refusal by name inside a handshake's error, if that is what it is.
pub(super) fn name_refused(error: &Error) -> Option<&NameRefused> {
    match error {
        Error::InvalidCertificate(CertificateError::Other(OtherError(inner))) => {
            inner.downcast_ref()
        }
        _ => None,
    }
}

fn authorise(names: &PeerNames, leaf: &CertificateDer<'_>) -> Result<(), Error> {
    let refused = |refused| CertificateError::Other(OtherError(Arc::new(refused)));
    names.authorise(leaf).map_err(refused)?;
    Ok(())
}

impl ServerCertVerifier for ServerNames {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        // Not looked at: `names` may hold several, and URIs, which a ServerName cannot express.
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let leaf = ParsedCertificate::try_from(end_entity)?;
        verify_server_cert_signed_by_trust_anchor(
            &leaf,
            &self.authorities,
            intermediates,
            now,
            self.algorithms.all,
        )?;
        authorise(&self.names, end_entity)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signed, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signed, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

impl ClientCertVerifier for ClientNames {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.chain.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self
            .chain
            .verify_client_cert(end_entity, intermediates, now)?;
        authorise(&self.names, end_entity)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chain
            .verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chain
            .verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.chain.supported_verify_schemes()
    }
}
