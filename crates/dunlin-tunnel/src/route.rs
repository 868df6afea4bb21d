//! The ends of a route: where connections come in and go out, and the peer in between.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use dunlin_lane::peers::Peers;
use dunlin_lane::policy::OldestTls;
use dunlin_proto::negotiate::LaneSecurity;

/// Where a route takes connections.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Listen {
    /// A unix socket that the tunnel makes, and removes when it ends.
    Unix(PathBuf),
    /// A TCP port. Anybody who reaches it is carried.
    Tcp(SocketAddr),
    /// A socket that was passed to the process, by its name in
    /// [`super::Sockets`].
    Passed(String),
    /// Nowhere, until [`super::Tunnel::open`] is asked for a listener.
    OnDemand,
}

/// What a route's channels are connected to. `{NAME}` in a unix socket's path or
/// in a program's arguments is where the channel's [`super::Parameter`] of that
/// name goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// A unix socket.
    Unix(PathBuf),
    /// A host and a port.
    Tcp(String),
    /// A program and its arguments, started for each channel, whose standard
    /// input and output are the channel.
    Exec(Vec<String>),
}

impl fmt::Display for Listen {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(formatter, "unix:{}", path.display()),
            Self::Tcp(address) => write!(formatter, "tcp:{address}"),
            Self::Passed(name) => write!(formatter, "systemd:{name}"),
            Self::OnDemand => formatter.write_str("nothing until it is asked for"),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(formatter, "unix:{}", path.display()),
            Self::Tcp(to) => write!(formatter, "tcp:{to}"),
            Self::Exec(words) => write!(formatter, "exec:{}", words.join(" ")),
        }
    }
}

/// The end of a relay where any TLS client comes in.
#[derive(Clone, Debug)]
pub struct RelayExit {
    /// The route's name, for the log.
    pub route: String,
    /// A port of its own. Nobody gets further there who is not in `allow`.
    pub listen: SocketAddr,
    /// Who may use it.
    pub allow: Peers,
    /// What its channels are connected to.
    pub target: Target,
    /// The oldest TLS that clients may speak.
    pub oldest_tls: OldestTls,
}

/// Where a peer is, who it has to be, and what protects the lanes to it.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Destination {
    pub(super) to: String,
    pub(super) peers: Peers,
    pub(super) security: LaneSecurity,
}
