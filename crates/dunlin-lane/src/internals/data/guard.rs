//! A resource that the dialer attaches to a lane, and that is dropped when the lane ends.

/// A resource that the dialer attaches to its lane until the lane ends.
pub trait LaneGuard: Send {
    /// Called by the lane's thread before it sends a frame.
    fn before_send(&self);
}
