//! What went over each route, counted where its bytes pass: at the sockets of its
//! channels on this side.

use dunlin_lane::sync::lock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::failure::Failure;

/// A route's figures since the tunnel began.
#[derive(Debug, Default)]
pub(super) struct Meter {
    open: AtomicU64,
    closed: AtomicU64,
    left_unread: AtomicU64,
    failed: AtomicU64,
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
}

/// What went over a route since the tunnel began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Connections of this side that are there now, also those whose other half is
    /// still being made.
    pub open: u64,
    /// Those that ended both ways, in order.
    pub closed: u64,
    /// Those that ended but for a few bytes before the end of one direction, which the hypervisor
    /// there did not read before it closed. Whether all is well only the hypervisors know.
    pub left_unread: u64,
    /// Those that were refused or aborted.
    pub failed: u64,
    /// Bytes that were read from connections of this side.
    pub read_bytes: u64,
    /// Bytes that were written to connections of this side.
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

/// What counts the connections of one listener.
pub(super) trait Tally: std::fmt::Debug + Send + Sync {
    /// A connection begins.
    fn begins(&self);

    /// A connection has ended like this.
    fn ends(&self, ending: Ending);
}

/// One connection in its route's figures and in those of the listener that was
/// opened for it. It counts from when this is made to when it is dropped, and as
/// in order or as left unread if either was reported, and as failed otherwise.
#[derive(Debug)]
pub(super) struct Count {
    meter: Arc<Meter>,
    tally: Option<Arc<dyn Tally>>,
    /// What was reported, if anything was.
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

    /// The connection ends like this. What is worse than what was reported before replaces it, and
    /// of the reasons the first counts: a second one is a consequence of it.
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
    /// Both ways, in order.
    Well,
    /// In order, except for a few bytes that the consumer left unread.
    LeftUnread,
    /// It was refused or aborted, and why, as far as it is known.
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
