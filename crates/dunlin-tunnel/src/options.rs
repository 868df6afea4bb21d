//! Routes and limits of a tunnel, checked before anything is opened.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::num::NonZero;
use std::path::Path;
use std::thread;
use std::time::Duration;

use dunlin_linux::affinity;
use dunlin_linux::local::FileAccess;
use dunlin_proto::limits::{
    DEFAULT_CHANNELS, DEFAULT_PEER_BYTES, DEFAULT_WINDOW_BYTES, LEAST_WINDOW_BYTES, MAX_CHANNELS,
    MAX_LANES, MAX_NAME_BYTES,
};
use dunlin_proto::stripe::Timeouts;
use thiserror::Error;

use super::parameter::{BadParameterTarget, may_be_path};
use super::rate::Rates;
use super::route::{Listen, RelayExit, Target};
use dunlin_lane::peers::{Peer, Peers};
use dunlin_lane::policy::OldestTls;
use dunlin_lane::record::RECORD_LIMIT;

/// How a route's connections are carried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Connections are striped over the lanes to a peer that is also a tunnel.
    #[default]
    Stripe,
    /// Connections are striped over plain TCP lanes that IPsec protects, with SAs that the two
    /// tunnels negotiate. Both tunnels need [`super::TunnelBuilder::sealed`].
    StripeOverIpsec,
    /// Each client connection gets its own TLS connection, to a peer that may be any TLS
    /// server. The value is the oldest TLS version that the peer may use. Lane count and
    /// window are ignored.
    Relay(OldestTls),
    /// Each connection gets its own TLS 1.3 connection to this port of the host in
    /// [`Entrance::to`]. At this port the peer's tunnel has a [`RelayExit`] with [`Target::Ports`].
    /// The connection's parameter `port` is sent as the server name of the handshake. The trunk to
    /// `to` carries none of the connections, and only shows whether the peer's tunnel runs.
    RelayAt(u16),
}

/// The end of a route at which the local hypervisor connects.
#[derive(Clone, Debug)]
pub struct Entrance {
    /// The route's name, the same on both hosts.
    pub route: String,
    /// Where the route accepts connections.
    pub listen: Listen,
    /// The peer's tunnel, `host:port`.
    pub to: String,
    /// The identities that the tunnel at `to` may have.
    pub peers: Peers,
    /// Lane count, 1 to 128. Routes to the same peer share lanes; the largest count applies.
    pub lanes: u16,
    /// The channel window on this side: the maximum number of bytes of a channel that wait here.
    pub window_bytes: u64,
    /// How the route's connections are carried.
    pub mode: Mode,
}

/// The end of a route that connects to the local hypervisor.
#[derive(Clone, Debug)]
pub struct Exit {
    /// The route's name, the same on both hosts.
    pub route: String,
    /// The peers that may use the route.
    pub allow: Peers,
    /// The target to which the route's channels are connected.
    pub target: Target,
    /// The channel window on this side: the maximum number of bytes of a channel that wait here.
    pub window_bytes: u64,
}

/// A valid combination of entrances, exits and relays.
#[derive(Clone, Debug, Default)]
pub struct Routes {
    pub(super) entrances: Vec<Entrance>,
    pub(super) exits: Vec<Exit>,
    pub(super) relays: Vec<RelayExit>,
    pub(super) rates: Rates,
    /// The permissions of unix sockets, by route.
    pub(super) access: BTreeMap<String, FileAccess>,
}

/// Why routes are invalid. The configuration is at fault.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{why} (route {route:?})")]
pub struct BadRoute {
    /// The name of the route to change.
    pub route: String,
    /// What is wrong with the route.
    pub why: BadRouteReason,
}

/// What is wrong with a route.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum BadRouteReason {
    /// The name is empty or longer than a message allows.
    #[error("route name length out of range (1–{MAX_NAME_BYTES} bytes)")]
    Name,
    /// Another exit has this name.
    #[error("two routes with a target have the same name")]
    Twice,
    /// Another route has the same listener.
    #[error("two routes listen on {0}")]
    SameListener(Listen),
    /// The lane count is out of range.
    #[error("lane count {0} out of range (1–{MAX_LANES})")]
    Lanes(u16),
    /// The window, in bytes, is out of range.
    #[error("window of {0} bytes out of range ({LEAST_WINDOW_BYTES}–{MAX_WINDOW_BYTES})")]
    Window(u64),
    /// The route names no peers, so any peer with a certificate of the authority could connect.
    #[error("no peers named: name them, or any certificate of the authority would be accepted")]
    AnyPeer,
    /// The target names no program.
    #[error("target names no program")]
    Exec,
    /// The route listens at its own target.
    #[error(
        "listener \"{at}\" is also the target \"{target}\": the hypervisor that binds the target \
         would replace the tunnel's socket; use another listener, or open one on demand for \
         each VM"
    )]
    OwnTarget {
        /// Where the route listens.
        at: Listen,
        /// The route's target.
        target: Target,
    },
    /// The target is the listener of another route, which leads back to a peer that may use the
    /// target.
    #[error(
        "target \"{target}\" is the listener of route {other:?}, which leads back to a peer that \
         may use the target; change the target, or the listener of route {other:?}"
    )]
    Circle {
        /// The name of the route that listens at the target.
        other: String,
        /// The target.
        target: Target,
    },
    /// The route's mode is [`Mode::Relay`], and its connections are redirected: use
    /// [`Mode::RelayAt`].
    #[error(
        "redirected connections need the original destination's port at the peer, and the mode \
         Relay does not send it: use the mode RelayAt"
    )]
    RedirectedRelay,
    /// The route creates no unix socket that could have permissions.
    #[error(
        "owner, group and mode apply only to a unix socket that the tunnel creates, and this \
         route has none: omit them, or let the route listen at a unix socket"
    )]
    NoUnixSocket,
    /// The target's parameter placeholders are invalid.
    #[error("invalid target: {0}")]
    Parameter(#[from] BadParameterTarget),
}

/// The largest channel window, in bytes: enough for 100 Gbit/s over a round trip of 80 ms.
pub const MAX_WINDOW_BYTES: u64 = 1 << 30;

impl Routes {
    /// The unix sockets that the tunnel creates for entrances.
    pub fn sockets(&self) -> impl Iterator<Item = &Path> {
        self.entrances
            .iter()
            .filter_map(|entrance| match &entrance.listen {
                Listen::Unix(path) => Some(&**path),
                _ => None,
            })
    }

    /// The entrances.
    pub fn entrances(&self) -> &[Entrance] {
        &self.entrances
    }

    /// Checks entrances and exits.
    ///
    /// # Errors
    /// [`BadRoute`], for the first invalid route.
    pub fn new(entrances: Vec<Entrance>, exits: Vec<Exit>) -> Result<Self, BadRoute> {
        let mut listeners = BTreeSet::new();
        for entrance in &entrances {
            let bad = |why| bad(&entrance.route, why);
            check(&entrance.route, &entrance.peers, entrance.window_bytes).map_err(bad)?;
            if entrance.lanes == 0 || entrance.lanes > MAX_LANES {
                return Err(bad(BadRouteReason::Lanes(entrance.lanes)));
            }
            let is_redirected = matches!(entrance.listen, Listen::Redirected { .. });
            if is_redirected && matches!(entrance.mode, Mode::Relay(_)) {
                return Err(bad(BadRouteReason::RedirectedRelay));
            }
            // The kernel chooses a different port for each listener with port 0, so these listeners
            // do not conflict.
            let any_port = matches!(entrance.listen, Listen::Tcp(at) if at.port() == 0);
            let nowhere = entrance.listen == Listen::OnDemand;
            if !listeners.insert(&entrance.listen) && !any_port && !nowhere
                || redirects_the_same(entrance, &entrances)
            {
                return Err(bad(BadRouteReason::SameListener(entrance.listen.clone())));
            }
        }
        let mut names = BTreeSet::new();
        for exit in &exits {
            let bad = |why| bad(&exit.route, why);
            check(&exit.route, &exit.allow, exit.window_bytes).map_err(bad)?;
            if !names.insert(&exit.route) {
                return Err(bad(BadRouteReason::Twice));
            }
            check_target(&exit.route, &exit.target, &exit.allow, &entrances).map_err(bad)?;
        }
        Ok(Self {
            entrances,
            exits,
            ..Self::default()
        })
    }

    /// Adds the exits of relays. The entrance of a relay is an [`Entrance`] with [`Mode::Relay`] or
    /// [`Mode::RelayAt`]. A relay may have the same name as an exit if both have the same target
    /// and the same peers.
    ///
    /// # Errors
    /// [`BadRoute`], for the first invalid route.
    pub fn with_relays(mut self, exits: Vec<RelayExit>) -> Result<Self, BadRoute> {
        let mut names: BTreeSet<_> = self.exits.iter().map(|one| &one.route).collect();
        let listeners = self.entrances.iter().map(|one| one.listen.clone());
        let mut listeners: BTreeSet<_> = listeners.collect();
        for exit in &exits {
            let bad = |why| bad(&exit.route, why);
            check(&exit.route, &exit.allow, WINDOW_BYTES).map_err(bad)?;
            check_target(&exit.route, &exit.target, &exit.allow, &self.entrances).map_err(bad)?;
            let has_port = matches!(exit.target, Target::Ports { .. });
            if !has_port && let Ok(Some(_)) = exit.target.parameter() {
                return Err(bad(BadParameterTarget::Relay.into()));
            }
            let is_same = |one: &Exit| {
                (&one.route, &one.target, &one.allow) == (&exit.route, &exit.target, &exit.allow)
            };
            if !names.insert(&exit.route) && !self.exits.iter().any(is_same) {
                return Err(bad(BadRouteReason::Twice));
            }
            let listen = Listen::Tcp(exit.listen);
            if exit.listen.port() != 0 && !listeners.insert(listen.clone()) {
                return Err(bad(BadRouteReason::SameListener(listen)));
            }
        }
        self.relays = exits;
        Ok(self)
    }

    /// Adds entrances with [`Listen::Redirected`], exits, and exits of relays.
    ///
    /// # Errors
    /// [`BadRoute`], for the first invalid route.
    pub fn with_redirected(
        self,
        entrances: Vec<Entrance>,
        exits: Vec<Exit>,
        relays: Vec<RelayExit>,
    ) -> Result<Self, BadRoute> {
        let entrances = self.entrances.into_iter().chain(entrances);
        let exits = self.exits.into_iter().chain(exits);
        let relays = self.relays.into_iter().chain(relays);
        let routes = Self::new(entrances.collect(), exits.collect())?;
        let routes = routes.with_relays(relays.collect())?;
        Ok(Self {
            access: self.access,
            rates: self.rates,
            ..routes
        })
    }

    /// Sets the owner, group and mode of the unix sockets of a route, also of those that
    /// [`Tunnel::open`](crate::Tunnel::open) opens for it.
    ///
    /// # Errors
    /// The route creates no unix socket.
    pub fn with_access(mut self, route: &str, access: FileAccess) -> Result<Self, BadRoute> {
        let makes_sockets = |one: &Entrance| {
            one.route == route && matches!(one.listen, Listen::Unix(_) | Listen::OnDemand)
        };
        if !self.entrances.iter().any(makes_sockets) {
            return Err(bad(route, BadRouteReason::NoUnixSocket));
        }
        self.access.insert(route.to_owned(), access);
        Ok(self)
    }

    /// Limits the rate at which this side sends on a route, in bytes per second. A rate below
    /// [`LEAST_RATE`](crate::LEAST_RATE) is raised to it.
    pub fn with_rate(mut self, route: &str, bytes_per_s: u64) -> Self {
        self.rates.set_route(route, Some(bytes_per_s));
        self
    }

    /// Limits the rate at which this side sends to a peer, on all routes together. If several
    /// entries match a peer, the lowest rate applies.
    pub fn with_peer_rate(mut self, peer: &Peer, bytes_per_s: u64) -> Self {
        self.rates.set_peer(peer, Some(bytes_per_s));
        self
    }

    /// The owner, group and mode that routes set for their unix sockets.
    pub fn access_of_sockets(&self) -> impl Iterator<Item = &FileAccess> {
        self.access.values()
    }

    pub(super) fn access(&self, route: &str) -> FileAccess {
        self.access.get(route).copied().unwrap_or_default()
    }
}

/// Whether another entrance takes redirected connections to the same address and one of the same
/// ports.
fn redirects_the_same(entrance: &Entrance, all: &[Entrance]) -> bool {
    let Listen::Redirected { address, ports, .. } = entrance.listen else {
        return false;
    };
    let is_same = |other: &Entrance| match other.listen {
        Listen::Redirected {
            address: at,
            ports: others,
            ..
        } => at == address && ports.overlaps(others),
        _ => false,
    };
    all.iter().filter(|other| is_same(other)).count() > 1
}

fn bad(route: &str, why: BadRouteReason) -> BadRoute {
    let route = route.to_owned();
    BadRoute { route, why }
}

/// Checks a target. Another route of this host may listen at the target, which makes a chain of
/// tunnels. But the target must not be the listener of its own route, or of a route that leads back
/// to a peer that may use the target.
fn check_target(
    name: &str,
    target: &Target,
    allow: &Peers,
    entrances: &[Entrance],
) -> Result<(), BadRouteReason> {
    if matches!(target, Target::Exec(words) if words.is_empty()) {
        return Err(BadRouteReason::Exec);
    }
    target.parameter()?;
    for entrance in entrances {
        if !target.may_be(&entrance.listen) {
            continue;
        }
        let target = target.clone();
        if entrance.route == name {
            let at = entrance.listen.clone();
            return Err(BadRouteReason::OwnTarget { at, target });
        }
        if allow.share_one(&entrance.peers) {
            let other = entrance.route.clone();
            return Err(BadRouteReason::Circle { other, target });
        }
    }
    Ok(())
}

fn check(name: &str, peers: &Peers, window_bytes: u64) -> Result<(), BadRouteReason> {
    if name.is_empty() || name.len() > MAX_NAME_BYTES {
        return Err(BadRouteReason::Name);
    }
    if *peers == Peers::AnyFromAuthority {
        return Err(BadRouteReason::AnyPeer);
    }
    if !(LEAST_WINDOW_BYTES..=MAX_WINDOW_BYTES).contains(&window_bytes) {
        return Err(BadRouteReason::Window(window_bytes));
    }
    Ok(())
}

/// Whether `to`, a text `host:port`, names the listener at `listen` on this host.
fn is_port_of(to: &str, listen: SocketAddr) -> bool {
    let Some((host, port)) = to.rsplit_once(':') else {
        return false;
    };
    if port.parse() != Ok(listen.port()) {
        return false;
    }
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let at = listen.ip().to_canonical();
    if host.eq_ignore_ascii_case("localhost") {
        return at.is_loopback() || at.is_unspecified();
    }
    let Ok(address) = host.parse::<IpAddr>() else {
        return false;
    };
    let address = address.to_canonical();
    // A connection to the unspecified address goes to this host. A listener on the unspecified
    // address accepts connections to every address of this host. Of these addresses, this check
    // recognises only the loopback addresses.
    address == at
        || (at.is_unspecified() && address.is_loopback())
        || (address.is_unspecified() && (at.is_loopback() || at.is_unspecified()))
}

/// The limits of a tunnel. All have defaults, and values out of range are clamped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The maximum number of channels of one peer, 1 to 4096.
    pub channels: usize,
    /// The maximum number of bytes that may wait on this side for all channels of a peer together
    /// (I8). The least value is 256 KiB for each channel that `channels` allows.
    pub peer_bytes: u64,
    /// The maximum number of trunks.
    pub trunks: usize,
    /// On a trunk that a peer dialled, the number of lanes on which this side sends. If the peer
    /// accepts fewer, this side uses fewer.
    pub lanes: u16,
    /// How long a peer may stay unreachable before its trunk ends; at least 1 s. This side spends
    /// half of the time to detect the loss, and half to resume the trunk. If all connections to the
    /// peer are lost and its host refuses new ones, this side tries to resume for only a tenth of
    /// the time.
    pub vanished: Duration,
    /// How long the side that dialled a trunk keeps it without channels. The trunk of a redirect has
    /// no such limit.
    pub idle: Duration,
    /// Timeout for connecting to a target.
    pub connect: Duration,
    /// The number of records after which a lane is replaced. It is at most the record limit of the
    /// lane's key.
    pub lane_records: u64,
    /// The maximum number of lanes' threads of a trunk that send at the same time, at least 1. A
    /// thread that waits because its lane is full does not count. The default depends on the
    /// processors that the process may use: their number, or one less if they are all processors of
    /// the host.
    pub sending_threads: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            channels: DEFAULT_CHANNELS,
            peer_bytes: DEFAULT_PEER_BYTES,
            trunks: 64,
            lanes: DEFAULT_LANES,
            vanished: Duration::from_secs(10),
            // Longer than the lanes (`warm_ns` of the core), so that the next migration can use the
            // same trunk.
            idle: Duration::from_secs(60),
            connect: Duration::from_secs(10),
            lane_records: RECORD_LIMIT,
            sending_threads: sending_threads(),
        }
    }
}

/// Formula: a thread for each processor that the process may use. If these are all processors of
/// the host, one less, because the hypervisor's thread that produces the bytes needs one too.
/// Drawback: if that thread is mostly idle, so is a part of one processor. Alternative: with a thread
/// for each lane, the pieces of a channel alternate between threads that wait for each other. With
/// four lanes on two processors, that cost up to a fifth more CPU time and moved less.
fn sending_threads() -> usize {
    let usable = thread::available_parallelism().map_or(1, NonZero::get);
    let spare = usize::from(usable >= affinity::online());
    usable.saturating_sub(spare).max(1)
}

/// Lower bound of [`Limits::lane_records`]. A lane with fewer records would carry little besides
/// its handshake and its end.
const LEAST_RECORDS: u64 = 1024;

/// The lane count of a route that sets none.
pub const DEFAULT_LANES: u16 = 4;
/// The window of a route that sets none, in bytes (I8).
pub const WINDOW_BYTES: u64 = DEFAULT_WINDOW_BYTES;

impl Limits {
    /// Returns these limits, clamped to their ranges.
    pub(super) fn bounded(self) -> Self {
        let channels = self.channels.clamp(1, MAX_CHANNELS);
        Self {
            channels,
            peer_bytes: self.peer_bytes.max(channels as u64 * LEAST_WINDOW_BYTES),
            trunks: self.trunks.max(1),
            lanes: self.lanes.clamp(1, MAX_LANES),
            vanished: self.vanished.max(Duration::from_secs(1)),
            idle: self.idle.max(Duration::from_millis(10)),
            connect: self.connect.max(Duration::from_millis(1)),
            lane_records: self.lane_records.clamp(LEAST_RECORDS, RECORD_LIMIT),
            sending_threads: self.sending_threads.max(1),
        }
    }

    /// How long the control lane may receive nothing before it counts as lost.
    pub(super) fn silence(&self) -> Duration {
        self.vanished / 2
    }

    /// How long the peer's host may refuse connections before the peer's tunnel counts as ended.
    /// By default this is longer than the restart of a packet filter takes.
    pub(super) fn refused(&self) -> Duration {
        self.vanished / 10
    }

    pub(super) fn timeouts(&self) -> Timeouts {
        let half_ns = u64::try_from(self.silence().as_nanos()).unwrap_or(u64::MAX);
        let usual = Timeouts::default();
        Timeouts {
            progress_ns: half_ns.min(usual.progress_ns),
            alone_ns: half_ns,
            ..usual
        }
    }
}

impl Target {
    /// Whether a connection to this target can reach `listen` for at least one value of the
    /// parameter. Paths are compared as text: symbolic links and mounts are not resolved.
    fn may_be(&self, listen: &Listen) -> bool {
        match (self, listen) {
            (Self::Unix(target), Listen::Unix(listen)) => may_be_path(target, listen),
            (Self::Tcp(to), Listen::Tcp(at)) => is_port_of(to, *at),
            _ => false,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn peers() -> Peers {
        ["host.test".parse().unwrap()].into_iter().collect()
    }

    fn entrance() -> Entrance {
        Entrance {
            route: "ram".to_owned(),
            listen: Listen::Unix("/run/ram".into()),
            to: "host.test:1".to_owned(),
            peers: peers(),
            lanes: 4,
            window_bytes: WINDOW_BYTES,
            mode: Mode::Stripe,
        }
    }

    fn exit() -> Exit {
        Exit {
            route: "ram".to_owned(),
            allow: peers(),
            target: Target::Unix("/run/in".into()),
            window_bytes: WINDOW_BYTES,
        }
    }

    fn is_own(bad: &BadRoute) -> bool {
        matches!(bad.why, BadRouteReason::OwnTarget { .. })
    }

    #[test]
    fn a_route_that_listens_at_its_own_target_is_invalid() {
        let both = |listen: &str, target: &str| {
            let listen = match listen.strip_prefix("tcp:") {
                Some(at) => Listen::Tcp(at.parse().unwrap()),
                None => Listen::Unix(listen.into()),
            };
            let target = match target.strip_prefix("tcp:") {
                Some(to) => Target::Tcp(to.to_owned()),
                None => Target::Unix(target.into()),
            };
            let entrance = Entrance {
                listen,
                ..entrance()
            };
            Routes::new(vec![entrance], vec![Exit { target, ..exit() }])
        };
        for (listen, target) in [
            ("/run/a", "/run/a"),
            ("/run//a", "/run/a"),
            ("/run/a", "/run/./a/"),
            ("/run/x/../a", "/run/a"),
            ("/../run/a", "/run/a"),
            ("/run/web.sock", "/run/{vm}.sock"),
            ("/run/{vm}.sock", "/run/{vm}.sock"),
            ("/run/web/web.sock", "/run/{vm}/{vm}.sock"),
            ("/run//web/./in", "/run/{vm}/in"),
            ("/web", "/{vm}"),
            ("tcp:127.0.0.1:4444", "tcp:127.0.0.1:4444"),
            ("tcp:127.0.0.1:4444", "tcp:localhost:4444"),
            ("tcp:0.0.0.0:4444", "tcp:127.0.0.1:4444"),
            ("tcp:[::]:4444", "tcp:127.0.0.1:4444"),
            ("tcp:[::1]:4444", "tcp:[::1]:4444"),
            ("tcp:0.0.0.0:4444", "tcp:127.0.0.2:4444"),
            ("tcp:127.0.0.1:4444", "tcp:0.0.0.0:4444"),
            ("tcp:0.0.0.0:4444", "tcp:0.0.0.0:4444"),
            ("tcp:0.0.0.0:4444", "tcp:LocalHost:4444"),
            ("tcp:192.0.2.1:4444", "tcp:[::ffff:192.0.2.1]:4444"),
        ] {
            let refused = both(listen, target);
            let is_it = matches!(&refused, Err(bad) if is_own(bad) && bad.route == "ram");
            assert!(is_it, "{listen} {target}: {refused:?}");
        }
        for (listen, target) in [
            ("/run/a", "/run/b"),
            ("/run/a/b", "/run/a"),
            ("/run/a", "/run/A"),
            ("/run/web.sock", "/run/in/{vm}.sock"),
            ("/run/web/db.sock", "/run/{vm}/{vm}.sock"),
            ("/run/a/b.sock", "/run/{vm}.sock"),
            ("/run/.sock", "/run/{vm}.sock"),
            ("/run/-x", "/run/{vm}"),
            ("/run/a b", "/run/{vm}"),
            ("/run/x.sock", "/run/x.sock{vm}x.sock"),
            ("tcp:127.0.0.1:4444", "tcp:127.0.0.1:4445"),
            ("tcp:127.0.0.1:4444", "tcp:192.0.2.1:4444"),
            ("tcp:127.0.0.1:4444", "tcp:127.0.0.2:4444"),
            ("tcp:127.0.0.2:4444", "tcp:[::1]:4444"),
            ("tcp:192.0.2.1:4444", "tcp:localhost:4444"),
            ("tcp:192.0.2.1:4444", "tcp:0.0.0.0:4444"),
            // The target's address may belong to another host.
            ("tcp:0.0.0.0:4444", "tcp:192.0.2.1:4444"),
            ("tcp:127.0.0.1:4444", "tcp:host.test:4444"),
        ] {
            let taken = both(listen, target);
            assert!(taken.is_ok(), "{listen} {target}: {taken:?}");
        }
    }

    #[test]
    fn a_target_may_be_a_listener_that_leads_on_but_not_one_that_leads_back() {
        let chained = |peer: &str| {
            let out = Entrance {
                route: "out".to_owned(),
                peers: [peer.parse().unwrap()].into_iter().collect(),
                ..entrance()
            };
            let into = Exit {
                target: Target::Unix("/run//ram".into()),
                ..exit()
            };
            Routes::new(vec![out], vec![into])
        };
        assert!(chained("third.test").is_ok());
        let back = chained("host.test").unwrap_err();
        assert_eq!(back.route, "ram");
        assert!(
            matches!(&back.why, BadRouteReason::Circle { other, .. } if other == "out"),
            "{back}"
        );
        // A route with the same name is the same route, regardless of its peers.
        let same = Entrance {
            peers: ["third.test".parse().unwrap()].into_iter().collect(),
            listen: Listen::Unix("/run/in".into()),
            ..entrance()
        };
        let same = Routes::new(vec![same], vec![exit()]);
        assert!(same.as_ref().is_err_and(is_own), "{same:?}");
        // A relay with the same name is the same route, too.
        let relay = RelayExit {
            route: "ram".to_owned(),
            listen: "127.0.0.1:1".parse().unwrap(),
            allow: peers(),
            target: Target::Unix("/run/ram".into()),
            oldest_tls: OldestTls::default(),
        };
        let relayed = Routes::new(vec![entrance()], Vec::new()).unwrap();
        let relayed = relayed.with_relays(vec![relay]);
        assert!(relayed.as_ref().is_err_and(is_own), "{relayed:?}");
    }

    #[test]
    fn i7_invalid_routes_are_rejected() {
        assert!(Routes::new(vec![entrance()], vec![exit()]).is_ok());
        let bad = |change: fn(&mut Entrance)| {
            let mut one = entrance();
            change(&mut one);
            Routes::new(vec![one], Vec::new()).unwrap_err().why
        };
        for (found, expected) in [
            (bad(|one| one.route.clear()), BadRouteReason::Name),
            (bad(|one| one.lanes = 0), BadRouteReason::Lanes(0)),
            (bad(|one| one.lanes = 129), BadRouteReason::Lanes(129)),
            (bad(|one| one.window_bytes = 1), BadRouteReason::Window(1)),
            (
                bad(|one| one.window_bytes = 2 << 30),
                BadRouteReason::Window(2 << 30),
            ),
            (
                bad(|one| one.peers = Peers::AnyFromAuthority),
                BadRouteReason::AnyPeer,
            ),
        ] {
            assert_eq!(found, expected);
        }
        let twice = Routes::new(vec![entrance(), entrance()], Vec::new());
        assert!(matches!(
            twice.unwrap_err().why,
            BadRouteReason::SameListener(_)
        ));
        let twice = Routes::new(Vec::new(), vec![exit(), exit()]);
        assert!(matches!(twice.unwrap_err().why, BadRouteReason::Twice));
        let nothing = Exit {
            target: Target::Exec(Vec::new()),
            ..exit()
        };
        let nothing = Routes::new(Vec::new(), vec![nothing]);
        assert!(matches!(nothing.unwrap_err().why, BadRouteReason::Exec));
        let any_host = Exit {
            target: Target::Tcp("{host}:1".to_owned()),
            ..exit()
        };
        let any_host = Routes::new(Vec::new(), vec![any_host]);
        assert!(matches!(
            any_host.unwrap_err().why,
            BadRouteReason::Parameter(_)
        ));
        // Routes without a listener do not conflict with each other.
        let asked = |route: &str| Entrance {
            route: route.to_owned(),
            listen: Listen::OnDemand,
            ..entrance()
        };
        assert!(Routes::new(vec![asked("one"), asked("two")], Vec::new()).is_ok());
    }

    #[test]
    fn limits_are_clamped_to_their_ranges() {
        let wild = Limits {
            channels: 1 << 20,
            peer_bytes: 0,
            trunks: 0,
            lanes: 1000,
            vanished: Duration::ZERO,
            idle: Duration::ZERO,
            connect: Duration::ZERO,
            lane_records: 0,
            sending_threads: 0,
        };
        let Limits {
            channels,
            peer_bytes,
            trunks,
            lanes,
            sending_threads,
            ..
        } = wild.bounded();
        assert_eq!((channels, trunks, lanes), (4096, 1, 128));
        assert_eq!(sending_threads, 1);
        assert_eq!(peer_bytes, 4096 * LEAST_WINDOW_BYTES);
        assert_eq!(Limits::default().bounded(), Limits::default());
    }
}
