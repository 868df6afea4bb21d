//! What a tunnel says of itself over its control socket, and `dunlin status
//! --json` with it.

use dunlin_tunnel::{OnDemandListener, RouteStatus, Status};
use serde::{Deserialize, Serialize};

/// A tunnel that runs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct TunnelLine {
    /// The name of its configuration's file, without what follows the dot.
    pub(crate) name: String,
    pub(crate) pid: u32,
    pub(crate) control: String,
    /// Where the peers' tunnels connect.
    pub(crate) address: String,
    pub(crate) running_s: f64,
    /// Rates are those of so many milliseconds, up to when this was said.
    pub(crate) over_ms: f64,
    pub(crate) routes: Vec<RouteLine>,
    pub(crate) listeners: Vec<ListenerLine>,
    pub(crate) peers: Vec<PeerLine>,
}

/// A route, and what went over it since the tunnel began. *Read* and *written* are
/// seen from the tunnel: what it read from hypervisors of this host, and wrote to
/// them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RouteLine {
    pub(crate) route: String,
    pub(crate) listens: Option<String>,
    pub(crate) to: Option<String>,
    pub(crate) target: Option<String>,
    pub(crate) channels: u64,
    pub(crate) closed: u64,
    /// Closed by a hypervisor that did not read the last bytes.
    #[serde(default)]
    pub(crate) left_unread: u64,
    pub(crate) failed: u64,
    pub(crate) read_bytes: u64,
    pub(crate) written_bytes: u64,
    pub(crate) read_bytes_per_s: f64,
    pub(crate) written_bytes_per_s: f64,
}

/// A listener that was opened for one purpose.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ListenerLine {
    pub(crate) number: u64,
    pub(crate) route: String,
    /// `NAME=VALUE`, or nothing.
    pub(crate) parameter: String,
    pub(crate) listen: String,
    /// Whether it takes connections still.
    pub(crate) listens: bool,
    pub(crate) channels: u64,
    pub(crate) closed: u64,
    #[serde(default)]
    pub(crate) left_unread: u64,
    pub(crate) failed: u64,
}

/// A peer's tunnel that is connected.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct PeerLine {
    pub(crate) peer: String,
    pub(crate) at: String,
    pub(crate) channels: u64,
    /// Those of both sides.
    pub(crate) lanes: u64,
    /// Bytes that wait here for consumers.
    pub(crate) held_bytes: u64,
    /// Bytes that were sent and not acknowledged.
    pub(crate) unacknowledged_bytes: u64,
}

impl RouteLine {
    /// A route with what it carried in the `seconds` since `before`.
    pub(super) fn new(now: &RouteStatus, before: Option<&RouteStatus>, seconds: f64) -> Self {
        let traffic = now.traffic;
        let rate = |now: u64, before: Option<u64>| {
            // One that has come in the meantime has been here for no time yet.
            now.saturating_sub(before.unwrap_or(now)) as f64 / seconds
        };
        let before = before.map(|one| one.traffic);
        Self {
            route: now.route.clone(),
            listens: now.listens.as_ref().map(ToString::to_string),
            to: now.to.clone(),
            target: now.target.as_ref().map(ToString::to_string),
            channels: traffic.open,
            closed: traffic.closed,
            left_unread: traffic.left_unread,
            failed: traffic.failed,
            read_bytes: traffic.read_bytes,
            written_bytes: traffic.written_bytes,
            read_bytes_per_s: rate(traffic.read_bytes, before.map(|one| one.read_bytes)),
            written_bytes_per_s: rate(traffic.written_bytes, before.map(|one| one.written_bytes)),
        }
    }
}

impl From<&OnDemandListener> for ListenerLine {
    fn from(listener: &OnDemandListener) -> Self {
        let standing = listener.status();
        Self {
            number: listener.number(),
            route: listener.route().to_owned(),
            parameter: listener.parameter().to_owned(),
            listen: listener.listen().to_string(),
            listens: standing.listens,
            channels: standing.open,
            closed: standing.closed,
            left_unread: standing.left_unread,
            failed: standing.failed,
        }
    }
}

impl From<&Status> for PeerLine {
    fn from(status: &Status) -> Self {
        Self {
            peer: status.peer.clone(),
            at: status.at.to_string(),
            channels: status.channels.len() as u64,
            lanes: status.lanes as u64,
            held_bytes: status.held_bytes,
            unacknowledged_bytes: status.unacknowledged_bytes,
        }
    }
}
