//! The reasons why an identity cannot be used, and warnings about an identity that can be used.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use rustls::pki_types::pem;
use thiserror::Error;

use super::super::kernel::Refused;
use super::dated::{Dated, Item};
use super::layout::Layout;

/// Maximum size of each file of an identity. A bundle of all public authorities has a quarter of
/// this size.
pub(super) const FILE_LIMIT_BYTES: u64 = 1 << 20;

/// Why an identity cannot be used. The message names the file or directory and the remedy.
#[derive(Debug, Error)]
#[error(transparent)]
pub struct IdentityError(#[from] IdentityErrorKind);

impl IdentityError {
    /// Whether this host's certificate has expired or is not valid yet, by this host's clock.
    pub(crate) fn is_of_date(&self) -> bool {
        use IdentityErrorKind::{Expired, NotYetValid};
        matches!(self.0, Expired { .. } | NotYetValid { .. })
    }

    /// The cause and its fields.
    #[cfg(feature = "unstable-internals")]
    pub fn kind(&self) -> &IdentityErrorKind {
        &self.0
    }
}

/// The causes of an [`IdentityError`].
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum IdentityErrorKind {
    /// The directory contains no certificate of this host under a known name.
    #[error("no certificate of this host in {} under any known name: put cert.pem and key.pem there, or the files of QEMU, Cloud Hypervisor or libvirt", directory.display())]
    NoLayout {
        /// The directory.
        directory: PathBuf,
    },
    /// The directory contains certificates of several layouts.
    #[error("{} contains files of the layouts {one} and {other}: specify the layout", directory.display())]
    SeveralLayouts {
        /// The directory.
        directory: PathBuf,
        /// A layout that is present.
        one: Layout,
        /// Another layout that is present.
        other: Layout,
    },
    /// The layout has separate certificates for the two roles.
    #[error("the layout {layout} in {} has separate certificates for source and destination: specify the role", directory.display())]
    RoleNeeded {
        /// The directory.
        directory: PathBuf,
        /// The directory's layout.
        layout: Layout,
    },
    /// A file is missing or cannot be read.
    #[error("cannot read {}: {source}; the file must exist and be readable by this process", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
    /// A file exceeds the size limit.
    #[error("{} is larger than {FILE_LIMIT_BYTES} bytes, the limit for a file of an identity", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
    },
    /// Every user of this host can read the key.
    #[error("key file {} is accessible to every user of this host (mode {mode:04o}): run chmod 0600 {}, and replace the key if others may have read it", path.display(), path.display())]
    KeyOpenToAll {
        /// The key's file.
        path: PathBuf,
        /// The file's permission bits.
        mode: u32,
    },
    /// The key is encrypted, and a passphrase cannot be entered.
    #[error("the key in {} is encrypted, which is not supported: decrypt it (openssl pkey -in KEY -out NEW) and store it with mode 0600", path.display())]
    KeyEncrypted {
        /// The key's file.
        path: PathBuf,
    },
    /// A file contains malformed PEM.
    #[error("{} is not valid PEM ({source}): replace the file", path.display())]
    BadPem {
        /// The file.
        path: PathBuf,
        /// The parse error.
        source: pem::Error,
    },
    /// A file contains no object of the required kind.
    #[error("{} contains no {wanted}", path.display())]
    Nothing {
        /// The file.
        path: PathBuf,
        /// The required object.
        wanted: &'static str,
    },
    /// A certificate or revocation list in a file cannot be parsed or used.
    #[error("{what} {} in {} cannot be used ({reason}): replace it", position + 1, path.display())]
    BadItem {
        /// The file.
        path: PathBuf,
        /// The expected kind of item.
        what: Item,
        /// The item's position in the file, from zero.
        position: usize,
        /// The reason.
        reason: String,
    },
    /// A line of the list of denied keys is invalid.
    #[error("invalid line {line} in {} ({reason}): use spki-sha256: and 64 hexadecimal digits, the SHA-256 of the key", path.display())]
    BadDenied {
        /// The file.
        path: PathBuf,
        /// The line number, from one.
        line: usize,
        /// The reason.
        reason: &'static str,
    },
    /// The crypto library does not support this kind of private key.
    #[error("the key in {} cannot be used ({source}): use an unencrypted RSA, ECDSA P-256 or P-384, or Ed25519 key", path.display())]
    BadKey {
        /// The file.
        path: PathBuf,
        /// The crypto library's error.
        source: rustls::Error,
    },
    /// The key does not match the certificate.
    #[error("the key in {} does not match the certificate in {}: use a matching pair", key.display(), certificate.display())]
    KeyMismatch {
        /// The key's file.
        key: PathBuf,
        /// The certificate's file.
        certificate: PathBuf,
    },
    /// This host's certificate has expired.
    #[error("the certificate in {} expired on {not_after}: renew it, or correct this host's clock", path.display())]
    Expired {
        /// The file.
        path: PathBuf,
        /// The end of the certificate's validity.
        not_after: String,
    },
    /// This host's certificate is not valid yet.
    #[error("the certificate in {} is not valid before {not_before}: wait, or correct this host's clock", path.display())]
    NotYetValid {
        /// The file.
        path: PathBuf,
        /// The beginning of the certificate's validity.
        not_before: String,
    },
    /// A local revocation list contains this host's certificate.
    #[error("the certificate in {} is revoked by its authority: obtain a new certificate", path.display())]
    Revoked {
        /// The file.
        path: PathBuf,
    },
    /// This host's certificate has the wrong extended key usage.
    #[error("the certificate in {} is not for {wanted} (extended key usage), so peers would refuse it: obtain a certificate for this use", path.display())]
    WrongPurpose {
        /// The file.
        path: PathBuf,
        /// The required usage.
        wanted: &'static str,
    },
}

/// Turns the reason why an item of a file is unusable into an error.
pub(super) fn bad_item<E: ToString>(
    path: &Path,
    what: Item,
    position: usize,
) -> impl FnOnce(E) -> IdentityErrorKind {
    let path = path.to_owned();
    move |error| IdentityErrorKind::BadItem {
        path,
        what,
        position,
        reason: error.to_string(),
    }
}

/// Why TLS settings cannot be made from an identity.
#[derive(Debug, Error)]
#[error(transparent)]
pub struct SettingsError(SettingsErrorKind);

impl SettingsError {
    /// The cause.
    #[cfg(feature = "unstable-internals")]
    pub fn kind(&self) -> &SettingsErrorKind {
        &self.0
    }
}

impl<E: Into<SettingsErrorKind>> From<E> for SettingsError {
    fn from(cause: E) -> Self {
        Self(cause.into())
    }
}

/// The causes of a [`SettingsError`].
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SettingsErrorKind {
    /// The crypto library or a cipher suite cannot be used.
    #[error(transparent)]
    Provider(#[from] super::super::provider::ProviderError),
    /// An authority must verify the peers, but no authority is trusted.
    #[error(
        "no trusted authority, so peer names cannot be verified: put the authorities' certificates into a CA bundle, or allow peers by pins only"
    )]
    NoAuthority,
    /// The certificate has the wrong extended key usage.
    #[error(transparent)]
    Identity(#[from] IdentityErrorKind),
    /// The kernel is required to seal and open records, but cannot.
    #[error("{0}; alternatively, let this process seal and open the records")]
    Offload(#[from] Refused),
    /// rustls rejects the settings.
    #[error("unusable TLS settings: {0}")]
    Refused(String),
}

/// A problem that does not prevent the use of an identity.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Warning {
    /// A group can read the key.
    KeyOpenToGroup {
        /// The key's file.
        path: PathBuf,
        /// The file's permission bits.
        mode: u32,
    },
    /// Every user of this host can read the key. The load options allow this.
    KeyOpenToAll {
        /// The key's file.
        path: PathBuf,
        /// The file's permission bits.
        mode: u32,
    },
    /// An item expires soon, or has expired.
    Expires {
        /// The item and its validity.
        what: Dated,
        /// Whole days until the item expires; `None` if it has expired.
        days: Option<u64>,
    },
    /// No complete chain leads from this host's certificate to a trust anchor of this identity.
    NoChain {
        /// The certificate's file.
        path: PathBuf,
        /// The issuer at which the chain ends.
        issuer: String,
    },
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::KeyOpenToGroup { path, mode } => write!(
                f,
                "key file {} is accessible to its group (mode {mode:04o}); run chmod 0600 {} \
                 unless the group should use the key",
                path.display(),
                path.display()
            ),
            Self::KeyOpenToAll { path, mode } => write!(
                f,
                "key file {} is accessible to every user of this host (mode {mode:04o}), which the \
                 options allow: any user who has read it can impersonate this host",
                path.display()
            ),
            Self::Expires { what, days } => {
                let Dated {
                    item,
                    path,
                    position,
                    until,
                    ..
                } = what;
                let path = path.display();
                write!(f, "{item} {} in {path} ", position + 1)?;
                match days {
                    None => write!(f, "expired on {until}")?,
                    Some(0) => write!(f, "expires within a day, on {until}")?,
                    Some(days) => write!(f, "expires within {} days, on {until}", days + 1)?,
                }
                f.write_str(match item {
                    Item::Certificate => ": renew it before peers refuse it",
                    Item::Authority => ": renew it, or certificates that it issued may be refused",
                    Item::RevocationList => {
                        ": install the next list; without it, peers of the authority are refused"
                    }
                })
            }
            Self::NoChain { path, issuer } => write!(
                f,
                "the certificate in {} has no chain to an authority in this host's CA bundle; if \
                 {issuer} is an intermediate authority, append its certificate to the file; \
                 otherwise peers will refuse this host's certificate",
                path.display()
            ),
        }
    }
}
