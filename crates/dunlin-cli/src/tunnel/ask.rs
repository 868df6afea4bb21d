//! `dunlin tunnel open` and `close`: listeners of a tunnel that runs.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;
use dunlin_tunnel::Parameter;

use super::control_service::{Request, name_of};
use super::line::ListenerLine;
use crate::control::Client;
use crate::line::Line;
use crate::options::{ControlPath, TUNNELS, parse_lanes};
use crate::text::clean;

/// What a channel, or several, are opened for.
#[derive(Debug, Args)]
pub(super) struct Wanted {
    /// The route, by its name in the configuration.
    route: String,
    /// What the target at the peer has a place for, such as vm=web.
    #[arg(long, value_name = "NAME=VALUE")]
    param: Option<Parameter>,
    /// At least so many lanes to the peer, 1 to 128, from now on.
    #[arg(long, value_name = "N", value_parser = parse_lanes())]
    lanes: Option<u16>,
    #[command(flatten)]
    which: Which,
}

impl Wanted {
    /// Asks the tunnel for a listener; returns what it has opened, and the rest of its answer.
    pub(super) fn open(
        &self,
        listen: Option<String>,
        once: bool,
        wait: bool,
    ) -> Result<(Client, ListenerLine)> {
        let request = Request::Open {
            route: self.route.clone(),
            parameter: self.param.as_ref().map(ToString::to_string),
            listen,
            lanes: self.lanes,
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
    /// unix:PATH or tcp:ADDRESS:PORT [default: a unix socket beside the tunnel's
    /// control socket].
    #[arg(long, value_name = "PLACE")]
    listen: Option<String>,
    /// Return when the last connection has ended: 0 if all of them ended well, 1
    /// if not, 4 if it was closed before there was one.
    #[arg(long)]
    wait: bool,
    /// One JSON object a line.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Close {
    /// Its number in `dunlin status`, or its address as `tunnel open` has printed it.
    listener: String,
    #[command(flatten)]
    which: Which,
    /// One JSON object.
    #[arg(long)]
    json: bool,
}

impl Open {
    pub(crate) fn run(&self) -> Result<i32> {
        let (mut client, opened) = self.wanted.open(self.listen.clone(), false, self.wait)?;
        if self.json {
            Line::Listener(opened).print();
        } else {
            use std::io::Write;
            // A script reads it before the wait is over; one that has gone does not.
            let mut out = std::io::stdout().lock();
            let _ = writeln!(out, "{}", clean(&opened.listen));
            let _ = out.flush();
        }
        client.done(self.json && self.wait)
    }
}

impl Close {
    pub(crate) fn run(&self) -> Result<i32> {
        let request = Request::Close {
            listener: self.listener.clone(),
        };
        self.which.ask(&request)?.done(self.json)
    }
}

/// Which tunnel of this host is meant.
#[derive(Clone, Debug, Args)]
pub(super) struct Which {
    /// The tunnel of this configuration [default: the only one that runs].
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    control: ControlPath,
}

impl Which {
    /// Asks the tunnel that is meant.
    fn ask(&self, request: &Request) -> Result<Client> {
        request.ask(&self.socket()?, None)
    }

    /// The control socket of the tunnel that is meant.
    fn socket(&self) -> Result<PathBuf> {
        if let Some(config) = &self.config {
            return Ok(self.control.tunnel(&name_of(config)?));
        }
        let mut running = self.control.sockets_in(TUNNELS);
        running.retain(|path| UnixStream::connect(path).is_ok());
        match &running[..] {
            [one] => Ok(one.clone()),
            [] => bail!("no tunnel runs here: is `dunlin tunnel run` up, and --control the same?"),
            several => {
                let names = several.iter().map(|path| path.display().to_string());
                let names: Vec<String> = names.collect();
                bail!(
                    "several tunnels run here, say which with --config or --control: {}",
                    names.join(", ")
                )
            }
        }
    }
}
