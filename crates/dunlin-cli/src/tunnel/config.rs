//! The tunnel's configuration: a TOML file, checked as a whole. Whatever is
//! wrong in it is named with its line and with what to do.

mod ipsec;
mod relay;
mod stripe;

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use dunlin::lane::kernel::Offload;
use dunlin::lane::peers::{Peer, Peers};
use dunlin_tunnel::{Entrance, Limits, Listen, Mode, RelayExit, Routes, Target, WINDOW_BYTES};
use serde::Deserialize;
use toml::Spanned;

pub(crate) use ipsec::Ipsec;
use ipsec::IpsecTable;

use crate::identity::Reading;
use crate::options::{parse_bytes, parse_limit};

/// A configuration without mistakes, as far as can be told without opening
/// anything.
#[derive(Debug)]
pub(crate) struct Config {
    /// Where peers' tunnels connect.
    pub(crate) listen: Port,
    pub(crate) identity: PathBuf,
    pub(crate) reading: Reading,
    /// Who seals and opens TLS records.
    pub(crate) offload: Offload,
    pub(crate) routes: Routes,
    /// Whether a route leads to a program.
    pub(crate) starts_programs: bool,
    /// By what lanes go over IPsec, where they may.
    pub(crate) ipsec: Option<Ipsec>,
    pub(crate) limits: Limits,
    /// How long channels may go on after SIGTERM.
    pub(crate) drain: Duration,
}

/// Where peers' tunnels connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Port {
    /// An address and a port.
    At(SocketAddr),
    /// A TCP socket that was passed to the process, by its name.
    Passed(String),
}

/// Everything that is wrong with a file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Mistakes {
    file: PathBuf,
    /// With lines, counted from 1.
    all: Vec<(usize, String)>,
}

impl fmt::Display for Mistakes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, (line, text)) in self.all.iter().enumerate() {
            if number > 0 {
                formatter.write_str("\n")?;
            }
            write!(formatter, "{}:{line}: {text}", self.file.display())?;
        }
        Ok(())
    }
}

impl std::error::Error for Mistakes {}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    listen: Spanned<String>,
    identity: PathBuf,
    #[serde(default)]
    allow_open_key: bool,
    tls_offload: Option<Spanned<String>>,
    drain: Option<Spanned<String>>,
    #[serde(default)]
    limits: LimitsTable,
    ipsec: Option<IpsecTable>,
    #[serde(default)]
    route: BTreeMap<String, Spanned<RouteTable>>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct LimitsTable {
    channels: Option<Spanned<u64>>,
    peer_memory: Option<Spanned<String>>,
    associations: Option<Spanned<u64>>,
    lanes: Option<Spanned<u64>>,
    vanished: Option<Spanned<String>>,
    connect: Option<Spanned<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RouteTable {
    mode: Option<Spanned<String>>,
    security: Option<Spanned<String>>,
    listen: Option<Spanned<String>>,
    to: Option<Spanned<String>>,
    peers: Option<Spanned<Vec<Spanned<String>>>>,
    lanes: Option<Spanned<u64>>,
    target: Option<Spanned<String>>,
    exec: Option<Spanned<Vec<String>>>,
    allow: Option<Spanned<Vec<Spanned<String>>>>,
    window: Option<Spanned<String>>,
    tls_listen: Option<Spanned<String>>,
    tls: Option<Spanned<String>>,
}

impl Config {
    /// What a file's text says.
    ///
    /// # Errors
    /// All of its mistakes; where it is no TOML, or has an unknown key, the first.
    pub(crate) fn parse(file: &Path, text: &str) -> Result<Self, Mistakes> {
        let mut found = Found {
            text,
            all: Vec::new(),
        };
        let parsed: Result<File, _> = toml::from_str(text);
        let config = match parsed {
            Ok(parsed) => check(parsed, &mut found),
            Err(error) => {
                let at = error.span().unwrap_or_default();
                // serde's name for it is no operator's.
                let text = error.message().replace("u64", "a whole number");
                found.add(&at, text);
                None
            }
        };
        match config {
            Some(config) if found.all.is_empty() => Ok(config),
            _ => {
                found.all.sort();
                Err(Mistakes {
                    file: file.to_owned(),
                    all: found.all,
                })
            }
        }
    }
}

/// Collects mistakes.
struct Found<'a> {
    text: &'a str,
    all: Vec<(usize, String)>,
}

impl Found<'_> {
    fn add(&mut self, at: &Range<usize>, text: String) {
        let before = self.text.get(..at.start).unwrap_or(self.text);
        let line = before.matches('\n').count() + 1;
        self.all.push((line, text));
    }

    /// What `parse` makes of a value, or a mistake.
    fn parsed<T, V, E: fmt::Display>(
        &mut self,
        value: &Spanned<V>,
        parse: impl FnOnce(&V) -> Result<T, E>,
    ) -> Option<T> {
        match parse(value.get_ref()) {
            Ok(parsed) => Some(parsed),
            Err(error) => {
                self.add(&value.span(), error.to_string());
                None
            }
        }
    }

    /// The same for a value that may be left out.
    fn or<T, V, E: fmt::Display>(
        &mut self,
        value: Option<&Spanned<V>>,
        usual: T,
        parse: impl FnOnce(&V) -> Result<T, E>,
    ) -> T {
        match value {
            Some(value) => self.parsed(value, parse).unwrap_or(usual),
            None => usual,
        }
    }
}

fn check(file: File, found: &mut Found<'_>) -> Option<Config> {
    let listen = found.parsed(&file.listen, |text| parse_port(text));
    let usual = Limits::default();
    let table = &file.limits;
    let limits = Limits {
        channels: found.or(table.channels.as_ref(), usual.channels, |count| {
            between("channels", *count, 1, 4096)
        }),
        peer_bytes: found.or(table.peer_memory.as_ref(), usual.peer_bytes, |text| {
            parse_bytes(text)
        }),
        associations: found.or(table.associations.as_ref(), usual.associations, |count| {
            between("associations", *count, 1, 4096)
        }),
        lanes: found.or(table.lanes.as_ref(), usual.lanes, |count| {
            between("lanes", *count, 1, 128)
        }),
        vanished: found.or(
            table.vanished.as_ref(),
            usual.vanished,
            |text| match parse_limit(text)? {
                limit if limit < Duration::from_secs(1) => {
                    Err("a peer cannot be missed in less than 1s".to_owned())
                }
                limit => Ok(limit),
            },
        ),
        connect: found.or(table.connect.as_ref(), usual.connect, |text| {
            parse_limit(text)
        }),
        lane_records: usual.lane_records,
    };
    if let Some(memory) = &table.peer_memory {
        let least = limits.channels as u64 * (256 << 10);
        if limits.peer_bytes < least {
            let text = format!(
                "{} channels need at least {} MiB: raise peer_memory, or lower channels",
                limits.channels,
                least.div_ceil(1 << 20)
            );
            found.add(&memory.span(), text);
        }
    }
    let offload = found.or(file.tls_offload.as_ref(), Offload::Auto, |text| {
        text.parse()
    });
    let drain = found.or(file.drain.as_ref(), DRAIN, |text| parse_limit(text));
    let is_prepared = file.ipsec.is_some();
    let ipsec = file.ipsec.as_ref();
    let ipsec = ipsec.and_then(|table| ipsec::check(table, found));
    let mut entrances = Vec::new();
    let mut exits = Vec::new();
    let mut relays = Vec::new();
    for (name, table) in &file.route {
        let at = table.span();
        let is_relay = relay::is_one(name, table.get_ref(), found);
        let over_ipsec = ipsec::is_asked_for(name, table.get_ref(), is_relay, is_prepared, found);
        if is_relay {
            relay::check(
                name,
                &at,
                table.get_ref(),
                found,
                &mut entrances,
                &mut relays,
            );
            continue;
        }
        stripe::check(
            name,
            &at,
            table.get_ref(),
            over_ipsec,
            found,
            &mut entrances,
            &mut exits,
        );
    }
    if file.route.is_empty() {
        let text = "there is no route: add [route.NAME] with listen and to on the host where \
                    connections come in, and with target and allow on the other";
        found.add(&(0..0), text.to_owned());
    }
    if !found.all.is_empty() {
        return None;
    }
    let routes = Routes::new(entrances, exits).and_then(|routes| routes.with_relays(relays));
    let routes = match routes {
        Ok(routes) => routes,
        Err(error) => {
            let table = file.route.get(error.route());
            let at = table.map_or(0..0, Spanned::span);
            found.add(&at, error.to_string());
            return None;
        }
    };
    let reading = Reading::with_open_key(file.allow_open_key);
    let mut tables = file.route.values();
    let starts_programs = tables.any(|table| table.get_ref().exec.is_some());
    Some(Config {
        listen: listen?,
        identity: file.identity,
        reading,
        offload,
        routes,
        starts_programs,
        ipsec,
        limits,
        drain,
    })
}

/// How long channels may go on after SIGTERM unless the file says otherwise:
/// what service managers wait before they kill, less a little.
const DRAIN: Duration = Duration::from_secs(80);

/// Who may answer at `to`: whom the route names, or the host there.
fn check_answering(
    peers: Option<&Spanned<Vec<Spanned<String>>>>,
    to: &Spanned<String>,
    host: Option<&str>,
    found: &mut Found<'_>,
) -> Option<Peers> {
    if let Some(peers) = peers {
        return check_peers(peers, found);
    }
    let host = host?;
    found.parsed(to, |_| {
        let peer = host
            .parse::<Peer>()
            .map_err(|error| format!("{error}: say with peers whose certificate is expected"))?;
        Ok::<_, String>(Peers::OneOf(vec![peer]))
    })
}

/// What a route leads to that has a target or a program.
fn check_target(name: &str, table: &RouteTable, found: &mut Found<'_>) -> Option<Target> {
    match (&table.target, &table.exec) {
        (Some(target), None) => found.parsed(target, |text| has_places(parse_target(text)?)),
        (None, Some(words)) => found.parsed(words, |words| match words.first() {
            Some(program) if program.starts_with('/') => has_places(Target::Exec(words.clone())),
            _ => Err(
                "exec is a program's whole path and its arguments: [\"/bin/cat\", \"-u\"]"
                    .to_owned(),
            ),
        }),
        (Some(_), Some(exec)) => {
            let text = format!("route {name} has a target and exec: leave one out");
            found.add(&exec.span(), text);
            None
        }
        (None, None) => None,
    }
}

fn check_peers(list: &Spanned<Vec<Spanned<String>>>, found: &mut Found<'_>) -> Option<Peers> {
    if list.get_ref().is_empty() {
        let text = "an empty list allows nobody: name the peers";
        found.add(&list.span(), text.to_owned());
        return None;
    }
    let before = found.all.len();
    let parsed = list.get_ref().iter();
    let peers = parsed.filter_map(|one| found.parsed(one, |text| text.parse::<Peer>()));
    let peers = Peers::OneOf(peers.collect());
    (found.all.len() == before).then_some(peers)
}

fn between<T: TryFrom<u64>>(what: &str, count: u64, least: u64, most: u64) -> Result<T, String> {
    let out = || format!("{count} {what} cannot be: {least} to {most} can");
    if !(least..=most).contains(&count) {
        return Err(out());
    }
    T::try_from(count).map_err(|_| out())
}

pub(crate) fn parse_port(text: &str) -> Result<Port, String> {
    if let Some(name) = text.strip_prefix(PASSED) {
        return passed_name(name).map(Port::Passed);
    }
    text.parse().map(Port::At).map_err(|_| {
        format!("{text:?} is no address: write 0.0.0.0:7300, [::]:7300 or systemd:NAME")
    })
}

/// What stands before the name of a socket that the service manager passes.
const PASSED: &str = "systemd:";

/// A name as `FileDescriptorName=` has it (systemd.socket(5)).
fn passed_name(name: &str) -> Result<String, String> {
    let fits = |byte: u8| byte.is_ascii_graphic() && byte != b':';
    if (1..=255).contains(&name.len()) && name.bytes().all(fits) {
        return Ok(name.to_owned());
    }
    Err(format!(
        "{name:?} is no name of a passed socket: write what its unit has as FileDescriptorName="
    ))
}

pub(super) fn parse_listen(text: &str) -> Result<Listen, String> {
    if let Some(name) = text.strip_prefix(PASSED) {
        return passed_name(name).map(Listen::Passed);
    }
    if let Some(path) = text.strip_prefix("unix:") {
        return Ok(Listen::Unix(socket_path(path)?));
    }
    if let Some(address) = text.strip_prefix("tcp:") {
        return address.parse().map(Listen::Tcp).map_err(|_| {
            format!("{address:?} is no address: write tcp:127.0.0.1:4444 or tcp:[::1]:4444")
        });
    }
    Err(format!(
        "{text:?} is no place to listen: write unix:PATH, tcp:ADDRESS:PORT or systemd:NAME"
    ))
}

fn parse_target(text: &str) -> Result<Target, String> {
    if let Some(path) = text.strip_prefix("unix:") {
        return Ok(Target::Unix(socket_path(path)?));
    }
    if let Some(to) = text.strip_prefix("tcp:") {
        host_of(to)?;
        return Ok(Target::Tcp(to.to_owned()));
    }
    Err(format!(
        "{text:?} is no target: write unix:PATH or tcp:HOST:PORT, or exec = [\"/PROGRAM\", …]"
    ))
}

/// A target whose places for a parameter can be.
fn has_places(target: Target) -> Result<Target, String> {
    match target.parameter() {
        Ok(_) => Ok(target),
        Err(error) => Err(error.to_string()),
    }
}

/// A path that fits a socket's address (unix(7)).
pub(crate) fn socket_path(path: &str) -> Result<PathBuf, String> {
    if !path.starts_with('/') {
        return Err(format!("{path:?} is no whole path: begin it with /"));
    }
    if path.len() > 107 || path.contains('\0') {
        return Err(format!(
            "{path:?} is too long for a socket's path: 107 bytes at most"
        ));
    }
    Ok(path.into())
}

/// The host of a host and a port.
pub(crate) fn host_of(text: &str) -> Result<String, String> {
    let wrong = || format!("{text:?} is no host and port: write host.example:7300");
    let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
    let host = match host.strip_prefix('[') {
        Some(host) => host.strip_suffix(']').ok_or_else(wrong)?,
        // Where the address ends and the port begins nobody can tell.
        None if host.contains(':') => {
            return Err(format!(
                "{text:?} is no host and port: an IPv6 address is written in brackets, as in \
                 [2001:db8::1]:7300"
            ));
        }
        None => host,
    };
    match port.parse::<u16>() {
        Ok(port) if port != 0 && !host.is_empty() => Ok(host.to_owned()),
        _ => Err(wrong()),
    }
}

#[cfg(test)]
mod tests;
