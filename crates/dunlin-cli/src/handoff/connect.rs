//! `dunlin handoff connect`: what a toolstack runs to get a socket with the kernel's TLS.
//!
//! Everything happens in this order, so that each failure is reported as what it is: arguments,
//! TCP, handshake with the peer's certificate, the kernel's TLS in both directions, one line on
//! standard output, the socket. What fails is one line on standard error and exit code 1, and no
//! socket is passed.

use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{ArgGroup, Args, ValueEnum};
use dunlin::lane::identity::Role;
use dunlin::lane::policy::{Bundle, HandoffTls, TrustPolicy};
use dunlin::lane::provider::{self, Offer, TlsVersion};
use dunlin_handoff::{connect, pass};
use dunlin_ipsec::inspect::Netlink;
use dunlin_linux::fdpass;

use super::line::HandedLine;
use crate::code;
use crate::identity::{Reading, allowed_peers, load_identity};
use crate::options::parse_limit;

/// The byte that carries the sockets; nobody looks at it.
const CARRIER: &[u8] = b"x";

#[derive(Debug, Args)]
#[command(args_override_self = true, group(ArgGroup::new("verification").required(true)))]
pub(crate) struct Connect {
    /// Name or address of the peer.
    #[arg(long)]
    host: String,
    /// Its port.
    #[arg(long)]
    port: u16,
    /// The number of a unix socket that the caller has left open: over it goes one byte with the
    /// socket attached.
    #[arg(long, value_name = "N")]
    send_fd: RawFd,
    /// What may be negotiated, in OpenSSL's words, best first: ECDHE-RSA-AES256-GCM-SHA384:...
    #[arg(long, value_name = "LIST")]
    ciphers: String,
    /// The same for the key exchange: secp384r1, P-256, X25519.
    #[arg(long, value_name = "LIST")]
    curves: String,
    /// Certificates to believe (PEM): authorities, and peers' own.
    #[arg(long, value_name = "FILE", group = "verification")]
    cert_bundle_file: Option<PathBuf>,
    /// Believe whoever answers. What is sent can be read by whoever that is.
    #[arg(long, group = "verification")]
    no_verify: bool,
    /// The name by which the peer chooses its certificate.
    #[arg(long, value_name = "NAME")]
    sni: Option<String>,
    /// A name that the certificate must bear, or its pin; repeatable. None is demanded otherwise:
    /// pool certificates have none.
    #[arg(
        long = "peer",
        value_name = "NAME|PIN",
        requires = "cert_bundle_file",
        conflicts_with = "no_verify"
    )]
    peers: Vec<String>,
    /// Directory with a certificate and key to show to the peer.
    #[arg(long, value_name = "DIR")]
    identity: Option<PathBuf>,
    #[command(flatten)]
    reading: Reading,
    /// The version of TLS. The keys of a 1.3 socket cannot be changed by who gets it, so a peer
    /// that changes its own ends the connection.
    #[arg(long, value_enum, default_value_t)]
    tls: Version,
    /// So many connections, whose sockets are passed together.
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u16).range(1..=64))]
    connections: u16,
    /// After so long it has failed.
    #[arg(long, value_name = "TIME", default_value = "25s", value_parser = parse_limit)]
    timeout: Duration,
    /// Print a JSON object for each socket instead of a line for people.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
pub(super) enum Version {
    #[default]
    #[value(name = "1.2")]
    V1_2,
    #[value(name = "1.3")]
    V1_3,
}

impl From<Version> for TlsVersion {
    fn from(version: Version) -> Self {
        match version {
            Version::V1_2 => Self::V1_2,
            Version::V1_3 => Self::V1_3,
        }
    }
}

impl Connect {
    pub(crate) fn run(&self) -> Result<i32> {
        let deadline = Instant::now() + self.timeout;
        let to = self.desk()?;
        let tls = self.tls()?;
        let mut handed = Vec::new();
        for _ in 0..self.connections {
            handed.push(self.one(&tls, deadline)?);
        }
        let mut out = io::stdout().lock();
        for (_, line) in &handed {
            match self.json {
                true => writeln!(out, "{}", serde_json::to_string(line)?),
                false => writeln!(out, "{line}"),
            }
            .context("standard output takes nothing")?;
        }
        // Before the socket goes: whoever has it may end this process.
        out.flush().context("standard output takes nothing")?;
        let sockets: Vec<_> = handed.iter().map(|(socket, _)| socket.as_fd()).collect();
        pass::give(to, CARRIER, &sockets, deadline).with_context(|| {
            format!("the socket cannot be passed to --send-fd {}", self.send_fd)
        })?;
        Ok(code::DONE)
    }

    /// Where the sockets go.
    fn desk(&self) -> Result<OwnedFd> {
        let number = self.send_fd;
        let desk = fdpass::inherited(number)
            .with_context(|| format!("--send-fd {number} is no descriptor that is open here"))?;
        match fdpass::is_unix_socket(&desk) {
            Ok(true) => Ok(desk),
            _ => bail!("--send-fd {number} is no unix socket, over which a descriptor could go"),
        }
    }

    fn tls(&self) -> Result<HandoffTls> {
        let provider = provider::auto().provider;
        let offer = Offer::new(self.tls.into(), &self.ciphers, &self.curves, provider)?;
        let trust = match &self.cert_bundle_file {
            Some(path) => {
                let bundle = Bundle::load(path).context("--cert-bundle-file cannot be used")?;
                TrustPolicy::Bundle(Arc::new(bundle), allowed_peers(&self.peers)?)
            }
            None => TrustPolicy::Anybody,
        };
        let identity = match &self.identity {
            Some(directory) => Some(load_identity(directory, Role::Source, &self.reading)?.0),
            None => None,
        };
        Ok(HandoffTls::new(
            offer,
            trust,
            self.sni.as_deref(),
            identity.as_ref(),
        )?)
    }

    /// A socket that can be used without TLS, and what is said about it.
    fn one(&self, tls: &HandoffTls, deadline: Instant) -> Result<(OwnedFd, HandedLine)> {
        let connected = connect::connect(&self.host, self.port, tls, deadline)?;
        let facts = connected.facts.clone();
        let handed = connected.into_kernel(deadline, &Netlink)?;
        let line = HandedLine::of(&facts, &handed.chosen);
        Ok((handed.stream.into(), line))
    }
}
