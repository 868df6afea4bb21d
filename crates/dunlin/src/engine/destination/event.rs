//! What the session's thread waits for.

use std::io;
use std::time::Duration;

use super::super::control::FromPeer;
use super::super::fault::Fault;
use crate::lane::accept::Arrival;

/// Sent to the session's thread by the acceptor, the readers of control lanes, the lanes' threads,
/// and whoever cancels.
pub(super) enum SessionEvent {
    Arrived(Box<Arrival>),
    /// The listener has failed.
    AcceptorEnded(io::Error),
    /// From the control lane of this epoch.
    Control(u32, FromPeer),
    /// A lane's thread has ended.
    LaneEnded {
        lane: u16,
        result: Result<(), Fault>,
        wire_bytes: u64,
        cpu: Duration,
    },
    /// Lanes, control lane or decision have changed; a caller that waits looks again.
    Tended,
    /// There are chunks to acknowledge.
    Acks,
    Cancelled,
}
