//! `dunlin serve-status`: metrics and a status page over HTTP, by a process that reads only status
//! sockets and the history.

use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;
use std::{fs, io, thread};

use anyhow::{Context, Result, bail};
use clap::Args;
use dunlin_linux::affinity::{allowed, process_cpu_time};
use dunlin_linux::local;
use dunlin_linux::signals::EndSignals;
use dunlin_linux::socket::{is_held, limit_queue};
use dunlin_tunnel::FileAccess;

use super::budget::{Budget, Times};
use super::http::{self, Answer, Connection};
use super::metrics::MEDIA_TYPE;
use super::page;
use super::source::Source;
use crate::code::DONE;
use crate::confine::ConfiningService;
use crate::control::{SHORTAGE_PAUSE, make_directory};
use crate::log::{Format, LogFlags, say};
use crate::options::ControlPath;
use crate::service::{Manager, cannot_listen, start};
use crate::tunnel::{parse_group, parse_mode};

/// Maximum number of open connections. Further clients get code 503.
const MAX_CONNECTIONS: usize = 32;

#[derive(Debug, Args)]
pub(crate) struct ServeStatus {
    /// Where to listen: unix:PATH, or an address and a port for TCP, such as 127.0.0.1:18380.
    #[arg(
        long,
        value_name = "ADDRESS",
        default_value = "unix:/run/dunlin-status/http.sock"
    )]
    listen: String,
    /// With TCP or a proxy: a name by which browsers reach this process; repeatable. Addresses of
    /// this host need no flag.
    #[arg(long = "host", value_name = "NAME")]
    hosts: Vec<String>,
    /// Group of the unix socket, a name or a number.
    #[arg(long, value_name = "GROUP", value_parser = parse_group)]
    group: Option<u32>,
    /// Mode of the unix socket in octal.
    #[arg(long, value_name = "MODE", value_parser = parse_mode, default_value = "0660")]
    mode: u32,
    /// CPU time that this process may use on average, in percent of the CPUs on which it may run.
    /// Above it, clients wait.
    #[arg(long, value_name = "PERCENT", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=100))]
    cpu_limit: u8,
    #[command(flatten)]
    control: ControlPath,
    #[command(flatten)]
    confining: ConfiningService,
    #[command(flatten)]
    log: LogFlags,
}

impl ServeStatus {
    pub(crate) fn run(&self) -> Result<i32> {
        self.log.start(Some(Format::Text));
        let signals = EndSignals::block()?;
        let Some(directory) = self.control.directory() else {
            bail!("--control must be a directory: the status sockets are in a subdirectory");
        };
        let manager = Manager::find();
        let listener = self.listener()?;
        listener.keep_queue_short()?;
        let at = listener.to_string();
        // This comes before the confinement, which forbids reading the host's name and reaching the
        // service manager.
        let source = Source::new(&self.control);
        let cpus = allowed().map_or(1, |cpus| cpus.len());
        let budget = Budget::new(self.cpu_limit, cpus, times(Instant::now()));
        manager.ready(&format!("serves the status at {at}"));
        // Confine the process before it starts threads, because existing threads would stay
        // unconfined.
        let confined = self.confining.reader(&directory)?;
        let server = Arc::new(Server {
            source,
            names: self.hosts.clone(),
            page: page::html(),
            policy: page::policy(),
            open: AtomicUsize::new(0),
        });
        let socket = listener.path();
        start("accept", move || server.accept(&listener, budget))?;
        println!("listening on {at}");
        let text = confined.text().unwrap_or_default();
        text.lines().for_each(say);
        let signal = signals.wait()?;
        say(&format!("{}: ending", signal.name()));
        if let Some(path) = socket {
            // The confinement may forbid this. The next process replaces the file.
            let _ = fs::remove_file(path);
        }
        Ok(DONE)
    }

    fn listener(&self) -> Result<Listener> {
        if let Some(path) = self.listen.strip_prefix("unix:") {
            let path = Path::new(path);
            let bound = listen_unix(path, self.group, self.mode);
            let listener = bound.with_context(|| format!("cannot listen at {}", path.display()))?;
            return Ok(Listener::Unix(listener, path.to_owned()));
        }
        if self.group.is_some() {
            bail!("a TCP port has no group: omit --group, or give --listen unix:PATH");
        }
        let failed = |error| cannot_listen(&self.listen, "--listen", &error);
        let addresses: Vec<SocketAddr> = self.listen.to_socket_addrs().map_err(failed)?.collect();
        let listener = TcpListener::bind(&addresses[..]).map_err(failed)?;
        let address = listener.local_addr()?;
        Ok(Listener::Tcp(listener, address))
    }
}

/// Listens at `path`, and replaces the socket of a process that has died.
fn listen_unix(path: &Path, group: Option<u32>, mode: u32) -> Result<UnixListener> {
    if let Some(directory) = path.parent() {
        make_directory(directory, 0o755)?;
    }
    if fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
        if is_held(path)? {
            bail!("another process listens there: end it, or choose another --listen");
        }
        fs::remove_file(path)?;
    }
    let access = FileAccess {
        owner: None,
        group,
        mode: Some(mode),
    };
    Ok(local::listen(path, &access)?.0)
}

/// The time since `began`, and the CPU time of this process.
fn times(began: Instant) -> Times {
    Times {
        elapsed: began.elapsed(),
        used: process_cpu_time(),
    }
}

enum Listener {
    Unix(UnixListener, PathBuf),
    Tcp(TcpListener, SocketAddr),
}

impl Listener {
    fn accept(&self) -> io::Result<Box<dyn Connection>> {
        Ok(match self {
            Self::Unix(listener, _) => Box::new(listener.accept()?.0),
            Self::Tcp(listener, _) => Box::new(listener.accept()?.0),
        })
    }

    /// Limits the queue of waiting clients to the number of clients that are served at a time. In a
    /// longer queue, a client could give up before it is served.
    fn keep_queue_short(&self) -> io::Result<()> {
        match self {
            Self::Unix(listener, _) => limit_queue(listener, MAX_CONNECTIONS as i32),
            Self::Tcp(listener, _) => limit_queue(listener, MAX_CONNECTIONS as i32),
        }
    }

    /// The file of a unix socket.
    fn path(&self) -> Option<PathBuf> {
        match self {
            Self::Unix(_, path) => Some(path.clone()),
            Self::Tcp(..) => None,
        }
    }
}

impl std::fmt::Display for Listener {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unix(_, path) => write!(formatter, "unix:{}", path.display()),
            Self::Tcp(_, address) => write!(formatter, "http://{address}/"),
        }
    }
}

struct Server {
    source: Source,
    /// The names by which browsers reach this process.
    names: Vec<String>,
    page: String,
    policy: String,
    /// The number of open connections.
    open: AtomicUsize,
}

impl Server {
    /// Serves each connection on a thread of its own, at most [`MAX_CONNECTIONS`] at a time.
    fn accept(self: &Arc<Self>, listener: &Listener, mut budget: Budget) {
        let began = Instant::now();
        loop {
            thread::sleep(budget.wait(times(began)));
            let Ok(mut connection) = listener.accept() else {
                // Descriptors or memory ran out, or the client is gone.
                thread::sleep(SHORTAGE_PAUSE);
                continue;
            };
            if self.open.fetch_add(1, Ordering::Relaxed) >= MAX_CONNECTIONS {
                self.open.fetch_sub(1, Ordering::Relaxed);
                // The answer fits the buffer of the socket, so this does not wait.
                let _ = http::refusal(http::BUSY).write(&mut *connection, false);
                continue;
            }
            let server = Arc::clone(self);
            let started = start("client", move || {
                server.answer(&mut *connection);
                server.open.fetch_sub(1, Ordering::Relaxed);
            });
            if started.is_err() {
                self.open.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    fn answer(&self, connection: &mut dyn Connection) {
        let request = match http::read(connection, &self.names) {
            Ok(request) => request,
            Err(code) => {
                // The client may be gone.
                let _ = http::refusal(code).write(connection, false);
                return;
            }
        };
        let sample;
        let (media_type, body) = match &*request.path {
            "/" => ("text/html; charset=utf-8", &self.page),
            "/status.json" => {
                sample = self.source.sample();
                ("application/json", &sample.json)
            }
            "/metrics" => {
                sample = self.source.sample();
                (MEDIA_TYPE, &sample.metrics)
            }
            _ => {
                let _ = http::refusal(http::NOT_FOUND).write(connection, request.head);
                return;
            }
        };
        let answer = Answer {
            code: http::OK,
            media_type,
            body: body.as_bytes(),
            policy: &self.policy,
        };
        // The client may be gone, or does not read.
        let _ = answer.write(connection, request.head);
    }
}
