//! The hand-off: connected sockets whose TLS the kernel does, for programs that do no TLS.
//!
//! [`connect`] performs the handshake with a peer that need not be Dunlin, [`kernel`] installs the
//! keys of both directions in the kernel, and [`pass`] passes the socket to its owner. [`accept`]
//! is the same for a server. Without kernel TLS there is no hand-off: nothing else seals records.
#![forbid(unsafe_code)]

pub mod accept;
pub mod connect;
pub mod kernel;
pub mod pass;
