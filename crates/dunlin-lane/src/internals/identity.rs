//! This host's identity: its certificate, its key, and its trust anchors.
//!
//! An identity is loaded from a directory in one of the layouts of [`Layout`], or from [`Files`].
//! [`policy`](super::policy) builds the TLS settings of both roles from it.
//!
//! The files are not watched. Load the identity again to read changed files, and pass its TLS
//! settings to [`ServerTls::replace`](super::policy::ServerTls::replace).

mod dated;
mod directory;
pub(super) mod error;
pub(super) mod files;
mod layout;
mod options;
#[cfg(test)]
mod wiped;

use std::cmp::Reverse;
use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::RootCertStore;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::sign::CertifiedKey;
use webpki::{ExtendedKeyUsageValidator, KeyPurposeIdIter};
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;
use x509_parser::revocation_list::CertificateRevocationList;
use x509_parser::time::ASN1Time;
use zeroize::Zeroizing;

pub use self::dated::{Dated, Item};
use self::error::bad_item;
pub use self::error::{
    IdentityError, IdentityErrorKind, SettingsError, SettingsErrorKind, Warning,
};
pub use self::layout::{
    AUTHORITIES_FILE, CERTIFICATE_FILE, DENIED_FILE, Files, KEY_FILE, Layout, REVOCATIONS_FILE,
    Role, UnknownLayout,
};
use self::options::DAY;
pub use self::options::LoadOptions;
use super::denied::Denied;
use super::names::PeerName;
use super::peers::{AuthorisedBy, PeerIdentity, PeerRefused, Pin};
use super::provider::{handshake_algorithms, load_key};
use super::trust;
use super::trust::{Authorities, UntrustedReason};

/// A host's certificate chain, key and trust anchors.
pub struct Identity {
    pub(super) chain: Vec<CertificateDer<'static>>,
    pub(super) key: Zeroizing<PrivateKeyDer<'static>>,
    pub(super) authorities: Arc<Authorities>,
    files: Files,
    dates: Vec<Dated>,
    options: LoadOptions,
}

/// For display: the content of a host's certificate, and how many trust anchors, revocation lists
/// and denied keys the identity has.
#[derive(Clone, Debug)]
#[cfg(feature = "unstable-internals")]
pub struct Summary {
    /// The names that the certificate carries.
    pub names: Vec<PeerName>,
    /// SHA-256 of the certificate.
    pub fingerprint: [u8; 32],
    /// The pin with which other hosts can allow the certificate.
    pub pin: Pin,
    /// The pin of the key. It stays valid if the certificate is renewed for the same key.
    pub key_pin: Option<Pin>,
    /// The beginning of the validity.
    pub not_before: String,
    /// The end of the validity.
    pub not_after: String,
    /// The number of trust anchors.
    pub authorities: usize,
    /// The number of revocation lists.
    pub revocation_lists: usize,
    /// The number of denied keys.
    pub denied_keys: usize,
}

impl Identity {
    /// Loads and checks the files in `directory`. The caller should log the warnings.
    ///
    /// | file, in PEM | content |
    /// | --- | --- |
    /// | `cert.pem` | this host's certificate, followed by any intermediates |
    /// | `key.pem` | its private key, which must not be readable by every user of the host |
    /// | `ca-cert.pem` | the trust anchors; not needed if all peers are pinned ([`Pin`](crate::Pin)) |
    /// | `ca-crl.pem` | revocation lists; optional |
    /// | `denied` | not PEM: each line has a key to refuse, as `spki-sha256:…`; optional |
    ///
    /// A directory may instead have the layout of QEMU, Cloud Hypervisor or libvirt
    /// ([`Layout`]); it then needs [`LoadOptions::role`].
    ///
    /// # Errors
    /// [`IdentityError`], which names the file and the remedy.
    pub fn load(
        directory: &Path,
        options: LoadOptions,
    ) -> Result<(Self, Vec<Warning>), IdentityError> {
        let files = Files::in_directory(directory, options.layout, options.role)?;
        Self::load_files(files, options)
    }

    /// Like [`Identity::load`], with files at any path. Only `dunlin-lane` exports [`Files`], not
    /// `dunlin`.
    ///
    /// # Errors
    /// [`IdentityError`], which names the file and the remedy.
    pub fn load_files(
        files: Files,
        options: LoadOptions,
    ) -> Result<(Self, Vec<Warning>), IdentityError> {
        let mut warnings = Vec::new();
        let key = files::read_key(&files.key, options, &mut warnings)?;
        let chain = files::certificates(&files.certificate)?;
        let mut dates = vec![Dated::of_certificate(
            Item::Certificate,
            &files.certificate,
            0,
            &chain[0],
        )?];
        let mut anchors = RootCertStore::empty();
        if let Some(path) = &files.authorities {
            let authorities = files::certificates(path)?;
            anchors = files::anchors(path, &authorities)?;
            for (position, authority) in authorities.iter().enumerate() {
                let what = Item::Authority;
                dates.push(Dated::of_certificate(what, path, position, authority)?);
            }
        }
        let mut revocations = Vec::new();
        if let Some(path) = &files.revocations {
            let lists = files::revocation_lists(path)?;
            let decoded = files::revocations(path, &lists)?;
            let mut lists: Vec<_> = lists.iter().zip(decoded).enumerate().collect();
            // webpki reads the first matching list of an authority and scope, so the newest comes
            // first.
            lists
                .sort_by_key(|(_, (list, _))| Reverse(issuer_and_date(list).map(|(_, made)| made)));
            let mut scopes = HashSet::new();
            for (position, (list, decoded)) in lists {
                let scope = decoded.issuing_distribution_point().map(<[u8]>::to_vec);
                // Ignore the date of a list that a newer list replaces: only
                // `Authorities::check_listed` uses the older list, regardless of its date.
                if scopes.insert((issuer_and_date(list).map(|(issuer, _)| issuer), scope)) {
                    dates.extend(Dated::of_revocation_list(path, position, list));
                }
                revocations.push(decoded);
            }
        }
        let denied = match &files.denied {
            Some(path) => Denied::parse(path, &files::read(path)?.0)?,
            None => Denied::default(),
        };
        let identity = Self {
            chain,
            key,
            authorities: Arc::new(Authorities {
                anchors,
                revocations,
                denied,
            }),
            files,
            dates,
            options,
        };
        identity.check_validity(SystemTime::now())?;
        identity.check_pair()?;
        if let Some(role) = options.role {
            identity.check_purpose(role)?;
        }
        warnings.extend(identity.check_chain()?);
        warnings.extend(identity.expiring(SystemTime::now()));
        Ok((identity, warnings))
    }

    /// The validity of each certificate and revocation list of the identity: first this host's
    /// certificate, then the trust anchors, then the revocation lists.
    #[cfg(feature = "unstable-internals")]
    pub fn dates(&self) -> &[Dated] {
        &self.dates
    }

    /// Returns a warning for each item that expires soon after `now`, or has expired.
    pub fn expiring(&self, now: SystemTime) -> Vec<Warning> {
        self.dates
            .iter()
            .filter_map(|what| what.warning(now, self.options.warn_before))
            .collect()
    }

    /// Summarises the certificate.
    ///
    /// # Errors
    /// [`IdentityErrorKind::BadItem`].
    #[cfg(feature = "unstable-internals")]
    pub fn summary(&self) -> Result<Summary, IdentityError> {
        let leaf = &self.chain[0];
        let certificate = self.leaf()?;
        let peer = PeerIdentity::of(leaf, &[], AuthorisedBy::Authority, None);
        Ok(Summary {
            names: peer.names,
            fingerprint: peer.fingerprint,
            pin: Pin::of_certificate(leaf),
            key_pin: Pin::of_key(leaf),
            not_before: certificate.validity().not_before.to_string(),
            not_after: certificate.validity().not_after.to_string(),
            authorities: self.authorities.anchors.len(),
            revocation_lists: self.authorities.revocations.len(),
            denied_keys: self.authorities.denied.len(),
        })
    }

    /// Checks a peer that was admitted earlier, possibly under an identity that was loaded before
    /// this one. The check fails if this identity denies a key of the peer or lists the peer's
    /// certificate as revoked, or if that certificate has expired.
    ///
    /// # Errors
    /// [`PeerRefused::Denied`], [`PeerRefused::Revoked`] or [`PeerRefused::Expired`].
    #[cfg(feature = "unstable-internals")]
    pub fn check_admitted(&self, peer: &PeerIdentity) -> Result<(), PeerRefused> {
        self.authorities.check_admitted(peer)
    }

    /// Checks whether a peer that was admitted earlier still has a chain to an authority of this
    /// identity, and whether this identity's lists revoke none of that chain.
    ///
    /// # Errors
    /// [`PeerRefused::Revoked`] or [`PeerRefused::Uncertified`].
    #[cfg(feature = "unstable-internals")]
    pub fn check_peer_chain(&self, peer: &PeerIdentity) -> Result<(), PeerRefused> {
        self.authorities.check_peer_chain(peer)
    }

    fn leaf(&self) -> Result<X509Certificate<'_>, IdentityErrorKind> {
        parse(
            Item::Certificate,
            &self.files.certificate,
            0,
            &self.chain[0],
        )
    }

    /// Checks the validity of this host's certificate. A peer would refuse an outdated
    /// certificate too, but only this check can name the file.
    fn check_validity(&self, now: SystemTime) -> Result<(), IdentityErrorKind> {
        let certificate = self.leaf()?;
        let validity = certificate.validity();
        let path = self.files.certificate.clone();
        if now > system_time(validity.not_after) {
            return Err(IdentityErrorKind::Expired {
                path,
                not_after: validity.not_after.to_string(),
            });
        }
        if now < system_time(validity.not_before) {
            return Err(IdentityErrorKind::NotYetValid {
                path,
                not_before: validity.not_before.to_string(),
            });
        }
        Ok(())
    }

    fn check_pair(&self) -> Result<(), IdentityErrorKind> {
        let signer =
            load_key(self.key.clone_key()).map_err(|source| IdentityErrorKind::BadKey {
                path: self.files.key.clone(),
                source,
            })?;
        match CertifiedKey::new(self.chain.clone(), signer).keys_match() {
            Ok(()) => Ok(()),
            // The library cannot compare the key with the certificate, so the key is accepted here.
            // The first handshake detects a mismatch.
            Err(rustls::Error::InconsistentKeys(rustls::InconsistentKeys::Unknown)) => Ok(()),
            Err(rustls::Error::InconsistentKeys(_)) => Err(IdentityErrorKind::KeyMismatch {
                key: self.files.key.clone(),
                certificate: self.files.certificate.clone(),
            }),
            Err(error) => {
                let path = &self.files.certificate;
                Err(bad_item(path, Item::Certificate, 0)(error))
            }
        }
    }

    /// Checks the extended key usage (RFC 5280, section 4.2.1.12) as a peer does, but with an error
    /// that names the file.
    pub(super) fn check_purpose(&self, role: Role) -> Result<(), IdentityErrorKind> {
        let certificate = self.leaf()?;
        let Ok(Some(usage)) = certificate.extended_key_usage() else {
            return Ok(());
        };
        let (fits, wanted) = match role {
            Role::Source => (usage.value.client_auth, "TLS clients, as a source needs"),
            Role::Destination => (
                usage.value.server_auth,
                "TLS servers, as a destination needs",
            ),
        };
        if fits || usage.value.any {
            return Ok(());
        }
        Err(IdentityErrorKind::WrongPurpose {
            path: self.files.certificate.clone(),
            wanted,
        })
    }

    /// Checks this host's certificate against its own trust anchors and revocation lists. A
    /// revoked certificate is an error. An incomplete chain is only a warning, and all other errors
    /// are ignored, because the peers' anchors may differ.
    fn check_chain(&self) -> Result<Option<Warning>, IdentityErrorKind> {
        let (leaf, intermediates) = (&self.chain[0], &self.chain[1..]);
        let algorithms = handshake_algorithms();
        let verified =
            self.authorities
                .verify(leaf, intermediates, UnixTime::now(), Any, &algorithms);
        let path = self.files.certificate.clone();
        match verified {
            Err(webpki::Error::CertRevoked) => Err(IdentityErrorKind::Revoked { path }),
            Err(error) if !self.authorities.anchors.is_empty() => {
                Ok(match UntrustedReason::of(leaf, intermediates, &error) {
                    Some(UntrustedReason::IncompleteChain { issuer }) => {
                        Some(Warning::NoChain { path, issuer })
                    }
                    _ => None,
                })
            }
            _ => Ok(None),
        }
    }
}

/// Accepts any extended key usage.
struct Any;

impl ExtendedKeyUsageValidator for Any {
    fn validate(&self, _: KeyPurposeIdIter<'_, '_>) -> Result<(), webpki::Error> {
        Ok(())
    }
}

impl Dated {
    fn of_certificate(
        item: Item,
        path: &Path,
        position: usize,
        certificate: &CertificateDer<'_>,
    ) -> Result<Self, IdentityErrorKind> {
        let certificate = parse(item, path, position, certificate)?;
        let validity = certificate.validity();
        let dates = (validity.not_before, validity.not_after);
        Ok(Self::new(item, path, position, dates))
    }

    /// Returns `None` if the list does not state when the next list is due.
    fn of_revocation_list(path: &Path, position: usize, list: &[u8]) -> Option<Self> {
        let (_, list) = CertificateRevocationList::from_der(list).ok()?;
        let dates = (list.last_update(), list.next_update()?);
        Some(Self::new(Item::RevocationList, path, position, dates))
    }

    fn new(item: Item, path: &Path, position: usize, (from, to): (ASN1Time, ASN1Time)) -> Self {
        Self {
            item,
            path: path.to_owned(),
            position,
            not_before: system_time(from),
            not_after: system_time(to),
            until: to.to_string(),
        }
    }

    fn warning(&self, now: SystemTime, before: Duration) -> Option<Warning> {
        let lifetime = self.not_after.duration_since(self.not_before).ok();
        let before = before.min(lifetime.unwrap_or_default() / 3);
        let left = self.not_after.duration_since(now).ok();
        if left.is_some_and(|left| left > before) {
            return None;
        }
        Some(Warning::Expires {
            what: self.clone(),
            days: left.map(|left| left.as_secs() / DAY.as_secs()),
        })
    }
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Identity")
            .field("files", &self.files)
            .finish_non_exhaustive()
    }
}

fn parse<'a>(
    what: Item,
    path: &Path,
    position: usize,
    certificate: &'a CertificateDer<'_>,
) -> Result<X509Certificate<'a>, IdentityErrorKind> {
    X509Certificate::from_der(certificate)
        .map(|(_, certificate)| certificate)
        .map_err(|error| bad_item(path, what, position)(trust::readable(&error.to_string())))
}

/// The issuer of a revocation list, and its date in seconds since 1970.
fn issuer_and_date(list: &[u8]) -> Option<(Vec<u8>, i64)> {
    let (_, list) = CertificateRevocationList::from_der(list).ok()?;
    Some((
        list.issuer().as_raw().to_vec(),
        list.last_update().timestamp(),
    ))
}

/// Converts a time. Times before 1970 become 1970; nothing that is checked here is that old.
fn system_time(time: ASN1Time) -> SystemTime {
    let seconds = u64::try_from(time.timestamp()).unwrap_or(0);
    UNIX_EPOCH + Duration::from_secs(seconds)
}
