//! The hand-off: sockets whose TLS is the kernel's, for programs that know nothing of TLS.
//!
//! [`connect`] makes the handshake with a peer that need not be Dunlin, [`kernel`] leaves the rest
//! of TLS to the kernel, [`pass`] hands the socket over. Where the kernel has no TLS, and only if
//! that was asked for, [`carry`] takes its place.
#![forbid(unsafe_code)]

pub mod accept;
pub mod carry;
pub mod connect;
pub mod kernel;
pub mod pass;
