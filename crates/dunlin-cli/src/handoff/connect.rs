//! `dunlin handoff connect`: a toolstack's helper that returns a connected socket with kernel TLS.
//!
//! The steps run in this order, so that each failure is reported precisely: check the arguments,
//! connect by TCP, perform the handshake and check the peer's certificate, install kernel TLS in
//! both directions, print one line per socket on standard output, pass the sockets. After a failure
//! the command prints one line on standard error, exits with code 1 and passes no socket.

use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{ArgGroup, Args};
use dunlin::lane::dial::DialCancel;
use dunlin::lane::fastest;
use dunlin::lane::identity::Role;
use dunlin::lane::policy::{Bundle, HandoffTls, TrustPolicy};
use dunlin::lane::provider::{Offer, TlsVersion};
use dunlin_handoff::{connect, pass};
use dunlin_ipsec::inspect::Netlink;
use dunlin_linux::fdpass;

use super::line::handed;
use crate::code;
use crate::identity::{Reading, allowed_peers, load_identity};
use crate::log;
use crate::options::{named, parse_limit};
use crate::progress::Waiting;

/// The byte that carries the sockets; receivers ignore its value.
const CARRIER: &[u8] = b"x";

#[derive(Debug, Args)]
#[command(args_override_self = true, group(ArgGroup::new("verification").required(true)))]
pub(crate) struct Connect {
    /// Name or address of the peer.
    #[arg(long)]
    host: String,
    /// Port of the peer.
    #[arg(long)]
    port: u16,
    /// Descriptor number of a unix socket inherited from the caller; the connected socket is sent
    /// over it, attached to one byte.
    #[arg(long, value_name = "N")]
    send_fd: RawFd,
    /// Cipher suites to negotiate, by OpenSSL name, best first: ECDHE-RSA-AES256-GCM-SHA384:...
    #[arg(long, value_name = "LIST")]
    ciphers: String,
    /// Groups for the key exchange, best first: secp384r1, P-256, X25519.
    #[arg(long, value_name = "LIST")]
    curves: String,
    /// Certificates to trust (PEM): authorities, or the peers' own.
    #[arg(long, value_name = "FILE", group = "verification")]
    cert_bundle_file: Option<PathBuf>,
    /// Do not verify the peer. An impostor can read everything that is sent.
    #[arg(long, group = "verification")]
    no_verify: bool,
    /// Server name to send to the peer (SNI).
    #[arg(long, value_name = "NAME")]
    sni: Option<String>,
    /// A name that the certificate must contain, or its pin; repeatable [default: names are not
    /// checked, because the certificates of a xapi pool have none].
    #[arg(
        long = "peer",
        value_name = "NAME|PIN",
        requires = "cert_bundle_file",
        conflicts_with = "no_verify"
    )]
    peers: Vec<String>,
    /// Directory with a certificate and key to present to the peer.
    #[arg(long, value_name = "DIR")]
    identity: Option<PathBuf>,
    #[command(flatten)]
    reading: Reading,
    /// TLS version. The receiver of a 1.3 socket cannot update its keys, so a peer's key update
    /// ends the connection.
    #[arg(long, value_parser = named(TLS), default_value = "1.2")]
    tls: TlsVersion,
    /// Number of connections; their sockets are passed together.
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u16).range(1..=64))]
    connections: u16,
    /// Time limit for the whole command.
    #[arg(long, value_name = "TIME", default_value = "25s", value_parser = parse_limit)]
    timeout: Duration,
    /// Print one JSON object per socket instead of a line for people.
    #[arg(long)]
    json: bool,
}

pub(super) const TLS: &[(&str, TlsVersion)] =
    &[("1.2", TlsVersion::V1_2), ("1.3", TlsVersion::V1_3)];

impl Connect {
    pub(crate) fn run(&self) -> Result<i32> {
        let deadline = Instant::now() + self.timeout;
        let to = self.caller()?;
        let (tls, warning) = self.tls()?;
        let mut handed = Vec::new();
        let what = format!("connecting to {} port {}", self.host, self.port);
        let waiting = Waiting::new(self.json, &what);
        for _ in 0..self.connections {
            handed.push(self.one(&tls, deadline)?);
        }
        drop(waiting);
        let mut out = io::stdout().lock();
        for (_, line) in &handed {
            writeln!(out, "{line}").context("cannot write to standard output")?;
        }
        // Flush before the socket is sent, because the receiver can terminate this process as soon
        // as it has the socket.
        out.flush().context("cannot write to standard output")?;
        log::warn(warning);
        let sockets: Vec<_> = handed.iter().map(|(socket, _)| socket.as_fd()).collect();
        pass::send_sockets(to, CARRIER, &sockets, deadline)
            .with_context(|| format!("cannot pass the socket to --send-fd {}", self.send_fd))?;
        Ok(code::DONE)
    }

    /// The caller's socket, which receives the connections.
    fn caller(&self) -> Result<OwnedFd> {
        let number = self.send_fd;
        let caller = fdpass::inherited(number)
            .with_context(|| format!("--send-fd {number} is not an open descriptor"))?;
        match fdpass::is_unix_socket(&caller) {
            Ok(true) => Ok(caller),
            _ => bail!(
                "--send-fd {number} is not a unix socket, so no descriptor can be passed over it"
            ),
        }
    }

    /// The settings of the handshake, and a warning about them.
    fn tls(&self) -> Result<(HandoffTls, Option<String>)> {
        let mut warning = None;
        let provider = fastest::auto().provider;
        let offer = Offer::new(self.tls, &self.ciphers, &self.curves, provider)?;
        let trust = match &self.cert_bundle_file {
            Some(path) => {
                let bundle = Bundle::load(path).context("cannot use --cert-bundle-file")?;
                if bundle.has_authority() && self.peers.is_empty() {
                    warning = Some(format!(
                        "any certificate of the authorities in {} is accepted; name the peer with \
                         --peer",
                        path.display()
                    ));
                }
                TrustPolicy::Bundle(Arc::new(bundle), allowed_peers(&self.peers)?)
            }
            None => TrustPolicy::AnyCertificate,
        };
        let identity = match &self.identity {
            Some(directory) => Some(load_identity(directory, Role::Source, &self.reading)?.0),
            None => None,
        };
        let tls = HandoffTls::new(offer, trust, self.sni.as_deref(), identity.as_ref())?;
        Ok((tls, warning))
    }

    /// Connects one socket, performs the handshake and moves TLS into the kernel. Returns the
    /// socket, and the line that describes it.
    fn one(&self, tls: &HandoffTls, deadline: Instant) -> Result<(OwnedFd, String)> {
        let cancel = DialCancel::new().context("cannot create a socket pair")?;
        let connected = connect::connect(&self.host, self.port, tls, deadline, &cancel)?;
        let info = connected.info.clone();
        let moved = connected.into_kernel(deadline, &Netlink)?;
        let line = match self.json {
            true => handed(&info, &moved.chosen).to_string(),
            false => format!("kTLS active: {} {}", info.version, info.cipher),
        };
        Ok((moved.stream.into(), line))
    }
}
