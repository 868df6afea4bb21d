//! The TLS of every door: what is offered, demanded and never done, for both roles.
//!
//! | | |
//! | --- | --- |
//! | version | 1.3 alone |
//! | suites | those of [`Crypto`], AES-256-GCM first |
//! | key exchange | X25519MLKEM768, then X25519; with ring alone X25519 ([`provider`](super::provider)) |
//! | certificates | of both sides, checked by the same lines (`trust`) |
//! | protocol | [`ALPN`], demanded of both sides: what speaks TLS and is not Dunlin is told apart |
//! | resumption, tickets, early data | none, so that every lane is authenticated in full |
//!
//! A relay's peer is some other program. For it, and for nothing else, there is more: no protocol
//! is named, key exchange with P-256 and P-384 is taken too, and TLS 1.2 where the route says so
//! ([`OldestTls`]). Certificates are those of the table, demanded of both sides and checked alike.
//!
//! A hand-off's peer is some other program too, and what is offered is in the words of whoever
//! asks for the socket (`Offer`): one version, TLS 1.2 unless he says otherwise. Whom it believes
//! is his to say as well ([`TrustPolicy`]), and our own certificate is shown if he names one.
//!
//! A source's settings stay what they were made as, for all lanes of a session. A destination
//! takes sessions as they come: [`ServerTls::replace`] gives it other settings, which hold for
//! every handshake that begins later, save those of a session under way: for its lanes the settings
//! stay.

pub(super) mod handoff;

use crate::sync::lock;
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
use super::identity::{Identity, Role, SettingsError};
use super::kernel;
use super::offload::Offload;
use super::peers::Peers;
use super::provider::{Crypto, Provider};
use super::trust::Trust;

pub use super::provider::OldestTls;
pub use super::trust::bundle::{Bundle, TrustPolicy};

/// The protocol's name in both hellos (RFC 7301). Its versions are negotiated above TLS.
pub const ALPN: &[u8] = b"dunlin";

const VERSIONS: &[&SupportedProtocolVersion] = &[&version::TLS13];
const OLDER_VERSIONS: &[&SupportedProtocolVersion] = &[&version::TLS13, &version::TLS12];

/// What differs between a lane's TLS and a relay's.
struct Terms {
    rustls: Arc<CryptoProvider>,
    versions: &'static [&'static SupportedProtocolVersion],
    protocols: Vec<Vec<u8>>,
}

impl Terms {
    fn of_lane(crypto: &Crypto) -> Result<Self, SettingsError> {
        Ok(Self {
            rustls: crypto.rustls()?,
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

/// The TLS settings of the side that connects.
#[derive(Clone, Debug)]
pub struct ClientTls {
    pub(super) config: Arc<ClientConfig>,
    pub(super) server_name: ServerName<'static>,
    pub(super) trust: Arc<Trust>,
    pub(super) provider: Provider,
    pub(super) offload: Offload,
}

/// The TLS settings of the side that accepts. Clones share what [`ServerTls::replace`] changes.
#[derive(Clone, Debug)]
pub struct ServerTls {
    current: Arc<Mutex<Arc<ServerSettings>>>,
    /// Those of the session under way.
    kept: Arc<Mutex<Option<Arc<ServerSettings>>>>,
}

/// What one handshake of the accepting side is made with.
#[derive(Debug)]
pub(super) struct ServerSettings {
    pub(super) config: Arc<ServerConfig>,
    pub(super) trust: Arc<Trust>,
    pub(super) provider: Provider,
    pub(super) offload: Offload,
}

impl Identity {
    /// Settings for a source that accepts only `peers` at the other end.
    ///
    /// # Errors
    /// [`SettingsError`].
    pub fn client(&self, crypto: &Crypto, peers: Peers) -> Result<ClientTls, SettingsError> {
        self.check_purpose(Role::Source)?;
        let server_name = peers.server_name();
        connecting(self, crypto, peers, Terms::of_lane(crypto)?, server_name)
    }

    /// Settings for a destination that lets in only `peers`.
    ///
    /// # Errors
    /// [`SettingsError`].
    pub fn server(&self, crypto: &Crypto, peers: Peers) -> Result<ServerTls, SettingsError> {
        self.check_purpose(Role::Destination)?;
        accepting(self, crypto, peers, Terms::of_lane(crypto)?)
    }

    /// Settings for a relay that connects to `peers` at `host`, which need not be Dunlin. `host`
    /// is named to the peer if no name in `peers` can be.
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
        connecting(self, crypto, peers, terms, server_name)
    }

    /// Settings for a relay that lets in `peers`, which need not be Dunlin.
    pub fn relay_server(
        &self,
        crypto: &Crypto,
        peers: Peers,
        oldest: OldestTls,
    ) -> Result<ServerTls, SettingsError> {
        self.check_purpose(Role::Destination)?;
        accepting(self, crypto, peers, Terms::of_relay(crypto, oldest)?)
    }
}

fn connecting(
    identity: &Identity,
    crypto: &Crypto,
    peers: Peers,
    terms: Terms,
    server_name: Option<ServerName<'static>>,
) -> Result<ClientTls, SettingsError> {
    let trust = trust(identity, &terms.rustls, peers, KeyUsage::server_auth())?;
    let verifier: Arc<dyn ServerCertVerifier> = trust.clone();
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
        trust,
        provider: crypto.provider,
        offload: offload(crypto)?,
    })
}

fn accepting(
    identity: &Identity,
    crypto: &Crypto,
    peers: Peers,
    terms: Terms,
) -> Result<ServerTls, SettingsError> {
    let trust = trust(identity, &terms.rustls, peers, KeyUsage::client_auth())?;
    Ok(ServerTls::new(ServerSettings {
        config: server_config(identity, trust.clone(), terms)?,
        trust,
        provider: crypto.provider,
        offload: offload(crypto)?,
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
    // A ticket after the handshake would meet a lane that reads data only.
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    Ok(Arc::new(config))
}

/// Who seals and opens records; where that must be the kernel, it is tried now and not when the
/// first peer is there.
fn offload(crypto: &Crypto) -> Result<Offload, SettingsError> {
    if let Some(&suite) = crypto.suites.first() {
        kernel::choose(crypto.offload, suite)?;
    }
    Ok(crypto.offload)
}

fn trust(
    identity: &Identity,
    rustls: &CryptoProvider,
    peers: Peers,
    usage: KeyUsage,
) -> Result<Arc<Trust>, SettingsError> {
    if identity.authorities.anchors.is_empty() && !peers.are_pins_alone() {
        return Err(SettingsError::NoAuthority);
    }
    Ok(Arc::new(Trust::new(
        Arc::clone(&identity.authorities),
        rustls.signature_verification_algorithms,
        peers,
        usage,
    )))
}

impl ClientTls {
    /// The settings as rustls takes them.
    pub fn config(&self) -> &Arc<ClientConfig> {
        &self.config
    }
}

impl ServerTls {
    pub(super) fn new(settings: ServerSettings) -> Self {
        Self {
            current: Arc::new(Mutex::new(Arc::new(settings))),
            kept: Arc::default(),
        }
    }

    /// The settings as rustls takes them, for a handshake that begins now.
    pub fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.settings().config)
    }

    /// Uses the settings of `other` from the next handshake on, in every clone. A session that is
    /// under way keeps those that it began with, for its further lanes too.
    pub fn replace(&self, other: &Self) {
        let settings = Arc::clone(&lock(&other.current));
        *lock(&self.current) = settings;
    }

    /// What a handshake that begins now is made with.
    pub(super) fn settings(&self) -> Arc<ServerSettings> {
        let kept = lock(&self.kept).clone();
        kept.unwrap_or_else(|| Arc::clone(&lock(&self.current)))
    }

    /// Uses `settings` for all that belongs to the session.
    pub(super) fn keep_settings(&self, settings: &Arc<ServerSettings>) {
        *lock(&self.kept) = Some(Arc::clone(settings));
    }

    /// The same settings for one more session, which keeps its own.
    pub fn of_session(&self) -> Self {
        Self {
            current: Arc::clone(&self.current),
            kept: Arc::default(),
        }
    }
}

/// rustls wants a name even where none is sent; no verifier here looks at it.
fn no_name() -> ServerName<'static> {
    ServerName::IpAddress(std::net::IpAddr::from([0, 0, 0, 0]).into())
}

fn refused(error: rustls::Error) -> SettingsError {
    SettingsError::Refused(error.to_string())
}
