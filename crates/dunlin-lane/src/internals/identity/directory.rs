//! Locates the files of an identity in a directory.

use std::io;
use std::path::{Path, PathBuf};

use super::error::{IdentityError, IdentityErrorKind};
use super::layout::{
    AUTHORITIES_FILE, CERTIFICATE_FILE, DENIED_FILE, Files, KEY_FILE, Layout, REVOCATIONS_FILE,
    Role,
};

impl Files {
    /// Returns the files of one role in a directory. Without `layout`, the files that exist
    /// determine the layout.
    ///
    /// # Errors
    /// The directory matches no layout or several, or cannot be read; or its layout has separate
    /// files for the two roles and `role` is `None`.
    pub fn in_directory(
        directory: &Path,
        layout: Option<Layout>,
        role: Option<Role>,
    ) -> Result<Self, IdentityError> {
        let layout = match layout {
            Some(layout) => layout,
            None => Layout::in_directory(directory)?,
        };
        let present = |path: PathBuf| path.exists().then_some(path);
        // A file that cannot be examined counts as present, so that loading the identity fails.
        // Otherwise a denied key could be accepted by mistake.
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
                let directory = directory.to_owned();
                return Err(IdentityErrorKind::RoleNeeded { directory, layout }.into());
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

/// The directories of libvirt's authorities, certificates and keys. A system-wide installation has
/// three directories under `/etc/pki`; `directory` may be `/etc/pki` or `/etc/pki/libvirt`. The
/// files of a user, and files at a configured path, are all in one directory.
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

    /// Determines the layout of a directory from the certificates in it.
    ///
    /// # Errors
    /// The directory matches no layout or several, or cannot be read.
    #[cfg(feature = "unstable-internals")]
    pub fn of(directory: &Path) -> Result<Self, IdentityError> {
        Self::in_directory(directory)
    }

    fn in_directory(directory: &Path) -> Result<Self, IdentityError> {
        // Examine `.` in the directory instead of the directory itself, so that the call also fails
        // without search permission.
        std::fs::metadata(directory.join(".")).map_err(|source| IdentityErrorKind::Unreadable {
            path: directory.to_owned(),
            source,
        })?;
        let is_present = |layout: &Self| match layout {
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
        let mut found = Self::ALL.into_iter().filter(is_present);
        let directory = directory.to_owned();
        let kind = match (found.next(), found.next()) {
            (Some(layout), None) => return Ok(layout),
            (None, _) => IdentityErrorKind::NoLayout { directory },
            (Some(one), Some(other)) => IdentityErrorKind::SeveralLayouts {
                directory,
                one,
                other,
            },
        };
        Err(kind.into())
    }
}
