//! The tokens of sockets in the epoll instance.

/// One end of a forwarded connection.
#[derive(Clone, Copy)]
pub(super) enum Side {
    Client,
    Backend,
}

/// The token of a client's socket. `side` is `None` while the client is pending, and the socket's
/// side after the client is forwarded.
pub(super) fn token(number: u64, side: Option<Side>) -> u64 {
    number << 2 | side.map_or(0, |side| side as u64 + 1)
}
