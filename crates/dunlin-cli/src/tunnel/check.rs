//! `dunlin tunnel check`: the configuration and its certificates, and with `--connect` the path to
//! each peer.

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::Args;
use dunlin_tunnel::{Entrance, Identities, Listen, MAX_PROBE_BYTES, Mode, Routes, Tunnel};

use super::config::Config;
use super::line::CheckedLine;
use super::run::read;
use crate::code::{DONE, FAILED};
use crate::line::{FailedLine, Line, millis};
use crate::options::parse_bytes;
use crate::progress::Waiting;
use crate::redirect::unknown_users;
use crate::text::clean;

#[derive(Debug, Args)]
pub(crate) struct Check {
    /// The configuration, a TOML file; see docs/reference/config.md.
    #[arg(long, value_name = "FILE", default_value = "/etc/dunlin/tunnel.toml")]
    config: PathBuf,
    /// Also connect to each peer, send bytes there and back, and report the rate. The peers'
    /// tunnels must run; this host's tunnel need not.
    #[arg(long)]
    connect: bool,
    /// With --connect: the number of bytes for each peer, at most 1G.
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = parse_probe)]
    size: u64,
    /// Print one JSON object per line.
    #[arg(long)]
    json: bool,
}

fn parse_probe(text: &str) -> Result<u64, String> {
    match parse_bytes(text)? {
        bytes if (1..=MAX_PROBE_BYTES).contains(&bytes) => Ok(bytes),
        _ => Err(format!("size {text} out of range (1 to 1G)")),
    }
}

impl Check {
    pub(crate) fn run(&self) -> Result<i32> {
        let (config, identities) = read(&self.config)?;
        if !self.json {
            println!("{}: valid", self.config.display());
        }
        for text in unknown_users(&config.redirects, config.redirect_user.as_deref())? {
            Line::Warning { text }.say(self.json);
        }
        if !self.connect {
            if self.json {
                Line::Done.print();
            }
            return Ok(DONE);
        }
        let peers = peers(&config.routes);
        let tunnel = tunnel(&config, identities, &peers)?;
        let mut code = DONE;
        for peer in &peers {
            let what = format!(
                "route {} to {}: sending bytes there and back",
                peer.route, peer.to
            );
            let waiting = Waiting::new(self.json, &what);
            let probed = tunnel.probe(peer, self.size);
            drop(waiting);
            let line = match probed {
                Ok(probe) => {
                    let seconds = probe.remaining.as_secs_f64().max(1e-9);
                    Line::Checked(CheckedLine {
                        to: peer.to.clone(),
                        route: peer.route.clone(),
                        bytes: probe.bytes,
                        first_byte_ms: millis(probe.first_byte),
                        gib_per_s: probe.bytes as f64 / seconds / (1_u64 << 30) as f64,
                    })
                }
                Err(failure) => {
                    code = FAILED;
                    let text = format!("route {} to {}: {failure}", peer.route, peer.to);
                    let mut failed = FailedLine::new(failure.code(), "", text, FAILED);
                    failed.at_fault = failure.at_fault().to_string();
                    Line::Failed(failed)
                }
            };
            line.say(self.json);
        }
        for entrance in config.routes.entrances() {
            let why = match entrance.mode {
                Mode::Stripe | Mode::RelayAt(_) => continue,
                Mode::StripeOverIpsec => "lanes over IPsec",
                Mode::Relay(_) => "a relay",
            };
            let route = clean(&entrance.route);
            let text = format!("route {route} to {} was not tried: {why}", entrance.to);
            Line::Warning { text }.say(self.json);
        }
        Ok(code)
    }
}

/// The entrances with trunks over TLS, one for each peer.
fn peers(routes: &Routes) -> Vec<Entrance> {
    let mut peers: Vec<Entrance> = Vec::new();
    let is_tried = |one: &&Entrance| matches!(one.mode, Mode::Stripe | Mode::RelayAt(_));
    for one in routes.entrances().iter().filter(is_tried) {
        let is_same = |other: &Entrance| {
            (&other.to, &other.peers, other.mode) == (&one.to, &one.peers, one.mode)
        };
        if !peers.iter().any(is_same) {
            let listen = Listen::OnDemand;
            peers.push(Entrance {
                listen,
                ..one.clone()
            });
        }
    }
    peers
}

/// Reads a configuration. Returns the configuration, and a tunnel with the identity that the
/// configuration names. The tunnel accepts no connections of hypervisors.
pub(crate) fn prober(config: &Path) -> Result<(Config, Tunnel)> {
    let (config, identities) = read(config)?;
    let tunnel = tunnel(&config, identities, &[])?;
    Ok((config, tunnel))
}

/// A tunnel that accepts no connections of hypervisors.
fn tunnel(config: &Config, identities: Identities, peers: &[Entrance]) -> Result<Tunnel> {
    let routes = Routes::new(peers.to_vec(), Vec::new())?;
    let tunnel = Tunnel::builder(None, identities, &routes).limits(config.limits);
    Ok(tunnel.start()?)
}
