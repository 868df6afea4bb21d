//! The source of a migration: from a running VM here to a running VM there.
//!
//! ```text
//!   connect ▶ offer, select ▶ describe, accept ▶ lanes up ▶ pre-copy ▶ switchover
//!                                                           (iterations)
//! ```
//! [`migrate`] runs on the caller's thread. Every way out of it joins every
//! thread, stops the dirty logs, lifts the throttle and leaves the guest as
//! it was, unless the destination has it, or may have it: then it stays paused
//! ([`Doubt`]).
//!
//! Around *commit* the events come in this order, for whoever hooks in:
//! `Recorded(Committing)`, `Paused`, `Committing`, `Committed`, then `Running`
//! after `Recorded(Released)`, or `InDoubt` any number of times before it. At
//! the destination: `Recorded(Prepared)`, `Ready`, `Committed`,
//! `Recorded(Running)`, `Told(Running)`, `Running`.

mod ask;
mod decide;
mod doubt;
mod lane;
mod lanes;
mod options;
mod precopy;
mod resume;
mod session;
mod set_up;
mod switchover;
pub(super) mod work_queue;

use std::sync::Arc;
use std::time::Duration;

pub use dunlin_proto::negotiate::LaneSecurity;
pub use dunlin_proto::precopy::AtTimeLimit;
pub use dunlin_proto::switchover::Resolution;

pub use ask::VmLocation;
pub use doubt::{Doubt, ResolveError};
pub use options::{Options, OptionsBuilder};

use super::control::FromPeer;
use super::error::{Fault, MigrateError};
use super::host::{Cancel, Host};
use super::report::{Observer, Report};
use super::vmm::SourceVm;
use crate::lane::identity::ClientTls;

/// Moves `vm` to the destination that listens at `to`, a host and port, such
/// as `host-b.example:4444`.
///
/// # Errors
/// [`MigrateError`] says what failed, whose fault it is, and where the VM is.
pub fn migrate(
    vm: &Arc<dyn SourceVm>,
    to: &str,
    tls: &ClientTls,
    options: &Options,
    host: &Arc<dyn Host>,
    observer: &dyn Observer,
    cancel: &Cancel,
) -> Result<Report, MigrateError> {
    session::run(vm, to, tls, options, host, observer, cancel)
}

/// What the session's thread waits for.
pub(super) enum SessionEvent {
    /// From the control lane of this epoch.
    Control(u32, FromPeer),
    LaneEnded {
        lane: u16,
        result: Result<(), Fault>,
        cpu: Duration,
    },
    /// A lane is near the limit of its key.
    LaneWorn,
    /// Something was done about lanes that whoever waits may have to see.
    Tended,
    /// The last chunk of an iteration has been given to a lane.
    Cut {
        iteration: u32,
    },
    Cancelled,
}
