//! Who this host is and whom it talks to, as flags; the certificates behind
//! them, read when they are needed and again when that is asked for.

use dunlin_lane::sync::lock;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use clap::Args;
use dunlin::lane::identity::{Identity, Layout, LoadOptions, Role};
use dunlin::lane::kernel::{Choice, choose};
use dunlin::lane::offload::Offload;
use dunlin::lane::peers::{Peer, Peers};
use dunlin::lane::policy::{ClientTls, ServerTls};
use dunlin::lane::provider::{CipherSuite, Crypto};
use serde::{Deserialize, Serialize};

use crate::confine;
use crate::options::text_of;

/// Who this host is, and whom it talks to.
#[derive(Clone, Debug, Args, Serialize, Deserialize)]
pub(crate) struct Common {
    /// Directory with `ca-cert.pem`, `cert.pem` and `key.pem`, or with QEMU's,
    /// Cloud Hypervisor's or libvirt's files (`/etc/pki`).
    #[arg(long, value_name = "DIR")]
    pub(crate) identity: PathBuf,
    /// A name that the peer's certificate must bear, or the pin of its
    /// certificate (sha256:HEX) or key (spki-sha256:HEX); repeatable [default:
    /// to migrate, the host of --to; to receive, anybody of the authority].
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
    /// This host's identity and its peers, with records left to the faster of kernel and process.
    pub(crate) fn new(identity: &Path, peers: Vec<String>, reading: &Reading) -> Self {
        Self {
            identity: identity.to_owned(),
            peers,
            reading: reading.clone(),
            records: Records::default(),
        }
    }
}

/// Who seals and opens TLS records.
#[derive(Clone, Debug, Args, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Records {
    /// Who seals and opens the data lanes' TLS records: kernel, process, or
    /// auto, the kernel where it has TLS and a fast cipher.
    #[arg(long = "tls-offload", value_name = "WHO", value_parser = text_of::<Offload>,
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

    /// Who does it, and why.
    pub(crate) fn choice(&self) -> Result<Choice> {
        chosen(&self.crypto()?)
    }
}

/// The fastest library on this processor, and who is asked to do its work.
pub(crate) fn crypto(offload: Offload) -> Crypto {
    Crypto {
        offload,
        ..Crypto::auto()
    }
}

/// Who seals and opens records, and why.
pub(crate) fn chosen(crypto: &Crypto) -> Result<Choice> {
    let suite = crypto.suites.first().copied();
    Ok(choose(
        crypto.offload,
        suite.unwrap_or(CipherSuite::Aes256Gcm),
    )?)
}

/// How an identity's files are read.
#[derive(Clone, Debug, Args, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Reading {
    /// Whose files these are: dunlin, qemu, cloud-hypervisor or libvirt
    /// [default: told by which there are].
    #[arg(long, value_name = "LAYOUT", value_parser = text_of::<Layout>)]
    identity_layout: Option<String>,
    /// Use a key that every user of this host can read.
    #[arg(long)]
    allow_open_key: bool,
    /// Days before the end of a certificate's validity from which on it is
    /// warned of; no sooner than in the last third of it.
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
    /// The usual way, with a key that every user can read or not.
    pub(crate) fn with_open_key(allow_open_key: bool) -> Self {
        Self {
            allow_open_key,
            ..Self::default()
        }
    }

    /// The layout of a directory, given or told by its files.
    pub(crate) fn layout(&self, directory: &Path) -> Result<Layout> {
        match &self.identity_layout {
            Some(layout) => Ok(layout.parse()?),
            None => Ok(Layout::of(directory)?),
        }
    }
}

/// Peers as given; none means anybody from our authority.
pub(crate) fn allowed_peers(peers: &[String]) -> Result<Peers> {
    let peers: Result<Vec<Peer>, _> = peers.iter().map(|peer| peer.parse()).collect();
    Ok(peers?.into_iter().collect())
}

/// Loads an identity for one side of a migration, with what should be said
/// about it.
pub(crate) fn load_identity(
    directory: &Path,
    role: Role,
    reading: &Reading,
) -> Result<(Identity, Vec<String>)> {
    confine::allows_identity(directory)?;
    let day = Duration::from_secs(24 * 60 * 60);
    let unusable = || format!("the identity in {} cannot be used", directory.display());
    let options = LoadOptions {
        layout: Some(reading.layout(directory).with_context(unusable)?),
        role: Some(role),
        allow_key_open_to_all: reading.allow_open_key,
        warn_before: day * reading.expiry_warning,
    };
    let (identity, warnings) = Identity::load(directory, options).with_context(unusable)?;
    Ok((identity, warnings.iter().map(ToString::to_string).collect()))
}

/// What a control lane to `to` is secured with, and what should be said.
pub(crate) fn client_tls(common: &Common, to: &str) -> Result<(ClientTls, Vec<String>)> {
    let (identity, warnings) = load_identity(&common.identity, Role::Source, &common.reading)?;
    let peers = if common.peers.is_empty() {
        // Whoever connects to a host expects that host.
        let host = to.rsplit_once(':').map_or(to, |(host, _)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']');
        allowed_peers(&[host.to_owned()])?
    } else {
        allowed_peers(&common.peers)?
    };
    Ok((identity.client(&common.records.crypto()?, peers)?, warnings))
}

/// The identity of a process that accepts sources, for as long as it lives.
pub(crate) struct Accepting {
    pub(crate) tls: ServerTls,
    common: Common,
    identity: Mutex<Identity>,
    told: Mutex<Vec<String>>,
}

impl Accepting {
    /// Loads it, with what should be said about it.
    pub(crate) fn load(common: &Common) -> Result<(Self, Vec<String>)> {
        let (identity, warnings) = read(common)?;
        let accepting = Self {
            tls: settings(&identity, common)?,
            common: common.clone(),
            identity: Mutex::new(identity),
            told: Mutex::new(warnings.clone()),
        };
        Ok((accepting, warnings))
    }

    /// Reads the files again, for the handshakes to come; returns until when
    /// the certificate is valid, and what should be said.
    ///
    /// # Errors
    /// Everything stays as it was.
    pub(crate) fn reload(&self) -> Result<(String, Vec<String>)> {
        let (identity, warnings) = read(&self.common)?;
        self.tls.replace(&settings(&identity, &self.common)?);
        let until = identity.summary()?.not_after;
        *lock(&self.identity) = identity;
        lock(&self.told).clone_from(&warnings);
        Ok((until, warnings))
    }

    /// What has come near its end since it was last asked.
    pub(crate) fn expiring(&self) -> Vec<String> {
        let warnings = lock(&self.identity).expiring(SystemTime::now());
        let mut told = lock(&self.told);
        let fresh: Vec<_> = warnings
            .iter()
            .map(ToString::to_string)
            .filter(|warning| !told.contains(warning))
            .collect();
        told.extend(fresh.iter().cloned());
        fresh
    }
}

fn read(common: &Common) -> Result<(Identity, Vec<String>)> {
    load_identity(&common.identity, Role::Destination, &common.reading)
}

fn settings(identity: &Identity, common: &Common) -> Result<ServerTls> {
    Ok(identity.server(&common.records.crypto()?, allowed_peers(&common.peers)?)?)
}
