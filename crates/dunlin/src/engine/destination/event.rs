//! Events of the session's thread.

use std::io;

use dunlin_lane::accept::Arrival;

use super::super::control::FromPeer;
use super::super::fault::Fault;

/// Sent to the session's thread by the acceptor, the readers of control lanes, the lane
/// threads, and the caller that cancels.
pub(super) enum SessionEvent {
    Arrived(Box<Arrival>),
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
