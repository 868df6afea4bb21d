//! A listener that is opened for one purpose, such as one VM's migration, while the
//! tunnel runs, and that goes when its last channel has ended.
//!
//! ```text
//!  Tunnel::open ─▶ listens ─▶ has channels ─▶ none is left: closed ─▶ over
//!                     │            │ close: takes no more              ▲
//!                     └─ close ────┴───────────────────────────────────┘
//! ```
//!
//! Each has a number among all listeners, so that its channels, and no others, are
//! connected in the order in which it has accepted them.

use dunlin_lane::sync::{self, lock};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use dunlin_linux::poll::{Waker, Wakeup, waker};
use dunlin_proto::limits::MAX_LANES;
use thiserror::Error;

use super::carriers::Carriers;
use super::event::Event;
use super::failure::Failure;
use super::listener::{Accepted, Listener, SocketFile, Sockets, next_number};
use super::meter::{Count, Ending, Tally};
use super::options::Entrance;
use super::parameter::Parameter;
use super::route::Listen;

/// Listeners that may be open at the same time by [`super::Tunnel::open`]: more
/// than a host migrates VMs at once, and each costs a thread and a descriptor.
pub const MAX_ON_DEMAND_LISTENERS: usize = 256;

/// What is asked of [`super::Tunnel::open`].
#[derive(Clone, Debug)]
pub struct Demand {
    /// The route, by its name in the configuration; it leads to a peer.
    pub route: String,
    /// What the route's target at the peer has a place for.
    pub parameter: Option<Parameter>,
    /// Where to listen: a unix socket or a TCP port.
    pub listen: Listen,
    /// At least so many lanes to the peer, 1 to 128, from now on.
    pub lanes: Option<u16>,
    /// Takes a single connection.
    pub once: bool,
}

/// Why there is no listener.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DemandError {
    /// The configuration has no such way out.
    #[error("no route {route:?} leads to a peer: give it `to` in the configuration")]
    Route {
        /// The route's name.
        route: String,
    },
    /// The number of lanes is out of range.
    #[error("lane count {lanes} out of range (1–{MAX_LANES})")]
    Lanes {
        /// The number.
        lanes: u16,
    },
    /// Others are not over.
    #[error(
        "{MAX_ON_DEMAND_LISTENERS} listeners are open already: close some, or wait for their ends"
    )]
    Busy,
    /// It takes no more connections.
    #[error("the tunnel is about to end: start it anew")]
    Ending,
    /// It cannot listen.
    #[error("route {route:?} cannot listen on {listen}: {error}")]
    Listen {
        /// The route.
        route: String,
        /// Where.
        listen: Listen,
        /// What the kernel says.
        error: io::Error,
    },
}

/// A listener that [`super::Tunnel::open`] has opened. Clones are the same one; it
/// stays when they are dropped.
#[derive(Clone, Debug)]
pub struct OnDemandListener(Arc<ListenerTally>);

/// The status of a listener and its channels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListenerStatus {
    /// Whether it takes connections.
    pub listens: bool,
    /// Channels that are there now.
    pub open: u64,
    /// Channels that ended both ways, in order.
    pub closed: u64,
    /// Channels that ended but for a few bytes before the end of one direction, which the
    /// hypervisor there did not read before it closed.
    pub left_unread: u64,
    /// Channels that were refused or aborted.
    pub failed: u64,
    /// Why the first of these was, as far as it is known.
    pub why: Option<Failure>,
}

impl ListenerStatus {
    /// Channels that have ended, in whatever way.
    pub fn ended(&self) -> u64 {
        self.closed + self.left_unread + self.failed
    }

    /// Whether nothing will change any more.
    pub fn is_over(&self) -> bool {
        !self.listens && self.open == 0
    }
}

/// What a listener and its channels share.
#[derive(Debug)]
pub(super) struct ListenerTally {
    number: u64,
    entrance: Entrance,
    parameter: String,
    once: bool,
    now: Mutex<Now>,
    changed: Condvar,
    waker: Waker,
}

#[derive(Debug)]
struct Now {
    status: ListenerStatus,
    /// It accepts no more connections.
    closing: bool,
}

impl OnDemandListener {
    /// Opens a listener; the caller has looked up its entrance.
    ///
    /// # Errors
    /// It cannot listen there.
    pub(super) fn open(
        carriers: &Carriers,
        mut entrance: Entrance,
        demand: &Demand,
        passed: &Sockets,
    ) -> io::Result<Self> {
        let (listener, file) = Listener::open(&mut entrance.listen, passed)?;
        let (waker, wakeup) = waker()?;
        let tally = Arc::new(ListenerTally {
            number: next_number(),
            entrance,
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
        let body = move || own.serve(&its_carriers, listener, file, &wakeup);
        if !carriers
            .site
            .spawn(format!("dunlin-listener-{}", tally.number), body)
        {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(Self(tally))
    }

    /// Its number among all listeners of the tunnel.
    pub fn number(&self) -> u64 {
        self.0.number
    }

    /// The route's name.
    pub fn route(&self) -> &str {
        &self.0.entrance.route
    }

    /// What its channels say of themselves, `NAME=VALUE`; nothing where they have
    /// no parameter.
    pub fn parameter(&self) -> &str {
        &self.0.parameter
    }

    /// Where it listens.
    pub fn listen(&self) -> &Listen {
        &self.0.entrance.listen
    }

    /// Its status now.
    pub fn status(&self) -> ListenerStatus {
        self.0.lock().status.clone()
    }

    /// Takes no more connections; its channels go on.
    pub fn close(&self) {
        self.0.close();
    }

    /// Waits until it is over, or until `deadline` where there is one, and says how
    /// it is then.
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

    /// Whether this is still its entrance.
    pub(super) fn is_of(&self, entrance: &Entrance) -> bool {
        let own = &self.0.entrance;
        (&own.route, &own.to, &own.peers) == (&entrance.route, &entrance.to, &entrance.peers)
    }
}

impl Tally for ListenerTally {
    fn begins(&self) {
        self.lock().status.open += 1;
    }

    /// Its caller may hold any lock but this one.
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

    /// Whether no more connections are taken.
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
    fn serve(
        self: Arc<Self>,
        carriers: &Carriers,
        listener: Listener,
        file: Option<SocketFile>,
        wakeup: &Wakeup,
    ) {
        if let Err(error) = self.take(carriers, &listener, wakeup) {
            let (route, number) = (&self.entrance.route, self.number);
            let text = format!("route {route}: listener {number} takes no more: {error}");
            carriers.site.tell(Event::Warning(text));
        }
        // The file goes before the socket stops listening.
        drop(file);
        drop(listener);
        self.lock().status.listens = false;
        self.changed.notify_all();
    }

    fn take(
        self: &Arc<Self>,
        carriers: &Carriers,
        listener: &Listener,
        wakeup: &Wakeup,
    ) -> io::Result<()> {
        let mut short = false;
        loop {
            listener.wait(wakeup, short)?;
            wakeup.clear();
            // Those that are in the backlog came before the last one ended.
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
                    Accepted::Short(_) => break true,
                }
            };
            if self.is_done() {
                return Ok(());
            }
        }
    }
}
