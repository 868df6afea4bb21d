//! This host's identity: its certificate, its key, and the authorities whose peers it trusts.
//!
//! Loaded once from a directory:
//!
//! ```text
//! ca-cert.pem   the authorities that issue peers' certificates, one or more
//! cert.pem      this host's certificate, followed by any intermediates
//! key.pem       its private key, unencrypted, readable by its owner alone
//! ```
//!
//! From an identity come the TLS settings of both roles, [`ClientTls`] for a source and
//! [`ServerTls`] for a destination. Both demand TLS 1.3 and a certificate of the other side, and
//! never resume, so every lane is authenticated in full.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use rustls::client::Resumption;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{ClientConfig, RootCertStore, ServerConfig, version};
use thiserror::Error;
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;

use super::names::{AuthorisedBy, PeerIdentity, PeerName, PeerNames};
use super::provider::{Crypto, Provider, ProviderError};
use super::trust::{ClientNames, ServerNames};

/// The file of trusted authorities in an identity's directory.
pub const AUTHORITIES_FILE: &str = "ca-cert.pem";
/// The file of this host's certificate chain, leaf first.
pub const CERTIFICATE_FILE: &str = "cert.pem";
/// The file of this host's private key.
pub const KEY_FILE: &str = "key.pem";
/// No identity file is longer: a bundle of every public authority has a quarter of this.
const FILE_LIMIT_BYTES: u64 = 1 << 20;

/// Why an identity cannot be used. The fault is local: a file, its permissions or its content.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum IdentityError {
    /// A file is missing or cannot be read.
    #[error("cannot read {}: {source}; an identity needs {AUTHORITIES_FILE}, {CERTIFICATE_FILE} and {KEY_FILE} in one directory", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file is too long to be what it should be.
    #[error("{} is longer than {FILE_LIMIT_BYTES} bytes and cannot be a PEM file of certificates or a key", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
    },
    /// Everybody on this host can use the key.
    #[error("{} is open to every user of this host (mode {mode:04o}) and is refused: run chmod 0600 {}, and replace the key if others may have read it", path.display(), path.display())]
    KeyOpenToAll {
        /// The key's file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// A file's PEM is damaged.
    #[error("{} is not sound PEM ({source}): write it again from its origin", path.display())]
    BadPem {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: pem::Error,
    },
    /// A file holds no object of the kind it should.
    #[error("{} holds no {wanted}", path.display())]
    Nothing {
        /// The file.
        path: PathBuf,
        /// What was looked for.
        wanted: &'static str,
    },
    /// A certificate in a file cannot be decoded or used.
    #[error("certificate {} in {} cannot be used ({reason}): replace it", position + 1, path.display())]
    BadCertificate {
        /// The file.
        path: PathBuf,
        /// Its position in the file, from zero.
        position: usize,
        /// What is wrong.
        reason: String,
    },
    /// The private key is of a kind that the crypto library cannot use.
    #[error("the key in {} cannot be used ({source}): use an unencrypted RSA, ECDSA P-256 or P-384, or Ed25519 key", path.display())]
    BadKey {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: rustls::Error,
    },
    /// Key and certificate are not a pair.
    #[error("the key in {} does not belong to the certificate in {}: put the two files of one pair there", key.display(), certificate.display())]
    KeyMismatch {
        /// The key's file.
        key: PathBuf,
        /// The certificate's file.
        certificate: PathBuf,
    },
    /// This host's certificate is out of date.
    #[error("the certificate in {} expired on {not_after}: renew it, or correct this host's clock", path.display())]
    Expired {
        /// The file.
        path: PathBuf,
        /// The end of its validity.
        not_after: String,
    },
    /// This host's certificate is not valid yet.
    #[error("the certificate in {} is valid only from {not_before} on: wait, or correct this host's clock", path.display())]
    NotYetValid {
        /// The file.
        path: PathBuf,
        /// The beginning of its validity.
        not_before: String,
    },
}

/// Why TLS settings cannot be made from an identity. The fault is in the configuration.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SettingsError {
    /// The crypto library or the suites.
    #[error(transparent)]
    Provider(#[from] ProviderError),
    /// rustls refuses the combination.
    #[error("these TLS settings cannot be used: {0}")]
    Refused(String),
}

/// Something that works and should be put right.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Warning {
    /// A group can read the key.
    KeyOpenToGroup {
        /// The key's file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
}

/// How strictly files are looked at.
#[derive(Clone, Copy, Debug, Default)]
pub struct LoadOptions {
    /// Accept a key that every user of this host can read. For tests and broken file systems.
    pub allow_key_open_to_all: bool,
}

/// A host's certificate chain, key and trusted authorities.
pub struct Identity {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    authorities: Arc<RootCertStore>,
}

/// What a host's certificate says, for people.
#[derive(Clone, Debug)]
pub struct Summary {
    /// The names that the certificate carries.
    pub names: Vec<PeerName>,
    /// SHA-256 of the certificate.
    pub fingerprint: [u8; 32],
    /// From when it is valid.
    pub not_before: String,
    /// Until when it is valid.
    pub not_after: String,
    /// How many authorities are trusted.
    pub authorities: usize,
}

/// The TLS settings of the side that connects.
#[derive(Clone, Debug)]
pub struct ClientTls {
    pub(super) config: Arc<ClientConfig>,
    pub(super) server_name: ServerName<'static>,
    pub(super) peers: PeerNames,
    pub(super) provider: Provider,
}

/// The TLS settings of the side that accepts.
#[derive(Clone, Debug)]
pub struct ServerTls {
    pub(super) config: Arc<ServerConfig>,
    pub(super) peers: PeerNames,
    pub(super) provider: Provider,
}

impl Identity {
    /// Loads and checks the three files in `directory`; the warnings are for the log.
    ///
    /// # Errors
    /// [`IdentityError`], which names the file and what to do.
    pub fn load(
        directory: &Path,
        options: LoadOptions,
    ) -> Result<(Self, Vec<Warning>), IdentityError> {
        let mut warnings = Vec::new();
        let key_path = directory.join(KEY_FILE);
        let chain_path = directory.join(CERTIFICATE_FILE);
        let key = read_key(&key_path, options, &mut warnings)?;
        let chain = certificates(&chain_path)?;
        let authorities = authorities(&directory.join(AUTHORITIES_FILE))?;
        check_validity(&chain_path, &chain[0])?;
        check_pair(&chain_path, &chain, &key_path, &key)?;
        Ok((
            Self {
                chain,
                key,
                authorities: Arc::new(authorities),
            },
            warnings,
        ))
    }

    /// What the certificate says.
    ///
    /// # Errors
    /// [`IdentityError::BadCertificate`].
    pub fn summary(&self) -> Result<Summary, IdentityError> {
        let leaf = &self.chain[0];
        let path = Path::new(CERTIFICATE_FILE);
        let certificate = parse(path, leaf)?;
        let peer = PeerIdentity::of(leaf, AuthorisedBy::Authority);
        Ok(Summary {
            names: peer.names,
            fingerprint: peer.fingerprint,
            not_before: certificate.validity().not_before.to_string(),
            not_after: certificate.validity().not_after.to_string(),
            authorities: self.authorities.len(),
        })
    }

    /// Settings for a source that accepts only `peers` at the other end.
    ///
    /// # Errors
    /// [`SettingsError`].
    pub fn client(&self, crypto: &Crypto, peers: PeerNames) -> Result<ClientTls, SettingsError> {
        let rustls = crypto.rustls()?;
        let verifier = ServerNames::new(
            self.authorities.clone(),
            rustls.signature_verification_algorithms,
            peers.clone(),
        );
        let mut config = ClientConfig::builder_with_provider(rustls)
            .with_protocol_versions(&[&version::TLS13])
            .map_err(refused)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_client_auth_cert(self.chain.clone(), self.key.clone_key())
            .map_err(refused)?;
        config.enable_secret_extraction = true;
        config.resumption = Resumption::disabled();
        let server_name = peers.server_name();
        config.enable_sni = server_name.is_some();
        // rustls wants a name even where none is sent; our verifier never looks at it.
        let server_name = server_name.unwrap_or(ServerName::IpAddress(
            std::net::IpAddr::from([0, 0, 0, 0]).into(),
        ));
        Ok(ClientTls {
            config: Arc::new(config),
            server_name,
            peers,
            provider: crypto.provider,
        })
    }

    /// Settings for a destination that lets in only `peers`.
    ///
    /// # Errors
    /// [`SettingsError`].
    pub fn server(&self, crypto: &Crypto, peers: PeerNames) -> Result<ServerTls, SettingsError> {
        let rustls = crypto.rustls()?;
        let chain =
            WebPkiClientVerifier::builder_with_provider(self.authorities.clone(), rustls.clone())
                .build()
                .map_err(|error| SettingsError::Refused(error.to_string()))?;
        let own = CertifiedKey::from_der(self.chain.clone(), self.key.clone_key(), &rustls)
            .map_err(refused)?;
        let mut config = ServerConfig::builder_with_provider(rustls)
            .with_protocol_versions(&[&version::TLS13])
            .map_err(refused)?
            .with_client_cert_verifier(Arc::new(ClientNames::new(chain, peers.clone())))
            .with_cert_resolver(Arc::new(SingleCertAndKey::from(own)));
        config.enable_secret_extraction = true;
        // A ticket after the handshake would meet a lane that reads data only.
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        Ok(ServerTls {
            config: Arc::new(config),
            peers,
            provider: crypto.provider,
        })
    }
}

impl ClientTls {
    /// The settings as rustls takes them.
    pub fn config(&self) -> &Arc<ClientConfig> {
        &self.config
    }
}

impl ServerTls {
    /// The settings as rustls takes them.
    pub fn config(&self) -> &Arc<ServerConfig> {
        &self.config
    }
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Identity").finish_non_exhaustive()
    }
}

impl std::fmt::Display for Warning {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::KeyOpenToGroup { path, mode } => write!(
                f,
                "{} is open to its group (mode {mode:04o}); run chmod 0600 {} unless the group \
                 is meant to use the key",
                path.display(),
                path.display()
            ),
        }
    }
}

fn refused(error: rustls::Error) -> SettingsError {
    SettingsError::Refused(error.to_string())
}

fn read_key(
    path: &Path,
    options: LoadOptions,
    warnings: &mut Vec<Warning>,
) -> Result<PrivateKeyDer<'static>, IdentityError> {
    let (text, mode) = read(path)?;
    let text = zeroize::Zeroizing::new(text);
    if mode & 0o007 != 0 && !options.allow_key_open_to_all {
        return Err(IdentityError::KeyOpenToAll {
            path: path.to_owned(),
            mode,
        });
    }
    if mode & 0o070 != 0 {
        warnings.push(Warning::KeyOpenToGroup {
            path: path.to_owned(),
            mode,
        });
    }
    PrivateKeyDer::from_pem_slice(&text).map_err(|source| match source {
        pem::Error::NoItemsFound => IdentityError::Nothing {
            path: path.to_owned(),
            wanted: "unencrypted private key: decrypt it, or write one there",
        },
        source => IdentityError::BadPem {
            path: path.to_owned(),
            source,
        },
    })
}

/// The certificates of a file, at least one.
fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, IdentityError> {
    let (text, _) = read(path)?;
    let certificates = CertificateDer::pem_slice_iter(&text)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|source| IdentityError::BadPem {
            path: path.to_owned(),
            source,
        })?;
    if certificates.is_empty() {
        return Err(IdentityError::Nothing {
            path: path.to_owned(),
            wanted: "certificate: write one or more there as PEM",
        });
    }
    Ok(certificates)
}

fn authorities(path: &Path) -> Result<RootCertStore, IdentityError> {
    let mut store = RootCertStore::empty();
    for (position, certificate) in certificates(path)?.into_iter().enumerate() {
        store
            .add(certificate)
            .map_err(|error| IdentityError::BadCertificate {
                path: path.to_owned(),
                position,
                reason: error.to_string(),
            })?;
    }
    Ok(store)
}

/// The content of a file and its permission bits, both from one descriptor, so that the bits are
/// those of the bytes.
fn read(path: &Path) -> Result<(Vec<u8>, u32), IdentityError> {
    let unreadable = |source| IdentityError::Unreadable {
        path: path.to_owned(),
        source,
    };
    let file = File::open(path).map_err(unreadable)?;
    let mode = file.metadata().map_err(unreadable)?.permissions().mode() & 0o7777;
    let mut text = Vec::new();
    file.take(FILE_LIMIT_BYTES + 1)
        .read_to_end(&mut text)
        .map_err(unreadable)?;
    if text.len() as u64 > FILE_LIMIT_BYTES {
        return Err(IdentityError::TooLong {
            path: path.to_owned(),
        });
    }
    Ok((text, mode))
}

/// A peer would refuse an outdated certificate too, but could tell us only that much: here the
/// file can be named.
fn parse<'a>(
    path: &Path,
    leaf: &'a CertificateDer<'_>,
) -> Result<X509Certificate<'a>, IdentityError> {
    X509Certificate::from_der(leaf)
        .map(|(_, certificate)| certificate)
        .map_err(|error| IdentityError::BadCertificate {
            path: path.to_owned(),
            position: 0,
            reason: error.to_string(),
        })
}

fn check_validity(path: &Path, leaf: &CertificateDer<'_>) -> Result<(), IdentityError> {
    let certificate = parse(path, leaf)?;
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| time.as_secs());
    let now = i64::try_from(now).unwrap_or(i64::MAX);
    let validity = certificate.validity();
    if now > validity.not_after.timestamp() {
        return Err(IdentityError::Expired {
            path: path.to_owned(),
            not_after: validity.not_after.to_string(),
        });
    }
    if now < validity.not_before.timestamp() {
        return Err(IdentityError::NotYetValid {
            path: path.to_owned(),
            not_before: validity.not_before.to_string(),
        });
    }
    Ok(())
}

fn check_pair(
    chain_path: &Path,
    chain: &[CertificateDer<'static>],
    key_path: &Path,
    key: &PrivateKeyDer<'static>,
) -> Result<(), IdentityError> {
    let bad_key = |source| IdentityError::BadKey {
        path: key_path.to_owned(),
        source,
    };
    let signer = super::provider::load_key(key.clone_key()).map_err(bad_key)?;
    match CertifiedKey::new(chain.to_vec(), signer).keys_match() {
        Ok(()) => Ok(()),
        // The library cannot tell: the first handshake will.
        Err(rustls::Error::InconsistentKeys(rustls::InconsistentKeys::Unknown)) => Ok(()),
        Err(rustls::Error::InconsistentKeys(_)) => Err(IdentityError::KeyMismatch {
            key: key_path.to_owned(),
            certificate: chain_path.to_owned(),
        }),
        Err(error) => Err(IdentityError::BadCertificate {
            path: chain_path.to_owned(),
            position: 0,
            reason: error.to_string(),
        }),
    }
}
