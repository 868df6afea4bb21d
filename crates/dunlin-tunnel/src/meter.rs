//! Traffic of each route, counted at the sockets of its channels on this side.

use dunlin_lane::sync::lock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::failure::Failure;

/// A route's counters since the tunnel started.
#[derive(Debug, Default)]
pub(super) struct Meter {
    open: AtomicU64,
    closed: AtomicU64,
    left_unread: AtomicU64,
    failed: AtomicU64,
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
}

/// A route's traffic since the tunnel started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Connections of this side that are open now, connected to their other half or not.
    pub open: u64,
    /// Connections that ended in both directions, in order.
    pub closed: u64,
    /// Connections that ended while a hypervisor left the last few bytes of one direction unread.
    /// Only the hypervisors can tell whether that is a failure.
    pub left_unread: u64,
    /// Connections that were refused or aborted.
    pub failed: u64,
    /// Bytes read from connections of this side.
    pub read_bytes: u64,
    /// Bytes written to connections of this side.
    pub written_bytes: u64,
}

impl Meter {
    pub(super) fn traffic(&self) -> Traffic {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Traffic {
            open: of(&self.open),
            closed: of(&self.closed),
            left_unread: of(&self.left_unread),
            failed: of(&self.failed),
            read_bytes: of(&self.read_bytes),
            written_bytes: of(&self.written_bytes),
        }
    }
}

/// Counts the connections of one listener.
pub(super) trait Tally: std::fmt::Debug + Send + Sync {
    /// A connection begins.
    fn begins(&self);

    /// A connection has ended.
    fn ends(&self, ending: Ending);
}

/// Counts one connection for its route and for the listener that accepted it, from creation to
/// drop. It counts as failed unless an orderly end or unread last bytes were reported.
#[derive(Debug)]
pub(super) struct Count {
    meter: Arc<Meter>,
    tally: Option<Arc<dyn Tally>>,
    /// The reported ending.
    ending: Mutex<Option<Ending>>,
}

impl Count {
    pub(super) fn new(meter: Arc<Meter>, tally: Option<Arc<dyn Tally>>) -> Self {
        meter.open.fetch_add(1, Ordering::Relaxed);
        if let Some(tally) = &tally {
            tally.begins();
        }
        Self {
            meter,
            tally,
            ending: Mutex::default(),
        }
    }

    pub(super) fn read(&self, bytes: usize) {
        add(&self.meter.read_bytes, bytes);
    }

    pub(super) fn wrote(&self, bytes: usize) {
        add(&self.meter.written_bytes, bytes);
    }

    /// Reports how the connection ends. A worse ending replaces a better one. Of two failures the
    /// first is kept: the second is a consequence of it.
    pub(super) fn ends(&self, ending: Ending) {
        let mut reported = lock(&self.ending);
        match (&*reported, &ending) {
            (Some(Ending::Badly(Some(_))), _)
            | (Some(Ending::Badly(None)), Ending::Well | Ending::LeftUnread)
            | (Some(Ending::LeftUnread), Ending::Well) => {}
            _ => *reported = Some(ending),
        }
    }
}

/// How a connection ended.
#[derive(Debug)]
pub(super) enum Ending {
    /// In both directions, in order.
    Well,
    /// In order, but the consumer left the last few bytes unread.
    LeftUnread,
    /// Refused or aborted, with the reason if there is one.
    Badly(Option<Failure>),
}

impl Drop for Count {
    fn drop(&mut self) {
        let ending = lock(&self.ending).take().unwrap_or(Ending::Badly(None));
        self.meter.open.fetch_sub(1, Ordering::Relaxed);
        let ended = match ending {
            Ending::Well => &self.meter.closed,
            Ending::LeftUnread => &self.meter.left_unread,
            Ending::Badly(_) => &self.meter.failed,
        };
        ended.fetch_add(1, Ordering::Relaxed);
        if let Some(tally) = &self.tally {
            tally.ends(ending);
        }
    }
}

fn add(count: &AtomicU64, bytes: usize) {
    count.fetch_add(bytes as u64, Ordering::Relaxed);
}
