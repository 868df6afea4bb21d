//! The page engine: moves a VM's memory and state over lanes, and decides
//! with the peer where it runs.
//!
//! ```text
//!   source::migrate                             destination::receive
//!   ├ control reader ◀──── control lane ──────▶ control reader ┤
//!   ├ lane thread 1  ───── data lane 1 ───────▶ lane thread 1  ┤
//!   ├ …                                                      … ┤
//!   └ session (the caller's thread)     session, acceptor ─────┘
//! ```
//!
//! The session threads decide, by dunlin-proto; the others move bytes. A VMM
//! implements the traits of [`vmm`].

mod control;
pub mod destination;
pub mod dirty;
mod error;
mod host;
pub mod journal;
pub mod memory;
mod options;
mod proof;
mod report;
pub mod source;
mod tune;
pub mod vmm;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use error::{MigrateError, VmIs, fault_behind, harmless, is_harmful};
pub use host::{Cancel, Host, StandardHost};
pub use options::OptionError;
pub use report::{Downtime, Event, Iteration, Observer, Progress, Report, Traffic};
pub use tune::{Tune, TuneError};

/// A thread that panicked while it held one of the engine's locks has ended
/// its session: the panic is reported when it is joined. What the lock guards
/// stays readable for the threads that wind up.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
