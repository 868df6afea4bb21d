//! A hand-off's terms: what is offered is in the words of whoever asks for the socket, and whom to
//! believe is his to say.

use std::sync::Arc;

use rustls::client::{Resumption, TicketRequest};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::NoClientAuth;
use rustls::server::danger::ClientCertVerifier;
use rustls::{ClientConfig, SupportedProtocolVersion, version};
use webpki::KeyUsage;

use super::{ServerSettings, ServerTls, Terms, VERSIONS, no_name, refused, server_config, trust};
use crate::denied::Denied;
use crate::identity::{Identity, Role, SettingsError};
use crate::offload::Offload;
use crate::peers::{PeerIdentity, Peers};
use crate::provider::{self, Offer, TlsVersion};
use crate::trust::bundle::{Believing, TrustPolicy};

/// The TLS settings of a hand-off that connects.
#[derive(Clone, Debug)]
pub struct HandoffTls {
    pub(crate) config: Arc<ClientConfig>,
    pub(crate) server_name: ServerName<'static>,
    version: TlsVersion,
    trust: TrustPolicy,
}

impl HandoffTls {
    /// Offers `offer` to a peer that `trust` vouches for, names `server` to it, and shows it the
    /// certificate of `identity`.
    ///
    /// # Errors
    /// [`SettingsError`].
    pub fn new(
        offer: Offer,
        trust: TrustPolicy,
        server: Option<&str>,
        identity: Option<&Identity>,
    ) -> Result<Self, SettingsError> {
        let server_name = server
            .map(|name| ServerName::try_from(name.to_owned()))
            .transpose()
            .map_err(|error| SettingsError::Refused(format!("as a server's name: {error}")))?;
        let believing = Believing {
            trust: trust.clone(),
            denied: identity.map_or_else(Denied::default, |own| own.authorities.denied.clone()),
            algorithms: offer.rustls.signature_verification_algorithms,
        };
        let versions = versions(offer.version);
        let builder = ClientConfig::builder_with_provider(offer.rustls)
            .with_protocol_versions(versions)
            .map_err(refused)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(believing));
        let mut config = match identity {
            Some(own) => builder
                .with_client_auth_cert(own.chain.clone(), own.key.clone_key())
                .map_err(refused)?,
            None => builder.with_no_client_auth(),
        };
        config.enable_secret_extraction = true;
        config.resumption = Resumption::disabled();
        config.enable_sni = server_name.is_some();
        // A ticket would meet a program that reads data only. Few servers heed this (RFC 9149).
        config.send_ticket_request = Some(TicketRequest {
            new_session_count: 0,
            resumption_count: 0,
        });
        Ok(Self {
            config: Arc::new(config),
            server_name: server_name.unwrap_or_else(no_name),
            version: offer.version,
            trust,
        })
    }

    /// The version that is offered.
    pub fn version(&self) -> TlsVersion {
        self.version
    }

    /// Who the bearer of a certificate is that a handshake has believed.
    pub fn identity_of(&self, leaf: &CertificateDer<'_>) -> Option<PeerIdentity> {
        self.trust.identity(leaf)
    }
}

impl Identity {
    /// Settings for a hand-off that accepts: what it takes is in `offer`, and clients are asked for
    /// a certificate if `clients` says whose.
    ///
    /// # Errors
    /// [`SettingsError`].
    pub fn handoff_server(
        &self,
        offer: Offer,
        clients: Option<Peers>,
    ) -> Result<ServerTls, SettingsError> {
        self.check_purpose(Role::Destination)?;
        let asked = clients.is_some();
        // A client that was not asked shows no certificate.
        let clients = clients.unwrap_or(Peers::OneOf(Vec::new()));
        let trust = trust(self, &offer.rustls, clients, KeyUsage::client_auth())?;
        let verifier: Arc<dyn ClientCertVerifier> = match asked {
            true => trust.clone(),
            false => Arc::new(NoClientAuth),
        };
        let terms = Terms {
            versions: versions(offer.version),
            rustls: offer.rustls,
            protocols: Vec::new(),
        };
        Ok(ServerTls::new(ServerSettings {
            config: server_config(self, verifier, terms)?,
            trust,
            provider: provider::auto().provider,
            // It is chosen when the handshake is over, and what then is not the caller's to say here.
            offload: Offload::Auto,
        }))
    }
}

fn versions(version: TlsVersion) -> &'static [&'static SupportedProtocolVersion] {
    const V1_2: &[&SupportedProtocolVersion] = &[&version::TLS12];
    match version {
        TlsVersion::V1_2 => V1_2,
        TlsVersion::V1_3 => VERSIONS,
    }
}
