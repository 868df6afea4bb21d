//! `dunlin handoff accept`: serves one port, hands over some of its clients, and forwards or
//! rejects the others.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{ArgGroup, Args};
use dunlin::lane::fastest;
use dunlin::lane::identity::{Files, Identity, LoadOptions, Role};
use dunlin::lane::peers::Peers;
use dunlin::lane::policy::ServerTls;
use dunlin::lane::provider::{Offer, TlsVersion};
use dunlin_handoff::accept::{
    Acceptor, Backend, Event, HandoffName, Limits, Options, ProxyHeader, Target,
};
use dunlin_ipsec::inspect::Netlink;
use dunlin_linux::signals::{EndSignals, HangUps};
use tracing::field::display;
use tracing::{info, warn};

use super::connect::TLS;
use super::line::accepted;
use super::tally::Tally;
use crate::code::FAILED;
use crate::confine::ConfiningService;
use crate::identity::{Reading, allowed_peers, load_identity};
use crate::log::{self, Format, LogFlags, say};
use crate::options::{ControlPath, named, parse_limit};
use crate::output::put;
use crate::published::StatusSocket;
use crate::service::{Manager, ServiceEvent, drained, passed, serve, wait_for};
use crate::tunnel::{Port, parse_port, parse_server, socket_path};

/// Cipher suites for TLS 1.2, best first.
const CIPHERS: &str = "ECDHE-ECDSA-AES256-GCM-SHA384:ECDHE-RSA-AES256-GCM-SHA384:\
                       ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-RSA-AES128-GCM-SHA256";
/// Cipher suites for TLS 1.3, best first.
const CIPHERS_1_3: &str = "TLS_AES_256_GCM_SHA384:TLS_AES_128_GCM_SHA256";
const CURVES: &str = "X25519:secp384r1:secp256r1";

#[derive(Debug, Args)]
#[command(group(ArgGroup::new("certificate").required(true).args(["identity", "cert"])))]
pub(crate) struct Accept {
    /// Listen address for clients: 0.0.0.0:443, or systemd:NAME.
    #[arg(long, value_name = "ADDRESS:PORT", value_parser = parse_port)]
    listen: Port,
    /// Hand over the connections for this server name; repeatable.
    #[arg(long = "sni", value_name = "NAME", required = true, value_parser = parse_name)]
    names: Vec<String>,
    /// The unix socket that receives the connections, unix:PATH: one for all names, or one for each
    /// name in the same order.
    #[arg(long = "to", value_name = "unix:PATH", required = true, value_parser = parse_path)]
    to: Vec<PathBuf>,
    /// Server for clients that send another name or no name: tcp:HOST:PORT or unix:PATH [default:
    /// reject them].
    #[arg(long = "else", value_name = "TARGET", value_parser = parse_target)]
    other: Option<Target>,
    /// Send the forwarded client's address to the server in a PROXY protocol header.
    #[arg(long, value_name = "VERSION", requires = "other", value_parser = named(HEADERS))]
    proxy_protocol: Option<ProxyHeader>,
    /// Also forward clients that do not speak TLS.
    #[arg(long, requires = "other")]
    forward_plain: bool,
    /// Maximum number of forwarded clients; each takes two threads and eight files.
    #[arg(long, value_name = "N", default_value_t = Limits::default().forwarded as u16,
          value_parser = clap::value_parser!(u16).range(1..))]
    forwarded: u16,
    /// Directory with this host's certificate and key.
    #[arg(long, value_name = "DIR")]
    identity: Option<PathBuf>,
    /// Certificate file with its chain (PEM), instead of --identity.
    #[arg(long, value_name = "FILE", requires = "key")]
    cert: Option<PathBuf>,
    /// Key file of the certificate.
    #[arg(long, value_name = "FILE", requires = "cert")]
    key: Option<PathBuf>,
    #[command(flatten)]
    reading: Reading,
    /// Accept only clients with a certificate of this name or pin; repeatable.
    #[arg(long = "peer", value_name = "NAME|PIN")]
    peers: Vec<String>,
    /// Accept only clients with a certificate of the identity's authorities.
    #[arg(long, requires = "identity", conflicts_with = "cert")]
    verify_clients: bool,
    /// TLS version of the sockets that are handed over. The receiver of a 1.3 socket cannot update
    /// its keys, so a client's key update ends the connection.
    #[arg(long, value_parser = named(TLS), default_value = "1.2")]
    tls: TlsVersion,
    /// Cipher suites to negotiate, by OpenSSL name, best first [default: AES-GCM].
    #[arg(long, value_name = "LIST")]
    ciphers: Option<String>,
    /// Groups for the key exchange, best first.
    #[arg(long, value_name = "LIST", default_value = CURVES)]
    curves: String,
    /// Time limit for a client's handshake.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_limit)]
    timeout: Duration,
    /// Time limit for forwarded clients after SIGTERM.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_limit)]
    drain: Duration,
    /// Report the clients' results and the certificate's expiry in this directory, for `dunlin
    /// serve-status` [default: do not].
    #[arg(long, value_name = "DIR")]
    control: Option<PathBuf>,
    #[command(flatten)]
    confining: ConfiningService,
    #[command(flatten)]
    log: LogFlags,
}

const HEADERS: &[(&str, ProxyHeader)] = &[("v1", ProxyHeader::V1), ("v2", ProxyHeader::V2)];

impl Accept {
    pub(crate) fn run(&self) -> Result<i32> {
        self.log.start(Some(Format::Text));
        let sockets = passed()?;
        let (sender, events) = channel();
        let (ends, hang_ups) = (EndSignals::block()?, HangUps::block()?);
        let manager = Manager::find();
        let tally = Arc::new(Tally::default());
        let tls = self.tls(&tally)?;
        let listener = self.listen.open(&sockets, "--listen")?;
        // Close the sockets that systemd passed to this process. Otherwise the port would stay open
        // after the acceptor stops.
        drop(sockets);
        let published = self.control.as_ref().map(|_| {
            let control = self.control.clone();
            StatusSocket::bind(&ControlPath { control }, "handoff")
        });
        // Confine the process before it reads from a client and before it starts threads.
        let confined = self.confining.handoff()?;
        let (failed, counted) = (sender.clone(), Arc::clone(&tally));
        let observer = move |event: &Event| {
            log_event(event);
            counted.count(event);
            if matches!(event, Event::Failed(_)) {
                // An error only means that the process is ending.
                let _ = failed.send(ServiceEvent::Failed);
            }
        };
        let acceptor = Acceptor::start(listener, tls.clone(), self.options()?, observer)?;
        wait_for(sender, ends, hang_ups, || ())?;
        if let Some(published) = &published {
            let (tally, address) = (Arc::clone(&tally), acceptor.address().to_string());
            published.serve(move || tally.report(&address))?;
        }
        put(&format!("listening on {}", acceptor.address()));
        let text = confined.text().unwrap_or_default();
        text.lines().for_each(say);
        manager.ready(&format!("clients connect to {}", acceptor.address()));
        let ended = serve(events, &manager, "certificates", || {
            tls.replace(&self.tls(&tally)?);
            Ok(())
        });
        let Some(signal) = ended else {
            return Ok(FAILED);
        };
        say(&format!(
            "{}: no new clients; forwarded clients have {} s to end",
            signal.name(),
            self.drain.as_secs()
        ));
        Ok(drained(acceptor.drain(self.drain), "connection"))
    }

    fn options(&self) -> Result<Options> {
        let paths: Vec<_> = match &self.to[..] {
            [path] => vec![path; self.names.len()],
            paths if paths.len() == self.names.len() => paths.iter().collect(),
            paths => bail!(
                "give one --to for all names, or one for each: there are {} --sni and {} --to",
                self.names.len(),
                paths.len()
            ),
        };
        let of = |(name, to): (&String, &PathBuf)| HandoffName {
            name: name.clone(),
            to: to.clone(),
        };
        let header = self.proxy_protocol;
        Ok(Options {
            names: self.names.iter().zip(paths).map(of).collect(),
            backend: self.other.clone().map(|to| Backend { to, header }),
            forwards_plain: self.forward_plain,
            describe: Box::new(accepted),
            inspector: Box::new(Netlink),
            limits: Limits {
                handshake_timeout: self.timeout,
                forwarded: self.forwarded.into(),
                ..Limits::default()
            },
        })
    }

    /// Settings of the handshakes, from the current files. The tally gets the dates on which the
    /// certificates and revocation lists in these files expire.
    fn tls(&self, tally: &Tally) -> Result<ServerTls> {
        let ciphers = match self.tls {
            TlsVersion::V1_2 => CIPHERS,
            TlsVersion::V1_3 => CIPHERS_1_3,
        };
        let ciphers = self.ciphers.as_deref().unwrap_or(ciphers);
        let provider = fastest::auto().provider;
        let offer = Offer::new(self.tls, ciphers, &self.curves, provider)?;
        let (identity, warnings) = self.load()?;
        log::warn(warnings);
        let clients = match (self.peers.is_empty(), self.verify_clients) {
            (true, false) => None,
            (true, true) => Some(Peers::AnyFromAuthority),
            (false, _) => Some(allowed_peers(&self.peers)?),
        };
        let tls = identity.handoff_server(offer, clients);
        let tls = match self.cert {
            Some(_) if !self.peers.is_empty() => tls.context(
                "cannot check clients by --peer: a name in --peer needs the authorities of \
                 --identity; with --cert, specify a pin",
            )?,
            _ => tls?,
        };
        tally.loaded(identity.dates());
        Ok(tls)
    }

    fn load(&self) -> Result<(Identity, Vec<String>)> {
        if let Some(directory) = &self.identity {
            return load_identity(directory, Role::Destination, &self.reading);
        }
        let (Some(certificate), Some(key)) = (&self.cert, &self.key) else {
            bail!("--cert and --key must be given together");
        };
        let files = Files {
            certificate: certificate.clone(),
            key: key.clone(),
            authorities: None,
            revocations: None,
            denied: None,
        };
        let options = LoadOptions {
            role: Some(Role::Destination),
            ..LoadOptions::default()
        };
        let (identity, warnings) = Identity::load_files(files, options)
            .with_context(|| format!("cannot use {}", certificate.display()))?;
        Ok((identity, warnings.iter().map(ToString::to_string).collect()))
    }
}

/// Logs an event with its client, server name and fault code.
fn log_event(event: &Event) {
    let (peer, name) = match event {
        Event::HandedOver { arrived, .. } => (Some(arrived.info.at), Some(&arrived.name)),
        Event::Forwarded { from, name } | Event::Refused { from, name, .. } => {
            (Some(*from), name.as_ref())
        }
        _ => (None, None),
    };
    let peer = peer.map(display);
    match event {
        Event::HandedOver { .. } | Event::Forwarded { .. } => info!(peer, name, "{event}"),
        Event::Refused { refusal, .. } => {
            warn!(peer, name, fault = refusal.code().name(), "{event}");
        }
        _ => warn!(peer, name, "{event}"),
    }
}

/// A server name as in a ClientHello (RFC 6066, section 3).
fn parse_name(text: &str) -> Result<String, String> {
    let fits = (1..=255).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic());
    match fits {
        true => Ok(text.to_owned()),
        false => Err(format!(
            "invalid server name {text:?}: write it in ASCII, as clients send it"
        )),
    }
}

fn parse_path(text: &str) -> Result<PathBuf, String> {
    match text.strip_prefix("unix:") {
        Some(path) => socket_path(path),
        None => Err(format!("invalid unix socket {text:?}: write unix:PATH")),
    }
}

fn parse_target(text: &str) -> Result<Target, String> {
    parse_server(text, Target::Unix, Target::Tcp).unwrap_or_else(|| {
        Err(format!(
            "invalid server {text:?}: write tcp:HOST:PORT or unix:PATH"
        ))
    })
}
