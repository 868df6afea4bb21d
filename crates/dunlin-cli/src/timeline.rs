//! The timeline of a migration: its spans in Chrome's trace format, for Perfetto or about:tracing.
//!
//! The VM's process records it and sends it with the result; it may not write the file. Thread 0 has
//! the session with its iterations and steps, and each lane is a thread with the lane's number.

use std::sync::Mutex;
use std::time::Instant;

use dunlin_lane::sync::lock;
use serde_json::{Map, Value, json};

/// Spans in a timeline; those that end later are left out, but for the longest, the session. The
/// shortest iterations last 5 ms, so this is at least 50 s of them, and about 2 MiB.
const MAX_SPANS: usize = 10_000;

/// The begin and the events of the timeline that is being recorded: a process has one migration at a
/// time.
static RECORDING: Mutex<Option<(Instant, Vec<Value>)>> = Mutex::new(None);

/// Records the spans that this process enters from now on; [`crate::log::install`] precedes it.
pub(crate) fn begin() {
    *lock(&RECORDING) = Some((Instant::now(), Vec::new()));
}

/// Ends the timeline; returns its events.
pub(crate) fn end() -> Vec<Value> {
    lock(&RECORDING)
        .take()
        .map_or_else(Vec::new, |(_, events)| events)
}

/// Adds a span that ends now, with its lane and fields, to a timeline that has room for it.
pub(crate) fn add(name: &str, entered: Instant, of: impl FnOnce() -> (u64, Map<String, Value>)) {
    let mut recording = lock(&RECORDING);
    let has_room = |events: &Vec<Value>| events.len() < MAX_SPANS || name == "session";
    let recording = recording.as_mut();
    let Some((began, events)) = recording.filter(|(_, events)| has_room(events)) else {
        return;
    };
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
