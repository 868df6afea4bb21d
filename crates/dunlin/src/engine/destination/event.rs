//! Events of the session's thread.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Sender;

use dunlin_lane::accept::Arrival;
use dunlin_lane::peers::PeerIdentity;
use dunlin_proto::limits::MAX_LANES;

use super::super::control::FromPeer;
use super::super::fault::Fault;
use super::received::DestinationEvent;

/// Maximum number of events from [`Inbox::push`] that wait while the session's thread is busy, for
/// example in the VMM. Most of these events are connections. Further events are dropped. Plain
/// lanes are not authenticated at this point, so any host can open them (invariant I7).
const ARRIVALS_LIMIT: usize = 2 * MAX_LANES as usize;

/// Sent to the session's thread by the acceptor, the readers of control lanes, the lane
/// threads, and the caller that cancels.
pub(super) enum SessionEvent {
    Arrived(Box<Arrival>),
    /// An event of the listener that belongs to no session. This session's observer gets it.
    Notice(DestinationEvent),
    /// This peer has offered this session's VM in another session of the same listener. That offer
    /// is refused.
    OfferedAgain(Box<PeerIdentity>),
    /// The listener has failed.
    AcceptorEnded(io::Error),
    /// What the reader of the control lane with this epoch has delivered.
    Control(u32, FromPeer),
    /// A lane's thread has ended.
    LaneEnded {
        lane: u16,
        result: Result<(), Fault>,
        wire_bytes: u64,
    },
    /// The lanes, the control lane or the decision about the VM has changed. A caller that waits
    /// for one of them must check again.
    Tended,
    /// Chunks are waiting to be acknowledged.
    Acks,
    Cancelled,
}

/// How an acceptor passes connections to a session.
#[derive(Clone)]
pub(super) struct Inbox {
    sender: Sender<SessionEvent>,
    /// The number of events from [`Inbox::push`] that wait for the session's thread.
    waiting: Arc<AtomicUsize>,
}

impl Inbox {
    pub(super) fn new(sender: Sender<SessionEvent>) -> Self {
        let waiting = Arc::default();
        Self { sender, waiting }
    }

    /// Passes an event on. Drops the event and returns false if too many events wait or the session
    /// has ended.
    pub(super) fn push(&self, event: SessionEvent) -> bool {
        if self.waiting.fetch_add(1, Ordering::SeqCst) >= ARRIVALS_LIMIT {
            self.took();
            return false;
        }
        self.sender.send(event).is_ok()
    }

    /// Notes that the session has taken an event from [`Inbox::push`].
    pub(super) fn took(&self) {
        self.waiting.fetch_sub(1, Ordering::SeqCst);
    }

    /// Reports that the listener has failed.
    pub(super) fn fail(&self, error: io::Error) {
        // Sending fails only after the session has ended.
        let _ = self.sender.send(SessionEvent::AcceptorEnded(error));
    }
}
