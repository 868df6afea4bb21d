//! Events of the session's thread.

use super::super::control::FromPeer;
use super::super::fault::Fault;

/// Sent to the session's thread by the readers of control lanes, by the lane threads,
/// and by the caller that cancels.
pub(in crate::engine) enum SessionEvent {
    /// From the control lane of this epoch.
    Control(u32, FromPeer),
    /// A lane's thread has ended.
    LaneEnded {
        lane: u16,
        result: Result<(), Fault>,
    },
    /// The lanes, the control lane or the use of a lane's key have changed; a caller
    /// that waits for lanes must check again.
    Tended,
    /// The last chunk of an iteration has been given to a lane.
    Cut {
        iteration: u32,
    },
    Cancelled,
}
