//! Bytes per second between two snapshots.

use std::collections::HashMap;

use super::snapshot::{SessionLine, Snapshot};
use crate::ipsec::AssociationLine;

/// A direction of bytes, as this host sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Direction {
    Sent,
    Received,
}

/// A counter of bytes. The process ID is a part of the key, so that the counters of a new process,
/// which begin at 0, are not compared with the counters of an earlier process.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Counter {
    Lane(u32, String, u16),
    Route(u32, String, Direction),
    Association(u32, String),
}

/// A counter's value in bytes, and the time in seconds at which it was read. The time is from the
/// clock that the counter's process reports, or that of the snapshot if the process reports none.
type Value = (u64, f64);

/// The rates between two snapshots, in bytes per second.
#[derive(Debug, Default)]
pub(crate) struct Rates(HashMap<Counter, f64>);

impl Rates {
    /// The rates from `before` to `now`. A counter has no rate if it is new, if its value is lower
    /// than before, or if its clock did not advance.
    pub(crate) fn between(before: &Snapshot, now: &Snapshot) -> Self {
        let earlier = counters(before, 0.0);
        let seconds = now.at.saturating_duration_since(before.at).as_secs_f64();
        let rate = |(counter, (bytes, at)): (Counter, Value)| {
            let (bytes_before, at_before) = earlier.get(&counter)?;
            let grown = bytes.checked_sub(*bytes_before)?;
            let seconds = at - at_before;
            (seconds > 0.0).then(|| (counter, grown as f64 / seconds))
        };
        Self(
            counters(now, seconds)
                .into_iter()
                .filter_map(rate)
                .collect(),
        )
    }

    /// The rate of one lane of a session's source.
    #[allow(dead_code, reason = "only builds with `dunlin top` use it")]
    pub(crate) fn lane(&self, session: &SessionLine, lane: u16) -> Option<f64> {
        self.get(&Counter::Lane(
            session.live.as_ref()?.pid,
            session.key(),
            lane,
        ))
    }

    /// The rate of a route of the tunnel with this process ID.
    pub(crate) fn route(&self, process: u32, route: &str, way: Direction) -> Option<f64> {
        self.get(&Counter::Route(process, route.to_owned(), way))
    }

    /// The rate of an SA of the keying process with this ID.
    #[allow(dead_code, reason = "`dunlin top` shows it")]
    pub(crate) fn association(&self, process: u32, one: &AssociationLine) -> Option<f64> {
        self.get(&Counter::Association(process, key_of(one)))
    }

    fn get(&self, counter: &Counter) -> Option<f64> {
        self.0.get(counter).copied()
    }
}

/// All counters of a snapshot. `at` is the time for counters of processes that report no clock.
fn counters(snapshot: &Snapshot, at: f64) -> HashMap<Counter, Value> {
    let mut counters = HashMap::new();
    for session in &snapshot.sessions {
        let line = &session.line;
        let Some(live) = &line.live else { continue };
        let Some(migration) = &live.migration else {
            continue;
        };
        let lanes = migration.progress.iter().flat_map(|one| &one.lanes);
        for (lane, bytes) in lanes {
            let counter = Counter::Lane(live.pid, line.key(), *lane);
            counters.insert(counter, (*bytes, migration.seconds));
        }
    }
    for tunnel in &snapshot.tunnels {
        for route in &tunnel.routes {
            for (way, bytes) in [
                (Direction::Sent, route.read_bytes),
                (Direction::Received, route.written_bytes),
            ] {
                let counter = Counter::Route(tunnel.pid, route.route.clone(), way);
                counters.insert(counter, (bytes, tunnel.running_s));
            }
        }
    }
    for session in &snapshot.ipsec {
        for one in &session.associations {
            if let (Some(process), Some(bytes)) = (session.process, one.bytes) {
                counters.insert(Counter::Association(process, key_of(one)), (bytes, at));
            }
        }
    }
    counters
}

/// Identifies an SA of a process.
fn key_of(one: &AssociationLine) -> String {
    format!("{} {:08x}", one.direction, one.spi)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::time::{Duration, Instant};

    use serde_json::{Value, from_value, json};

    use super::*;

    /// A snapshot `at_s` seconds after the start, with a tunnel that has read `bytes`.
    fn snapshot(start: Instant, at_s: u64, pid: u32, bytes: u64) -> Snapshot {
        let mut route = json!({"route": "ram", "channels": 1, "closed": 0, "failed": 0,
            "written_bytes": 7, "read_bytes_per_s": 0.0, "written_bytes_per_s": 0.0});
        route["read_bytes"] = bytes.into();
        let tunnel = json!({"name": "t", "pid": pid, "control": "", "address": "",
            "running_s": at_s, "over_ms": 0.0, "routes": [route], "listeners": [], "peers": []});
        let sa = json!({"direction": "out", "spi": 1, "epoch": 1, "bytes": bytes});
        let ipsec: Value = json!({"peer": "b", "up": true, "process": pid, "kept": true,
            "associations": [sa]});
        Snapshot {
            at: start + Duration::from_secs(at_s),
            tunnels: vec![from_value(tunnel).unwrap()],
            ipsec: vec![from_value(ipsec).unwrap()],
            ..Snapshot::empty()
        }
    }

    #[test]
    fn only_a_counter_of_the_same_process_that_did_not_go_back_has_a_rate() {
        let start = Instant::now();
        let before = snapshot(start, 10, 1, 1000);
        let rate = |now: &Snapshot| {
            let rates = Rates::between(&before, now);
            let sent = rates.route(now.tunnels[0].pid, "ram", Direction::Sent);
            let sa = &now.ipsec[0].associations[0];
            assert_eq!(rates.association(now.tunnels[0].pid, sa), sent);
            sent
        };
        let later = snapshot(start, 12, 1, 5000);
        assert_eq!(rate(&later), Some(2000.0));
        let rates = Rates::between(&before, &later);
        let received = rates.route(1, "ram", Direction::Received);
        assert_eq!(received, Some(0.0));
        assert_eq!(rate(&snapshot(start, 12, 1, 999)), None);
        assert_eq!(rate(&snapshot(start, 12, 2, 5000)), None);
        assert_eq!(rate(&snapshot(start, 10, 1, 5000)), None);
    }
}
