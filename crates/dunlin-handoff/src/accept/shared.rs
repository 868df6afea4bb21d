//! State that all threads of an acceptor share.

use dunlin_lane::sync::lock;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex};

use dunlin_linux::epoll::Epoll;
use dunlin_linux::poll::{Waker, Wakeup};
use dunlin_proto::observe::Observer;

use super::forwarded::Forwarded;
use super::{Event, Options, Refusal};
use dunlin_lane::policy::ServerTls;
use dunlin_lane::splice::Stop;

/// State shared by all threads.
pub(super) struct Shared {
    pub(super) options: Options,
    pub(super) tls: ServerTls,
    pub(super) epoll: Epoll,
    pub(super) observer: Box<dyn Observer<Event>>,
    pub(super) state: Mutex<State>,
    /// Notified when a hand-over, a forwarded client or the accepting thread ends.
    pub(super) changed: Condvar,
    pub(super) waker: Waker,
    pub(super) wakeup: Wakeup,
    /// When a stop is requested, pending clients are dropped immediately, and hand-overs no longer
    /// wait for their receiver to accept.
    pub(super) stop: Stop,
}

#[derive(Default)]
pub(super) struct State {
    /// The forwarded clients by number. A newer client has a higher number, so the clients are
    /// sorted by age.
    pub(super) forwarded: BTreeMap<u64, Arc<Forwarded>>,
    /// The number of hand-overs in progress, by the index of the hand-off name.
    pub(super) handovers: BTreeMap<usize, usize>,
    /// Whether the acceptor drains and accepts no new clients.
    pub(super) is_draining: bool,
    /// Whether the accepting thread has ended.
    pub(super) is_closed: bool,
}

impl State {
    pub(super) fn is_idle(&self) -> bool {
        self.forwarded.is_empty() && self.handovers.is_empty()
    }
}

impl Shared {
    pub(super) fn report(&self, event: &Event) {
        self.observer.event(event);
    }

    pub(super) fn refused(&self, from: SocketAddr, name: Option<String>, refusal: Refusal) {
        self.report(&Event::Refused {
            from,
            name,
            refusal,
        });
    }

    /// Counts a hand-over as ended, whether it succeeded or failed.
    pub(super) fn end_handover(&self, index: usize) {
        let mut state = lock(&self.state);
        if let Some(waiting) = state.handovers.get_mut(&index) {
            *waiting -= 1;
            if *waiting == 0 {
                state.handovers.remove(&index);
            }
        }
        drop(state);
        self.changed.notify_all();
    }
}
