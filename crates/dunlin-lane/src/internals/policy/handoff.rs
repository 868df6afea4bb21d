//! The TLS settings of a hand-off. The toolstack that asks for the socket chooses what is offered
//! and which peers to trust.

use std::sync::Arc;

use rustls::client::{Resumption, TicketRequest};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::NoClientAuth;
use rustls::server::danger::ClientCertVerifier;
use rustls::{ClientConfig, SupportedProtocolVersion, version};
use webpki::KeyUsage;

use super::{
    ServerSettings, ServerTls, Side, Terms, VERSIONS, no_name, refused, server_config, trust,
};
use crate::internals::fastest;
use crate::internals::identity::{Identity, Role, SettingsError, SettingsErrorKind};
use crate::internals::offload::Offload;
use crate::internals::peers::{PeerIdentity, Peers};
use crate::internals::provider::{Offer, TlsVersion};
use crate::internals::trust::bundle::{PolicyVerifier, TrustPolicy};

/// The TLS settings of a hand-off on the connecting side.
#[derive(Clone, Debug)]
pub struct HandoffTls {
    pub(crate) config: Arc<ClientConfig>,
    pub(crate) server_name: ServerName<'static>,
    version: TlsVersion,
    trust: TrustPolicy,
}

impl HandoffTls {
    /// Returns settings that offer `offer` to a peer trusted by `trust`. If `server` is given and
    /// is not an IP address, it is sent as SNI. If `identity` is given, its certificate is
    /// presented to a peer that requests one.
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
            .map_err(|error| SettingsErrorKind::Refused(format!("invalid server name: {error}")))?;
        let verifier = PolicyVerifier {
            trust: trust.clone(),
            own: identity.map(|own| Arc::clone(&own.authorities)),
            algorithms: offer.rustls.signature_verification_algorithms,
        };
        let versions = versions(offer.version);
        let builder = ClientConfig::builder_with_provider(offer.rustls)
            .with_protocol_versions(versions)
            .map_err(refused)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier));
        let mut config = match identity {
            Some(own) => builder
                .with_client_auth_cert(own.chain.clone(), own.key.clone_key())
                .map_err(refused)?,
            None => builder.with_no_client_auth(),
        };
        config.enable_secret_extraction = true;
        config.resumption = Resumption::disabled();
        config.enable_sni = server_name.is_some();
        // Request no tickets (RFC 9149), because the socket's owner cannot process them. Few
        // servers honour the request.
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

    /// The offered version.
    pub fn version(&self) -> TlsVersion {
        self.version
    }

    /// Returns the identity of the peer that presented `leaf`. A handshake must have verified
    /// `leaf`. Returns `None` with [`TrustPolicy::AnyCertificate`].
    pub fn identity_of(&self, leaf: &CertificateDer<'_>) -> Option<PeerIdentity> {
        self.trust.identity(leaf)
    }
}

#[cfg(feature = "unstable-internals")]
impl Identity {
    /// Returns settings for a hand-off that accepts what `offer` contains. If `clients` is given, a
    /// client must present a certificate that `clients` allows.
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
        // Without `clients` the server requests no certificate, so this list is never used.
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
            side: Side {
                trust,
                provider: fastest::auto().provider,
                // This value is not used, because a hand-off chooses between kernel and process
                // after the handshake.
                offload: Offload::Auto,
            },
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
