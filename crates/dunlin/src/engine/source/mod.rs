//! The source of a migration.
//!
//! ```text
//!   connect ▶ offer, select ▶ describe, accept ▶ lanes up ▶ pre-copy ▶ switchover
//!                                                           (iterations)
//! ```
//! [`migrate`] runs on the caller's thread. Each phase is a type that owns its data and
//! that the next phase consumes:
//!
//! ```text
//!   Connecting ──▶ PreCopy ──▶ Switchover ──▶ Committed ──▶ InDoubt
//!       └────────────┴─────────────┴──────────────┴────────────┴──▶ Settled
//! ```
//! Every path to *Settled* joins every thread, stops the dirty logs and lifts the
//! throttle. It leaves the guest as it was, unless the destination has it or may have
//! it: then the guest stays paused ([`Doubt`]).
//!
//! Around *commit* the events arrive in this order: `Recorded(Committing)`, `Paused`,
//! `Committing`, `Committed`, then `Running` after `Recorded(Released)`, or `InDoubt`
//! any number of times before it. At the destination: `Recorded(Prepared)`, `Ready`,
//! `Committed`, `Recorded(Running)`, `Notified(Running)`, `Running`.

mod ask;
mod committed;
mod connecting;
mod control;
pub(super) mod doubt;
pub(super) mod event;
mod guest;
mod lane;
mod lanes;
mod options;
mod phase;
mod precopy;
mod session;
mod settled;
mod switchover;
mod window;
pub(super) mod work_queue;

use std::sync::Arc;

use dunlin_linux::affinity::thread_cpu_time;
pub use dunlin_proto::negotiate::LaneSecurity;
pub use dunlin_proto::precopy::AtTimeLimit;
pub use dunlin_proto::switchover::Resolution;

pub use ask::VmLocation;
pub use doubt::{Doubt, ResolveError};
pub use options::{Options, OptionsBuilder};

use self::committed::Committed;
use self::connecting::Connecting;
use self::event::SessionEvent;
use self::precopy::PreCopy;
use self::switchover::Switchover;
use super::error::MigrateError;
use super::fault::VmIs;
use super::host::{Cancel, Host};
use super::report::{Observer, Report};
use super::vmm::SourceVm;
use crate::lane::policy::ClientTls;

/// Moves `vm` to the destination listening at `to`, a host and port such as
/// `host-b.example:4444`.
///
/// # Errors
/// [`MigrateError`]: what failed, who is at fault, and where the VM is.
pub fn migrate(
    vm: &Arc<dyn SourceVm>,
    to: &str,
    tls: &ClientTls,
    options: &Options,
    host: &Arc<dyn Host>,
    observer: &dyn Observer,
    cancel: &Cancel,
) -> Result<Report, MigrateError> {
    let cpu_before = thread_cpu_time();
    let connecting = Connecting::new(vm, to, tls, options, host, observer, cancel)
        .map_err(|fault| fault.into_error(VmIs::AtSource))?;
    let sender = connecting.session().sender.clone();
    cancel.listen(move || {
        // Fails once the session has ended.
        let _ = sender.send(SessionEvent::Cancelled);
    });
    let work_queue = Arc::clone(&connecting.session().work_queue);
    options.tune.attach(move |rate| work_queue.set_rate(rate));
    let settled = connecting
        .describe()
        .and_then(PreCopy::converge)
        .and_then(Switchover::prepare)
        .map_or_else(|settled| settled, Committed::settle);
    cancel.unlisten();
    options.tune.detach();
    settled.into_result(|| thread_cpu_time().saturating_sub(cpu_before))
}
