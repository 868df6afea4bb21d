//! What `serve-status` serves: at most one sample per second, which all clients share. Nothing is
//! sampled while no client asks.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, UNIX_EPOCH};

use dunlin_lane::sync::lock;
use serde_json::{Value, json};

use super::metrics::{self, View};
use super::rates::{Direction, Rates};
use super::snapshot::{LIVE_LIMIT, Snapshot};
use super::totals::Totals;
use crate::options::ControlPath;
use crate::published::history::{self, Finished};
use crate::text::plain;

/// How long a sample is served.
const FRESH: Duration = Duration::from_secs(1);

pub(super) struct Source {
    control: ControlPath,
    history: Option<PathBuf>,
    host: String,
    last: Mutex<Last>,
}

struct Last {
    totals: Totals,
    snapshot: Option<Snapshot>,
    sample: Option<Arc<Sample>>,
}

/// The state of this host, in the forms that are served.
pub(super) struct Sample {
    at: Instant,
    pub(super) json: String,
    pub(super) metrics: String,
}

impl Source {
    /// A source of samples of the processes below `control`.
    pub(super) fn new(control: &ControlPath) -> Self {
        let history = history::directory(control);
        let entries = history.as_deref().map(history::read).unwrap_or_default();
        // Without the host's name, the page shows the host of its URL.
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        Self {
            control: control.clone(),
            host: host.trim().to_owned(),
            history,
            last: Mutex::new(Last {
                totals: Totals::after(&entries),
                snapshot: None,
                sample: None,
            }),
        }
    }

    /// The last sample, or, if it is older than [`FRESH`], a new one. Other clients wait meanwhile.
    pub(super) fn sample(&self) -> Arc<Sample> {
        let mut last = lock(&self.last);
        if let Some(sample) = &last.sample
            && sample.at.elapsed() < FRESH
        {
            return Arc::clone(sample);
        }
        let mut snapshot = Snapshot::published(&self.control, LIVE_LIMIT);
        let history = self
            .history
            .as_deref()
            .map(history::read)
            .unwrap_or_default();
        last.totals.add(&history);
        if let Some(before) = &last.snapshot {
            add_rates(&mut snapshot, before);
        }
        let metrics = metrics::text(&View {
            snapshot: &snapshot,
            totals: &last.totals,
        });
        let sample = Arc::new(Sample {
            at: Instant::now(),
            json: self.json(&snapshot, &history),
            metrics,
        });
        last.snapshot = Some(snapshot);
        last.sample = Some(Arc::clone(&sample));
        sample
    }

    fn json(&self, snapshot: &Snapshot, history: &[(String, Finished)]) -> String {
        let since = snapshot.taken.duration_since(UNIX_EPOCH);
        let sessions: Vec<_> = snapshot.sessions.iter().map(|one| &one.line).collect();
        let finished: Vec<_> = history.iter().rev().map(|(_, one)| one).collect();
        let object: Value = json!({
            "host": self.host,
            "version": env!("CARGO_PKG_VERSION"),
            "taken_ms": u64::try_from(since.unwrap_or_default().as_millis()).unwrap_or(u64::MAX),
            "sessions": sessions,
            "tunnels": snapshot.tunnels,
            "ipsec": snapshot.ipsec,
            "handoffs": snapshot.handoffs,
            "identities": snapshot.identities,
            "silent": snapshot.silent,
            "history": finished,
        });
        plain(object.to_string())
    }
}

/// Sets the rates of routes. Processes do not report these rates at their status sockets.
fn add_rates(snapshot: &mut Snapshot, before: &Snapshot) {
    let rates = Rates::between(before, snapshot);
    let over = snapshot.at.saturating_duration_since(before.at);
    for tunnel in &mut snapshot.tunnels {
        let of = |route: &str, way| rates.route(tunnel.pid, route, way).unwrap_or(0.0);
        for route in &mut tunnel.routes {
            route.read_bytes_per_s = of(&route.route, Direction::Sent);
            route.written_bytes_per_s = of(&route.route, Direction::Received);
        }
        tunnel.over_ms = crate::line::millis(over);
    }
}
