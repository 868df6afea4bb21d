//! `dunlin ipsec serve` and `up`: the processes that keep IPsec sessions.

use dunlin_lane::sync::lock;
use std::collections::BTreeSet;
use std::io::{BufReader, Write};
use std::net::{IpAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use std::{mem, thread};

use anyhow::{Context, Result, anyhow};
use clap::Args;
use dunlin::lane::dial::DialCancel;
use dunlin::lane::peers::Peer as Allowed;
use dunlin::lane::resolve;
use dunlin_ipsec as ipsec;
use dunlin_ipsec::{
    self, AddressBlock, Event, Mode, Observer, Options, PortRange, Server, Session, Udp,
};
use dunlin_linux::signals::{EndSignal, EndSignals, HangUps};
use tracing::{error, warn};

use super::ModeName;
use super::advice::{log_event, with_advice};
use super::control_service::{Answer, Request, SessionLine, stay_blocked};
use crate::code::{CANCELLED, DONE, FAILED};
use crate::control::{self, Service, Socket};
use crate::fault::fault_name;
use crate::identity::{Accepting, Common, Reading, client_tls};
use crate::line::{FailedLine, Line};
use crate::log::{Format, LogFlags, say, warn};
use crate::options::{ControlPath, Cpus, ipsec_cpus, offload_advice, parse_limit};
use crate::published::StatusSocket;
use crate::service::{Manager, ServiceEvent, cannot_listen, serve, start, wait_for};
use crate::state::StatePath;
use crate::text::chained;

/// Default port of `serve`.
const PORT: u16 = 7302;
/// The first dynamic port (RFC 6335, section 6).
pub(super) const FIRST_SOURCE_PORT: u16 = 49_152;
/// Interval between checks of whether the sessions have ended.
const TICK: Duration = Duration::from_millis(200);

/// Flags of both `serve` and `up`.
#[derive(Debug, Args)]
struct Own {
    /// Directory of this host's certificate and key, as for `dunlin vm receive` and `migrate`.
    #[arg(long, value_name = "DIR")]
    identity: PathBuf,
    #[command(flatten)]
    reading: Reading,
    /// CPUs of this host that send, such as 0,2-3 [default: those on which this process may run].
    #[arg(long, value_name = "LIST")]
    cpus: Option<Cpus>,
    /// Maximum number of SAs for the packets that the peer sends.
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u16).range(1..=1024))]
    sas: u16,
    /// Time limit for the peer's answers.
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = parse_limit)]
    timeout: Duration,
    /// Age at which the keys for sending are renewed.
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = parse_limit)]
    rekey_after: Duration,
    /// At the end of a session, how long to wait for the connections on its ports to end. After
    /// that the ports stay blocked until `dunlin ipsec clean`.
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = parse_limit)]
    quiet_wait: Duration,
    #[command(flatten)]
    control: ControlPath,
    #[command(flatten)]
    state: StatePath,
    #[command(flatten)]
    log: LogFlags,
}

impl Own {
    fn common(&self, peers: Vec<String>) -> Common {
        Common::new(&self.identity, peers, &self.reading)
    }

    fn options(&self, mode: Mode, ports: PortRange, udp: Option<u16>) -> Result<Options> {
        let mut options = Options::new(mode, ports, self.state.ipsec_records()?);
        options.cpus = ipsec_cpus(self.cpus.as_ref())?;
        options.sas_max = self.sas;
        options.timeout = self.timeout;
        options.rekey_after = Some(self.rekey_after);
        options.quiet_wait = self.quiet_wait;
        options.udp = udp.map(|listener| Udp {
            listener,
            first_source: FIRST_SOURCE_PORT,
        });
        Ok(options)
    }
}

/// The record files of sessions of this process that ended and left their ports blocked.
#[derive(Clone, Debug, Default)]
struct Blocked(Arc<Mutex<BTreeSet<PathBuf>>>);

impl Blocked {
    fn observer(&self) -> Observer {
        let blocked = self.clone();
        Arc::new(move |event: &Event| {
            if let Event::Left { record, .. } = event {
                lock(&blocked.0).insert(record.clone());
            }
            log_event(event);
        })
    }

    /// Records that still exist, because no later session took them over and `ipsec clean` did not
    /// remove them.
    fn records(&self) -> Vec<String> {
        let records = lock(&self.0);
        let remaining = records.iter().filter(|record| record.exists());
        remaining
            .map(|record| record.display().to_string())
            .collect()
    }

    /// Warns of blocked ports after the end of all sessions, and returns the exit code.
    fn code(&self) -> i32 {
        let records = self.records();
        if records.is_empty() {
            return DONE;
        }
        warn([stay_blocked(&records)]);
        FAILED
    }
}

/// Accept sessions.
#[derive(Debug, Args)]
pub(crate) struct Serve {
    /// Address to listen on for peers, such as 0.0.0.0:7302.
    #[arg(long, value_name = "ADDR", default_value_t = format!("[::]:{PORT}"))]
    listen: String,
    /// Ports that peers may protect.
    #[arg(long, value_name = "A-B")]
    ports: PortRange,
    /// Accept ESP in UDP at this port from peers that ask for it.
    #[arg(long, value_name = "PORT")]
    udp: Option<u16>,
    /// A name that a peer's certificate must contain, or its pin, and optionally the addresses from
    /// which this peer may connect: host-a.example=192.0.2.1,2001:db8::/64; repeatable [default:
    /// any certificate of the authority].
    #[arg(long = "peer", value_name = "NAME|PIN[=ADDR,…]")]
    peers: Vec<BoundPeer>,
    #[command(flatten)]
    own: Own,
}

/// A peer, and the addresses from which it may connect.
#[derive(Clone, Debug)]
struct BoundPeer {
    /// The name or pin as given on the command line.
    name: String,
    peer: Allowed,
    addresses: Vec<AddressBlock>,
}

impl FromStr for BoundPeer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // Names and pins contain no equals sign, so the addresses follow the first equals sign.
        let (peer, addresses) = match text.split_once('=') {
            Some((peer, addresses)) => (peer, Some(addresses)),
            None => (text, None),
        };
        let name = peer.to_owned();
        let peer = peer.parse().map_err(|error| format!("{error}"))?;
        let addresses = addresses.into_iter().flat_map(|all| all.split(','));
        let addresses = addresses.map(|one| one.parse().map_err(|error| format!("{error}")));
        Ok(Self {
            name,
            peer,
            addresses: addresses.collect::<Result<_, String>>()?,
        })
    }
}

impl Serve {
    pub(crate) fn run(&self) -> Result<i32> {
        self.own.log.start(Some(Format::Text));
        let (ends, hang_ups) = (EndSignals::block()?, HangUps::block()?);
        let names = self.peers.iter().map(|one| one.name.clone()).collect();
        let common = self.own.common(names);
        let (accepting, warnings) = Accepting::load(&common)?;
        let accepting = Arc::new(accepting);
        warn(warnings.into_iter().chain(offload_advice()));
        let mut options = self.own.options(Mode::Cpu, self.ports, self.udp)?;
        let bound = self.peers.iter().filter(|one| !one.addresses.is_empty());
        let bound = bound.map(|one| (one.peer.clone(), one.addresses.clone()));
        options.bound = bound.collect();
        let listener = TcpListener::bind(&self.listen)
            .map_err(|error| cannot_listen(&self.listen, "--listen", &error))?;
        let socket = Socket::bind(&self.own.control.ipsec("serve")?, "an IPsec server")?;
        let blocked = Blocked::default();
        let server = Server::start(listener, accepting.tls.clone(), options, blocked.observer())?;
        println!("listening on {}", server.address());
        let manager = Manager::find();
        manager.ready(&format!("peers connect to {}", server.address()));
        let (sender, events) = channel::<ServiceEvent>();
        wait_for(sender.clone(), ends, hang_ups, || ())?;
        let sessions = Sessions::Server(server);
        let held = Held::serve(&socket, "serve", sessions, blocked.clone(), sender)?;
        let identity = Some(Arc::clone(&accepting));
        let published = held.publish(&self.own.control, identity)?;
        let signal = serve(events, &manager, "certificate", || {
            let (until, warnings) = accepting.reload()?;
            say(&format!("the new certificate is valid until {until}"));
            warn(warnings);
            Ok(())
        });
        if let Some(signal) = signal {
            say(&format!("{}: ending all sessions", signal.name()));
        }
        held.end()?;
        drop(published);
        control::drain();
        Ok(blocked.code())
    }
}

/// Protect ports.
#[derive(Debug, Args)]
pub(crate) struct Up {
    /// The other host, and the port of its `serve` if that is not 7302. Its certificate must
    /// contain this name unless --name is given.
    #[arg(long, value_name = "HOST[:PORT]")]
    peer: String,
    /// Ports to protect. A connection is protected if its source or destination port is in this
    /// range.
    #[arg(long, value_name = "A-B")]
    ports: PortRange,
    /// How traffic is spread over SAs.
    #[arg(long, value_enum, default_value_t)]
    mode: ModeName,
    /// Encapsulate ESP in UDP, received at this port of this host.
    #[arg(long, value_name = "PORT")]
    udp: Option<u16>,
    /// A name that the peer's certificate must contain, or its pin; repeatable.
    #[arg(long = "name", value_name = "NAME|PIN")]
    names: Vec<String>,
    #[command(flatten)]
    own: Own,
}

impl Up {
    pub(crate) fn run(&self) -> Result<i32> {
        self.own.log.start(Some(Format::Text));
        let (ends, hang_ups) = (EndSignals::block()?, HangUps::block()?);
        let to = with_port(&self.peer);
        let common = self.own.common(self.names.clone());
        let (tls, warnings) = client_tls(&common, &to)?;
        warn(warnings.into_iter().chain(offload_advice()));
        let options = self.own.options(self.mode.into(), self.ports, self.udp)?;
        let socket = Socket::bind(&self.own.control.ipsec(&self.peer)?, "a keying session")?;
        let cancel = DialCancel::new().context("cannot create a socket pair")?;
        let (sender, events) = channel::<ServiceEvent>();
        let own = cancel.clone();
        wait_for(sender.clone(), ends, hang_ups, move || own.cancel())?;
        let addresses = addresses_of(&to, self.own.timeout, &cancel);
        warn_of_addresses(&self.peer, &addresses);
        let blocked = Blocked::default();
        let session = ipsec::up(&to, &tls, &options, &blocked.observer(), &cancel);
        if let Err(ipsec::IpsecError::Ended) = &session
            && let Some(signal) = next_signal(events.try_iter())
        {
            let name = signal.name();
            say(&format!(
                "{name}: connections to {to} on ports {} are not protected",
                self.ports
            ));
            return Ok(CANCELLED);
        }
        let session = session.map_err(with_advice).with_context(|| {
            format!(
                "connections to {to} on ports {} are not protected",
                self.ports
            )
        })?;
        println!("up");
        let manager = Manager::find();
        manager.ready(&format!("ports {} to {to} are protected", self.ports));
        let sessions = Sessions::One(self.peer.clone(), session);
        let held = Held::serve(&socket, &self.peer, sessions, blocked.clone(), sender)?;
        let published = held.publish(&self.own.control, None)?;
        let signal = next_signal(events.iter());
        if let Some(signal) = signal {
            manager.stopping();
            say(&format!("{}: ending the session", signal.name()));
        }
        let ended = held.end();
        drop(published);
        control::drain();
        match ended {
            Err(error) if signal.is_none() => Err(anyhow!(error).context("the session ended")),
            Err(error) => {
                let error = anyhow!(error);
                error!(fault = fault_name(&error), "{}", chained(&error));
                Ok(FAILED)
            }
            Ok(()) => Ok(blocked.code()),
        }
    }
}

/// The next signal that ends the process; reloads are ignored. `None` if no such signal is pending
/// or the session ends first.
fn next_signal(mut events: impl Iterator<Item = ServiceEvent>) -> Option<EndSignal> {
    match events.find(|event| !matches!(event, ServiceEvent::Reload)) {
        Some(ServiceEvent::End(signal)) => Some(signal),
        _ => None,
    }
}

/// Remove the SAs, policies and records that dead processes left.
#[derive(Debug, Args)]
pub(crate) struct Clean {
    #[command(flatten)]
    state: StatePath,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl Clean {
    pub(crate) fn run(&self) -> Result<i32> {
        let any = PortRange::new(1, u16::MAX).context("invalid port range 1-65535")?;
        let options = Options::new(Mode::Cpu, any, self.state.ipsec_records()?);
        ipsec::clean_up(&options, &Blocked::default().observer())?;
        if self.json {
            Line::Done.print();
        }
        Ok(DONE)
    }
}

/// Warns about a peer with several addresses.
fn warn_of_addresses(peer: &str, addresses: &BTreeSet<IpAddr>) {
    if addresses.len() > 1 {
        let all: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        warn([format!(
            "{peer} has several addresses ({}), of which only one will be protected: give one \
             address to --peer and to the programs that connect, and the name to --name",
            all.join(", ")
        )]);
    }
}

/// The addresses of a name; empty if the name does not resolve. `ipsec::up` reports that error.
fn addresses_of(to: &str, limit: Duration, cancel: &DialCancel) -> BTreeSet<IpAddr> {
    let all = resolve::endpoint(to, Instant::now() + limit, cancel.wakeup());
    let all = all.into_iter().flatten();
    all.map(|address| address.ip().to_canonical()).collect()
}

fn with_port(peer: &str) -> String {
    // An IPv6 address contains colons, so a port can follow only an address in brackets.
    let bracketed = peer.starts_with('[');
    let has_port = match peer.rsplit_once(':') {
        Some((host, port)) => {
            port.parse::<u16>().is_ok()
                && (host.ends_with(']') || !host.contains(':') && !bracketed)
        }
        None => false,
    };
    match peer.parse::<std::net::Ipv6Addr>() {
        _ if has_port => peer.to_owned(),
        Ok(address) => format!("[{address}]:{PORT}"),
        Err(_) => format!("{peer}:{PORT}"),
    }
}

/// The sessions of a process.
enum Sessions {
    Server(Server),
    /// A session, and its peer as given on the command line.
    One(String, Session),
    /// The sessions have ended, or a thread is ending them.
    Over,
}

impl Sessions {
    fn lines(&self) -> Result<Vec<SessionLine>> {
        let line = |peer: ipsec::Peer| SessionLine::new(peer.name, peer.status.as_ref());
        Ok(match self {
            Self::Server(server) => server.peers()?.into_iter().map(line).collect(),
            Self::One(peer, one) => vec![SessionLine::new(peer.clone(), one.status()?.as_ref())],
            Self::Over => Vec::new(),
        })
    }

    fn rekey(&self) {
        match self {
            Self::Server(server) => server.rekey(),
            Self::One(_, session) => session.rekey(),
            Self::Over => {}
        }
    }

    /// Ends the sessions. Returns when their connections have ended, or the wait for them has timed
    /// out.
    fn end(self) -> Result<(), ipsec::IpsecError> {
        match self {
            Self::Server(server) => {
                server.stop();
                Ok(())
            }
            Self::One(_, session) => {
                session.end();
                session.wait()
            }
            Self::Over => Ok(()),
        }
    }

    fn is_over(&self) -> bool {
        matches!(self, Self::One(_, session) if session.is_over()) || matches!(self, Self::Over)
    }
}

/// The sessions of a process, with what its control socket needs to answer requests.
struct Held {
    name: String,
    sessions: Mutex<Sessions>,
    /// Locked by the thread that ends the sessions, until their connections have ended. This lock
    /// is separate from `sessions`, so that status requests are answered during that time.
    ending: Mutex<()>,
    blocked: Blocked,
}

impl Held {
    /// Starts to serve `socket`. Sends [`ServiceEvent::Failed`] to `over` when the sessions have
    /// ended or a request ends them.
    fn serve(
        socket: &Socket,
        name: &str,
        sessions: Sessions,
        blocked: Blocked,
        over: Sender<ServiceEvent>,
    ) -> Result<Arc<Self>> {
        let held = Arc::new(Self {
            name: name.to_owned(),
            sessions: Mutex::new(sessions),
            ending: Mutex::new(()),
            blocked,
        });
        socket.serve(&held)?;
        let watched = Arc::clone(&held);
        start("dunlin-ipsec-ends", move || {
            while !lock(&watched.sessions).is_over() {
                thread::sleep(TICK);
            }
            // An error only means that the process is ending.
            let _ = over.send(ServiceEvent::Failed);
        })?;
        Ok(held)
    }

    /// Serves the status socket of this process until the result is dropped. A process that accepts
    /// peers gives its `identity`. The status then contains the dates on which the certificates and
    /// revocation lists of the identity expire.
    fn publish(
        self: &Arc<Self>,
        control: &ControlPath,
        identity: Option<Arc<Accepting>>,
    ) -> Result<StatusSocket> {
        let published = StatusSocket::bind(control, "ipsec");
        let held = Arc::clone(self);
        published.serve(move || {
            let certificates = identity.as_ref().map(|identity| identity.expiry());
            let answer = Answer {
                certificates: certificates.unwrap_or_default(),
                ..held.answer()
            };
            // This cannot fail, because JSON can represent every field of `Answer`.
            serde_json::to_string(&answer).unwrap_or_default()
        })?;
        Ok(published)
    }

    fn answer(&self) -> Answer {
        let sessions = lock(&self.sessions).lines();
        Answer {
            name: self.name.clone(),
            pid: std::process::id(),
            failed: sessions.as_ref().err().map(chained),
            sessions: sessions.unwrap_or_default(),
            certificates: Vec::new(),
            blocked: self.blocked.records(),
        }
    }

    /// Ends the sessions, or waits for a thread that is already ending them.
    fn end(&self) -> Result<(), ipsec::IpsecError> {
        let _ending = lock(&self.ending);
        let taken = mem::replace(&mut *lock(&self.sessions), Sessions::Over);
        taken.end()
    }
}

impl Service for Held {
    type Request = Request;

    fn handle(
        self: &Arc<Self>,
        request: Request,
        _: BufReader<UnixStream>,
        mut connection: &UnixStream,
    ) -> Result<()> {
        match request {
            Request::Status => {}
            Request::Rekey => lock(&self.sessions).rekey(),
            Request::Down => {
                if let Err(error) = self.end() {
                    let error = anyhow!(error);
                    warn!(fault = fault_name(&error), "{}", chained(&error));
                }
            }
        }
        writeln!(connection, "{}", serde_json::to_string(&self.answer())?)?;
        Ok(())
    }

    fn refused(&self, error: &anyhow::Error) -> FailedLine {
        let why = chained(error);
        warn!(fault = fault_name(error), "cannot answer a request: {why}");
        error.into()
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Debug;

    use tracing::field::{Field, Visit};
    use tracing::{Event, Level, Subscriber};
    use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
    use tracing_subscriber::registry::Registry;

    use super::*;

    /// Level and fault code of a log line.
    type LogLine = (Level, Option<String>);

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<LogLine>>>);

    impl<S: Subscriber> Layer<S> for Lines {
        fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
            let mut fault = Fault(None);
            event.record(&mut fault);
            lock(&self.0).push((*event.metadata().level(), fault.0));
        }
    }

    struct Fault(Option<String>);

    impl Visit for Fault {
        fn record_str(&mut self, field: &Field, value: &str) {
            if field.name() == "fault" {
                self.0 = Some(value.to_owned());
            }
        }

        fn record_debug(&mut self, _: &Field, _: &dyn Debug) {}
    }

    #[test]
    fn failures_are_logged_as_warnings_with_their_fault_code() {
        let held = Arc::new(Held {
            name: "serve".to_owned(),
            sessions: Mutex::new(Sessions::Over),
            ending: Mutex::new(()),
            blocked: Blocked::default(),
        });
        let error = || anyhow!(ipsec::IpsecError::NoPerCpu).context("of this request");
        let lines = Lines::default();
        let log = Registry::default().with(lines.clone());
        tracing::subscriber::with_default(log, || {
            held.refused(&error());
            let mut reloads = [error(), anyhow!("no such file")].into_iter();
            let (sender, events) = channel();
            for _ in 0..reloads.len() {
                sender.send(ServiceEvent::Reload).expect("a receiver");
            }
            drop(sender);
            serve(events, &Manager::find(), "certificate", || {
                reloads.next().map_or(Ok(()), Err)
            });
        });
        let fault = Some("feature-missing".to_owned());
        let expected = [fault.clone(), fault, None].map(|fault| (Level::WARN, fault));
        assert_eq!(*lock(&lines.0), expected);
    }

    #[test]
    fn a_peer_is_bound_to_the_addresses_after_its_name() {
        let bound = |text: &str| {
            let one: BoundPeer = text.parse().expect("a peer");
            let addresses: Vec<String> = one.addresses.iter().map(ToString::to_string).collect();
            (one.name, addresses.join(" "))
        };
        assert_eq!(bound("host-a"), ("host-a".to_owned(), String::new()));
        assert_eq!(
            bound("host-a=192.0.2.1,2001:db8::/64"),
            ("host-a".to_owned(), "192.0.2.1/32 2001:db8::/64".to_owned())
        );
        for wrong in ["host-a=", "host-a=b", "=192.0.2.1", "host-a=192.0.2.1,"] {
            assert!(wrong.parse::<BoundPeer>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn an_address_resolves_to_itself() {
        for (to, one) in [
            ("192.0.2.1:7302", "192.0.2.1"),
            ("[2001:db8::1]:9", "2001:db8::1"),
        ] {
            let one = one.parse().expect("an address");
            let cancel = DialCancel::new().expect("an eventfd");
            let addresses = addresses_of(to, Duration::from_secs(10), &cancel);
            assert_eq!(addresses, BTreeSet::from([one]));
        }
    }

    #[test]
    fn a_peer_has_its_port_or_the_default() {
        for (peer, to) in [
            ("host-b", "host-b:7302"),
            ("host-b:9", "host-b:9"),
            ("192.0.2.1", "192.0.2.1:7302"),
            ("2001:db8::1", "[2001:db8::1]:7302"),
            ("[2001:db8::1]", "[2001:db8::1]:7302"),
            ("[2001:db8::1]:9", "[2001:db8::1]:9"),
        ] {
            assert_eq!(with_port(peer), to);
        }
    }
}
