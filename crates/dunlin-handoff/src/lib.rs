//! The hand-off: passes connected kernel-TLS sockets to programs without TLS.
//!
//! [`connect`] performs the handshake with a peer that need not be Dunlin, [`kernel`] installs the
//! keys of both directions in the kernel, and [`pass`] passes the socket to its owner. [`accept`]
//! is the server side. Without kernel TLS the hand-off fails: nothing else seals records.
#![forbid(unsafe_code)]

pub mod accept;
pub mod connect;
pub mod kernel;
pub mod pass;
