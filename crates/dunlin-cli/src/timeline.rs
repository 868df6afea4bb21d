//! The timeline of a migration: its spans in Chrome's trace format, for Perfetto or about:tracing.
//!
//! The VM's process records the timeline, and sends it with the result to the client, which writes
//! the file. The process itself may lack the permission to write it. Thread 0 has the session with its
//! iterations and steps, and each lane is a thread with the lane's number.

use std::sync::Mutex;
use std::time::Instant;

use dunlin_lane::sync::lock;
use serde_json::{Map, Value, json};

/// The number of events after which iterations, lanes and the opening of lanes are left out. The
/// limit is necessary, because the number of iterations is not limited. The session, the switchover
/// and their steps end last and are always kept. An iteration lasts at least 5 ms, so 10,000 events
/// cover at least 50 s of iterations. 10,000 events take about 2 MiB.
const MAX_EVENTS: usize = 10_000;

/// The start and the events of the timeline that is being recorded. A process has only one, which
/// records the spans of all threads. If the process has several VMs, the timeline can thus contain
/// the spans of several migrations.
static RECORDING: Mutex<Option<(Instant, Vec<Value>)>> = Mutex::new(None);

/// Records the spans that this process enters from now on; call [`crate::log::install`] first.
pub(crate) fn begin() {
    *lock(&RECORDING) = Some((Instant::now(), Vec::new()));
}

/// Ends the timeline; returns its events.
pub(crate) fn end() -> Vec<Value> {
    lock(&RECORDING)
        .take()
        .map_or_else(Vec::new, |(_, events)| events)
}

/// Adds a span that ends now, with its lane and fields, if a timeline is being recorded and has
/// room for it.
pub(crate) fn add(name: &str, entered: Instant, of: impl FnOnce() -> (u64, Map<String, Value>)) {
    let mut recording = lock(&RECORDING);
    let Some((began, events)) = recording.as_mut() else {
        return;
    };
    if events.len() >= MAX_EVENTS && matches!(name, "iteration" | "lane" | "open") {
        return;
    }
    let (lane, fields) = of();
    let pid = std::process::id();
    let us = |from: Instant, to: Instant| to.duration_since(from).as_nanos() as f64 / 1000.0;
    if name == "lane" || name == "session" {
        let thread = if lane == 0 {
            "session".into()
        } else {
            format!("lane {lane}")
        };
        events.push(json!({
            "name": "thread_name", "ph": "M", "pid": pid, "tid": lane, "args": {"name": thread},
        }));
    }
    events.push(json!({
        "name": name, "ph": "X", "ts": us(*began, entered), "dur": us(entered, Instant::now()),
        "pid": pid, "tid": lane, "args": fields,
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_timeline_still_gets_the_switchover_and_the_session() {
        begin();
        let span = |name| add(name, Instant::now(), || (0, Map::new()));
        (0..2 * MAX_EVENTS).for_each(|_| span("iteration"));
        let last = ["pause", "commit", "switchover", "close", "session"];
        for name in ["lane", "open"].iter().chain(&last) {
            span(name);
        }
        let events = end();
        let (iterations, rest) = events.split_at(MAX_EVENTS);
        assert!(iterations.iter().all(|event| event["name"] == "iteration"));
        let spans = rest.iter().filter(|event| event["ph"] == "X");
        let names: Vec<_> = spans.map(|event| event["name"].clone()).collect();
        assert_eq!(names, last);
    }
}
