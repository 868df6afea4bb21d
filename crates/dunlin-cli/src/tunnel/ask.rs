//! `dunlin tunnel open` and `close`: listeners of a tunnel that runs.

use anyhow::Result;
use clap::Args;
use dunlin_tunnel::Parameter;

use super::control_service::Request;
use super::line::ListenerLine;
use super::which::Which;
use crate::control::Client;
use crate::line::Line;
use crate::options::parse_lanes;
use crate::text::clean;

#[derive(Debug, Args)]
pub(crate) struct Open {
    /// The route, by its name in the configuration.
    route: String,
    /// What the target at the peer has a place for, such as vm=web.
    #[arg(long, value_name = "NAME=VALUE")]
    param: Option<Parameter>,
    /// unix:PATH or tcp:ADDRESS:PORT [default: a unix socket beside the tunnel's
    /// control socket].
    #[arg(long, value_name = "PLACE")]
    listen: Option<String>,
    /// At least so many lanes to the peer, 1 to 128, from now on.
    #[arg(long, value_name = "N", value_parser = parse_lanes())]
    lanes: Option<u16>,
    /// Return when the last connection has ended: 0 if all of them ended well, 1
    /// if not, 4 if it was closed before there was one.
    #[arg(long)]
    wait: bool,
    #[command(flatten)]
    which: Which,
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
        let request = Request::Open {
            route: self.route.clone(),
            parameter: self.param.as_ref().map(ToString::to_string),
            listen: self.listen.clone(),
            lanes: self.lanes,
            once: false,
            wait: self.wait,
        };
        let mut client = self.which.ask(&request)?;
        let opened = listener(&mut client)?;
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

/// What the tunnel has opened.
pub(super) fn listener(client: &mut Client) -> Result<ListenerLine> {
    client.expect(|line| match line {
        Line::Listener(listener) => Some(listener),
        _ => None,
    })
}
