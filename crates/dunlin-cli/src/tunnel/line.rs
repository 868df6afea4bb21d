//! Status of a tunnel, as sent over its control socket and printed by `dunlin status --json`.

use dunlin_lane::{Peer, PeerName};
use dunlin_tunnel::{LaneStatus, OnDemandListener, RouteStatus, Status};
use serde::{Deserialize, Serialize};

use crate::published::CertificateLine;
use crate::text::clean;

/// A running tunnel.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct TunnelLine {
    /// The file name of the tunnel's configuration, without the extension.
    pub(crate) name: String,
    pub(crate) pid: u32,
    pub(crate) control: String,
    /// Address to which the peers' tunnels connect; `None` if this tunnel only connects.
    pub(crate) address: Option<String>,
    pub(crate) running_s: f64,
    /// Rates are averages over this many milliseconds before the status was taken.
    pub(crate) over_ms: f64,
    pub(crate) routes: Vec<RouteLine>,
    pub(crate) listeners: Vec<ListenerLine>,
    /// `None` if no connections are redirected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) redirect: Option<RedirectLine>,
    pub(crate) peers: Vec<PeerLine>,
    /// The number of lanes that were lost or could not be opened.
    #[serde(default)]
    pub(crate) lanes_lost: u64,
    /// The items of the tunnel's identities, such as certificates, each with its expiry date.
    #[serde(default)]
    pub(crate) certificates: Vec<CertificateLine>,
}

/// A route, and its traffic since the tunnel started. The tunnel *reads* from this host's
/// hypervisors and *writes* to them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RouteLine {
    pub(crate) route: String,
    pub(crate) listens: Option<String>,
    /// Why the route does not listen at present, although it should.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) lost: Option<String>,
    pub(crate) to: Option<String>,
    /// Why the last attempt to connect to the peer's tunnel failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) trouble: Option<String>,
    pub(crate) target: Option<String>,
    pub(crate) channels: u64,
    pub(crate) closed: u64,
    /// Channels that were closed by a hypervisor which did not read the last bytes.
    #[serde(default)]
    pub(crate) left_unread: u64,
    pub(crate) failed: u64,
    pub(crate) read_bytes: u64,
    pub(crate) written_bytes: u64,
    /// The limit of the rate at which bytes are read from hypervisors, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) limit_bytes_per_s: Option<u64>,
    pub(crate) read_bytes_per_s: f64,
    pub(crate) written_bytes_per_s: f64,
}

/// Redirected connections that were refused, and the state of the redirects' rules.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RedirectLine {
    /// Connections that were refused, because their destination belongs to no redirect.
    pub(crate) refused: u64,
    pub(crate) rules: RulesLine,
}

/// The rules of the redirects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RulesLine {
    /// `applied`, `different`, `missing`, or `unknown` if the rules are not watched.
    pub(crate) state: String,
    /// What differs, or why the state is unknown.
    pub(crate) difference: Option<String>,
}

impl RulesLine {
    /// The state in one line.
    pub(crate) fn text(&self) -> String {
        let why = self.difference.as_deref().unwrap_or_default();
        match self.state.as_str() {
            "applied" => "the redirect's rules are in force".to_owned(),
            "unknown" => format!("the redirect's rules are not watched: {}", clean(why)),
            state => format!(
                "the redirect's rules are {} (at fault: this host): {}; run `dunlin redirect apply`",
                clean(state),
                clean(why)
            ),
        }
    }
}

/// An on-demand listener.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ListenerLine {
    pub(crate) number: u64,
    pub(crate) route: String,
    /// `NAME=VALUE`, or empty.
    pub(crate) parameter: String,
    pub(crate) listen: String,
    /// Whether the listener still accepts connections.
    pub(crate) listens: bool,
    /// Why the listener is not reachable at present, although it has not ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) lost: Option<String>,
    pub(crate) channels: u64,
    pub(crate) closed: u64,
    #[serde(default)]
    pub(crate) left_unread: u64,
    pub(crate) failed: u64,
}

/// A connected peer's tunnel.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct PeerLine {
    pub(crate) peer: String,
    /// The name or the pin of the peer for `dunlin tunnel set --peer`; empty if the tunnel runs an
    /// earlier release.
    #[serde(default)]
    pub(crate) selector: String,
    pub(crate) at: String,
    pub(crate) channels: u64,
    /// Lanes of both directions.
    pub(crate) lanes: u64,
    #[serde(default)]
    pub(crate) by_lane: Vec<LaneLine>,
    /// Received bytes that local consumers have not read.
    pub(crate) held_bytes: u64,
    /// Sent bytes that the peer has not acknowledged.
    pub(crate) unacknowledged_bytes: u64,
    /// The limit of the rate at which this side sends to the peer, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) limit_bytes_per_s: Option<u64>,
    /// Why the peer gets no new channel, if it gets none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) refused: Option<String>,
    /// The address and the reason, if in one of the directions the most recent attempt to open a
    /// lane failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) trouble: Option<String>,
}

/// An open lane of a trunk.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct LaneLine {
    pub(crate) lane: u16,
    /// `sent` or `received`.
    pub(crate) direction: String,
    /// Bytes on the connection, in the lane's direction.
    pub(crate) bytes: u64,
    pub(crate) retransmits: u32,
}

/// The path to a peer's tunnel, as `dunlin tunnel check --connect` found it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct CheckedLine {
    /// The address of the peer's tunnel.
    pub(crate) to: String,
    /// A route to the peer.
    pub(crate) route: String,
    pub(crate) bytes: u64,
    /// Time until the first byte had returned, including the time to connect.
    pub(crate) first_byte_ms: f64,
    /// The rate in each direction.
    pub(crate) gib_per_s: f64,
}

impl CheckedLine {
    /// The result in one line.
    pub(crate) fn text(&self) -> String {
        let (to, route) = (clean(&self.to), clean(&self.route));
        let mib = self.bytes as f64 / (1_u64 << 20) as f64;
        format!(
            "route {route} to {to}: {mib:.1} MiB there and back at {:.2} GiB/s; the first byte \
             returned after {:.1} ms",
            self.gib_per_s, self.first_byte_ms
        )
    }
}

impl RouteLine {
    /// A route, with its rates over the `seconds` since `before`.
    pub(super) fn new(now: &RouteStatus, before: Option<&RouteStatus>, seconds: f64) -> Self {
        let traffic = now.traffic;
        let rate = |now: u64, before: Option<u64>| {
            // A route that was added after `before` has no earlier counters, so its rates are 0.
            now.saturating_sub(before.unwrap_or(now)) as f64 / seconds
        };
        let before = before.map(|one| one.traffic);
        Self {
            route: now.route.clone(),
            listens: now.listens.as_ref().map(ToString::to_string),
            lost: now.lost.as_ref().map(ToString::to_string),
            to: now.to.clone(),
            trouble: now.trouble.clone(),
            target: now.target.as_ref().map(ToString::to_string),
            channels: traffic.open,
            closed: traffic.closed,
            left_unread: traffic.left_unread,
            failed: traffic.failed,
            read_bytes: traffic.read_bytes,
            written_bytes: traffic.written_bytes,
            limit_bytes_per_s: now.rate,
            read_bytes_per_s: rate(traffic.read_bytes, before.map(|one| one.read_bytes)),
            written_bytes_per_s: rate(traffic.written_bytes, before.map(|one| one.written_bytes)),
        }
    }
}

impl From<&LaneStatus> for LaneLine {
    fn from(lane: &LaneStatus) -> Self {
        Self {
            lane: lane.lane,
            direction: if lane.sends { "sent" } else { "received" }.to_owned(),
            bytes: lane.bytes,
            retransmits: lane.retransmits,
        }
    }
}

impl From<&OnDemandListener> for ListenerLine {
    fn from(listener: &OnDemandListener) -> Self {
        let status = listener.status();
        Self {
            number: listener.number(),
            route: listener.route().to_owned(),
            parameter: listener.parameter().to_owned(),
            listen: listener.listen().to_string(),
            listens: status.listens,
            lost: status.lost.as_ref().map(ToString::to_string),
            channels: status.open,
            closed: status.closed,
            left_unread: status.left_unread,
            failed: status.failed,
        }
    }
}

impl From<&Status> for PeerLine {
    fn from(status: &Status) -> Self {
        Self {
            peer: status.peer.clone(),
            selector: match &status.selector {
                Peer::Name(PeerName::Dns(name) | PeerName::Uri(name)) => name.clone(),
                Peer::Name(PeerName::Ip(address)) => address.to_string(),
                Peer::Pin(pin) => pin.to_string(),
            },
            at: status.at.to_string(),
            channels: status.channels.len() as u64,
            lanes: status.lanes as u64,
            by_lane: status.by_lane.iter().map(Into::into).collect(),
            held_bytes: status.held_bytes,
            unacknowledged_bytes: status.unacknowledged_bytes,
            limit_bytes_per_s: status.rate,
            refused: status.refused.clone(),
            trouble: status.trouble.clone(),
        }
    }
}
