//! Lanes on which the side that accepted the connection sends.
//!
//! A dialer returns a sender, because the side that dials sends the lane's first message. An
//! acceptor returns a receiver. If the lane carries frames to the dialer, the sender becomes a
//! receiver, and the receiver a sender, before the first frame. TLS has keys for both directions,
//! so nothing is negotiated again.

use super::{DataReceiver, DataSender, ReceiveError, SendError};

impl DataSender {
    /// Makes this end, which dialled, a receiver. Call this after this end has sent the lane's
    /// first message, and before any frame.
    ///
    /// # Errors
    /// The socket's options cannot be set.
    #[cfg(feature = "unstable-internals")]
    pub fn into_receiver(self) -> Result<DataReceiver, ReceiveError> {
        DataReceiver::of(self.into_end())
    }
}

impl DataReceiver {
    /// Makes this end, which accepted the connection, a sender.
    ///
    /// # Errors
    /// [`SendError::Spent`] if this end has already read from the connection, or the socket's
    /// options cannot be set.
    #[cfg(feature = "unstable-internals")]
    pub fn into_sender(self) -> Result<DataSender, SendError> {
        DataSender::of(self.into_end().ok_or(SendError::Spent)?)
    }
}
