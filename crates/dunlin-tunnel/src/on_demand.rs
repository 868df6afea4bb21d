//! Listeners that are opened while the tunnel runs, each for one purpose such as the migration of
//! one VM. A listener closes when its last channel has ended.
//!
//! ```text
//!  Tunnel::open ─▶ listens ─▶ has channels ─▶ none is left: closed ─▶ over
//!                     │            │ close: takes no more              ▲
//!                     └─ close ────┴───────────────────────────────────┘
//! ```
//!
//! Each listener has a number that is unique in the tunnel. Channels are connected in the order of
//! acceptance only if they belong to the same listener.

use dunlin_lane::sync::{self, lock};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use dunlin_linux::local::FileAccess;
use dunlin_linux::poll::{Waker, Wakeup, waker};
use dunlin_linux::socket::Accepted;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::limits::MAX_LANES;
use thiserror::Error;

use super::carriers::Carriers;
use super::event::Event;
use super::failure::{Failure, Lost};
use super::listener::{LastingListener, Sockets, next_number};
use super::meter::{Count, Ending, Tally};
use super::options::Entrance;
use super::parameter::Parameter;
use super::route::Listen;

/// How many listeners of [`super::Tunnel::open`] may exist at the same time. A host migrates fewer
/// VMs simultaneously. Each listener costs a thread and a descriptor.
pub const MAX_ON_DEMAND_LISTENERS: usize = 256;

/// A request for a listener, for [`super::Tunnel::open`].
#[derive(Clone, Debug)]
pub struct Demand {
    /// The route's name. The route must have an entrance in the configuration.
    pub route: String,
    /// The value for the placeholder in the route's target at the peer.
    pub parameter: Option<Parameter>,
    /// Where to listen: a unix socket or a TCP port.
    pub listen: Listen,
    /// Raises the lane count for the peer to at least this many, 1 to 128.
    pub lanes: Option<u16>,
    /// Whether the listener accepts only one connection.
    pub once: bool,
    /// The owner, group and mode of a unix socket. A field that is `None` takes the route's value.
    pub access: FileAccess,
}

/// Why no listener was opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DemandError {
    /// The configuration has no entrance for this route.
    #[error("the configuration has no route {route:?} to a peer")]
    Route {
        /// The route's name.
        route: String,
    },
    /// The lane count is out of range.
    #[error("lane count {lanes} out of range (1–{MAX_LANES})")]
    Lanes {
        /// The count.
        lanes: u16,
    },
    /// Too many listeners are open.
    #[error("too many listeners are open (at most {MAX_ON_DEMAND_LISTENERS})")]
    Busy,
    /// The tunnel is draining.
    #[error("tunnel is shutting down")]
    Ending,
    /// The address cannot be bound.
    #[error("route {route:?} cannot listen on {listen}: {error}")]
    Listen {
        /// The route.
        route: String,
        /// The address.
        listen: Listen,
        /// The kernel's error.
        error: io::Error,
    },
}

impl DemandError {
    /// The fault code.
    #[must_use]
    pub fn code(&self) -> FaultCode {
        match self {
            Self::Route { .. } => FaultCode::UnknownRoute,
            Self::Lanes { .. } => FaultCode::LaneLimit,
            Self::Busy => FaultCode::Busy,
            Self::Ending => FaultCode::Ended,
            Self::Listen { .. } => FaultCode::Kernel,
        }
    }
}

/// A listener that [`super::Tunnel::open`] opened. Clones refer to the same listener, which stays
/// open when they are dropped.
#[derive(Clone, Debug)]
pub struct OnDemandListener(Arc<ListenerTally>);

/// The status of a listener and its channels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListenerStatus {
    /// Whether the listener accepts connections.
    pub listens: bool,
    /// Why the listener is at present not reachable at its path, although it has not ended.
    pub lost: Option<Failure>,
    /// Open channels.
    pub open: u64,
    /// Channels with a clean end in both directions.
    pub closed: u64,
    /// Channels that ended while a hypervisor left the last few bytes of one direction unread.
    pub left_unread: u64,
    /// Channels that were refused or aborted.
    pub failed: u64,
    /// The reason of the first failure of a channel, if one was reported.
    pub why: Option<Failure>,
}

impl ListenerStatus {
    /// Channels that have ended, in any way.
    pub fn ended(&self) -> u64 {
        self.closed + self.left_unread + self.failed
    }

    /// Whether the status is final: the listener is closed and no channel is open.
    pub fn is_over(&self) -> bool {
        !self.listens && self.open == 0
    }
}

/// The state that a listener and its channels share.
#[derive(Debug)]
pub(super) struct ListenerTally {
    number: u64,
    entrance: Entrance,
    access: FileAccess,
    lost: Lost,
    parameter: String,
    once: bool,
    now: Mutex<Now>,
    changed: Condvar,
    waker: Waker,
}

#[derive(Debug)]
struct Now {
    status: ListenerStatus,
    /// Whether [`OnDemandListener::close`] was called.
    closing: bool,
}

impl OnDemandListener {
    /// Opens a listener for an entrance that the caller has looked up.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub(super) fn open(
        carriers: &Carriers,
        mut entrance: Entrance,
        demand: &Demand,
        access: &FileAccess,
        passed: &Sockets,
    ) -> io::Result<Self> {
        // The listener is listed before it begins to listen, so that no peer can reach it earlier.
        let lost = Lost::default();
        let listed = carriers
            .site
            .list_on_demand(&entrance.listen, Arc::clone(&lost));
        let listener = LastingListener::open(&mut entrance.listen, access, passed)?;
        let listener = listener.reporting_to(Arc::clone(&lost));
        let (waker, wakeup) = waker()?;
        let tally = Arc::new(ListenerTally {
            number: next_number(),
            entrance,
            access: *access,
            lost,
            parameter: demand
                .parameter
                .as_ref()
                .map(ToString::to_string)
                .unwrap_or_default(),
            once: demand.once,
            now: Mutex::new(Now {
                status: ListenerStatus {
                    listens: true,
                    ..ListenerStatus::default()
                },
                closing: false,
            }),
            changed: Condvar::new(),
            waker,
        });
        let (own, its_carriers) = (Arc::clone(&tally), carriers.clone());
        let body = move || {
            own.serve(&its_carriers, listener, &wakeup);
            drop(listed);
        };
        if !carriers
            .site
            .spawn(format!("dunlin-listener-{}", tally.number), body)
        {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(Self(tally))
    }

    /// The listener's number, unique in the tunnel.
    pub fn number(&self) -> u64 {
        self.0.number
    }

    /// The route's name.
    pub fn route(&self) -> &str {
        &self.0.entrance.route
    }

    /// The parameter of the listener's channels, `NAME=VALUE`; empty if there is none.
    pub fn parameter(&self) -> &str {
        &self.0.parameter
    }

    /// The address.
    pub fn listen(&self) -> &Listen {
        &self.0.entrance.listen
    }

    /// The current status.
    pub fn status(&self) -> ListenerStatus {
        let mut status = self.0.lock().status.clone();
        status.lost = lock(&self.0.lost).clone();
        status
    }

    /// Stops accepting connections; open channels continue.
    pub fn close(&self) {
        self.0.close();
    }

    /// Waits until the status is final ([`ListenerStatus::is_over`]), or until `deadline`. Returns
    /// the status at that time.
    pub fn wait(&self, deadline: Option<Instant>) -> ListenerStatus {
        let changed = &self.0.changed;
        let mut now = self.0.lock();
        while !now.status.is_over() {
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                break;
            }
            now = sync::wait(changed, now, left);
        }
        now.status.clone()
    }

    /// Whether `entrance` is the entrance for which this listener was opened.
    pub(super) fn is_of(&self, entrance: &Entrance) -> bool {
        let own = &self.0.entrance;
        (&own.route, &own.to, &own.peers) == (&entrance.route, &entrance.to, &entrance.peers)
    }
}

impl Tally for ListenerTally {
    fn begins(&self) {
        self.lock().status.open += 1;
    }

    /// Reports how a channel ended. The caller may hold any lock except this listener's.
    fn ends(&self, ending: Ending) {
        let mut now = self.lock();
        let status = &mut now.status;
        status.open -= 1;
        match ending {
            Ending::Well => status.closed += 1,
            Ending::LeftUnread => status.left_unread += 1,
            Ending::Badly(why) => {
                status.failed += 1;
                if status.why.is_none() {
                    status.why = why;
                }
            }
        }
        drop(now);
        self.changed.notify_all();
        self.waker.wake();
    }
}

impl ListenerTally {
    fn lock(&self) -> MutexGuard<'_, Now> {
        lock(&self.now)
    }

    fn close(&self) {
        self.lock().closing = true;
        self.waker.wake();
    }

    /// Whether the listener has to close.
    fn is_done(&self) -> bool {
        let now = self.lock();
        let status = &now.status;
        let ended = status.ended();
        let had_all = if self.once {
            status.open + ended > 0
        } else {
            status.open == 0 && ended > 0
        };
        now.closing || had_all
    }

    /// The body of the listener's thread.
    fn serve(self: Arc<Self>, carriers: &Carriers, mut listener: LastingListener, wakeup: &Wakeup) {
        if let Err(error) = self.take(carriers, &mut listener, wakeup) {
            let (route, number) = (&self.entrance.route, self.number);
            let text =
                format!("route {route}: listener {number} stopped accepting connections: {error}");
            carriers.site.report(Event::Warning(text));
        }
        drop(listener);
        self.lock().status.listens = false;
        self.changed.notify_all();
    }

    fn take(
        self: &Arc<Self>,
        carriers: &Carriers,
        listener: &mut LastingListener,
        wakeup: &Wakeup,
    ) -> io::Result<()> {
        let mut short = false;
        loop {
            listener.wait(wakeup, short)?;
            wakeup.clear();
            listener.check(&carriers.site, &self.entrance.route, &self.access);
            // After `close`, or after the only connection of a `once` listener, stop immediately.
            // Otherwise accept the connections in the backlog first. They arrived before the last
            // channel ended.
            short = loop {
                if self.lock().closing || (self.once && self.is_done()) {
                    return Ok(());
                }
                match listener.accept() {
                    Accepted::Connection(stream) => {
                        let meter = carriers.site.meter(&self.entrance.route);
                        let tally = Arc::clone(self) as Arc<dyn Tally>;
                        let socket = stream.counted(Count::new(meter, Some(tally)));
                        let parameter = self.parameter.clone();
                        carriers.carry(&self.entrance, self.number, parameter, socket);
                    }
                    Accepted::Nothing => break false,
                    Accepted::Shortage(_) | Accepted::Failed(_) => break true,
                }
            };
            if self.is_done() {
                return Ok(());
            }
        }
    }
}
