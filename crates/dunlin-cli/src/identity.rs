//! Flags for this host's identity and its peers. Loads the certificates that the flags name, at
//! start and at each reload.

use dunlin_lane::sync::lock;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use clap::Args;
use dunlin::lane::identity::{Identity, Layout, LoadOptions, Role, Warning};
use dunlin::lane::kernel::{Choice, choose};
use dunlin::lane::offload::Offload;
use dunlin::lane::peers::{Peer, Peers};
use dunlin::lane::policy::{ClientTls, ServerTls};
use dunlin::lane::provider::{CipherSuite, Crypto};
use dunlin_linux::accounts::group_id;
use serde::{Deserialize, Serialize};

use crate::confine;
use crate::options::text_of;
use crate::published::{CertificateLine, expiry};

/// The group of the services (dist/systemd/dunlin-sysusers.conf).
pub(crate) const SERVICES: &str = "dunlin";

/// This host's identity, and its peers.
#[derive(Clone, Debug, Args, Serialize, Deserialize)]
pub(crate) struct Common {
    /// Directory with `ca-cert.pem`, `cert.pem` and `key.pem`, or with the files of QEMU, Cloud
    /// Hypervisor or libvirt (`/etc/pki`).
    #[arg(long, value_name = "DIR")]
    pub(crate) identity: PathBuf,
    /// A name that the peer's certificate must contain, or the pin of its certificate (sha256:HEX)
    /// or key (spki-sha256:HEX); repeatable [default: to migrate, the host of --to; to receive, any
    /// certificate of the authority].
    #[arg(long = "peer", value_name = "NAME|PIN", value_parser = text_of::<Peer>)]
    pub(crate) peers: Vec<String>,
    #[command(flatten)]
    #[serde(default)]
    pub(crate) reading: Reading,
    #[command(flatten)]
    #[serde(default)]
    pub(crate) records: Records,
}

impl Common {
    /// An identity and its peers. Kernel or process TLS is chosen automatically.
    pub(crate) fn new(identity: &Path, peers: Vec<String>, reading: &Reading) -> Self {
        Self {
            identity: identity.to_owned(),
            peers,
            reading: reading.clone(),
            records: Records::default(),
        }
    }
}

/// Where TLS records are sealed and opened.
#[derive(Clone, Debug, Args, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Records {
    /// Where the data lanes' TLS records are sealed and opened: kernel, process, or auto, which is
    /// the kernel if it has TLS and a fast cipher.
    #[arg(long = "tls-offload", value_name = "WHERE", value_parser = text_of::<Offload>,
          default_value_t = Records::default().offload)]
    offload: String,
}

impl Default for Records {
    fn default() -> Self {
        Self {
            offload: Offload::Auto.to_string(),
        }
    }
}

impl Records {
    fn crypto(&self) -> Result<Crypto> {
        Ok(crypto(self.offload.parse()?))
    }

    /// The choice between kernel and process TLS, and its reason.
    pub(crate) fn choice(&self) -> Result<Choice> {
        chosen(&self.crypto()?)
    }
}

/// The fastest provider on this processor, with the given offload preference.
pub(crate) fn crypto(offload: Offload) -> Crypto {
    Crypto {
        offload,
        ..Crypto::auto()
    }
}

/// The choice between kernel and process TLS for `crypto`, and its reason.
pub(crate) fn chosen(crypto: &Crypto) -> Result<Choice> {
    let suite = crypto.suites.first().copied();
    Ok(choose(
        crypto.offload,
        suite.unwrap_or(CipherSuite::Aes256Gcm),
    )?)
}

/// How an identity's files are loaded.
#[derive(Clone, Debug, Args, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Reading {
    /// Layout of the files: dunlin, qemu, cloud-hypervisor or libvirt [default: detected].
    #[arg(long, value_name = "LAYOUT", value_parser = text_of::<Layout>)]
    identity_layout: Option<String>,
    /// Accept a key file that every user of this host can read.
    #[arg(long)]
    allow_open_key: bool,
    /// Warn when a certificate expires within this many days, but never before the last third of
    /// its validity.
    #[arg(long, value_name = "DAYS", default_value_t = Reading::default().expiry_warning)]
    expiry_warning: u32,
}

impl Default for Reading {
    fn default() -> Self {
        Self {
            identity_layout: None,
            allow_open_key: false,
            expiry_warning: 30,
        }
    }
}

impl Reading {
    /// Defaults, except for the permission to load a world-readable key.
    pub(crate) fn with_open_key(allow_open_key: bool) -> Self {
        Self {
            allow_open_key,
            ..Self::default()
        }
    }

    /// The layout of a directory, from the flag or detected from its files.
    pub(crate) fn layout(&self, directory: &Path) -> Result<Layout> {
        match &self.identity_layout {
            Some(layout) => Ok(layout.parse()?),
            None => Ok(Layout::of(directory)?),
        }
    }
}

/// Parses peers; an empty list means any peer with a certificate from the trusted
/// authorities.
pub(crate) fn allowed_peers(peers: &[String]) -> Result<Peers> {
    if peers.is_empty() {
        return Ok(Peers::AnyFromAuthority);
    }
    Ok(peers
        .iter()
        .map(|peer| peer.parse::<Peer>())
        .collect::<Result<_, _>>()?)
}

/// Loads an identity for one side of a migration; returns it with its warnings.
pub(crate) fn load_identity(
    directory: &Path,
    role: Role,
    reading: &Reading,
) -> Result<(Identity, Vec<String>)> {
    confine::allows_identity(directory)?;
    let day = Duration::from_secs(24 * 60 * 60);
    let unusable = || format!("cannot use the identity in {}", directory.display());
    let options = LoadOptions {
        layout: Some(reading.layout(directory).with_context(unusable)?),
        role: Some(role),
        allow_key_open_to_all: reading.allow_open_key,
        warn_before: day * reading.expiry_warning,
    };
    let (identity, warnings) = Identity::load(directory, options).with_context(unusable)?;
    let warnings = warnings.iter().filter(|one| !is_for_services(one));
    Ok((identity, warnings.map(ToString::to_string).collect()))
}

/// Whether the warning is about a key that only its owner and the group [`SERVICES`] can read.
/// `dunlin libvirt enable` and the commands in the documentation install keys with these
/// permissions.
fn is_for_services(warning: &Warning) -> bool {
    const WRITE_OR_EXECUTE: u32 = 0o030;
    let Warning::KeyOpenToGroup { path, mode } = warning else {
        return false;
    };
    let Ok(Some(services)) = group_id(SERVICES) else {
        return false;
    };
    mode & WRITE_OR_EXECUTE == 0 && fs::metadata(path).is_ok_and(|key| key.gid() == services)
}

/// TLS settings for connections to the peer at `to` (HOST:PORT), with the warnings from loading the
/// identity.
pub(crate) fn client_tls(common: &Common, to: &str) -> Result<(ClientTls, Vec<String>)> {
    let (identity, warnings) = load_identity(&common.identity, Role::Source, &common.reading)?;
    let peers = if common.peers.is_empty() {
        // By default the peer must be the host that was dialled.
        let host = to.rsplit_once(':').map_or(to, |(host, _)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']');
        allowed_peers(&[host.to_owned()])?
    } else {
        allowed_peers(&common.peers)?
    };
    Ok((identity.client(&common.records.crypto()?, peers)?, warnings))
}

/// The identity of a process that accepts peers.
pub(crate) struct Accepting {
    pub(crate) tls: ServerTls,
    common: Common,
    /// The identity, and the warnings about the identity that were already reported.
    loaded: Mutex<(Identity, Vec<String>)>,
}

impl Accepting {
    /// Loads the identity; returns it with its warnings.
    pub(crate) fn load(common: &Common) -> Result<(Self, Vec<String>)> {
        let (tls, identity, warnings) = accept_with(common)?;
        let accepting = Self {
            tls,
            common: common.clone(),
            loaded: Mutex::new((identity, warnings.clone())),
        };
        Ok((accepting, warnings))
    }

    /// Reloads the files for future handshakes; returns the end of the certificate's validity, and
    /// warnings.
    ///
    /// # Errors
    /// The files cannot be loaded. The previous identity stays in use.
    pub(crate) fn reload(&self) -> Result<(String, Vec<String>)> {
        let (tls, identity, warnings) = accept_with(&self.common)?;
        let until = identity.summary()?.not_after;
        self.tls.replace(&tls);
        *lock(&self.loaded) = (identity, warnings.clone());
        Ok((until, warnings))
    }

    /// When the certificates and revocation lists of the identity expire.
    pub(crate) fn expiry(&self) -> Vec<CertificateLine> {
        expiry(lock(&self.loaded).0.dates())
    }

    /// Returns the warnings of expiry that were not reported before. They count as reported from
    /// now on.
    pub(crate) fn expiring(&self) -> Vec<String> {
        let (identity, reported) = &mut *lock(&self.loaded);
        let warnings = identity.expiring(SystemTime::now());
        let mut fresh: Vec<_> = warnings.iter().map(ToString::to_string).collect();
        fresh.retain(|warning| !reported.contains(warning));
        reported.extend(fresh.iter().cloned());
        fresh
    }
}

/// Returns the TLS settings and the identity of a process that accepts peers, with the warnings
/// from loading the identity.
fn accept_with(common: &Common) -> Result<(ServerTls, Identity, Vec<String>)> {
    let (identity, warnings) = load_identity(&common.identity, Role::Destination, &common.reading)?;
    let tls = identity.server(&common.records.crypto()?, allowed_peers(&common.peers)?)?;
    Ok((tls, identity, warnings))
}
