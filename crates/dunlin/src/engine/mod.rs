//! The migration engine: moves a VM's memory and state over lanes, and agrees with the
//! peer on which side runs the VM.
//!
//! ```text
//!   source::Migration                          destination::Incoming
//!   ├ control reader ◀──── control lane ──────▶ control reader ┤
//!   ├ lane thread 1  ───── data lane 1 ───────▶ lane thread 1  ┤
//!   ├ …                                                      … ┤
//!   └ session (the caller's thread)     session, acceptor ─────┘
//! ```
//!
//! The session threads execute the decisions of dunlin-proto; the other threads move
//! bytes. A VMM implements the traits of [`vmm`].
//!
//! - *lane*: one authenticated TCP connection. The control lane carries messages, the data
//!   lanes carry memory in *chunks* with at most 256 KiB of page content; a *mark* separates two
//!   iterations.
//! - *iteration* or *pass*: sending each page that is dirty at its start. The first sends all of the
//!   guest's memory. Pre-copy consists of the iterations during which the guest runs. The *last pass*
//!   sends the remaining pages while the guest is paused.
//! - The messages of the switchover: *final* (the source has sent everything), *ready* (the
//!   destination has loaded everything), *commit* (the source gives the VM away: the point of no
//!   return), *running* (the VM runs at the destination).

mod control;
mod control_link;
pub mod destination;
pub mod dirty;
mod error;
mod fault;
mod host;
#[cfg(all(test, feature = "shuttle"))]
mod interleavings;
pub mod journal;
pub mod memory;
mod options;
mod report;
pub mod source;
mod sync;
mod threads;
mod tune;
pub mod vmm;

#[cfg(feature = "unstable-internals")]
pub use dunlin_lane::fault::fault_behind;
pub use dunlin_linux::poll::Wakeup;
pub use dunlin_proto::fault::AtFault;
pub use dunlin_proto::observe::Observer;
pub use error::MigrateError;
pub use fault::VmIs;
pub use host::{Cancel, Connector, Host, StandardHost};
pub use options::OptionError;
pub use report::{Downtime, Event, Iteration, Progress, Report, Traffic};
use sync::lock;
pub use tune::{Tune, TuneError};
