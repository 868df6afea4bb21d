//! A resource that a lane holds while it is open.

/// A resource that the dialer attaches to its lane until the lane ends.
pub trait LaneGuard: Send {
    /// Called by the lane's thread before it sends a frame.
    fn before_send(&self);
}
