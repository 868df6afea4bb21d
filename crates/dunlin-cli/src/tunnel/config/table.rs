//! A route's table in the file, and its values.

use std::fmt;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::ops::Range;
use std::path::PathBuf;

use anyhow::anyhow;
use dunlin::lane::fastest;
use dunlin::lane::peers::{Peer, Peers};
use dunlin_tunnel::{Entrance, Listen, Mode, PortRange, Sockets, Target, WINDOW_BYTES};
use serde::Deserialize;
use toml::Spanned;

use crate::service::cannot_listen;

/// An address to listen on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Port {
    /// An address and a port.
    At(SocketAddr),
    /// A TCP socket passed to the process, by its name.
    Passed(String),
}

impl Port {
    /// Binds the address or takes the passed socket; `setting` names the flag or key of the
    /// address, for errors.
    pub(crate) fn open(&self, passed: &Sockets, setting: &str) -> anyhow::Result<TcpListener> {
        match self {
            Self::At(address) => {
                TcpListener::bind(address).map_err(|error| cannot_listen(address, setting, &error))
            }
            Self::Passed(name) => passed
                .tcp(name)
                .map_err(|error| anyhow!("cannot listen on systemd:{name}: {error}")),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RouteTable {
    pub(super) mode: Option<Spanned<String>>,
    pub(super) security: Option<Spanned<String>>,
    pub(super) listen: Option<Spanned<String>>,
    pub(super) socket_owner: Option<Spanned<String>>,
    pub(super) socket_group: Option<Spanned<String>>,
    pub(super) socket_mode: Option<Spanned<String>>,
    pub(super) to: Option<Spanned<String>>,
    pub(super) peers: Option<Spanned<Vec<Spanned<String>>>>,
    pub(super) lanes: Option<Spanned<LanesKey>>,
    pub(super) target: Option<Spanned<String>>,
    pub(super) exec: Option<Spanned<Vec<String>>>,
    pub(super) allow: Option<Spanned<Vec<Spanned<String>>>>,
    pub(super) window: Option<Spanned<String>>,
    pub(super) rate: Option<Spanned<String>>,
    pub(super) tls_listen: Option<Spanned<String>>,
    pub(super) tls: Option<Spanned<String>>,
}

/// A number, or `"auto"`.
#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum LanesKey {
    Number(u64),
    Word(String),
}

/// Collects the mistakes in the file, each with its line.
pub(super) struct Found<'a> {
    pub(super) text: &'a str,
    pub(super) all: Vec<(usize, String)>,
}

impl Found<'_> {
    pub(super) fn add(&mut self, at: &Range<usize>, text: String) {
        let before = self.text.get(..at.start).unwrap_or(self.text);
        let line = before.matches('\n').count() + 1;
        self.all.push((line, text));
    }

    /// The parsed value; a failure is added as a mistake.
    pub(super) fn parsed<T, V, E: fmt::Display>(
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

    /// The parsed text, or `usual` if the text is absent or has a mistake.
    pub(super) fn or<T, E: fmt::Display>(
        &mut self,
        value: &Option<Spanned<String>>,
        usual: T,
        parse: impl FnOnce(&str) -> Result<T, E>,
    ) -> T {
        let value = value.as_ref();
        let parsed = value.and_then(|value| self.parsed(value, |text| parse(text)));
        parsed.unwrap_or(usual)
    }

    /// A count from 1 to `most`, or `usual` if the count is absent or out of range.
    pub(super) fn count<T: TryFrom<u64>>(
        &mut self,
        what: &str,
        value: &Option<Spanned<u64>>,
        usual: T,
        most: u64,
    ) -> T {
        let value = value.as_ref();
        let parsed =
            value.and_then(|value| self.parsed(value, |count| between(what, *count, most)));
        parsed.unwrap_or(usual)
    }

    /// A number of lanes. Without the key, `"auto"` applies.
    pub(super) fn lanes(&mut self, key: &Option<Spanned<LanesKey>>) -> u16 {
        let given = key.as_ref().and_then(|key| {
            self.parsed(key, |lanes| match lanes {
                LanesKey::Number(lanes) => between("lanes", *lanes, 128).map(Some),
                LanesKey::Word(word) if word == "auto" => Ok(None),
                LanesKey::Word(word) => Err(format!(
                    "lanes {word:?} is not a number of lanes: give 1 to 128, or \"auto\""
                )),
            })
        });
        given.flatten().unwrap_or_else(|| fastest::lanes(None))
    }

    /// Adds a mistake for each of `keys` that the route has, because the route lacks the setting
    /// `with` that they require.
    pub(super) fn misplaced(
        &mut self,
        route: &str,
        with: &str,
        keys: &[(&str, Option<Range<usize>>)],
    ) {
        for (key, at) in keys {
            if let Some(at) = at {
                self.add(at, format!("route {route}: {key} needs {with}"));
            }
        }
    }
}

/// The peers allowed to answer at `to`: those that the route names, or the host in `to`.
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
            .map_err(|error| format!("{error}: name the expected peer in `peers`"))?;
        Ok::<_, String>(Peers::OneOf(vec![peer]))
    })
}

/// The target of a route with `target` or `exec`.
fn check_target(name: &str, table: &RouteTable, found: &mut Found<'_>) -> Option<Target> {
    match (&table.target, &table.exec) {
        (Some(target), None) => found.parsed(target, |text| with_parameter(parse_target(text)?)),
        (None, Some(words)) => found.parsed(words, |words| match words.first() {
            Some(program) if program.starts_with('/') => {
                with_parameter(Target::Exec(words.clone()))
            }
            _ => Err(
                "exec must be a program's absolute path and its arguments: [\"/bin/cat\", \"-u\"]"
                    .to_owned(),
            ),
        }),
        (Some(_), Some(exec)) => {
            let text = format!("route {name} has a target and exec: remove one");
            found.add(&exec.span(), text);
            None
        }
        (None, None) => None,
    }
}

fn check_peers(list: &Spanned<Vec<Spanned<String>>>, found: &mut Found<'_>) -> Option<Peers> {
    if list.get_ref().is_empty() {
        let text = "an empty list allows no peer: name the peers";
        found.add(&list.span(), text.to_owned());
        return None;
    }
    let before = found.all.len();
    let parsed = list.get_ref().iter();
    let peers = parsed.filter_map(|one| found.parsed(one, |text| text.parse::<Peer>()));
    let peers = Peers::OneOf(peers.collect());
    (found.all.len() == before).then_some(peers)
}

fn between<T: TryFrom<u64>>(what: &str, count: u64, most: u64) -> Result<T, String> {
    let fits = (1..=most).contains(&count);
    let count_of = fits.then(|| T::try_from(count).ok()).flatten();
    count_of.ok_or_else(|| format!("{what} {count} out of range (1 to {most})"))
}

/// The span of a value, if the route has the value.
pub(super) fn at<V>(value: &Option<Spanned<V>>) -> Option<Range<usize>> {
    value.as_ref().map(Spanned::span)
}

/// The end of a route at which hypervisors connect. Its peer is at `to`.
pub(super) fn check_entrance(
    name: &str,
    table: &RouteTable,
    listen: Option<Listen>,
    to: &Spanned<String>,
    mode: Mode,
    found: &mut Found<'_>,
) -> Option<Entrance> {
    let host = found.parsed(to, |text| host_of(text));
    let peers = check_answering(table.peers.as_ref(), to, host.as_deref(), found);
    Some(Entrance {
        route: name.to_owned(),
        listen: listen?,
        to: to.get_ref().clone(),
        peers: peers?,
        lanes: 1,
        window_bytes: WINDOW_BYTES,
        mode,
    })
}

/// The target of a route, and the peers allowed to reach it.
pub(super) fn check_exit(
    name: &str,
    at: &Range<usize>,
    table: &RouteTable,
    found: &mut Found<'_>,
) -> Option<(Target, Peers)> {
    let target = check_target(name, table, found);
    let Some(allow) = &table.allow else {
        let text = format!(
            "route {name} has a target and allows no peer: add allow = [\"NAME\"] with the names \
             in the peers' certificates"
        );
        found.add(at, text);
        return None;
    };
    let allow = check_peers(allow, found);
    target.zip(allow)
}

/// Adds a mistake for a route that listens without a peer.
pub(super) fn lacks_peer(name: &str, listen: &Spanned<String>, found: &mut Found<'_>) {
    let text = format!("route {name} listens and has no peer: set `to = \"HOST:PORT\"`");
    found.add(&listen.span(), text);
}

pub(crate) fn parse_port(text: &str) -> Result<Port, String> {
    if let Some(name) = text.strip_prefix(PASSED) {
        return passed_name(name).map(Port::Passed);
    }
    text.parse().map(Port::At).map_err(|_| {
        format!("invalid address {text:?}: write 0.0.0.0:18300, [::]:18300 or systemd:NAME")
    })
}

/// Prefix of the name of a socket passed by the service manager.
const PASSED: &str = "systemd:";

/// A name as in `FileDescriptorName=` (systemd.socket(5)).
pub(super) fn passed_name(name: &str) -> Result<String, String> {
    let fits = |byte: u8| byte.is_ascii_graphic() && byte != b':';
    if (1..=255).contains(&name.len()) && name.bytes().all(fits) {
        return Ok(name.to_owned());
    }
    Err(format!(
        "invalid socket name {name:?}: write the FileDescriptorName= of its unit"
    ))
}

pub(crate) fn parse_listen(text: &str) -> Result<Listen, String> {
    if let Some(name) = text.strip_prefix(PASSED) {
        return passed_name(name).map(Listen::Passed);
    }
    if let Some(path) = text.strip_prefix("unix:") {
        return Ok(Listen::Unix(socket_path(path)?));
    }
    if let Some(address) = text.strip_prefix("tcp:") {
        return address.parse().map(Listen::Tcp).map_err(|_| {
            format!("invalid address {address:?}: write tcp:127.0.0.1:4444 or tcp:[::1]:4444")
        });
    }
    Err(format!(
        "invalid listen address {text:?}: write unix:PATH, tcp:ADDRESS:PORT or systemd:NAME"
    ))
}

fn parse_target(text: &str) -> Result<Target, String> {
    if let Some((address, ports)) = text.strip_prefix("tcp:").and_then(|at| at.rsplit_once(':'))
        && ports.contains('-')
    {
        return ports_target(address, ports);
    }
    parse_server(text, Target::Unix, Target::Tcp).unwrap_or_else(|| {
        Err(format!(
            "invalid target {text:?}: write unix:PATH or tcp:HOST:PORT, or exec = [\"/PROGRAM\", …]"
        ))
    })
}

/// A target `tcp:ADDRESS:FIRST-LAST`: the peer's parameter `port` selects one of the ports.
fn ports_target(address: &str, ports: &str) -> Result<Target, String> {
    let bare = address
        .strip_prefix('[')
        .and_then(|one| one.strip_suffix(']'));
    let address = bare.unwrap_or(address).parse::<IpAddr>().map_err(|_| {
        format!("invalid address {address:?}: a target with several ports needs an address, such as 127.0.0.1")
    })?;
    let range = ports.parse::<PortRange>();
    Ok(Target::Ports {
        addresses: vec![address],
        ports: range.map_err(|error| format!("invalid ports {ports:?}: {error}"))?,
    })
}

/// A server, `unix:PATH` or `tcp:HOST:PORT`; `None` for other texts.
pub(crate) fn parse_server<T>(
    text: &str,
    unix: impl Fn(PathBuf) -> T,
    tcp: impl Fn(String) -> T,
) -> Option<Result<T, String>> {
    match text.split_once(':')? {
        ("unix", path) => Some(socket_path(path).map(unix)),
        ("tcp", to) => Some(host_of(to).map(|_| tcp(to.to_owned()))),
        _ => None,
    }
}

/// Checks a target's parameter.
pub(super) fn with_parameter(target: Target) -> Result<Target, String> {
    target.parameter().map_err(|error| error.to_string())?;
    Ok(target)
}

/// An absolute path that fits a socket address (unix(7)).
pub(crate) fn socket_path(path: &str) -> Result<PathBuf, String> {
    if !path.starts_with('/') {
        return Err(format!("{path:?} is not an absolute path: begin it with /"));
    }
    if path.len() > 107 || path.contains('\0') {
        return Err(format!(
            "{path:?} does not fit a socket path (at most 107 bytes, none of them NUL)"
        ));
    }
    Ok(path.into())
}

/// The host of `HOST:PORT`.
pub(super) fn host_of(text: &str) -> Result<String, String> {
    let wrong = || format!("invalid host and port {text:?}: write host.example:18300");
    let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
    let host = match host.strip_prefix('[') {
        Some(host) => host.strip_suffix(']').ok_or_else(wrong)?,
        // Without brackets the end of an IPv6 address is ambiguous.
        None if host.contains(':') => {
            return Err(format!(
                "invalid host and port {text:?}: write an IPv6 address in brackets, as in \
                 [2001:db8::1]:18300"
            ));
        }
        None => host,
    };
    match port.parse::<u16>() {
        Ok(port) if port != 0 && !host.is_empty() => Ok(host.to_owned()),
        _ => Err(wrong()),
    }
}
