//! Totals over the migrations that have ended since this process started.

use std::collections::{BTreeMap, BTreeSet};

use crate::published::history::Finished;

/// Upper bounds of the buckets for a downtime, in seconds.
const DOWNTIMES: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];

/// Upper bounds of the buckets for the duration of a migration, in seconds.
const DURATIONS: &[f64] = &[
    1.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0,
];

/// The roles and the results that are counted. Entries of the history with other values are
/// ignored.
const ROLES: [&str; 2] = ["source", "destination"];
const RESULTS: [&str; 4] = ["moved", "failed", "cancelled", "in-doubt"];

/// Values by bucket.
#[derive(Clone, Debug)]
pub(super) struct Histogram {
    /// The upper bound and the number of values of each bucket; the last bound is infinite.
    pub(super) buckets: Vec<(f64, u64)>,
    pub(super) sum: f64,
}

impl Histogram {
    fn new(bounds: &[f64]) -> Self {
        let bounds = bounds.iter().copied().chain([f64::INFINITY]);
        Self {
            buckets: bounds.map(|bound| (bound, 0)).collect(),
            sum: 0.0,
        }
    }

    fn add(&mut self, value: f64) {
        self.sum += value;
        if let Some((_, count)) = self.buckets.iter_mut().find(|(bound, _)| value <= *bound) {
            *count += 1;
        }
    }

    pub(super) fn count(&self) -> u64 {
        self.buckets.iter().map(|(_, count)| count).sum()
    }
}

/// Totals of ended migrations. They begin at zero. A scraper that has larger values of an earlier
/// process sees a reset, and counts no migration twice.
#[derive(Debug)]
pub(super) struct Totals {
    /// The number of migrations, by role and result.
    pub(super) migrations: BTreeMap<(&'static str, &'static str), u64>,
    pub(super) durations: BTreeMap<(&'static str, &'static str), Histogram>,
    /// The downtimes as the guests saw them, by role.
    pub(super) guest_downtimes: BTreeMap<&'static str, Histogram>,
    pub(super) downtime: Histogram,
    /// The durations of the parts of downtimes, by part.
    pub(super) parts: BTreeMap<&'static str, Histogram>,
    pub(super) sent_bytes: u64,
    /// The names of the entries that the history had at the last read.
    seen: BTreeSet<String>,
}

impl Totals {
    /// Totals of the migrations that end after the entries of `history`.
    pub(super) fn after(history: &[(String, Finished)]) -> Self {
        Self {
            migrations: BTreeMap::new(),
            durations: BTreeMap::new(),
            guest_downtimes: BTreeMap::new(),
            downtime: Histogram::new(DOWNTIMES),
            parts: BTreeMap::new(),
            sent_bytes: 0,
            seen: names(history),
        }
    }

    /// Adds the entries that were not there before.
    pub(super) fn add(&mut self, history: &[(String, Finished)]) {
        for (name, finished) in history {
            if !self.seen.contains(name) {
                self.add_one(finished);
            }
        }
        self.seen = names(history);
    }

    fn add_one(&mut self, one: &Finished) {
        let known =
            |names: &[&'static str], name: &str| names.iter().find(|one| **one == name).copied();
        let (Some(role), Some(result)) = (known(&ROLES, &one.role), known(&RESULTS, &one.result))
        else {
            return;
        };
        *self.migrations.entry((role, result)).or_default() += 1;
        let durations = self.durations.entry((role, result));
        durations
            .or_insert_with(|| Histogram::new(DURATIONS))
            .add(one.total_s);
        self.sent_bytes += one.wire_bytes.unwrap_or(0);
        if let Some(ms) = one.guest_downtime_ms {
            let downtimes = self.guest_downtimes.entry(role);
            downtimes
                .or_insert_with(|| Histogram::new(DOWNTIMES))
                .add(ms / 1000.0);
        }
        if let Some(downtime) = &one.downtime {
            self.downtime.add(downtime.total_ms / 1000.0);
            for (part, ms) in downtime.parts() {
                let parts = self.parts.entry(part);
                parts
                    .or_insert_with(|| Histogram::new(DOWNTIMES))
                    .add(ms / 1000.0);
            }
        }
    }
}

fn names(history: &[(String, Finished)]) -> BTreeSet<String> {
    history.iter().map(|(name, _)| name.clone()).collect()
}
