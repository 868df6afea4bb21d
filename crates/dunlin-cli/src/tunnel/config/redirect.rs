//! Redirects in the configuration: the tunnel carries a toolstack's connections to a range of ports
//! of its peers. `crate::redirect` makes the packet filter's rules from them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::RangeInclusive;

use dunlin::lane::peers::Peer;
use dunlin_tunnel::{Entrance, Listen, Mode, PortRange, RelayExit, WINDOW_BYTES};
use serde::Deserialize;
use time::{Date, Duration, Month, OffsetDateTime};
use toml::Spanned;

use super::stripe::parse_window;
use super::table::{Found, LanesKey, Port, at};

/// Default port of the peers' tunnels: outside the ports of toolstacks, and below the ephemeral
/// ports (32768 and above), which any program may hold.
pub(crate) const PEER_PORT: u16 = 18300;
/// Default for the first port of the listeners for redirected connections.
const REDIRECT_PORT: u16 = 18301;
/// Maximum length of a redirect's name, in bytes. The rules' comments contain the name, and
/// nftables limits a comment to 128 bytes.
const LONGEST_NAME: usize = 64;
/// The largest number of ports in a redirect. There is a limit because other programs of this host
/// cannot serve clients on a redirect's ports; toolstacks use at most 64.
const MOST_PORTS: u16 = 1024;
/// The largest number of hosts in the peers of all redirects. Each host needs a listener and a
/// trunk.
const MOST_PEERS: usize = 256;
/// How far ahead `plain_until` may be.
const LONGEST_PLAIN: Duration = Duration::days(90);

/// Connections of local users to ports of peers, and connections of the peers to the same ports of
/// this host. The tunnel carries both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Redirect {
    pub(crate) name: String,
    /// The same ports here and at the peers.
    pub(crate) ports: PortRange,
    pub(crate) peers: Vec<RedirectPeer>,
    /// Names or uids of local users. Only connections of these users are redirected.
    pub(crate) users: Vec<String>,
    /// Addresses of this host to which the peers' connections go, tried in order.
    pub(crate) local: Vec<IpAddr>,
    pub(crate) plain: Option<Plain>,
    /// Port of the peers' tunnels.
    pub(crate) peer_port: u16,
    /// Port at which this tunnel and the peers' tunnels accept relays.
    pub(crate) relay_port: Option<u16>,
    pub(crate) lanes: u16,
    pub(crate) window_bytes: u64,
    pub(crate) mode: Mode,
}

/// The listeners for redirected connections, on loopback. Each host in `peers` has its own, because
/// the tunnel closes a listener while its peer does not answer. The ports follow the order of the
/// hosts' names. The tunnel and the rules therefore use the same ports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Listeners {
    first: u16,
    hosts: Vec<String>,
}

impl Listeners {
    /// The listeners of these redirects, from the port `first` on.
    pub(crate) fn new(redirects: &[Redirect], first: u16) -> Self {
        let peers = redirects.iter().flat_map(|redirect| &redirect.peers);
        let hosts: BTreeSet<_> = peers.map(|peer| peer.host.clone()).collect();
        let hosts = hosts.into_iter().collect();
        Self { first, hosts }
    }

    /// The port of the listener for connections to a host.
    pub(crate) fn port(&self, host: &str) -> u16 {
        let index = self.hosts.iter().position(|one| one == host);
        let index = index.and_then(|index| u16::try_from(index).ok());
        self.first.saturating_add(index.unwrap_or_default())
    }

    /// The ports of all listeners.
    pub(crate) fn ports(&self) -> RangeInclusive<u16> {
        let more = u16::try_from(self.hosts.len()).unwrap_or(u16::MAX).max(1) - 1;
        self.first..=self.first.saturating_add(more)
    }
}

/// A peer of a redirect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RedirectPeer {
    /// An address in canonical form, or a host name, which means all of its addresses.
    pub(crate) host: String,
    /// A name or pin of the peer's certificate.
    pub(crate) identity: String,
}

/// Peers without Dunlin, which may connect to the ports in the clear.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plain {
    pub(crate) from: Vec<IpAddr>,
    /// The last day (UTC) on which these peers may connect.
    pub(crate) until: Date,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RedirectTable {
    ports: Spanned<String>,
    peers: Spanned<BTreeMap<Spanned<String>, Spanned<String>>>,
    users: Spanned<Vec<Spanned<String>>>,
    local: Option<Spanned<Vec<Spanned<String>>>>,
    peer_port: Option<Spanned<u64>>,
    relay_port: Option<Spanned<u64>>,
    lanes: Option<Spanned<LanesKey>>,
    window: Option<Spanned<String>>,
    pub(super) rate: Option<Spanned<String>>,
    mode: Option<Spanned<String>>,
    security: Option<Spanned<String>>,
    plain_from: Option<Spanned<Vec<Spanned<String>>>>,
    plain_until: Option<Spanned<String>>,
}

/// The first port of the listeners for redirected connections.
pub(super) fn port(port: &Option<Spanned<u64>>, found: &mut Found<'_>) -> u16 {
    found.count("redirect_port", port, REDIRECT_PORT, u64::from(u16::MAX))
}

/// The redirects of the file's tables.
pub(super) fn check(
    tables: &BTreeMap<String, Spanned<RedirectTable>>,
    is_prepared: bool,
    others: &Others<'_>,
    found: &mut Found<'_>,
) -> Vec<Redirect> {
    let mut redirects = Vec::new();
    for (name, table) in tables {
        if !is_name(name) {
            let text = format!(
                "invalid redirect name {name:?}: use 1 to {LONGEST_NAME} letters, digits, hyphens \
                 and underscores"
            );
            found.add(&table.span(), text);
        }
        if others.routes.contains(&name.as_str()) {
            let text = format!("redirect {name} and a route have the same name: rename one");
            found.add(&table.span(), text);
        }
        redirects.extend(check_one(name, table.get_ref(), is_prepared, found));
    }
    check_together(&redirects, tables, others, found);
    redirects
}

fn check_one(
    name: &str,
    table: &RedirectTable,
    is_prepared: bool,
    found: &mut Found<'_>,
) -> Option<Redirect> {
    let ports = found.parsed(&table.ports, |text| parse_ports(text));
    let peers = peers(name, &table.peers, found);
    let users = users(name, &table.users, found);
    let local = match &table.local {
        Some(local) => addresses(name, "local", local, found),
        None => vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()],
    };
    let plain = plain(name, table, &peers, today(), found);
    let (peer_port, relay_port) = (&table.peer_port, &table.relay_port);
    let most = u64::from(u16::MAX);
    let relay_port = relay_port
        .is_some()
        .then(|| found.count("relay_port", relay_port, 0, most));
    Some(Redirect {
        name: name.to_owned(),
        peers,
        users,
        local,
        plain,
        peer_port: found.count("peer_port", peer_port, PEER_PORT, most),
        relay_port,
        lanes: found.lanes(&table.lanes),
        window_bytes: found.or(&table.window, WINDOW_BYTES, parse_window),
        mode: mode(name, table, relay_port, is_prepared, found),
        ports: ports?,
    })
}

/// The other settings with which a redirect could collide.
pub(super) struct Others<'a> {
    pub(super) listen: Option<&'a Port>,
    pub(super) redirect_port: u16,
    /// Names of routes.
    pub(super) routes: Vec<&'a str>,
    pub(super) entrances: &'a [Entrance],
    pub(super) relays: &'a [RelayExit],
}

/// Reports redirects with overlapping ports, and ports of the tunnel within a redirect. If a port
/// of the tunnel were within a redirect, the redirect's rules would reject the tunnel's peers, or
/// lead the tunnel's own connections back to the tunnel.
fn check_together(
    redirects: &[Redirect],
    tables: &BTreeMap<String, Spanned<RedirectTable>>,
    others: &Others<'_>,
    found: &mut Found<'_>,
) {
    for (index, redirect) in redirects.iter().enumerate() {
        let Redirect { name, ports, .. } = redirect;
        let Some(table) = tables.get(name) else {
            continue;
        };
        let at = table.get_ref().ports.span();
        for other in &redirects[..index] {
            if ports.overlaps(other.ports) {
                let text = format!(
                    "redirect {name}: ports {ports} overlap ports {} of redirect {}: give each \
                     redirect ports of its own",
                    other.ports, other.name
                );
                found.add(&at, text);
            }
        }
        let peer_port = ("peer_port".to_owned(), redirect.peer_port);
        let relay_ports = redirects.iter().filter_map(|one| {
            let key = format!("relay_port of redirect {}", one.name);
            Some((key, one.relay_port?))
        });
        let own = Listeners::new(redirects, others.redirect_port).ports();
        let own = own.map(|port| ("redirect_port, or a port after it".to_owned(), port));
        let all = others.ports().chain([peer_port]).chain(relay_ports);
        for (key, port) in all.chain(own) {
            if ports.contains(port) {
                let text = format!(
                    "redirect {name}: ports {ports} contain {port}, which is {key}: change ports, \
                     or {key}"
                );
                found.add(&at, text);
            }
        }
    }
    check_relay_ports(redirects, tables, others, found);
    let listeners = Listeners::new(redirects, others.redirect_port);
    let Some(table) = tables.values().next() else {
        return;
    };
    if let Some(Port::At(listen)) = others.listen
        && listeners.ports().contains(&listen.port())
    {
        let text = format!(
            "`listen` has port {}, and the listeners for redirected connections have ports {}-{}, \
             from redirect_port on: choose another port for `listen`, or another redirect_port",
            listen.port(),
            listeners.ports().start(),
            listeners.ports().end()
        );
        found.add(&table.span(), text);
    }
    if listeners.hosts.len() > MOST_PEERS {
        let text = format!(
            "{} peers of redirects out of range (1 to {MOST_PEERS}): use another tunnel for some \
             of them",
            listeners.hosts.len()
        );
        found.add(&table.span(), text);
    }
}

/// Reports a `relay_port` at which the tunnel listens for something else.
fn check_relay_ports(
    redirects: &[Redirect],
    tables: &BTreeMap<String, Spanned<RedirectTable>>,
    others: &Others<'_>,
    found: &mut Found<'_>,
) {
    let listeners = Listeners::new(redirects, others.redirect_port).ports();
    for (index, redirect) in redirects.iter().enumerate() {
        let table = tables.get(&redirect.name).map(Spanned::get_ref);
        let (Some(port), Some(at)) = (redirect.relay_port, table.and_then(|it| at(&it.relay_port)))
        else {
            continue;
        };
        let is_taken = others.ports().any(|(_, other)| other == port)
            || listeners.contains(&port)
            || port == redirect.peer_port
            || redirects[..index]
                .iter()
                .any(|other| other.relay_port == Some(port));
        if is_taken {
            let text = format!(
                "redirect {}: the tunnel already uses relay_port {port} for something else: choose \
                 a port that only this redirect uses",
                redirect.name
            );
            found.add(&at, text);
        }
    }
}

impl Others<'_> {
    /// The ports at which the tunnel listens and to which it connects, each with the setting in the
    /// configuration that contains the port.
    fn ports(&self) -> impl Iterator<Item = (String, u16)> {
        let listen = match self.listen {
            Some(Port::At(listen)) => Some(("`listen`".to_owned(), listen.port())),
            _ => None,
        };
        let entrances = self.entrances.iter().flat_map(|entrance| {
            let route = &entrance.route;
            let listen = match entrance.listen {
                Listen::Tcp(at) => Some((format!("`listen` of route {route}"), at.port())),
                _ => None,
            };
            let to = entrance.to.rsplit_once(':');
            let to = to.and_then(|(_, port)| port.parse().ok());
            let to = to.map(|port| (format!("`to` of route {route}"), port));
            listen.into_iter().chain(to)
        });
        let relays = self.relays.iter().map(|relay| {
            let key = format!("tls_listen of route {}", relay.route);
            (key, relay.listen.port())
        });
        listen.into_iter().chain(entrances).chain(relays)
    }
}

fn is_name(name: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
    (1..=LONGEST_NAME).contains(&name.len()) && name.bytes().all(fits)
}

fn parse_ports(text: &str) -> Result<PortRange, String> {
    let range = match text.contains('-') {
        true => text.parse::<PortRange>(),
        false => format!("{text}-{text}").parse(),
    };
    let range = range.map_err(|_| {
        format!("invalid ports {text:?}: write the toolstack's range, such as 49152-49215")
    })?;
    if range.first() < 1024 {
        return Err(format!(
            "ports {range} begin below 1024, where other services listen: write the toolstack's \
             range, such as 49152-49215"
        ));
    }
    match range.last() - range.first() {
        more if more < MOST_PORTS => Ok(range),
        more => Err(format!(
            "{} ports out of range (1 to {MOST_PORTS}): write the toolstack's range, such as \
             49152-49215",
            u32::from(more) + 1
        )),
    }
}

fn peers(
    name: &str,
    table: &Spanned<BTreeMap<Spanned<String>, Spanned<String>>>,
    found: &mut Found<'_>,
) -> Vec<RedirectPeer> {
    let mut peers: Vec<RedirectPeer> = Vec::new();
    for (host, identity) in table.get_ref() {
        let at = host.span();
        found.parsed(identity, |text| text.parse::<Peer>());
        let Some(host) = found.parsed(host, |text| parse_host(text)) else {
            continue;
        };
        if let Some(other) = peers.iter().find(|other| other.host == host) {
            let text = format!(
                "redirect {name}: {host} has two identities, {} and {}: remove one",
                other.identity,
                identity.get_ref()
            );
            found.add(&at, text);
        }
        peers.push(RedirectPeer {
            host,
            identity: identity.get_ref().clone(),
        });
    }
    if table.get_ref().is_empty() {
        let text = format!(
            "redirect {name} has no peer: add peers = {{ \"ADDRESS\" = \"NAME\" }} with the name \
             in the peer's certificate"
        );
        found.add(&table.span(), text);
    }
    peers
}

/// An address in canonical form, or a host name in lower case.
fn parse_host(text: &str) -> Result<String, String> {
    if let Ok(address) = text.parse::<IpAddr>() {
        return usable(address).map(|address| address.to_string());
    }
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    // A text without letters is not a host name, but an address with a mistake.
    let is_name = text.bytes().all(fits) && text.bytes().any(|byte| byte.is_ascii_alphabetic());
    if is_name && text.len() <= 253 && !text.starts_with(['-', '.']) {
        return Ok(text.to_ascii_lowercase());
    }
    Err(format!(
        "invalid host {text:?}: write an address, such as 192.0.2.2 or 2001:db8::2, or a host name"
    ))
}

/// An address that a host can have. An IPv4-mapped IPv6 address becomes the IPv4 address, because
/// its packets are IPv4 packets.
fn usable(address: IpAddr) -> Result<IpAddr, String> {
    let address = address.to_canonical();
    if address.is_unspecified() || address.is_multicast() {
        return Err(format!(
            "{address} is not the address of one host: write one, such as 192.0.2.2 or 2001:db8::2"
        ));
    }
    Ok(address)
}

fn users(name: &str, list: &Spanned<Vec<Spanned<String>>>, found: &mut Found<'_>) -> Vec<String> {
    if list.get_ref().is_empty() {
        let text = format!(
            "redirect {name}: `users` is empty, so no connection would be redirected: name the \
             toolstack's users, such as [\"root\", \"libvirt-qemu\"]"
        );
        found.add(&list.span(), text);
    }
    let users = list.get_ref().iter();
    let users = users.filter_map(|user| found.parsed(user, |text| parse_user(text)));
    users.collect()
}

/// A user name as useradd(8) permits it, or a uid. The largest number is not a uid: system calls
/// use it for "no change".
pub(super) fn parse_user(text: &str) -> Result<String, String> {
    let wrong = || format!("invalid user {text:?}: write a user name, or a uid such as \"107\"");
    if text.bytes().all(|byte| byte.is_ascii_digit()) {
        let uid = text.parse::<u32>().ok().filter(|uid| *uid != u32::MAX);
        return uid.map(|uid| uid.to_string()).ok_or_else(wrong);
    }
    let fits = |byte: u8| byte.is_ascii_graphic() && !b":,/\"'\\".contains(&byte);
    let fits = text.bytes().all(fits) && !text.starts_with('-') && text.len() <= 256;
    fits.then(|| text.to_owned()).ok_or_else(wrong)
}

fn addresses(
    name: &str,
    key: &str,
    list: &Spanned<Vec<Spanned<String>>>,
    found: &mut Found<'_>,
) -> Vec<IpAddr> {
    if list.get_ref().is_empty() {
        let text = format!("redirect {name}: {key} is empty: name an address, or remove {key}");
        found.add(&list.span(), text);
    }
    let mut addresses = Vec::new();
    for one in list.get_ref() {
        let address = found.parsed(one, |text| match text.parse() {
            Ok(address) => usable(address),
            Err(_) => Err(format!(
                "invalid address {text:?}: write an address, such as 192.0.2.2 or 2001:db8::2"
            )),
        });
        addresses.extend(address);
    }
    addresses
}

fn plain(
    name: &str,
    table: &RedirectTable,
    peers: &[RedirectPeer],
    today: Date,
    found: &mut Found<'_>,
) -> Option<Plain> {
    let until = table.plain_until.as_ref();
    let Some(from) = &table.plain_from else {
        if let Some(at) = at(&table.plain_until) {
            found.add(
                &at,
                format!(
                    "redirect {name}: plain_until needs plain_from: add it, or remove plain_until"
                ),
            );
        }
        return None;
    };
    let addresses = addresses(name, "plain_from", from, found);
    for (one, text) in addresses.iter().zip(from.get_ref()) {
        if peers.iter().any(|peer| peer.host == one.to_string()) {
            let why = format!(
                "redirect {name}: {one} is in peers and in plain_from: remove it from plain_from \
                 if a tunnel runs on that host, and otherwise from peers"
            );
            found.add(&text.span(), why);
        }
    }
    let Some(until) = until else {
        let latest = today + LONGEST_PLAIN;
        let text = format!(
            "redirect {name}: plain_from needs an end: add plain_until = \"YYYY-MM-DD\", {latest} \
             or an earlier day"
        );
        found.add(&from.span(), text);
        return None;
    };
    let until = found.parsed(until, |text| parse_until(text, today))?;
    Some(Plain {
        from: addresses,
        until,
    })
}

/// Parses a date that is at most 90 days ahead. A date in the past is valid: an error would leave a
/// host that boots after that date without any rules.
fn parse_until(text: &str, today: Date) -> Result<Date, String> {
    let latest = today + LONGEST_PLAIN;
    let date = parse_date(text)
        .ok_or_else(|| format!("invalid date {text:?}: write YYYY-MM-DD, such as {latest}"))?;
    if date > latest {
        return Err(format!(
            "plain_until {date} is more than {} days ahead: write {latest} or an earlier day",
            LONGEST_PLAIN.whole_days()
        ));
    }
    Ok(date)
}

fn parse_date(text: &str) -> Option<Date> {
    let mut parts = text.split('-');
    let mut number = |digits: usize| {
        let part = parts.next()?;
        let fits = part.len() == digits && part.bytes().all(|byte| byte.is_ascii_digit());
        fits.then(|| part.parse::<u16>().ok())?
    };
    let (year, month, day) = (number(4)?, number(2)?, number(2)?);
    if parts.next().is_some() {
        return None;
    }
    let month = Month::try_from(u8::try_from(month).ok()?).ok()?;
    Date::from_calendar_date(year.into(), month, u8::try_from(day).ok()?).ok()
}

fn mode(
    name: &str,
    table: &RedirectTable,
    relay_port: Option<u16>,
    is_prepared: bool,
    found: &mut Found<'_>,
) -> Mode {
    let relay = found.or(&table.mode, None, |text| match (text, relay_port) {
        ("stripe", _) => Ok(None),
        ("relay", Some(port)) => Ok(Some(Mode::RelayAt(port))),
        ("relay", None) => Err(format!(
            "redirect {name} is a relay: add relay_port, an unused port on which the tunnel of every \
             host accepts this relay"
        )),
        (other, _) => Err(format!(
            "unknown mode {other:?}: write \"stripe\" or \"relay\", or remove `mode`"
        )),
    });
    if relay.is_some() {
        let keys = [
            ("lanes", at(&table.lanes)),
            ("window", at(&table.window)),
            ("security", at(&table.security)),
        ];
        found.misplaced(name, "mode = \"stripe\"", &keys);
    }
    let striped = found.or(&table.security, Mode::Stripe, |text| match text {
        "tls" => Ok(Mode::Stripe),
        "ipsec" if is_prepared => Ok(Mode::StripeOverIpsec),
        "ipsec" => Err(format!(
            "redirect {name} uses IPsec: add [ipsec] on both hosts"
        )),
        other => Err(format!(
            "unknown security {other:?}: write \"tls\" or \"ipsec\", or remove `security`"
        )),
    });
    relay.unwrap_or(striped)
}

impl Plain {
    /// Whether the day `plain_until` has passed. If so, the rules accept nothing in the clear.
    pub(crate) fn is_over(&self, today: Date) -> bool {
        self.until < today
    }
}

pub(crate) fn today() -> Date {
    OffsetDateTime::now_utc().date()
}

#[cfg(test)]
mod tests;
