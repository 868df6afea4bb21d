//! The timeline of a migration: its spans in Chrome's trace format, for Perfetto or about:tracing.
//!
//! The VM's process records the timeline, and sends it with the result to the client. The client
//! writes the file, because the VM's process may lack the permission to do so. In the file, thread
//! 0 has the session with its iterations and steps, and each lane is a thread with the lane's
//! number.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Instant;

use dunlin_lane::sync::lock;
use serde_json::{Map, Value, json};
use tracing::info_span;
use tracing::span::{EnteredSpan, Id};

/// The number of events after which iterations, lanes and the opening of lanes are left out. The
/// limit is necessary, because the number of iterations is not limited. The session, the switchover
/// and their steps end last and are always kept. An iteration lasts at least 5 ms, so 10,000 events
/// cover at least 50 s of iterations. 10,000 events take about 2 MiB.
const MAX_EVENTS: usize = 10_000;

/// The start and the events of each timeline that is being recorded, by the id of its root span.
static RECORDINGS: Mutex<BTreeMap<u64, (Instant, Vec<Value>)>> = Mutex::new(BTreeMap::new());

/// A timeline that is being recorded. It contains the spans within its root span, which is entered
/// on the thread that began the timeline. Other migrations of this process have other root spans.
pub(crate) struct Timeline(EnteredSpan);

impl Timeline {
    /// Records the spans that this thread enters from now on; call [`crate::log::install`] first.
    pub(crate) fn begin() -> Self {
        let root = info_span!("migration").entered();
        let recording = (Instant::now(), Vec::new());
        lock(&RECORDINGS).extend(root.id().map(|id| (id.into_u64(), recording)));
        Self(root)
    }

    /// Ends the timeline; returns its events.
    pub(crate) fn end(self) -> Vec<Value> {
        let id = self.0.id();
        let recording = id.and_then(|id| lock(&RECORDINGS).remove(&id.into_u64()));
        recording.map_or_else(Vec::new, |(_, events)| events)
    }
}

/// Adds a span that ends now, with its lane and fields, if a timeline with this root span is being
/// recorded and has room for it.
pub(crate) fn add(
    root: &Id,
    name: &str,
    entered: Instant,
    of: impl FnOnce() -> (u64, Map<String, Value>),
) {
    let mut recordings = lock(&RECORDINGS);
    let Some((began, events)) = recordings.get_mut(&root.into_u64()) else {
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
#[allow(clippy::unwrap_used)]
mod tests {
    use tracing_subscriber::Registry;

    use super::*;

    #[test]
    fn a_full_timeline_still_gets_the_switchover_and_the_session() {
        let _subscriber = tracing::subscriber::set_default(Registry::default());
        let timeline = Timeline::begin();
        let root = timeline.0.id().unwrap();
        let span = |name| add(&root, name, Instant::now(), || (0, Map::new()));
        (0..2 * MAX_EVENTS).for_each(|_| span("iteration"));
        let last = ["pause", "commit", "switchover", "close", "session"];
        for name in ["lane", "open"].iter().chain(&last) {
            span(name);
        }
        let events = timeline.end();
        let (iterations, rest) = events.split_at(MAX_EVENTS);
        assert!(iterations.iter().all(|event| event["name"] == "iteration"));
        let spans = rest.iter().filter(|event| event["ph"] == "X");
        let names: Vec<_> = spans.map(|event| event["name"].clone()).collect();
        assert_eq!(names, last);
    }
}
