//! The hand-off: passes connected kernel-TLS sockets to programs that do not implement TLS.
//!
//! [`connect`] performs the handshake with any TLS server, [`kernel`] installs the keys of both
//! directions in the kernel, and [`pass`] passes the socket to the program that uses it. [`accept`]
//! is the server side. Without kernel TLS the hand-off fails: there is no fallback that seals
//! records in this process.
#![forbid(unsafe_code)]

pub mod accept;
pub mod connect;
mod error;
pub mod kernel;
pub mod pass;

pub use error::HandoffError;
