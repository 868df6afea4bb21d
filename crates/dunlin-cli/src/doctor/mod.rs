//! `dunlin doctor`: what this host can do for migrations. Its probes change nothing on the host,
//! except that the kernel may load modules for them.
//!
//! ```text
//!  tls, ipsec, nic, path, kvm, memory, toolstack, identity, peer ─▶ verdicts ─▶ report
//!                                                             JSON of two hosts ─▶ compare
//! ```
//!
//! In each file, the functions that read the host are separate from the functions that compute the
//! verdicts.

mod compare;
mod identity;
mod ipsec;
mod kvm;
mod memory;
mod nic;
mod path;
mod peer;
mod report;
mod tls;
mod toolstack;
pub(crate) mod verdict;

use std::path::PathBuf;

use anyhow::{Result, bail, ensure};
use clap::Args;

use crate::code::{DONE, FAILED};
use crate::identity::Reading;
use crate::progress::Waiting;
use path::PathFlag;
use verdict::{State, Verdict, setting};

#[derive(Debug, Args)]
pub(crate) struct Doctor {
    /// The tunnel's configuration [default: /etc/dunlin/tunnel.toml, if it exists].
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Directory with this host's certificates [default: that of the configuration, or the first of
    /// /etc/dunlin, /etc/pki/qemu and /etc/pki that has some].
    #[arg(long, value_name = "DIR")]
    identity: Option<PathBuf>,
    /// Also ask the running tunnel of this peer about its host, with the identity of the
    /// configuration; repeatable. The peer answers hosts that may use one of its targets. The
    /// default port is that of the configuration's route to the peer, or 18300.
    #[arg(long = "peer", value_name = "HOST[:PORT]")]
    peers: Vec<String>,
    /// Compare the socket buffers with a path that has this rate (bytes per second) and this
    /// round-trip time, such as 3G,20ms; or `measured`, for the path to the first peer that
    /// answers.
    #[arg(long, value_name = "RATE,RTT")]
    path: Option<PathFlag>,
    /// Compare two hosts by the output of --json on each, and examine nothing.
    #[arg(long, value_name = "FILE", num_args = 2, conflicts_with_all = ["config", "identity", "peers", "path", "strict"])]
    compare: Vec<PathBuf>,
    /// Exit with 1 for warnings too.
    #[arg(long)]
    strict: bool,
    /// Print one JSON object per line.
    #[arg(long)]
    json: bool,
    /// libvirt's settings.
    #[arg(
        long,
        value_name = "FILE",
        default_value = "/etc/libvirt/qemu.conf",
        hide = true
    )]
    qemu_conf: PathBuf,
}

impl Doctor {
    pub(crate) fn run(&self) -> Result<i32> {
        if let [one, other] = &self.compare[..] {
            return compare::run(one, other, self.json);
        }
        let verdicts = self.examine()?;
        match self.json {
            true => report::json(&verdicts),
            false => report::table(&verdicts),
        }
        let least = if self.strict {
            State::Warn
        } else {
            State::Fail
        };
        match verdicts.iter().any(|one| one.state >= least) {
            true => Ok(FAILED),
            false => Ok(DONE),
        }
    }

    fn examine(&self) -> Result<Vec<Verdict>> {
        let (config, config_verdict) = identity::config(self.config.as_deref());
        let directory = self.identity.as_deref();
        let (directory, reading) = match (&config, directory) {
            (Some((_, config)), None) => (Some(&*config.identity), config.reading.clone()),
            _ => (directory, Reading::default()),
        };
        let redirected = config
            .as_ref()
            .filter(|(_, config)| !config.redirects.is_empty())
            .map(|(path, _)| &**path);
        let is_measured = matches!(self.path, Some(PathFlag::Measured));
        ensure!(
            !is_measured || !self.peers.is_empty(),
            "--path measured needs a peer: give --peer HOST"
        );
        let examined = [&["this host".to_owned()][..], &self.peers]
            .concat()
            .join(", ");
        let _waiting = Waiting::new(self.json, &format!("examining {examined}"));
        let (of_peers, measured) = match (&config, &self.peers[..]) {
            (_, []) => (Vec::new(), None),
            (Some((file, _)), peers) => peer::examine(file, peers, is_measured)?,
            (None, _) => {
                bail!("--peer needs the tunnel's configuration: give a valid --config FILE")
            }
        };
        let path = match self.path {
            Some(PathFlag::Given(path)) => Some(path),
            _ => measured,
        };
        let mut all = vec![host()];
        all.extend(tls::auto());
        all.extend(tls::kernel());
        all.extend(tls::ciphers());
        all.extend(ipsec::examine());
        all.extend(nic::examine());
        all.extend(path::examine(path));
        all.extend(kvm::examine());
        all.extend(memory::examine());
        all.push(config_verdict);
        all.push(identity::certificates(directory, &reading));
        all.extend(toolstack::redirects(redirected));
        all.extend(toolstack::libvirt(&self.qemu_conf, redirected.is_some()));
        all.extend(of_peers);
        Ok(all)
    }
}

fn host() -> Verdict {
    let release = setting("/proc/sys/kernel/osrelease").unwrap_or_default();
    let value = format!("{release} {}", std::env::consts::ARCH);
    Verdict::ok(
        "host.kernel",
        value,
        "the checks below show what this kernel can do",
    )
}
