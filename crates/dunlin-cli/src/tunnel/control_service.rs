//! The control socket of a running tunnel.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use dunlin::engine::vmm::FaultCode;
use dunlin::lane::peers::Peer;
use dunlin_tunnel::{
    Demand, Failure, FileAccess, Listen, ListenerStatus, OnDemandListener, RouteStatus, Tunnel,
};
use serde::{Deserialize, Serialize};

use super::config::table::parse_listen;
use super::line::{ListenerLine, RedirectLine, RouteLine, TunnelLine};
use super::rules::Rules;
use crate::code::{CANCELLED, FAILED};
use crate::confine::allows_owner;
use crate::control::{self, Client, Service, Socket, make_directory, send};
use crate::line::{FailedLine, Line};
use crate::log::say;
use crate::published::expiry;
use crate::service::start;

/// A request to a tunnel.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case")]
pub(crate) enum Request {
    /// Status of the tunnel; [`RATES_OVER`] is the period of its rates.
    Status,
    /// Open an on-demand listener.
    Open {
        route: String,
        /// `NAME=VALUE`.
        parameter: Option<String>,
        /// The listener's address; by default a socket next to the control socket.
        listen: Option<String>,
        lanes: Option<u16>,
        /// The owner of the unix socket, by number.
        #[serde(default)]
        owner: Option<u32>,
        /// The group of the unix socket, by number.
        #[serde(default)]
        group: Option<u32>,
        /// The mode of the unix socket.
        #[serde(default)]
        mode: Option<u32>,
        /// Accept one connection, which the client of this control socket opens itself. Close the
        /// listener if the client hangs up before it has opened the connection.
        once: bool,
        /// Send a second answer when the listener's last connection has ended.
        wait: bool,
    },
    /// Change the limit of the rate of a route or of a peer.
    Set {
        route: Option<String>,
        /// The peer's name or pin.
        peer: Option<String>,
        /// `None` for no limit.
        bytes_per_s: Option<u64>,
    },
    /// Close a listener, given by its number or address.
    Close { listener: String },
}

impl Request {
    /// Sends the request to the tunnel behind a control socket; `limit` applies to each line of the
    /// answer.
    pub(super) fn ask(&self, socket: &Path, limit: Option<Duration>) -> Result<Client> {
        Client::ask(socket, "tunnel", self, limit)
    }
}

/// Period over which rates are measured; a status request takes this long.
///
/// Formula: long enough to average out the pauses in a channel that carries 10 MiB/s, and well
/// within the time limit of `dunlin status`. Drawback: a status request takes a quarter of a
/// second, and its rates do not cover the time before it. Alternative: rates since the previous
/// request need no wait, but two clients would reset each other's period. Alternative: a thread
/// that always measures would wake up without need. Clients that want rates over other periods
/// compute these rates from the totals.
pub(crate) const RATES_OVER: Duration = Duration::from_millis(250);

/// Serves a tunnel's control socket until the tunnel ends.
pub(super) struct ControlService {
    tunnel: Weak<Tunnel>,
    name: String,
    control: PathBuf,
    began: Instant,
    rules: Rules,
    /// The number for the name of the next listener's socket, if the request gives no address.
    next: AtomicU64,
}

impl ControlService {
    /// Serves requests at `socket` from now on.
    pub(super) fn serve(
        tunnel: &Arc<Tunnel>,
        name: &str,
        socket: &Socket,
        rules: Rules,
    ) -> Result<Arc<Self>> {
        let service = Arc::new(Self {
            tunnel: Arc::downgrade(tunnel),
            name: name.to_owned(),
            control: socket.path.clone(),
            began: Instant::now(),
            rules,
            next: AtomicU64::new(1),
        });
        socket.serve(&service)?;
        Ok(service)
    }

    /// Waits until every request is answered, for a limited time, and removes the listeners'
    /// directory.
    pub(super) fn drain(&self) {
        control::drain();
        // The directory exists only if a listener was requested.
        let _ = fs::remove_dir(self.directory());
    }

    fn tunnel(&self) -> Result<Arc<Tunnel>> {
        self.tunnel.upgrade().context("the tunnel has ended")
    }

    /// The status, with rates over a period for which this function waits.
    pub(super) fn status(&self, period: Duration) -> Result<TunnelLine> {
        let before = self.tunnel()?.routes();
        let begin = Instant::now();
        thread::sleep(period);
        let tunnel = self.tunnel()?;
        let now = tunnel.routes();
        let over = begin.elapsed();
        let route = |now: &RouteStatus| {
            let before = before.iter().find(|before| before.route == now.route);
            RouteLine::new(now, before, over.as_secs_f64())
        };
        Ok(TunnelLine {
            name: self.name.clone(),
            pid: std::process::id(),
            control: self.control.display().to_string(),
            address: tunnel.address().map(|address| address.to_string()),
            running_s: self.began.elapsed().as_secs_f64(),
            over_ms: crate::line::millis(over),
            routes: now.iter().map(route).collect(),
            listeners: tunnel
                .on_demand_listeners()
                .iter()
                .map(Into::into)
                .collect(),
            redirect: tunnel.refused_redirects().map(|refused| RedirectLine {
                refused,
                rules: self.rules.read(),
            }),
            peers: tunnel.status().iter().map(Into::into).collect(),
            lanes_lost: tunnel.lanes_lost(),
            certificates: expiry(&tunnel.validity()),
        })
    }

    /// The status for the status socket, without rates; empty if the tunnel has ended.
    pub(super) fn report(&self) -> String {
        let status = self.status(Duration::ZERO);
        status.map_or_else(
            |_| String::new(),
            |line| Line::Tunnel(Box::new(line)).to_json(),
        )
    }

    /// Directory of the sockets of listeners without a given address.
    fn directory(&self) -> PathBuf {
        self.control.with_extension("d")
    }

    fn new_address(&self) -> Result<Listen> {
        let directory = self.directory();
        make_directory(&directory, 0o755)?;
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        Ok(Listen::Unix(directory.join(format!("{number}.sock"))))
    }

    fn close(&self, listener: &str) -> Result<()> {
        let on_demand = self.tunnel()?.on_demand_listeners();
        let matches = |one: &&OnDemandListener| {
            one.number().to_string() == listener || one.listen().to_string() == listener
        };
        let Some(listener) = on_demand.iter().find(matches) else {
            bail!(
                "no on-demand listener {listener}: `dunlin status` lists their numbers; to close a \
                 configured listener, remove its route"
            );
        };
        listener.close();
        Ok(())
    }

    /// Sends an answer when the listener and its connections have ended.
    fn wait(
        self: &Arc<Self>,
        listener: OnDemandListener,
        once: bool,
        mut requests: impl BufRead + Send + 'static,
        connection: &UnixStream,
    ) -> Result<()> {
        if once {
            let watched = listener.clone();
            start("requester", move || {
                // The client sends nothing more, so the read returns when the client hangs up.
                let _ = requests.read_line(&mut String::new());
                let status = watched.status();
                if status.open + status.ended() == 0 {
                    watched.close();
                }
            })?;
        }
        let status = listener.wait(None);
        send(connection, &ended(&status))
    }
}

impl Service for ControlService {
    type Request = Request;

    fn handle(
        self: &Arc<Self>,
        request: Request,
        requests: BufReader<UnixStream>,
        connection: &UnixStream,
    ) -> Result<()> {
        match request {
            Request::Status => {
                let line = Line::Tunnel(Box::new(self.status(RATES_OVER)?));
                send(connection, &line)
            }
            Request::Set {
                route,
                peer,
                bytes_per_s,
            } => {
                let tunnel = self.tunnel()?;
                if let Some(peer) = peer {
                    tunnel.set_peer_rate(&peer.parse::<Peer>()?, bytes_per_s);
                }
                if let Some(route) = route {
                    tunnel.set_rate(&route, bytes_per_s)?;
                }
                send(connection, &Line::Done)
            }
            Request::Close { listener } => {
                self.close(&listener)?;
                send(connection, &Line::Done)
            }
            Request::Open {
                route,
                parameter,
                listen,
                lanes,
                owner,
                group,
                mode,
                once,
                wait,
            } => {
                let access = FileAccess { owner, group, mode };
                let parameter = parameter.map(|text| text.parse()).transpose()?;
                let listen = match listen {
                    Some(text) => match parse_listen(&text).map_err(|text| anyhow!(text))? {
                        Listen::Passed(name) => bail!(
                            "only a route of the configuration can listen on systemd:{name}: give \
                             unix:PATH or tcp:ADDRESS:PORT"
                        ),
                        listen => listen,
                    },
                    None => self.new_address()?,
                };
                if access != FileAccess::default() && !matches!(listen, Listen::Unix(_)) {
                    bail!(
                        "owner, group and mode apply only to a unix socket, and {listen} is not one: \
                         omit them, or give unix:PATH"
                    );
                }
                allows_owner(&access)?;
                let demand = Demand {
                    route,
                    parameter,
                    listen,
                    lanes,
                    once,
                    access,
                };
                let listener = self.tunnel()?.open(&demand)?;
                let line = ListenerLine::from(&listener);
                say(&described(&line));
                let sent = send(connection, &Line::Listener(line));
                // An error means that the client has disconnected. No other process has received
                // the listener's address, so the listener would stay unused.
                if sent.is_err() {
                    listener.close();
                }
                if wait {
                    sent?;
                    return self.wait(listener, once, requests, connection);
                }
                sent?;
                send(connection, &Line::Done)
            }
        }
    }
}

/// The result of a listener after its last channel has ended.
fn ended(status: &ListenerStatus) -> Line {
    let (all, bad) = (status.ended(), status.failed);
    if all == 0 && bad == 0 {
        let text = "closed before the first connection";
        return Line::Failed(FailedLine::new(FaultCode::Cancelled, "", text, CANCELLED));
    }
    if bad == 0 {
        return Line::Done;
    }
    let fault = status
        .why
        .as_ref()
        .map_or(FaultCode::ChannelBroken, Failure::code);
    let text = format!("failed connections: {bad} of {all}");
    let mut failed = FailedLine::new(fault, "", text, FAILED);
    if let Some(why) = &status.why {
        // If the peer reported the failure, `at_fault` converts the party at fault to this side's
        // view.
        failed.at_fault = why.at_fault().to_string();
        failed.text.push_str(&format!(": {why}"));
    }
    Line::Failed(failed)
}

/// A listener, in one line.
pub(super) fn described(line: &ListenerLine) -> String {
    let what = match &*line.parameter {
        "" => String::new(),
        parameter => format!(" for {parameter}"),
    };
    let (number, route, listen) = (line.number, &line.route, &line.listen);
    format!("listener {number}: {listen}, route {route}{what}")
}

/// A tunnel's name: the stem of its configuration's file name.
pub(super) fn name_of(config: &Path) -> Result<String> {
    let name = config.file_stem().and_then(|name| name.to_str());
    match name {
        Some(name) if !name.starts_with('.') => Ok(name.to_owned()),
        _ => bail!(
            "the control socket is named after {}, but this name begins with a dot or is not \
             UTF-8: rename the file, or give --control a path that ends in .sock",
            config.display()
        ),
    }
}
