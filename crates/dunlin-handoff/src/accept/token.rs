//! The tokens of sockets in the epoll instance.

/// One end of a forwarded connection.
#[derive(Clone, Copy)]
pub(super) enum Side {
    Client,
    Server,
}

/// The kind of a socket, in addition to its client's number.
#[derive(Clone, Copy)]
pub(super) enum Of {
    Undecided,
    Forwarded(Side),
}

pub(super) fn token(number: u64, of: Of) -> u64 {
    number << 2
        | match of {
            Of::Undecided => 0,
            Of::Forwarded(Side::Client) => 1,
            Of::Forwarded(Side::Server) => 2,
        }
}
