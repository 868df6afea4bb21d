//! Finding the files of an identity in a directory.

use std::io;
use std::path::{Path, PathBuf};

use super::error::IdentityError;
use super::layout::{
    AUTHORITIES_FILE, CERTIFICATE_FILE, DENIED_FILE, Files, KEY_FILE, Layout, REVOCATIONS_FILE,
    Role,
};

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
