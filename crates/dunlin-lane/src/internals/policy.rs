//! The TLS settings of every connection, for both roles.
//!
//! | | |
//! | --- | --- |
//! | version | 1.3 only |
//! | suites | those of [`Crypto`], by default AES-256-GCM first |
//! | key exchange | X25519MLKEM768, then X25519; only X25519 in a build without aws-lc-rs ([`provider`](super::provider)) |
//! | certificates | required from both sides, same check for both (`trust`) |
//! | protocol | [`ALPN`], required from both sides: identifies TLS peers that are not Dunlin |
//! | resumption, tickets, early data | off, so every lane is fully authenticated |
//!
//! A relay's peer is another program. Relays therefore send no ALPN, also accept key exchange with
//! P-256 and P-384, and accept TLS 1.2 if the route allows it ([`OldestTls`]). Certificates are
//! required from both sides and checked as in the table.
//!
//! A hand-off's peer is another program too. The toolstack that asks for the socket chooses what is
//! offered (`Offer`: one version, TLS 1.2 by default), which peers to trust ([`TrustPolicy`]), and
//! whether to present this host's certificate.
//!
//! A source's settings never change, so all lanes of a session use the same ones. A destination can
//! replace its settings while it runs. [`ServerTls::replace`] affects every later handshake, except
//! those of a session in progress: its lanes keep the settings with which the session began.

pub(super) mod handoff;

use crate::internals::sync::lock;
use std::sync::{Arc, Mutex};

use rustls::client::Resumption;
use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::ServerName;
use rustls::server::NoServerSessionStorage;
use rustls::server::danger::ClientCertVerifier;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{ClientConfig, ServerConfig, SupportedProtocolVersion, version};
use webpki::KeyUsage;

pub use self::handoff::HandoffTls;
use super::identity::{Identity, Role, SettingsError, SettingsErrorKind};
use super::kernel;
use super::offload::Offload;
use super::peers::Peers;
use super::provider::{Crypto, Provider};
use super::trust::Trust;

pub use super::provider::OldestTls;
pub use super::trust::bundle::{Bundle, TrustPolicy};

/// The name of Dunlin's protocol, which each side sends in the handshake (ALPN, RFC 7301). Protocol
/// versions are negotiated above TLS.
pub const ALPN: &[u8] = b"dunlin";

const VERSIONS: &[&SupportedProtocolVersion] = &[&version::TLS13];
const OLDER_VERSIONS: &[&SupportedProtocolVersion] = &[&version::TLS13, &version::TLS12];

/// The TLS parameters in which lanes, relays and hand-offs differ.
struct Terms {
    rustls: Arc<CryptoProvider>,
    versions: &'static [&'static SupportedProtocolVersion],
    protocols: Vec<Vec<u8>>,
}

impl Terms {
    fn of_lane(crypto: &Crypto) -> Result<Self, SettingsError> {
        Ok(Self {
            rustls: crypto.rustls_for_lanes()?,
            versions: VERSIONS,
            protocols: vec![ALPN.to_vec()],
        })
    }

    fn of_relay(crypto: &Crypto, oldest: OldestTls) -> Result<Self, SettingsError> {
        Ok(Self {
            rustls: crypto.rustls_for_relay(oldest)?,
            versions: match oldest {
                OldestTls::V1_2 => OLDER_VERSIONS,
                OldestTls::V1_3 => VERSIONS,
            },
            protocols: Vec::new(),
        })
    }
}

/// The TLS settings of the connecting side.
#[derive(Clone, Debug)]
pub struct ClientTls {
    pub(super) config: Arc<ClientConfig>,
    pub(super) server_name: ServerName<'static>,
    pub(super) side: Side,
}

/// What a handshake of either role needs in addition to rustls's configuration.
#[derive(Clone, Debug)]
pub(super) struct Side {
    pub(super) trust: Arc<Trust>,
    pub(super) provider: Provider,
    pub(super) offload: Offload,
}

/// The TLS settings of the accepting side. [`ServerTls::replace`] replaces them in all clones.
#[derive(Clone, Debug)]
pub struct ServerTls {
    current: Arc<Mutex<Arc<ServerSettings>>>,
    /// The settings with which this session began; `None` before its first handshake.
    kept: Arc<Mutex<Option<Arc<ServerSettings>>>>,
}

/// The settings of one handshake on the accepting side.
#[derive(Debug)]
pub(super) struct ServerSettings {
    pub(super) config: Arc<ServerConfig>,
    pub(super) side: Side,
}

impl Identity {
    /// Returns settings for a source that accepts only `peers`.
    ///
    /// # Errors
    /// [`SettingsError`].
    pub fn client(&self, crypto: &Crypto, peers: Peers) -> Result<ClientTls, SettingsError> {
        self.check_purpose(Role::Source)?;
        let server_name = peers.server_name();
        client_tls(self, crypto, peers, Terms::of_lane(crypto)?, server_name)
    }

    /// Returns settings for a destination that accepts only `peers`.
    ///
    /// # Errors
    /// [`SettingsError`].
    pub fn server(&self, crypto: &Crypto, peers: Peers) -> Result<ServerTls, SettingsError> {
        self.check_purpose(Role::Destination)?;
        server_tls(self, crypto, peers, Terms::of_lane(crypto)?)
    }

    /// Returns settings for a relay that connects to `peers` at `host`. The peers need not be
    /// Dunlin. The server's name is the first DNS name in `peers`, or else the first IP address
    /// there, or else `host`. SNI carries this name if it is a DNS name.
    #[cfg(feature = "unstable-internals")]
    pub fn relay_client(
        &self,
        crypto: &Crypto,
        peers: Peers,
        oldest: OldestTls,
        host: &str,
    ) -> Result<ClientTls, SettingsError> {
        self.check_purpose(Role::Source)?;
        let named = || ServerName::try_from(host.to_owned()).ok();
        let server_name = peers.server_name().or_else(named);
        let terms = Terms::of_relay(crypto, oldest)?;
        client_tls(self, crypto, peers, terms, server_name)
    }

    /// Returns settings for a relay that accepts `peers`, which need not be Dunlin.
    #[cfg(feature = "unstable-internals")]
    pub fn relay_server(
        &self,
        crypto: &Crypto,
        peers: Peers,
        oldest: OldestTls,
    ) -> Result<ServerTls, SettingsError> {
        self.check_purpose(Role::Destination)?;
        server_tls(self, crypto, peers, Terms::of_relay(crypto, oldest)?)
    }
}

fn client_tls(
    identity: &Identity,
    crypto: &Crypto,
    peers: Peers,
    terms: Terms,
    server_name: Option<ServerName<'static>>,
) -> Result<ClientTls, SettingsError> {
    let side = side(identity, crypto, &terms, peers, KeyUsage::server_auth())?;
    let verifier: Arc<dyn ServerCertVerifier> = side.trust.clone();
    let mut config = ClientConfig::builder_with_provider(terms.rustls)
        .with_protocol_versions(terms.versions)
        .map_err(refused)?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_client_auth_cert(identity.chain.clone(), identity.key.clone_key())
        .map_err(refused)?;
    config.alpn_protocols = terms.protocols;
    config.enable_secret_extraction = true;
    config.resumption = Resumption::disabled();
    config.enable_sni = server_name.is_some();
    let server_name = server_name.unwrap_or_else(no_name);
    Ok(ClientTls {
        config: Arc::new(config),
        server_name,
        side,
    })
}

fn server_tls(
    identity: &Identity,
    crypto: &Crypto,
    peers: Peers,
    terms: Terms,
) -> Result<ServerTls, SettingsError> {
    let side = side(identity, crypto, &terms, peers, KeyUsage::client_auth())?;
    Ok(ServerTls::new(ServerSettings {
        config: server_config(identity, side.trust.clone(), terms)?,
        side,
    }))
}

fn server_config(
    identity: &Identity,
    clients: Arc<dyn ClientCertVerifier>,
    terms: Terms,
) -> Result<Arc<ServerConfig>, SettingsError> {
    let (chain, key) = (identity.chain.clone(), identity.key.clone_key());
    let own = CertifiedKey::from_der(chain, key, &terms.rustls).map_err(refused)?;
    let mut config = ServerConfig::builder_with_provider(terms.rustls)
        .with_protocol_versions(terms.versions)
        .map_err(refused)?
        .with_client_cert_verifier(clients)
        .with_cert_resolver(Arc::new(SingleCertAndKey::from(own)));
    config.alpn_protocols = terms.protocols;
    config.enable_secret_extraction = true;
    // A data lane cannot process a ticket that arrives after the handshake.
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    Ok(Arc::new(config))
}

/// Returns a side's settings. If the kernel must seal and open records, checks the kernel now
/// instead of at the first connection.
fn side(
    identity: &Identity,
    crypto: &Crypto,
    terms: &Terms,
    peers: Peers,
    usage: KeyUsage,
) -> Result<Side, SettingsError> {
    let trust = trust(identity, &terms.rustls, peers, usage)?;
    if let Some(&suite) = crypto.suites.first() {
        kernel::choose(crypto.offload, suite)?;
    }
    Ok(Side {
        trust,
        provider: crypto.provider,
        offload: crypto.offload,
    })
}

fn trust(
    identity: &Identity,
    rustls: &CryptoProvider,
    peers: Peers,
    usage: KeyUsage,
) -> Result<Arc<Trust>, SettingsError> {
    if identity.authorities.anchors.is_empty() && !peers.are_pins_alone() {
        return Err(SettingsErrorKind::NoAuthority.into());
    }
    Ok(Arc::new(Trust::new(
        Arc::clone(&identity.authorities),
        rustls.signature_verification_algorithms,
        peers,
        usage,
    )))
}

impl ClientTls {
    /// The settings in rustls's form.
    #[cfg(feature = "unstable-internals")]
    pub fn config(&self) -> &Arc<ClientConfig> {
        &self.config
    }

    /// Asks for another server name (SNI); `None` if `name` is neither a DNS name nor an IP
    /// address. Which peers are accepted does not depend on the server name.
    #[cfg(feature = "unstable-internals")]
    pub fn asking_for(mut self, name: &str) -> Option<Self> {
        self.server_name = ServerName::try_from(name.to_owned()).ok()?;
        Arc::make_mut(&mut self.config).enable_sni = true;
        Some(self)
    }
}

impl ServerTls {
    pub(super) fn new(settings: ServerSettings) -> Self {
        Self {
            current: Arc::new(Mutex::new(Arc::new(settings))),
            kept: Arc::default(),
        }
    }

    /// The settings in rustls's form, for a handshake that begins now.
    #[cfg(feature = "unstable-internals")]
    pub fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.settings().config)
    }

    /// Uses the settings of `other` from the next handshake on, in every clone. A session in
    /// progress keeps its settings, including for later lanes.
    pub fn replace(&self, other: &Self) {
        let settings = Arc::clone(&lock(&other.current));
        *lock(&self.current) = settings;
    }

    /// The settings for a handshake that begins now.
    pub(super) fn settings(&self) -> Arc<ServerSettings> {
        let kept = lock(&self.kept).clone();
        kept.unwrap_or_else(|| Arc::clone(&lock(&self.current)))
    }

    /// Uses `settings`, with which this session began, for all its later handshakes.
    pub(super) fn keep_settings(&self, settings: &Arc<ServerSettings>) {
        *lock(&self.kept) = Some(Arc::clone(settings));
    }

    /// Returns these settings for another session. [`ServerTls::replace`] affects both objects, but
    /// each of the two sessions keeps the settings with which it began.
    #[cfg(feature = "unstable-internals")]
    pub fn of_session(&self) -> Self {
        Self {
            current: Arc::clone(&self.current),
            kept: Arc::default(),
        }
    }
}

/// A placeholder for the server name. rustls requires a name even if it sends none. No verifier in
/// this crate reads the placeholder.
fn no_name() -> ServerName<'static> {
    ServerName::IpAddress(std::net::IpAddr::from([0, 0, 0, 0]).into())
}

fn refused(error: rustls::Error) -> SettingsError {
    SettingsErrorKind::Refused(error.to_string()).into()
}
