//! The tunnel's configuration: a TOML file, checked as a whole. Every mistake is reported with its
//! line and its remedy.

mod ipsec;
pub(crate) mod rate;
pub(crate) mod redirect;
mod relay;
pub(crate) mod socket;
mod stripe;
pub(crate) mod table;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::bail;
use dunlin::lane::offload::Offload;
use dunlin_tunnel::{Exit, FileAccess, Limits, Routes};
use serde::Deserialize;
use toml::Spanned;

pub(crate) use ipsec::Ipsec;
use ipsec::IpsecTable;
use rate::PeerTable;
use redirect::{Others, PEER_PORT, Redirect, RedirectTable};
use table::{Found, LanesKey, Port, RouteTable, parse_port};

use crate::identity::Reading;
use crate::options::{parse_bytes, parse_limit};

/// A configuration in which no mistake was found. The check opens no files or sockets, except to
/// look up users and groups.
#[derive(Debug)]
pub(crate) struct Config {
    /// Address to which the peers' tunnels connect; `None` if this tunnel only connects.
    pub(crate) listen: Option<Port>,
    pub(crate) identity: PathBuf,
    pub(crate) reading: Reading,
    /// Where TLS records are sealed and opened: kernel or process.
    pub(crate) offload: Offload,
    pub(crate) routes: Routes,
    pub(crate) redirects: Vec<Redirect>,
    /// First loopback port of the listeners for redirected connections.
    pub(crate) redirect_port: u16,
    /// The user of the tunnel, if given. The redirects' rules let only this user and root serve the
    /// ports of the listeners for redirected connections.
    pub(crate) redirect_user: Option<String>,
    /// Whether a route's target is a program.
    pub(crate) starts_programs: bool,
    /// Settings of lanes over IPsec, if configured.
    pub(crate) ipsec: Option<Ipsec>,
    pub(crate) limits: Limits,
    /// Time limit for channels after SIGTERM.
    pub(crate) drain: Duration,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    listen: Option<Spanned<String>>,
    identity: PathBuf,
    #[serde(default)]
    allow_open_key: bool,
    tls_offload: Option<Spanned<String>>,
    drain: Option<Spanned<String>>,
    #[serde(default)]
    limits: LimitsTable,
    ipsec: Option<IpsecTable>,
    redirect_port: Option<Spanned<u64>>,
    redirect_user: Option<Spanned<String>>,
    #[serde(default)]
    redirect: BTreeMap<String, Spanned<RedirectTable>>,
    #[serde(default)]
    peer: BTreeMap<String, Spanned<PeerTable>>,
    #[serde(default)]
    route: BTreeMap<String, Spanned<RouteTable>>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct LimitsTable {
    channels: Option<Spanned<u64>>,
    peer_memory: Option<Spanned<String>>,
    trunks: Option<Spanned<u64>>,
    lanes: Option<Spanned<LanesKey>>,
    vanished: Option<Spanned<String>>,
    connect: Option<Spanned<String>>,
}

impl Config {
    /// Parses a file.
    ///
    /// # Errors
    /// All mistakes in the file, one per line; for invalid TOML or an unknown key only the first.
    pub(crate) fn parse(file: &Path, text: &str) -> anyhow::Result<Self> {
        let mut found = Found {
            text,
            all: Vec::new(),
        };
        let parsed: Result<File, _> = toml::from_str(text);
        let config = match parsed {
            Ok(parsed) => check(parsed, &mut found),
            Err(error) => {
                let at = error.span().unwrap_or_default();
                // serde's message contains a Rust type. Replace it by words for operators.
                let text = error.message().replace("u64", "a whole number");
                found.add(&at, text);
                None
            }
        };
        match config {
            Some(config) if found.all.is_empty() => Ok(config),
            _ => {
                found.all.sort();
                let line = |(line, text)| format!("{}:{line}: {text}", file.display());
                let lines: Vec<String> = found.all.into_iter().map(line).collect();
                bail!(lines.join("\n"))
            }
        }
    }
}

fn check(file: File, found: &mut Found<'_>) -> Option<Config> {
    let listen = file.listen.as_ref();
    let listen = listen.and_then(|listen| found.parsed(listen, |text| parse_port(text)));
    let usual = Limits::default();
    let table = &file.limits;
    let limits = Limits {
        channels: found.count("channels", &table.channels, usual.channels, 4096),
        peer_bytes: found.or(&table.peer_memory, usual.peer_bytes, parse_bytes),
        trunks: found.count("trunks", &table.trunks, usual.trunks, 4096),
        lanes: found.lanes(&table.lanes),
        vanished: found.or(&table.vanished, usual.vanished, |text| {
            match parse_limit(text)? {
                limit if limit < Duration::from_secs(1) => Err("vanished below 1s".to_owned()),
                limit => Ok(limit),
            }
        }),
        idle: usual.idle,
        connect: found.or(&table.connect, usual.connect, parse_limit),
        lane_records: usual.lane_records,
        sending_threads: usual.sending_threads,
    };
    if let Some(memory) = &table.peer_memory {
        let least = limits.channels as u64 * (256 << 10);
        if limits.peer_bytes < least {
            let text = format!(
                "peer_memory is below {} MiB, the minimum for channels = {}: raise peer_memory, or \
                 lower `channels`",
                least.div_ceil(1 << 20),
                limits.channels
            );
            found.add(&memory.span(), text);
        }
    }
    let offload = found.or(&file.tls_offload, Offload::Auto, str::parse);
    let drain = found.or(&file.drain, DRAIN, parse_limit);
    let is_prepared = file.ipsec.is_some();
    let ipsec = file.ipsec.as_ref();
    let ipsec = ipsec.and_then(|table| ipsec::check(table, found));
    let mut entrances = Vec::new();
    let mut exits = Vec::new();
    let mut relays = Vec::new();
    let mut access = Vec::new();
    for (name, table) in &file.route {
        let at = table.span();
        let is_relay = relay::is_one(name, table.get_ref(), found);
        let over_ipsec = ipsec::is_asked_for(name, table.get_ref(), is_relay, is_prepared, found);
        access.push((name, socket::check(name, table.get_ref(), is_relay, found)));
        if is_relay {
            let (entrance, exit) = relay::check(name, &at, table.get_ref(), found);
            entrances.extend(entrance);
            relays.extend(exit);
        } else {
            let (entrance, exit) = stripe::check(name, &at, table.get_ref(), over_ipsec, found);
            entrances.extend(entrance);
            exits.extend(exit);
        }
    }
    let redirect_port = redirect::port(&file.redirect_port, found);
    let redirect_user = found.or(&file.redirect_user, None, |text| {
        redirect::parse_user(text).map(Some)
    });
    let others = Others {
        listen: listen.as_ref(),
        redirect_port,
        routes: file.route.keys().map(String::as_str).collect(),
        entrances: &entrances,
        relays: &relays,
    };
    let redirects = redirect::check(&file.redirect, is_prepared, &others, found);
    let rates = rate::check(&file.route, &file.redirect, &file.peer, found);
    if file.listen.is_none() {
        needs_no_listener(&file, &exits, found);
    }
    if file.route.is_empty() && file.redirect.is_empty() {
        let text = "the file has no route: add [route.NAME], with `listen` and `to` on the host \
                    from which VMs leave, and with `target` and `allow` on the other host; or \
                    [redirect.NAME] for a toolstack's range of ports";
        found.add(&(0..0), text.to_owned());
    }
    if !found.all.is_empty() {
        return None;
    }
    access.retain(|(_, access)| *access != FileAccess::default());
    let routes = Routes::new(entrances, exits).and_then(|routes| routes.with_relays(relays));
    let mut access = access.into_iter();
    let routes = routes.and_then(|routes| {
        access.try_fold(routes, |routes, (name, access)| {
            routes.with_access(name, access)
        })
    });
    let routes = match routes {
        Ok(routes) => rates.limit(routes),
        Err(error) => {
            let table = file.route.get(&error.route);
            let at = table.map_or(0..0, Spanned::span);
            found.add(&at, error.to_string());
            return None;
        }
    };
    let reading = Reading::with_open_key(file.allow_open_key);
    let mut tables = file.route.values();
    let starts_programs = tables.any(|table| table.get_ref().exec.is_some());
    Some(Config {
        listen,
        identity: file.identity,
        reading,
        offload,
        routes,
        redirects,
        redirect_port,
        redirect_user,
        starts_programs,
        ipsec,
        limits,
        drain,
    })
}

/// Reports the parts that need `listen`. Called if the configuration does not set it.
fn needs_no_listener(file: &File, exits: &[Exit], found: &mut Found<'_>) {
    for exit in exits {
        let at = file.route.get(&exit.route).map_or(0..0, Spanned::span);
        let text = format!(
            "route {} has a target, but no peer can connect without `listen`: add listen = \
             \"0.0.0.0:{PEER_PORT}\"",
            exit.route
        );
        found.add(&at, text);
    }
    if file.ipsec.is_some() {
        let text = "[ipsec] needs `listen`, because peers open lanes over IPsec to this host: add \
                    `listen`";
        found.add(&(0..0), text.to_owned());
    }
}

/// Default time limit for channels after SIGTERM: slightly less than service managers wait before
/// they send SIGKILL.
const DRAIN: Duration = Duration::from_secs(80);

#[cfg(test)]
mod tests;
