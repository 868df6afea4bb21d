//! The parts of a route: where it accepts connections, its target, and the peer to which it leads.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use dunlin_lane::peers::Peers;
use dunlin_lane::policy::OldestTls;
use dunlin_proto::ipsec::ports::PortRange;
use dunlin_proto::negotiate::LaneSecurity;

/// Where a route accepts connections.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Listen {
    /// A unix socket that the tunnel creates, and removes when it ends.
    Unix(PathBuf),
    /// A TCP port. The tunnel does not authenticate its clients.
    Tcp(SocketAddr),
    /// A socket that was passed to the process, by its name in [`super::Sockets`].
    Passed(String),
    /// No listener until [`super::Tunnel::open`] opens one.
    OnDemand,
    /// A port on 127.0.0.1 and ::1, to which the packet filter redirects the connections to
    /// `address` and `ports`. The tunnel keeps a trunk to the peer up, and listens only while the
    /// trunk is up. At other times the kernel refuses a connection at once, as the peer's kernel
    /// does if nothing listens there.
    Redirected {
        /// A peer's address.
        address: IpAddr,
        /// Ports at the peer.
        ports: PortRange,
        /// The port on loopback.
        at: u16,
    },
}

impl Listen {
    /// Whether connections to `original` belong to this redirected listener.
    pub(super) fn is_redirected_from(&self, original: SocketAddr) -> bool {
        match self {
            Self::Redirected { address, ports, .. } => {
                *address == original.ip() && ports.contains(original.port())
            }
            _ => false,
        }
    }
}

/// What a route's channels are connected to. In the path of a unix socket and in the arguments of a
/// program, `{NAME}` is replaced with the value of the channel's [`super::Parameter`] of that name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// A unix socket.
    Unix(PathBuf),
    /// A host and a port.
    Tcp(String),
    /// A program and its arguments. It is started once per channel, with the channel as its
    /// standard input and output.
    Exec(Vec<String>),
    /// The port that the channel's parameter `port` names; it must be one of `ports`. The channel
    /// is connected to that port at the first of the local `addresses` that accepts the connection.
    Ports {
        /// The addresses, in the order in which they are tried.
        addresses: Vec<IpAddr>,
        /// The ports that a peer may name.
        ports: PortRange,
    },
}

fn at_ports(address: IpAddr, ports: PortRange) -> String {
    match address {
        IpAddr::V4(address) => format!("{address}:{ports}"),
        IpAddr::V6(address) => format!("[{address}]:{ports}"),
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(formatter, "unix:{}", path.display()),
            Self::Tcp(address) => write!(formatter, "tcp:{address}"),
            Self::Passed(name) => write!(formatter, "systemd:{name}"),
            Self::OnDemand => formatter.write_str("no listener until one is opened"),
            Self::Redirected { address, ports, .. } => {
                write!(formatter, "redirect:{}", at_ports(*address, *ports))
            }
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(formatter, "unix:{}", path.display()),
            Self::Tcp(to) => write!(formatter, "tcp:{to}"),
            Self::Exec(words) => write!(formatter, "exec:{}", words.join(" ")),
            Self::Ports { addresses, ports } => {
                let addresses = addresses.iter().map(|one| at_ports(*one, *ports));
                let addresses: Vec<_> = addresses.collect();
                write!(formatter, "tcp:{}", addresses.join(", tcp:"))
            }
        }
    }
}

/// The side of a relay that accepts TLS clients.
#[derive(Clone, Debug)]
pub struct RelayExit {
    /// The route's name, for its rate limit, its counters and the log. TLS clients do not send it.
    pub route: String,
    /// The address of the port, which only this route uses. Clients that `allow` does not name
    /// are rejected.
    pub listen: SocketAddr,
    /// The peers that may use the route.
    pub allow: Peers,
    /// The target to which the route's channels are connected.
    pub target: Target,
    /// The oldest TLS version that clients may use.
    pub oldest_tls: OldestTls,
}

/// A peer's address, the identities that may answer there, and the security of the lanes to it.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Destination {
    pub(super) to: String,
    pub(super) peers: Peers,
    pub(super) security: LaneSecurity,
}
