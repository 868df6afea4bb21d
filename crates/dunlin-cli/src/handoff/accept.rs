//! `dunlin handoff accept`: one port for names that are handed over and for those of the server
//! behind.

use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::mpsc::channel;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use clap::{ArgGroup, Args, ValueEnum};
use dunlin::lane::identity::{Files, Identity, LoadOptions, Role};
use dunlin::lane::peers::Peers;
use dunlin::lane::policy::ServerTls;
use dunlin::lane::provider::{self, Offer};
use dunlin_handoff::accept::{Acceptor, Event, Limits, Options, Other, Own, ProxyHeader, Target};
use dunlin_ipsec::inspect::Netlink;
use dunlin_linux::signals::{EndSignals, HangUps};

use super::connect::Version;
use super::line::AcceptedLine;
use crate::code::{DONE, FAILED};
use crate::identity::{Reading, allowed_peers, load_identity};
use crate::log::say;
use crate::options::parse_limit;
use crate::service::{Manager, Told, cannot_listen, passed, wait_for};
use crate::text::chained;
use crate::tunnel::{Port, host_of, parse_port, socket_path};

/// What a client of TLS 1.2 may choose from, best first.
const CIPHERS: &str = "ECDHE-ECDSA-AES256-GCM-SHA384:ECDHE-RSA-AES256-GCM-SHA384:\
                       ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-RSA-AES128-GCM-SHA256";
/// The same in TLS 1.3.
const CIPHERS_1_3: &str = "TLS_AES_256_GCM_SHA384:TLS_AES_128_GCM_SHA256";
const CURVES: &str = "X25519:secp384r1:secp256r1";

#[derive(Debug, Args)]
#[command(group(ArgGroup::new("certificate").required(true).args(["identity", "cert"])))]
pub(crate) struct Accept {
    /// Where clients come in: 0.0.0.0:443, or systemd:NAME.
    #[arg(long, value_name = "ADDRESS:PORT", value_parser = parse_port)]
    listen: Port,
    /// A name whose connections are handed over; repeatable.
    #[arg(long = "sni", value_name = "NAME", required = true, value_parser = parse_name)]
    names: Vec<String>,
    /// The unix socket at which they are taken, unix:PATH: one for all names, or one for each, in
    /// their order.
    #[arg(long = "to", value_name = "unix:PATH", required = true, value_parser = parse_path)]
    to: Vec<PathBuf>,
    /// The server of all other names, and of clients without one: tcp:HOST:PORT or unix:PATH.
    /// Without it they are refused.
    #[arg(long = "else", value_name = "TARGET", value_parser = parse_target)]
    other: Option<Target>,
    /// Tell it where a client comes from, in front of what the client says.
    #[arg(long, value_name = "VERSION", requires = "other")]
    proxy_protocol: Option<Header>,
    /// Connect it with clients that do not speak TLS, too.
    #[arg(long, requires = "other")]
    forward_plain: bool,
    /// So many of its clients at most; each takes two threads and eight files.
    #[arg(long, value_name = "N", default_value_t = Limits::default().forwarded as u16,
          value_parser = clap::value_parser!(u16).range(1..))]
    forwarded: u16,
    /// Directory with this host's certificate and key.
    #[arg(long, value_name = "DIR")]
    identity: Option<PathBuf>,
    /// The certificate alone, with its chain (PEM).
    #[arg(long, value_name = "FILE", requires = "key")]
    cert: Option<PathBuf>,
    /// Its key.
    #[arg(long, value_name = "FILE", requires = "cert")]
    key: Option<PathBuf>,
    #[command(flatten)]
    reading: Reading,
    /// Let in only clients with a certificate of this name, or the pin of it; repeatable.
    #[arg(long = "peer", value_name = "NAME|PIN")]
    peers: Vec<String>,
    /// Let in only clients with a certificate of the identity's authorities.
    #[arg(long, requires = "identity", conflicts_with = "cert")]
    verify_clients: bool,
    /// The version of TLS of what is handed over. The keys of a 1.3 socket cannot be changed by
    /// who gets it, so a client that changes its own ends the connection.
    #[arg(long, value_enum, default_value_t)]
    tls: Version,
    /// What may be negotiated, in OpenSSL's words, best first [default: AES-GCM].
    #[arg(long, value_name = "LIST")]
    ciphers: Option<String>,
    /// The same for the key exchange.
    #[arg(long, value_name = "LIST", default_value = CURVES)]
    curves: String,
    /// How long a client may take for its handshake.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_limit)]
    timeout: Duration,
    /// How long forwarded clients may go on after SIGTERM.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_limit)]
    drain: Duration,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Header {
    V1,
    V2,
}

/// What the main thread waits for.
enum Heard {
    Told(Told),
    /// Nobody is accepted any more.
    Failed,
}

impl From<Told> for Heard {
    fn from(told: Told) -> Self {
        Self::Told(told)
    }
}

impl Accept {
    pub(crate) fn run(&self) -> Result<i32> {
        let sockets = passed()?;
        let (told, events) = channel();
        let (ends, hang_ups) = (EndSignals::block()?, HangUps::block()?);
        let manager = Manager::find();
        let tls = self.tls()?;
        let listener = match &self.listen {
            Port::At(address) => TcpListener::bind(address)
                .map_err(|error| cannot_listen(address, "--listen", &error))?,
            Port::Passed(name) => sockets
                .tcp(name)
                .map_err(|error| anyhow!("cannot listen on systemd:{name}: {error}"))?,
        };
        // It would keep the port open behind the last who is taken.
        drop(sockets);
        let failed = told.clone();
        let observer = move |event| {
            say(&format!("{event}"));
            if matches!(event, Event::Failed(_)) {
                // The main thread is there until the process ends.
                let _ = failed.send(Heard::Failed);
            }
        };
        let acceptor = Acceptor::start(listener, tls.clone(), self.options()?, observer)?;
        wait_for(told, ends, hang_ups)?;
        println!("listening on {}", acceptor.address());
        manager.ready(&format!("clients connect to {}", acceptor.address()));
        for event in events {
            match event {
                Heard::Failed => break,
                Heard::Told(Told::Again) => {
                    manager.reloading();
                    let how = match self.tls() {
                        Ok(fresh) => {
                            tls.replace(&fresh);
                            "the certificates were read anew".to_owned()
                        }
                        Err(error) => format!("everything stays as it was: {}", chained(&error)),
                    };
                    say(&how);
                    manager.ready(&how);
                }
                Heard::Told(Told::End(signal)) => {
                    manager.stopping();
                    say(&format!(
                        "{}: no more clients are taken, and those that are forwarded have {} s to end",
                        signal.name(),
                        self.drain.as_secs()
                    ));
                    return Ok(match acceptor.drain(self.drain) {
                        0 => DONE,
                        cut => {
                            say(&format!("{cut} connections were cut off"));
                            FAILED
                        }
                    });
                }
            }
        }
        Ok(FAILED)
    }

    fn options(&self) -> Result<Options> {
        let paths: Vec<_> = match &self.to[..] {
            [path] => vec![path; self.names.len()],
            paths if paths.len() == self.names.len() => paths.iter().collect(),
            paths => bail!(
                "{} names and {} times --to: give one --to for all names, or one for each",
                self.names.len(),
                paths.len()
            ),
        };
        let of = |(name, to): (&String, &PathBuf)| Own {
            name: name.clone(),
            to: to.clone(),
        };
        let header = self.proxy_protocol.map(|version| match version {
            Header::V1 => ProxyHeader::V1,
            Header::V2 => ProxyHeader::V2,
        });
        Ok(Options {
            names: self.names.iter().zip(paths).map(of).collect(),
            other: self.other.clone().map(|to| Other { to, header }),
            forwards_plain: self.forward_plain,
            describe: Box::new(|arrived| AcceptedLine::of(arrived).to_json()),
            inspector: Box::new(Netlink),
            limits: Limits {
                opening: self.timeout,
                forwarded: self.forwarded.into(),
                ..Limits::default()
            },
        })
    }

    /// What handshakes are made with, read from the files as they are now.
    fn tls(&self) -> Result<ServerTls> {
        let ciphers = match self.tls {
            Version::V1_2 => CIPHERS,
            Version::V1_3 => CIPHERS_1_3,
        };
        let ciphers = self.ciphers.as_deref().unwrap_or(ciphers);
        let provider = provider::auto().provider;
        let offer = Offer::new(self.tls.into(), ciphers, &self.curves, provider)?;
        let (identity, warnings) = self.load()?;
        for warning in warnings {
            say(&format!("warning: {warning}"));
        }
        let clients = match (self.peers.is_empty(), self.verify_clients) {
            (true, false) => None,
            (true, true) => Some(Peers::AnyFromAuthority),
            (false, _) => Some(allowed_peers(&self.peers)?),
        };
        let tls = identity.handoff_server(offer, clients);
        Ok(match self.cert {
            Some(_) if !self.peers.is_empty() => tls.context(
                "with --cert there are no authorities: --identity has some, and a pin needs none",
            )?,
            _ => tls?,
        })
    }

    fn load(&self) -> Result<(Identity, Vec<String>)> {
        if let Some(directory) = &self.identity {
            return load_identity(directory, Role::Destination, &self.reading);
        }
        let (Some(certificate), Some(key)) = (&self.cert, &self.key) else {
            bail!("--cert and --key are given together");
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
            .with_context(|| format!("{} cannot be used", certificate.display()))?;
        Ok((identity, warnings.iter().map(ToString::to_string).collect()))
    }
}

/// A name as a ClientHello can say it (RFC 6066, section 3).
fn parse_name(text: &str) -> Result<String, String> {
    let fits = (1..=255).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic());
    match fits {
        true => Ok(text.to_owned()),
        false => Err(format!(
            "{text:?} is no server's name: write it in ASCII, as clients send it"
        )),
    }
}

fn parse_path(text: &str) -> Result<PathBuf, String> {
    match text.strip_prefix("unix:") {
        Some(path) => socket_path(path),
        None => Err(format!("{text:?} is no unix socket: write unix:PATH")),
    }
}

fn parse_target(text: &str) -> Result<Target, String> {
    if let Some(path) = text.strip_prefix("unix:") {
        return socket_path(path).map(Target::Unix);
    }
    if let Some(to) = text.strip_prefix("tcp:") {
        host_of(to)?;
        return Ok(Target::Tcp(to.to_owned()));
    }
    Err(format!(
        "{text:?} is no server: write tcp:HOST:PORT or unix:PATH"
    ))
}
