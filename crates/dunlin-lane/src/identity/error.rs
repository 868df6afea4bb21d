//! Why an identity cannot be used, and what should be put right in one that can.

use std::fmt;
use std::io;
use std::path::PathBuf;

use rustls::pki_types::pem;
use thiserror::Error;

use super::super::kernel::Refused;
use super::dated::{Dated, Item};
use super::layout::Layout;

/// No identity file is longer: a bundle of every public authority has a quarter of this.
pub(super) const FILE_LIMIT_BYTES: u64 = 1 << 20;

/// Why an identity cannot be used. The fault is local: a file, its permissions or its content.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum IdentityError {
    /// No certificate of this host is where one is looked for.
    #[error("{} holds no certificate of this host under any name that is known: put cert.pem and key.pem there, or QEMU's, Cloud Hypervisor's or libvirt's files", directory.display())]
    NoLayout {
        /// The directory.
        directory: PathBuf,
    },
    /// It is not clear which certificate is meant.
    #[error("{} holds files of the layouts {one} and {other}: say which one is meant", directory.display())]
    SeveralLayouts {
        /// The directory.
        directory: PathBuf,
        /// A layout that is there.
        one: Layout,
        /// Another.
        other: Layout,
    },
    /// The layout has a certificate for each role.
    #[error("the layout {layout} in {} has a certificate for each side of a migration: say which side is meant", directory.display())]
    RoleNeeded {
        /// The directory.
        directory: PathBuf,
        /// Its layout.
        layout: Layout,
    },
    /// A file is missing or cannot be read.
    #[error("cannot read {}: {source}; put it there, and let this process read it", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file is too long to be what it should be.
    #[error("{} is longer than {FILE_LIMIT_BYTES} bytes and cannot be a PEM file of an identity", path.display())]
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
    /// A passphrase would be needed.
    #[error("the key in {} is encrypted, and nobody is here to give its passphrase: write it there decrypted (openssl pkey -in KEY -out NEW), with mode 0600", path.display())]
    KeyEncrypted {
        /// The key's file.
        path: PathBuf,
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
    /// A certificate or revocation list in a file cannot be decoded or used.
    #[error("{what} {} in {} cannot be used ({reason}): replace it", position + 1, path.display())]
    BadItem {
        /// The file.
        path: PathBuf,
        /// What it should be.
        what: Item,
        /// Its position in the file, from zero.
        position: usize,
        /// What is wrong.
        reason: String,
    },
    /// A line of the list of denied keys denies none.
    #[error("line {line} of {} cannot be used ({reason}): write spki-sha256: and 64 hexadecimal digits, the SHA-256 of the key", path.display())]
    BadDenied {
        /// The file.
        path: PathBuf,
        /// Its number, from one.
        line: usize,
        /// What is wrong.
        reason: &'static str,
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
    /// This host's certificate is revoked, as far as this host itself knows.
    #[error("the certificate in {} is revoked by its authority: have another one issued", path.display())]
    Revoked {
        /// The file.
        path: PathBuf,
    },
    /// This host's certificate is for something else.
    #[error("the certificate in {} is not for {wanted} (extended key usage), and no peer would take it: have one issued that is", path.display())]
    WrongPurpose {
        /// The file.
        path: PathBuf,
        /// What it should be for.
        wanted: &'static str,
    },
}

/// Why TLS settings cannot be made from an identity. The fault is in the configuration.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SettingsError {
    /// The crypto library or the suites.
    #[error(transparent)]
    Provider(#[from] super::super::provider::ProviderError),
    /// Peers are to be known by an authority, and none is trusted.
    #[error(
        "no authority is trusted here, so that no name can be proved: put the authorities' certificates into a CA bundle, or allow peers by pins alone"
    )]
    NoAuthority,
    /// The certificate is for something else.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The kernel was to seal and open records.
    #[error("{0}; or let this process do it (`--tls-offload auto`)")]
    Offload(#[from] Refused),
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
    /// Everybody can read the key, and that was allowed.
    KeyOpenToAll {
        /// The key's file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The end of something's validity is near, or past.
    Expires {
        /// What ends when.
        what: Dated,
        /// Whole days until then; none once it is past.
        days: Option<u64>,
    },
    /// This host's certificate does not lead to any of its own authorities.
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
                "{} is open to its group (mode {mode:04o}); run chmod 0600 {} unless the group \
                 is meant to use the key",
                path.display(),
                path.display()
            ),
            Self::KeyOpenToAll { path, mode } => write!(
                f,
                "{} is open to every user of this host (mode {mode:04o}), as was allowed: whoever \
                 has read it can pass for this host",
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
                    None => write!(f, "was valid until {until}")?,
                    Some(0) => write!(f, "ends within a day, on {until}")?,
                    Some(days) => write!(f, "ends in {days} days, on {until}")?,
                }
                f.write_str(match item {
                    Item::Certificate => ": renew it before peers refuse it",
                    Item::Authority => ": everything that it issued ends with it",
                    Item::RevocationList => {
                        ": fetch the next one; peers of that authority are refused without"
                    }
                })
            }
            Self::NoChain { path, issuer } => write!(
                f,
                "the certificate in {} does not lead to an authority in this host's own CA \
                 bundle; if {issuer} is an intermediate authority, append its certificate to the \
                 file, or peers will refuse it",
                path.display()
            ),
        }
    }
}
