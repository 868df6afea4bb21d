//! Events of the session's thread.

use super::super::control::FromPeer;
use super::super::fault::Fault;

/// Sent to the session's thread by the readers of control lanes, by the lane threads,
/// and by the caller that cancels.
pub(in crate::engine) enum SessionEvent {
    /// What the reader of the control lane with this epoch has delivered.
    Control(u32, FromPeer),
    /// A lane's thread has ended.
    LaneEnded {
        lane: u16,
        result: Result<(), Fault>,
    },
    /// The state of the lanes or of the control lane has changed, or a lane's key is near its
    /// limit. A caller that waits for lanes must check again.
    Tended,
    /// The last chunk of an iteration has been given to a lane.
    Cut {
        iteration: u32,
    },
    Cancelled,
}
