//! Traffic of each route, counted at the sockets of its channels on this side.

use dunlin_lane::sync::lock;
use std::sync::{Arc, Mutex};

use super::failure::Failure;
use super::rate::Pacer;

/// A route's counters, and the limit of its rate.
#[derive(Debug, Default)]
pub(super) struct Meter {
    pub(super) traffic: Mutex<Traffic>,
    pub(super) pacer: Pacer,
}

/// A route's traffic since the tunnel started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Connections of this side that are open now, even if the channel's other end is not connected
    /// yet.
    pub open: u64,
    /// Connections with a clean end in both directions.
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

/// Counts the connections of one listener.
pub(super) trait Tally: std::fmt::Debug + Send + Sync {
    fn begins(&self);

    fn ends(&self, ending: Ending);
}

/// Counts one connection for its route and for the listener that accepted it. The connection counts
/// as open until this value is dropped. After that it counts as failed, unless a clean end or an
/// end with unread last bytes was reported.
#[derive(Debug)]
pub(super) struct Count {
    meter: Arc<Meter>,
    tally: Option<Arc<dyn Tally>>,
    /// The reported ending.
    ending: Mutex<Option<Ending>>,
}

impl Count {
    pub(super) fn new(meter: Arc<Meter>, tally: Option<Arc<dyn Tally>>) -> Self {
        lock(&meter.traffic).open += 1;
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
        lock(&self.meter.traffic).read_bytes += bytes as u64;
    }

    pub(super) fn wrote(&self, bytes: usize) {
        lock(&self.meter.traffic).written_bytes += bytes as u64;
    }

    /// The limit of the route's rate.
    pub(super) fn pacer(&self) -> &Pacer {
        &self.meter.pacer
    }

    /// Reports how the connection ends. A worse ending replaces a better one. Of two failures that
    /// each have a reason, the first is kept, because the second is its consequence.
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
    /// Both directions ended cleanly.
    Well,
    /// The connection ended cleanly, but the consumer left the last few bytes unread.
    LeftUnread,
    /// The connection was refused or aborted, with the reason if there is one.
    Badly(Option<Failure>),
}

impl Drop for Count {
    fn drop(&mut self) {
        let ending = lock(&self.ending).take().unwrap_or(Ending::Badly(None));
        let mut traffic = lock(&self.meter.traffic);
        traffic.open -= 1;
        match ending {
            Ending::Well => traffic.closed += 1,
            Ending::LeftUnread => traffic.left_unread += 1,
            Ending::Badly(_) => traffic.failed += 1,
        }
        drop(traffic);
        if let Some(tally) = &self.tally {
            tally.ends(ending);
        }
    }
}
