//! The TLS records of a relay's connection to another program. Two threads serve the connection,
//! one for each direction.
//!
//! With [`session`], this process seals and opens the records. With [`in_kernel`], the kernel does,
//! and this process handles only TLS's own messages. Lanes use neither of the two modules, because
//! the peer of a lane is always Dunlin, which never renews a lane's keys.

mod error;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
pub mod in_kernel;
pub(crate) mod messages;
mod records;
pub mod session;

pub use self::error::RelayError;
use self::session::Session;

/// What seals and opens a connection's records.
pub enum Records {
    /// This process.
    Process(Session),
    /// The kernel: it seals what is written to the socket and opens what is read.
    Kernel(in_kernel::Sealing, in_kernel::Opening),
}
