//! The timeline of a migration: its spans in Chrome's trace format, for Perfetto or about:tracing.
//!
//! The VM's process records it and sends it with the result; it may not write the file. Thread 0 has
//! the session with its iterations and steps, and each lane is a thread with the lane's number.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::time::Instant;

use dunlin_lane::sync::lock;
use serde_json::{Map, Value, json};

/// Spans in a timeline; later ones are left out. The shortest iterations last 5 ms, so this is at
/// least 50 s of them, and at most 4 MiB.
const MAX_SPANS: usize = 10_000;

/// The timeline that is being recorded: a process has one migration at a time.
static RECORDING: Mutex<Option<Recording>> = Mutex::new(None);

struct Recording {
    began: Instant,
    spans: usize,
    lanes: BTreeSet<u64>,
    events: Vec<Value>,
}

impl Recording {
    /// Adds an event; the caller holds the lock, so times ascend.
    fn add(&mut self, phase: &str, name: &str, lane: u64, fields: Map<String, Value>) {
        self.lanes.insert(lane);
        let us = self.began.elapsed().as_nanos() as f64 / 1000.0;
        self.events.push(json!({
            "name": name, "ph": phase, "ts": us, "pid": std::process::id(), "tid": lane,
            "args": fields,
        }));
    }
}

/// Records the spans that this process enters from now on; [`crate::log::install`] precedes it.
pub(crate) fn begin() {
    *lock(&RECORDING) = Some(Recording {
        began: Instant::now(),
        spans: 0,
        lanes: BTreeSet::new(),
        events: Vec::new(),
    });
}

/// Ends the timeline; returns its events, with the names of the threads.
pub(crate) fn end() -> Vec<Value> {
    let Some(recording) = lock(&RECORDING).take() else {
        return Vec::new();
    };
    let named = recording.lanes.iter().map(|lane| {
        let name = match lane {
            0 => "session".into(),
            lane => format!("lane {lane}"),
        };
        json!({
            "name": "thread_name", "ph": "M", "pid": std::process::id(), "tid": lane,
            "args": {"name": name},
        })
    });
    named.chain(recording.events).collect()
}

/// Adds the begin of a span with its lane and fields, if a timeline is being recorded and has room
/// for it; returns whether the end must follow.
pub(crate) fn enter(name: &str, of: impl FnOnce() -> (u64, Map<String, Value>)) -> bool {
    let mut recording = lock(&RECORDING);
    let Some(recording) = recording.as_mut().filter(|one| one.spans < MAX_SPANS) else {
        return false;
    };
    recording.spans += 1;
    let (lane, fields) = of();
    recording.add("B", name, lane, fields);
    true
}

/// Adds the end of a span.
pub(crate) fn exit(name: &str, of: impl FnOnce() -> (u64, Map<String, Value>)) {
    if let Some(recording) = lock(&RECORDING).as_mut() {
        let (lane, fields) = of();
        recording.add("E", name, lane, fields);
    }
}
