//! The control socket of a tunnel: what is asked of it while it runs.

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
use dunlin_tunnel::{Demand, Listen, ListenerStatus, OnDemandListener, Tunnel};
use serde::{Deserialize, Serialize};

use super::config::table::parse_listen;
use super::line::{ListenerLine, RouteLine, TunnelLine};
use crate::code::{CANCELLED, FAILED};
use crate::control::{Client, Pending, Service, Socket, make_directory, send};
use crate::line::{FailedLine, Line};
use crate::log::say;
use crate::service::start;

/// What can be asked of a tunnel.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case")]
pub(crate) enum Request {
    /// How it is; rates are those of [`RATES_OVER`].
    Status,
    /// Open a listener for one purpose.
    Open {
        route: String,
        /// `NAME=VALUE`.
        parameter: Option<String>,
        /// Where; the tunnel has a place of its own.
        listen: Option<String>,
        lanes: Option<u16>,
        /// For a single connection, which whoever asks makes himself: it is closed
        /// when he hangs up before.
        once: bool,
        /// Answer once more when it is over.
        wait: bool,
    },
    /// Close one, by its number or by where it listens.
    Close { listener: String },
}

impl Request {
    /// Asks the tunnel behind a control socket, whose lines each come within `limit`.
    pub(super) fn ask(&self, socket: &Path, limit: Option<Duration>) -> Result<Client> {
        Client::ask(socket, "tunnel", self, limit)
    }
}

/// Over how long rates are measured: a look waits for so long.
///
/// Formula: long enough that a rate of 10 MiB/s is told from its pauses, and well
/// within the time that `dunlin status` waits.
/// Drawback: a look takes a quarter of a second, and says nothing of before.
/// Alternative: what went since the last look costs no wait; but two who look
/// would take each other's bytes. A thread that always measures would wake up
/// without anybody asking. Whoever wants other spans has the totals.
pub(crate) const RATES_OVER: Duration = Duration::from_millis(250);

/// Answers for a tunnel, as long as that runs.
pub(super) struct ControlService {
    tunnel: Weak<Tunnel>,
    name: String,
    control: PathBuf,
    began: Instant,
    /// Names the sockets of listeners that were given no place.
    next: AtomicU64,
    pending: Pending,
}

impl ControlService {
    /// Answers at `socket` from now on.
    pub(super) fn serve(tunnel: &Arc<Tunnel>, name: &str, socket: &Socket) -> Result<Arc<Self>> {
        let service = Arc::new(Self {
            tunnel: Arc::downgrade(tunnel),
            name: name.to_owned(),
            control: socket.path().to_owned(),
            began: Instant::now(),
            next: AtomicU64::new(1),
            pending: Pending::default(),
        });
        socket.serve(&service)?;
        Ok(service)
    }

    /// Waits until every request is answered, and leaves no socket.
    pub(super) fn farewell(&self) {
        self.pending.farewell();
        // Without a request for a listener there is no directory.
        let _ = fs::remove_dir(self.directory());
    }

    fn tunnel(&self) -> Result<Arc<Tunnel>> {
        self.tunnel.upgrade().context("the tunnel has ended")
    }

    fn status(&self) -> Result<TunnelLine> {
        let before = self.tunnel()?.routes();
        let begin = Instant::now();
        thread::sleep(RATES_OVER);
        let tunnel = self.tunnel()?;
        let now = tunnel.routes();
        let over = begin.elapsed();
        let route = |now: &_| {
            let dunlin_tunnel::RouteStatus { route, .. } = now;
            let before = before.iter().find(|before| before.route == *route);
            RouteLine::new(now, before, over.as_secs_f64())
        };
        Ok(TunnelLine {
            name: self.name.clone(),
            pid: std::process::id(),
            control: self.control.display().to_string(),
            address: tunnel.address().to_string(),
            running_s: self.began.elapsed().as_secs_f64(),
            over_ms: crate::line::millis(over),
            routes: now.iter().map(route).collect(),
            listeners: tunnel
                .on_demand_listeners()
                .iter()
                .map(Into::into)
                .collect(),
            peers: tunnel.status().iter().map(Into::into).collect(),
        })
    }

    /// Where listeners are that were given no place.
    fn directory(&self) -> PathBuf {
        self.control.with_extension("d")
    }

    fn place(&self) -> Result<Listen> {
        let directory = self.directory();
        make_directory(&directory, 0o755)?;
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        Ok(Listen::Unix(directory.join(format!("{number}.sock"))))
    }

    fn close(&self, listener: &str) -> Result<()> {
        let on_demand = self.tunnel()?.on_demand_listeners();
        let is_meant = |one: &&OnDemandListener| {
            one.number().to_string() == listener || one.listen().to_string() == listener
        };
        let Some(listener) = on_demand.iter().find(is_meant) else {
            bail!(
                "no listener {listener} is open: `dunlin status` has their numbers, and \
                 configured ones go with their routes"
            );
        };
        listener.close();
        Ok(())
    }

    /// Answers when a listener is over.
    fn wait(
        self: &Arc<Self>,
        listener: OnDemandListener,
        once: bool,
        mut requests: impl BufRead + Send + 'static,
        connection: &UnixStream,
    ) -> Result<()> {
        if once {
            let heeded = listener.clone();
            start("control-heed", move || {
                // Nothing more is asked: this is how a hang-up is noticed.
                let _ = requests.read_line(&mut String::new());
                let standing = heeded.status();
                if standing.open + standing.ended() == 0 {
                    heeded.close();
                }
            })?;
        }
        let standing = listener.wait(None);
        send(connection, &ended(&standing))
    }
}

impl Service for ControlService {
    type Request = Request;

    fn obey(
        self: &Arc<Self>,
        request: Request,
        requests: BufReader<UnixStream>,
        connection: &UnixStream,
    ) -> Result<()> {
        match request {
            Request::Status => {
                let line = Line::Tunnel(Box::new(self.status()?));
                send(connection, &line)
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
                once,
                wait,
            } => {
                let parameter = parameter.map(|text| text.parse()).transpose()?;
                let listen = match listen {
                    Some(text) => match parse_listen(&text).map_err(|text| anyhow!(text))? {
                        Listen::Passed(name) => bail!(
                            "the socket {name} was passed for a route: a listener of its own \
                             is at unix:PATH or tcp:ADDRESS:PORT"
                        ),
                        listen => listen,
                    },
                    None => self.place()?,
                };
                let demand = Demand {
                    route,
                    parameter,
                    listen,
                    lanes,
                    once,
                };
                let listener = self.tunnel()?.open(&demand)?;
                let line = ListenerLine::from(&listener);
                say(&described(&line));
                let told = send(connection, &Line::Listener(line));
                // The caller has gone, and no other process has the listener's name.
                if told.is_err() {
                    listener.close();
                }
                if wait {
                    told?;
                    return self.wait(listener, once, requests, connection);
                }
                told?;
                send(connection, &Line::Done)
            }
        }
    }

    fn refused(&self, error: &anyhow::Error) -> FailedLine {
        error.into()
    }

    fn warn(&self, text: &str) {
        say(text);
    }

    fn pending(&self) -> &Pending {
        &self.pending
    }
}

/// How a listener and its channels have ended.
fn ended(standing: &ListenerStatus) -> Line {
    let (all, bad) = (standing.ended(), standing.failed);
    if all == 0 && bad == 0 {
        let text = "closed before anybody had connected";
        return Line::Failed(FailedLine::new(FaultCode::Cancelled, "", text, CANCELLED));
    }
    if bad == 0 {
        return Line::Done;
    }
    let mut failed = FailedLine {
        fault: "channel-broken".into(),
        at_fault: "this side".into(),
        vm: String::new(),
        text: format!("{bad} of {all} connections did not end well"),
        code: FAILED,
    };
    if let Some(why) = &standing.why {
        failed.fault = why.code().to_string();
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

/// The name of a tunnel: that of its configuration's file.
pub(super) fn name_of(config: &Path) -> Result<String> {
    let name = config.file_stem().and_then(|name| name.to_str());
    match name {
        Some(name) if !name.starts_with('.') => Ok(name.to_owned()),
        _ => bail!(
            "{} has no name that a control socket could have: rename it, or give --control \
             a path that ends in .sock",
            config.display()
        ),
    }
}
