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
use std::path::PathBuf;
use std::str::FromStr;

use thiserror::Error;

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
