//! `dunlin tunnel open` and `close`: listeners of a running tunnel.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::{ArgGroup, Args};
use dunlin::lane::peers::Peer;
use dunlin_tunnel::{FileAccess, Parameter};

use super::config::rate::parse_tunnel_rate;
use super::config::socket::{parse_group, parse_mode, parse_owner};
use super::control_service::{Request, name_of};
use super::line::ListenerLine;
use crate::control::Client;
use crate::line::Line;
use crate::options::{ControlPath, TUNNELS, parse_lanes};
use crate::progress::Waiting;
use crate::text::clean;
use crate::vm::request::ANSWER_LIMIT;

/// The listener to request.
#[derive(Debug, Args)]
pub(super) struct Wanted {
    /// The route's name in the configuration.
    route: String,
    /// Value for the parameter in the target's address at the peer, such as vm=web.
    #[arg(long, value_name = "NAME=VALUE")]
    param: Option<Parameter>,
    /// Open at least this many lanes to the peer, 1 to 128, and keep them.
    #[arg(long, value_name = "N", value_parser = parse_lanes())]
    lanes: Option<u16>,
    #[command(flatten)]
    which: Which,
}

impl Wanted {
    /// Requests a listener from the tunnel; returns the listener, and the client that reads the
    /// rest of the answer.
    pub(super) fn open(
        &self,
        listen: Option<String>,
        access: FileAccess,
        (once, wait): (bool, bool),
    ) -> Result<(Client, ListenerLine)> {
        let request = Request::Open {
            route: self.route.clone(),
            parameter: self.param.as_ref().map(ToString::to_string),
            listen,
            lanes: self.lanes,
            owner: access.owner,
            group: access.group,
            mode: access.mode,
            once,
            wait,
        };
        let mut client = self.which.ask(&request)?;
        let opened = client.expect(|line| match line {
            Line::Listener(listener) => Some(listener),
            _ => None,
        })?;
        Ok((client, opened))
    }
}

#[derive(Debug, Args)]
pub(crate) struct Open {
    #[command(flatten)]
    wanted: Wanted,
    /// unix:PATH or tcp:ADDRESS:PORT [default: a unix socket next to the tunnel's control socket].
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<String>,
    /// Owner of the unix socket, a name or a number [default: the route's socket_owner].
    #[arg(long, value_name = "USER", value_parser = parse_owner)]
    owner: Option<u32>,
    /// Group of the unix socket, a name or a number [default: the route's socket_group].
    #[arg(long, value_name = "GROUP", value_parser = parse_group)]
    group: Option<u32>,
    /// Mode of the unix socket in octal, such as 0660 [default: the route's socket_mode].
    #[arg(long, value_name = "MODE", value_parser = parse_mode)]
    mode: Option<u32>,
    /// Wait for the last connection to end; exit code 0 if all ended well, 1 if one failed, 4 if
    /// the listener was closed before the first connection.
    #[arg(long)]
    wait: bool,
    /// Print one JSON object per line.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
#[command(group(ArgGroup::new("target").required(true).args(["route", "peer"])))]
pub(crate) struct Set {
    /// The route's name in the configuration.
    route: Option<String>,
    /// Instead of a route: a peer, by a name in its certificate or a pin.
    #[arg(long, value_name = "NAME", value_parser = parse_peer)]
    peer: Option<String>,
    /// Send at most this many bytes per second, such as 500M, or none for no limit.
    #[arg(long, value_name = "RATE", value_parser = parse_limit_or_none)]
    rate: Limit,
    #[command(flatten)]
    which: Which,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Bytes per second; `None` for no limit. A type of its own, because clap would make a field of the
/// type `Option` an optional flag.
#[derive(Clone, Copy, Debug)]
struct Limit(Option<u64>);

fn parse_limit_or_none(text: &str) -> Result<Limit, String> {
    match text {
        "none" => Ok(Limit(None)),
        rate => parse_tunnel_rate(rate).map(|rate| Limit(Some(rate))),
    }
}

/// Checks a peer and returns its text, which the tunnel parses again.
fn parse_peer(text: &str) -> Result<String, String> {
    let parsed = text.parse::<Peer>();
    parsed
        .map(|_| text.to_owned())
        .map_err(|error| error.to_string())
}

#[derive(Debug, Args)]
pub(crate) struct Close {
    /// The listener's number in `dunlin status`, or the address that `tunnel open` printed.
    listener: String,
    #[command(flatten)]
    which: Which,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl Open {
    pub(crate) fn run(&self) -> Result<i32> {
        let access = FileAccess {
            owner: self.owner,
            group: self.group,
            mode: self.mode,
        };
        let how = (false, self.wait);
        let (mut client, opened) = self.wanted.open(self.listen.clone(), access, how)?;
        if self.json {
            Line::Listener(opened).print();
        } else {
            use std::io::Write;
            // Flush, because a script reads the address before the wait ends. A closed output is
            // not an error.
            let mut out = std::io::stdout().lock();
            let _ = writeln!(out, "{}", clean(&opened.listen));
            let _ = out.flush();
        }
        let _waiting = self
            .wait
            .then(|| Waiting::new(self.json, "waiting for the last connection to end"));
        client.done(self.json && self.wait)
    }
}

impl Set {
    pub(crate) fn run(&self) -> Result<i32> {
        let (route, peer) = (self.route.clone(), self.peer.clone());
        set_rate(&self.which.socket()?, route, peer, self.rate.0, self.json)
    }
}

/// Limits the rate on a route, or to a peer, of the tunnel behind a control socket.
pub(crate) fn set_rate(
    socket: &Path,
    route: Option<String>,
    peer: Option<String>,
    bytes_per_s: Option<u64>,
    json: bool,
) -> Result<i32> {
    let request = Request::Set {
        route,
        peer,
        bytes_per_s,
    };
    request.ask(socket, Some(ANSWER_LIMIT))?.done(json)
}

impl Close {
    pub(crate) fn run(&self) -> Result<i32> {
        let request = Request::Close {
            listener: self.listener.clone(),
        };
        self.which.ask(&request)?.done(self.json)
    }
}

/// Selects a tunnel of this host.
#[derive(Clone, Debug, Args)]
pub(super) struct Which {
    /// The tunnel with this configuration [default: the only running tunnel].
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    control: ControlPath,
}

impl Which {
    /// Sends the request to the selected tunnel.
    fn ask(&self, request: &Request) -> Result<Client> {
        request.ask(&self.socket()?, None)
    }

    /// The control socket of the selected tunnel.
    fn socket(&self) -> Result<PathBuf> {
        if let Some(config) = &self.config {
            return Ok(self.control.tunnel(&name_of(config)?));
        }
        let mut running = self.control.sockets_in(TUNNELS);
        running.retain(|path| UnixStream::connect(path).is_ok());
        match &running[..] {
            [one] => Ok(one.clone()),
            [] => bail!(
                "no tunnel runs here, or this user has no access to its control socket: start \
                 `dunlin tunnel run` with the same --control, or run this command as the tunnel's user"
            ),
            several => {
                let names = several.iter().map(|path| path.display().to_string());
                let names: Vec<String> = names.collect();
                bail!(
                    "several tunnels run here, select one with --config or --control: {}",
                    names.join(", ")
                )
            }
        }
    }
}
