//! State that all threads of an acceptor share.

use dunlin_lane::sync::lock;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex};

use dunlin_linux::epoll::Epoll;
use dunlin_linux::poll::{Waker, Wakeup};
use dunlin_proto::observe::Observer;

use super::forwarded::Forwarded;
use super::handovers::{Admission, Handovers};
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
    /// The hand-overs in flight, by the index of the hand-off name.
    pub(super) handovers: BTreeMap<usize, Handovers>,
    /// Whether the acceptor drains and accepts no new clients.
    pub(super) is_draining: bool,
    /// Whether the accepting thread has ended.
    pub(super) is_closed: bool,
}

impl State {
    /// Whether no client is forwarded and no hand-over has a thread. Clients may still be pending,
    /// and receivers may not have read all passed sockets yet.
    pub(super) fn is_idle(&self) -> bool {
        self.forwarded.is_empty() && self.handover_threads() == 0
    }

    pub(super) fn handover_threads(&self) -> usize {
        self.handovers.values().map(Handovers::threads).sum()
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

    /// Admits a client of the hand-off name at `index`, and counts the client's thread.
    pub(super) fn begin_handover(&self, index: usize) -> Admission {
        let mut state = lock(&self.state);
        let one = state.handovers.entry(index).or_default();
        one.admit(self.options.limits.handovers)
    }

    /// Counts the thread of a hand-over as ended, whether the hand-over succeeded or failed.
    /// `passed` is the connection on which the thread passed a socket.
    pub(super) fn end_handover(
        &self,
        index: usize,
        admission: Admission,
        passed: Option<UnixStream>,
    ) {
        if let Some(one) = lock(&self.state).handovers.get_mut(&index) {
            one.end(admission, passed);
        }
        self.end_read_handovers();
        self.changed.notify_all();
    }

    /// Closes each connection on which the receiver has read the socket and the line that describes
    /// it.
    pub(super) fn end_read_handovers(&self) {
        let handovers = &mut lock(&self.state).handovers;
        handovers.retain(|_, one| {
            one.close_read();
            !one.is_empty()
        });
    }
}
