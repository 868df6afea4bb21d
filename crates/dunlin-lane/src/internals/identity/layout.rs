//! The locations of an identity's files: Dunlin's own layout, and layouts of other programs.
//!
//! | layout | authorities | revocations | certificate | key |
//! | --- | --- | --- | --- | --- |
//! | `dunlin` | `ca-cert.pem` | `ca-crl.pem` | `cert.pem` | `key.pem` |
//! | `qemu`, `cloud-hypervisor` | `ca-cert.pem` | `ca-crl.pem` | `ROLE-cert.pem` | `ROLE-key.pem` |
//! | `libvirt`, in `/etc/pki` | `CA/cacert.pem` | `CA/cacrl.pem` | `libvirt/ROLEcert.pem` | `libvirt/private/ROLEkey.pem` |
//! | `libvirt`, in one directory | `cacert.pem` | `cacrl.pem` | `ROLEcert.pem` | `ROLEkey.pem` |
//!
//! The directory may also contain [`DENIED_FILE`]. `ROLE` is `client` at a source and `server` at a
//! destination. Sources: QEMU `include/crypto/tlscredsx509.h`, libvirt `src/rpc/virnettlsconfig.c`,
//! Cloud Hypervisor `vm-migration/src/tls.rs` (QEMU's names, without revocation lists).

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use thiserror::Error;

/// The file with the trust anchors in Dunlin's own layout.
pub const AUTHORITIES_FILE: &str = "ca-cert.pem";
/// The file with this host's certificate chain, leaf first, in Dunlin's own layout.
pub const CERTIFICATE_FILE: &str = "cert.pem";
/// The file with this host's private key in Dunlin's own layout.
pub const KEY_FILE: &str = "key.pem";
/// The optional file with revocation lists in Dunlin's own layout.
pub const REVOCATIONS_FILE: &str = "ca-crl.pem";

/// The optional file with denied keys, next to an identity's files in any layout. Each line holds
/// the pin of a key, `spki-sha256:…`.
pub const DENIED_FILE: &str = "denied";

/// The side of a migration that an identity is for. Layouts of other programs have a certificate
/// for each side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Connects: a TLS client.
    Source,
    /// Accepts: a TLS server.
    Destination,
}

/// The layout of an identity's files in a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Dunlin's own layout, with one certificate for both roles.
    Dunlin,
    /// The layout of QEMU's `tls-creds-x509`, and of Cloud Hypervisor's `tls_dir`.
    Qemu,
    /// The layout of libvirt, for system-wide files or for the files of a user.
    Libvirt,
}

/// The paths of an identity's files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    /// The certificates of the trust anchors, one or more; `None` if all peers are pinned.
    pub authorities: Option<PathBuf>,
    /// Revocation lists of those authorities, if any.
    pub revocations: Option<PathBuf>,
    /// This host's certificate, followed by any intermediates.
    pub certificate: PathBuf,
    /// This host's private key.
    pub key: PathBuf,
    /// Keys that this host denies, if any.
    pub denied: Option<PathBuf>,
}

/// The text does not name a layout.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[error("unknown layout {text:?}: use dunlin, qemu, cloud-hypervisor or libvirt")]
pub struct UnknownLayout {
    text: String,
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

#[cfg(feature = "unstable-internals")]
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
