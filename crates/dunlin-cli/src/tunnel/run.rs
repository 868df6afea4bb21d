//! `dunlin tunnel run`: the tunnel as a service.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use dunlin::lane::identity::{IdentityError, IdentityErrorKind, Role};
use dunlin::lane::security::SealedLanes;
use dunlin_ipsec::lanes::IpsecLanes;
use dunlin_ipsec::{Observer, Options};
use dunlin_linux::affinity::keep_to;
use dunlin_linux::signals::{EndSignals, HangUps};
use dunlin_proto::fault::FaultCode;
use dunlin_tunnel::{Event, Identities, Tunnel};
use tracing::{info, warn};

use super::config::table::Port;
use super::config::{Config, Ipsec};
use super::control_service::{ControlService, name_of};
use super::redirected;
use super::report::Reporter;
use super::rules::Rules;
use crate::code::FAILED;
use crate::confine::{self, ConfiningService, Needs};
use crate::control::Socket;
use crate::identity::{chosen, crypto, load_identity};
use crate::ipsec::advice;
use crate::line::Line;
use crate::log::{self, Format, LogFlags, say};
use crate::options::{ControlPath, Cpus, ipsec_cpus, offload_advice};
use crate::published::StatusSocket;
use crate::service::{Manager, ServiceEvent, drained, passed, serve, wait_for};
use crate::state::StatePath;
use crate::text::{chained, clean};

#[derive(Debug, Args)]
pub(crate) struct Run {
    /// The configuration, a TOML file; see docs/reference/config.md.
    #[arg(long, value_name = "FILE", default_value = "/etc/dunlin/tunnel.toml")]
    config: PathBuf,
    /// Run only on these CPUs, such as 0,2-3.
    #[arg(long, value_name = "LIST")]
    cpus: Option<Cpus>,
    /// With [redirect.NAME]: the directory in which `dunlin redirect watch` writes what it finds.
    #[arg(long, value_name = "DIR", default_value = "/run/dunlin-redirect")]
    redirect_state: PathBuf,
    #[command(flatten)]
    control: ControlPath,
    #[command(flatten)]
    state: StatePath,
    #[command(flatten)]
    confining: ConfiningService,
    #[command(flatten)]
    log: LogFlags,
}

impl Run {
    pub(crate) fn run(&self) -> Result<i32> {
        self.log.start(Some(Format::Text));
        let passed = passed()?;
        if let Some(Cpus(cpus)) = &self.cpus {
            // Set the CPU affinity before other threads start, because they inherit it.
            keep_to(cpus).map_err(|error| {
                anyhow!("cannot run on CPUs {cpus:?}: {error}; `nproc` prints the number of available CPUs")
            })?;
        }
        let (sender, events) = channel::<ServiceEvent>();
        let (ends, hang_ups) = (EndSignals::block()?, HangUps::block()?);
        let manager = Manager::find();
        let (config, identities) = read(&self.config)?;
        let listen = config.listen.as_ref();
        let listener = listen.map(|listen| listen.open(&passed, "listen in the configuration"));
        let listener = listener.transpose()?;
        let observer = |event: &Event| log_event(event);
        let socket = self.control_socket()?;
        let published = socket
            .as_ref()
            .map(|_| StatusSocket::bind(&self.control, "tunnel"));
        let rules = Rules::in_directory(&self.redirect_state);
        let has_rules = !config.redirects.is_empty();
        let reporter = Reporter::new(&identities, has_rules, rules.clone())?;
        // Confine the process before it starts threads, because existing threads would stay
        // unconfined.
        let control = socket
            .as_ref()
            .map(|socket| Needs::directory_of(&socket.path));
        let mut sockets: Vec<_> = config.routes.sockets().map(Needs::directory_of).collect();
        // `tunnel open` creates its sockets beneath the control directory, unless the request gives
        // a path.
        sockets.extend(socket.as_ref().and_then(|_| self.control.directory()));
        let owners: Vec<_> = config.routes.access_of_sockets().copied().collect();
        let confined =
            self.confining
                .tunnel(unconfined(&config), control.as_deref(), &sockets, &owners)?;
        let sealed = match &config.ipsec {
            Some(ipsec) => Some(self.ipsec_lanes(ipsec)?),
            None => None,
        };
        let tunnel = Tunnel::builder(listener, identities, &config.routes)
            .limits(config.limits)
            .sockets(passed)
            .sealed(sealed.map(|lanes| Arc::new(lanes) as Arc<dyn SealedLanes>))
            .observer(observer)
            .report(reporter.answers())
            .start()?;
        let tunnel = Arc::new(tunnel);
        rules.clone().log_changes(&tunnel)?;
        let service = match &socket {
            Some(socket) => Some(ControlService::serve(
                &tunnel,
                &name_of(&self.config)?,
                socket,
                rules,
            )?),
            None => None,
        };
        if let (Some(published), Some(service)) = (&published, &service) {
            let service = Arc::clone(service);
            published.serve(move || service.report())?;
        }
        let address = tunnel.address().map(|address| address.to_string());
        match &address {
            Some(address) => println!("listening on {address}"),
            None => println!("not listening for peers: this tunnel only connects to them"),
        }
        for (route, listen) in tunnel.entrances() {
            println!("route {} listens on {listen}", clean(&route));
        }
        for (route, address) in tunnel.relay_ports() {
            println!("route {} accepts TLS clients on {address}", clean(&route));
        }
        let text = confined.text().unwrap_or_default();
        text.lines().for_each(say);
        let address = address.as_deref().unwrap_or("no address");
        manager.ready(&format!("peers connect to {address}"));
        let mut drain = config.drain;
        wait_for(sender, ends, hang_ups, || ())?;
        let ended = serve(events, &manager, "configuration", || {
            drain = reload(&self.config, &tunnel, &confined, &reporter)?;
            Ok(())
        });
        let Some(signal) = ended else {
            return Ok(FAILED);
        };
        say(&format!(
            "{}: no new connections; channels have {} s to end",
            signal.name(),
            drain.as_secs()
        ));
        let code = drained(tunnel.drain(drain), "channel");
        drop(tunnel);
        if let Some(service) = service {
            service.drain();
        }
        Ok(code)
    }

    /// Binds the control socket. If that fails and `--control` was not given, the tunnel runs
    /// without a control socket.
    fn control_socket(&self) -> Result<Option<Socket>> {
        let bound = name_of(&self.config)
            .and_then(|name| Socket::bind(&self.control.tunnel(&name), "a tunnel"));
        match bound {
            Ok(socket) => Ok(Some(socket)),
            Err(error) if self.control.control.is_some() => Err(error),
            Err(error) => {
                let why = chained(&error);
                log::warn([format!(
                    "{why}; `dunlin status` and `tunnel open` cannot find this tunnel"
                )]);
                Ok(None)
            }
        }
    }

    /// The dialer and acceptor of lanes over IPsec.
    fn ipsec_lanes(&self, ipsec: &Ipsec) -> Result<IpsecLanes> {
        log::warn(offload_advice());
        let records = self.state.ipsec_records()?;
        let mut options = Options::new(ipsec.mode, ipsec.ports, records);
        options.rekey_after = Some(ipsec.rekey_after);
        options.cpus = ipsec_cpus(ipsec.cpus.as_ref())?;
        let observer: Observer = Arc::new(|event: &dunlin_ipsec::Event| advice::log_event(event));
        IpsecLanes::new(options, observer).context("cannot use IPsec for lanes")
    }
}

/// Logs an event with its route, channel, peer, lane and fault code.
fn log_event(event: &Event) {
    let (mut route, mut channel, mut peer, mut lane) = (None, None, None, None);
    let mut host_answers = None;
    match event {
        Event::Opened(id)
        | Event::Closed(id)
        | Event::LeftUnread { id, .. }
        | Event::Aborted { id, .. } => {
            (route, channel, peer) = (Some(&id.route), Some(id.channel), Some(&id.peer));
        }
        Event::Refused { route: on, .. }
        | Event::ListenerLost { route: on, .. }
        | Event::ListenerRestored { route: on, .. } => route = Some(on),
        Event::LaneLost {
            lane: of, peer: to, ..
        } => (lane, peer) = (Some(of), Some(to)),
        Event::TrunkUp { peer: to, .. }
        | Event::TrunkFailed { to, .. }
        | Event::TrunkEnded { peer: to, .. }
        | Event::ControlLost { peer: to, .. }
        | Event::ControlResumed { peer: to }
        | Event::Rejected { from: to, .. } => peer = Some(to),
        Event::PeerSilent {
            peer: to,
            host_answers: answers,
            ..
        } => (peer, host_answers) = (Some(to), Some(*answers)),
        _ => {}
    }
    let fault = event.fault().map(FaultCode::name);
    match event {
        Event::TrunkUp { .. }
        | Event::TrunkEnded { .. }
        | Event::ControlResumed { .. }
        | Event::Opened(_)
        | Event::Closed(_)
        | Event::LeftUnread { .. }
        | Event::ListenerRestored { .. } => info!(route, channel, peer, lane, "{event}"),
        _ => warn!(route, channel, peer, lane, fault, host_answers, "{event}"),
    }
}

/// Why a tunnel with this configuration cannot be confined, and the remedy; `None` if it can.
fn unconfined(config: &Config) -> Option<(&'static str, &'static str)> {
    if config.starts_programs {
        return Some((
            "routes with exec start programs, but a confined tunnel cannot start any",
            "run those routes in a separate tunnel",
        ));
    }
    config.ipsec.as_ref().map(|_| {
        (
            "a confined tunnel gives up the privileges that lanes over IPsec need",
            "remove [ipsec]",
        )
    })
}

/// Reloads the configuration; returns the new drain limit.
fn reload(file: &Path, tunnel: &Tunnel, confined: &Line, reporter: &Reporter) -> Result<Duration> {
    let (config, identities) = read(file)?;
    if confine::is_confined(confined)
        && let Some((text, to_do)) = unconfined(&config)
    {
        bail!(
            "this tunnel is confined (at fault: configuration): {text}; {to_do}, or restart the \
             tunnel"
        );
    }
    for access in config.routes.access_of_sockets() {
        confine::allows_owner(access)?;
    }
    let is_new = match (&config.listen, tunnel.address()) {
        (Some(Port::At(at)), address) => at.port() != 0 && Some(*at) != address,
        (listen, address) => listen.is_some() != address.is_some(),
    };
    if is_new {
        say("the address for peers changes only when the tunnel is restarted");
    }
    tunnel.replace(identities.clone(), &config.routes)?;
    reporter.renew(&identities, !config.redirects.is_empty());
    Ok(config.drain)
}

/// Reads a configuration and its certificates.
pub(super) fn read(file: &Path) -> Result<(Config, Identities)> {
    let text = std::fs::read_to_string(file)
        .with_context(|| format!("cannot read the configuration {}", file.display()))?;
    let mut config = Config::parse(file, &text)?;
    config.routes = redirected::routes(&config)?;
    let load = |role| {
        let (identity, warnings) = load_identity(&config.identity, role, &config.reading)?;
        Ok::<_, anyhow::Error>((Arc::new(identity), warnings))
    };
    // With IPsec, each side opens lanes and accepts lanes.
    let (routes, opens) = (&config.routes, config.ipsec.is_some());
    let connects = opens || Identities::connects(routes);
    let accepts = opens || Identities::accepts(routes);
    let ((connecting, warnings), (accepting, more)) =
        match (load(Role::Source), load(Role::Destination)) {
            (Ok(own), Err(error)) if !accepts && is_missing(&error) => (own.clone(), own),
            (Err(error), Ok(own)) if !connects && is_missing(&error) => (own.clone(), own),
            (own, other) => (own?, other?),
        };
    let fresh = more.into_iter().filter(|one| !warnings.contains(one));
    log::warn(warnings.iter().cloned().chain(fresh));
    let identities = Identities {
        connecting,
        accepting,
        crypto: crypto(config.offload),
    };
    say(&chosen(&identities.crypto)?.reason);
    Ok((config, identities))
}

/// Whether an identity cannot be loaded because one of its files does not exist.
fn is_missing(error: &anyhow::Error) -> bool {
    let identity = error.downcast_ref::<IdentityError>();
    identity.is_some_and(|error| match error.kind() {
        IdentityErrorKind::Unreadable { source, .. } => source.kind() == ErrorKind::NotFound,
        _ => false,
    })
}
