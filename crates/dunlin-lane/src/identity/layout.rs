//! Where an identity's files are: Dunlin's own layout, and those that a host may have already.
//!
//! | layout | authorities | revocations | certificate | key |
//! | --- | --- | --- | --- | --- |
//! | `dunlin` | `ca-cert.pem` | `ca-crl.pem` | `cert.pem` | `key.pem` |
//! | `qemu`, `cloud-hypervisor` | `ca-cert.pem` | `ca-crl.pem` | `ROLE-cert.pem` | `ROLE-key.pem` |
//! | `libvirt`, in `/etc/pki` | `CA/cacert.pem` | `CA/cacrl.pem` | `libvirt/ROLEcert.pem` | `libvirt/private/ROLEkey.pem` |
//! | `libvirt`, in one directory | `cacert.pem` | `cacrl.pem` | `ROLEcert.pem` | `ROLEkey.pem` |
//!
//! In the directory itself there may be [`DENIED_FILE`]. `ROLE` is `client` at a source and
//! `server` at a destination. Sources: QEMU `include/crypto/tlscredsx509.h`, libvirt
//! `src/rpc/virnettlsconfig.c`, Cloud Hypervisor `vm-migration/src/tls.rs` (QEMU's names; it
//! knows no revocations).

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use thiserror::Error;

use super::error::IdentityError;

/// The file of trusted authorities in Dunlin's own layout.
pub const AUTHORITIES_FILE: &str = "ca-cert.pem";
/// The file of this host's certificate chain, leaf first, in Dunlin's own layout.
pub const CERTIFICATE_FILE: &str = "cert.pem";
/// The file of this host's private key in Dunlin's own layout.
pub const KEY_FILE: &str = "key.pem";
/// The file of revocation lists in Dunlin's own layout, if there is one.
pub const REVOCATIONS_FILE: &str = "ca-crl.pem";

/// The file of denied keys beside an identity of any layout, if there is one: on each line a pin
/// of a key, `spki-sha256:…`.
pub const DENIED_FILE: &str = "denied";

/// Which side of a migration an identity is for: layouts made by others have a certificate for
/// each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Connects: a TLS client.
    Source,
    /// Accepts: a TLS server.
    Destination,
}

/// How the files of an identity lie in a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// One certificate for both roles.
    Dunlin,
    /// QEMU's `tls-creds-x509`, and Cloud Hypervisor's `tls_dir`.
    Qemu,
    /// libvirt's, of a system or of a user.
    Libvirt,
}

/// The files of an identity, wherever they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    /// Certificates of the authorities that are trusted, one or more; none where peers are
    /// pinned.
    pub authorities: Option<PathBuf>,
    /// Revocation lists of those authorities, if there are any.
    pub revocations: Option<PathBuf>,
    /// This host's certificate, followed by any intermediates.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// Keys of which no peer's certificate may be, if any are denied.
    pub denied: Option<PathBuf>,
}

/// No such layout.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[error("{text:?} is no layout: use dunlin, qemu, cloud-hypervisor or libvirt")]
pub struct UnknownLayout {
    text: String,
}

impl Files {
    /// The files of one role in a directory, whose layout is told by which of them there are
    /// unless it is given.
    ///
    /// # Errors
    /// [`IdentityError::NoLayout`], [`IdentityError::SeveralLayouts`], and
    /// [`IdentityError::RoleNeeded`] for a layout that has two roles.
    pub fn in_directory(
        directory: &Path,
        layout: Option<Layout>,
        role: Option<Role>,
    ) -> Result<Self, IdentityError> {
        let layout = match layout {
            Some(layout) => layout,
            None => Layout::of(directory)?,
        };
        let present = |path: PathBuf| path.exists().then_some(path);
        // One that cannot be looked at denies keys, and loading it fails.
        let denied = directory.join(DENIED_FILE);
        let denied = match denied.symlink_metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            _ => Some(denied),
        };
        if layout == Layout::Dunlin {
            return Ok(Self {
                authorities: present(directory.join(AUTHORITIES_FILE)),
                revocations: present(directory.join(REVOCATIONS_FILE)),
                certificate: directory.join(CERTIFICATE_FILE),
                key: directory.join(KEY_FILE),
                denied,
            });
        }
        let role = match role {
            Some(Role::Source) => "client",
            Some(Role::Destination) => "server",
            None => {
                return Err(IdentityError::RoleNeeded {
                    directory: directory.to_owned(),
                    layout,
                });
            }
        };
        let (authorities, revocations, certificate, key) = if layout == Layout::Qemu {
            (
                directory.join("ca-cert.pem"),
                directory.join("ca-crl.pem"),
                directory.join(format!("{role}-cert.pem")),
                directory.join(format!("{role}-key.pem")),
            )
        } else {
            let (authorities, certificates, keys) = libvirt_directories(directory);
            (
                authorities.join("cacert.pem"),
                authorities.join("cacrl.pem"),
                certificates.join(format!("{role}cert.pem")),
                keys.join(format!("{role}key.pem")),
            )
        };
        Ok(Self {
            authorities: present(authorities),
            revocations: present(revocations),
            certificate,
            key,
            denied,
        })
    }
}

/// Where libvirt has authorities, certificates and keys. A system's are in three directories
/// under `/etc/pki`, of which both that one and `/etc/pki/libvirt` may be meant; a user's, and
/// those at a path that was configured, are in one.
fn libvirt_directories(directory: &Path) -> (PathBuf, PathBuf, PathBuf) {
    let system = |pki: &Path| {
        let certificates = pki.join("libvirt");
        let keys = certificates.join("private");
        (pki.join("CA"), certificates, keys)
    };
    if directory.join("CA").is_dir() {
        return system(directory);
    }
    match directory.parent() {
        Some(pki) if directory.join("private").is_dir() && pki.join("CA").is_dir() => system(pki),
        _ => (directory.into(), directory.into(), directory.into()),
    }
}

impl Layout {
    const ALL: [Self; 3] = [Self::Dunlin, Self::Qemu, Self::Libvirt];

    /// The layout of a directory, by the certificates in it.
    ///
    /// # Errors
    /// None, or more than one; or there is no such directory.
    pub fn of(directory: &Path) -> Result<Self, IdentityError> {
        // By its own entry: whoever may not search it finds no file in it either.
        std::fs::metadata(directory.join(".")).map_err(|source| IdentityError::Unreadable {
            path: directory.to_owned(),
            source,
        })?;
        let is_there = |layout: &Self| match layout {
            Self::Dunlin => directory.join(CERTIFICATE_FILE).exists(),
            Self::Qemu => ["client-cert.pem", "server-cert.pem"]
                .iter()
                .any(|name| directory.join(name).exists()),
            Self::Libvirt => {
                let (_, certificates, _) = libvirt_directories(directory);
                ["clientcert.pem", "servercert.pem"]
                    .iter()
                    .any(|name| certificates.join(name).exists())
            }
        };
        let mut found = Self::ALL.into_iter().filter(is_there);
        match (found.next(), found.next()) {
            (Some(layout), None) => Ok(layout),
            (None, _) => Err(IdentityError::NoLayout {
                directory: directory.to_owned(),
            }),
            (Some(one), Some(other)) => Err(IdentityError::SeveralLayouts {
                directory: directory.to_owned(),
                one,
                other,
            }),
        }
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Dunlin => "dunlin",
            Self::Qemu => "qemu",
            Self::Libvirt => "libvirt",
        })
    }
}

impl FromStr for Layout {
    type Err = UnknownLayout;

    fn from_str(text: &str) -> Result<Self, UnknownLayout> {
        match text {
            "dunlin" => Ok(Self::Dunlin),
            "qemu" | "cloud-hypervisor" => Ok(Self::Qemu),
            "libvirt" => Ok(Self::Libvirt),
            _ => Err(UnknownLayout {
                text: text.to_owned(),
            }),
        }
    }
}
