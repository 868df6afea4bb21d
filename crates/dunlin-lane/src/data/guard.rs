//! What a lane holds while it is open.

/// What a dialer keeps with its lane until the lane ends.
pub trait LaneGuard: Send {
    /// Called by the lane's thread before it sends a frame.
    fn before_send(&self);
}
