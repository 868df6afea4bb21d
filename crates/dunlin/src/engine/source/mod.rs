//! The source of a migration.
//!
//! ```text
//!   connect ▶ offer, select ▶ describe, accept ▶ lanes up ▶ pre-copy ▶ switchover
//!                                                           (iterations)
//! ```
//! [`Migration::run`] runs on the caller's thread. Each phase is a type that owns its data and
//! that the next phase consumes:
//!
//! ```text
//!   Connecting ──▶ PreCopy ──▶ Switchover ──▶ Committed ──▶ InDoubt
//!       └────────────┴─────────────┴──────────────┴────────────┴──▶ Settled
//! ```
//! Every path to *Settled* joins every thread, stops the dirty logs and lifts the throttle. If the
//! destination has the VM, the copy here is destroyed. If the VM may run at the destination, or ran
//! there and died, the guest stays paused here ([`Doubt`]). Otherwise the guest is left as it was,
//! or stays paused if the VMM fails to resume it.
//!
//! Around *commit* the events arrive in this order: `Recorded(Committing)`, `Paused`, `Committing`,
//! `Committed`, any number of `InDoubt`, and, if the destination has the VM, `Recorded(Released)`
//! and `Running`. At the destination: `Recorded(Prepared)`, `Ready`, `Committed`,
//! `Recorded(Running)`, `Notified(Running)`, `Running`.
//!
//! Each session, lane, iteration and step is a `tracing` span, and the observer is called inside
//! the spans of the session's thread:
//!
//! ```text
//! session ─┬─ connect, describe, open-lanes
//!          ├─ iteration …
//!          ├─ record
//!          ├─ switchover ── pause, last-pages (state), ready, commit (record), in-doubt, close
//!          └─ lane … ── open
//! ```

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

use dunlin_lane::policy::ClientTls;
use dunlin_linux::affinity::thread_cpu_time;
pub use dunlin_proto::negotiate::LaneSecurity;
use dunlin_proto::observe::Observer;
pub use dunlin_proto::precopy::AtTimeLimit;
pub use dunlin_proto::switchover::Resolution;
use tracing::field::Empty;
use tracing::info_span;

pub use ask::VmLocation;
pub use doubt::{Doubt, ResolveError};
pub use options::{Options, OptionsBuilder};

use self::committed::Committed;
use self::connecting::Connecting;
use self::event::SessionEvent;
use self::precopy::PreCopy;
use super::error::MigrateError;
use super::fault::VmIs;
use super::host::{Cancel, Host, StandardHost};
use super::report::{Event, Report};
use super::tune::Tune;
use super::vmm::SourceVm;

/// A migration of one VM to another host.
///
/// ```no_run
/// # use std::sync::Arc;
/// # use dunlin::engine::{MigrateError, Report, source::{Migration, Options}, vmm::SourceVm};
/// # fn f(vm: Arc<dyn SourceVm>, tls: &dunlin::lane::ClientTls) -> Result<Report, MigrateError> {
/// Migration::builder(vm, "host-b.example:4444", tls).run()
/// # }
/// ```
#[must_use = "nothing migrates before `run`"]
pub struct Migration<'a> {
    vm: Arc<dyn SourceVm>,
    to: String,
    tls: &'a ClientTls,
    options: Options,
    host: Arc<dyn Host>,
    observer: &'a dyn Observer<Event>,
    cancel: Cancel,
}

impl<'a> Migration<'a> {
    /// Moves `vm` to the destination that listens at `to`, a host and port, with default
    /// options, [`StandardHost`] and no observer.
    pub fn builder(vm: Arc<dyn SourceVm>, to: impl Into<String>, tls: &'a ClientTls) -> Self {
        Self {
            vm,
            to: to.into(),
            tls,
            options: Options::default(),
            host: Arc::new(StandardHost),
            observer: &|_: &Event| (),
            cancel: Cancel::new(),
        }
    }

    /// Sets the options. The handle that [`Self::tune`] has set stays in force.
    pub fn options(self, options: Options) -> Self {
        let tune = self.options.tune;
        let options = Options { tune, ..options };
        Self { options, ..self }
    }

    /// Takes threads and connections from `host`.
    pub fn host(self, host: Arc<dyn Host>) -> Self {
        Self { host, ..self }
    }

    /// Reports events to `observer`.
    pub fn observer(self, observer: &'a dyn Observer<Event>) -> Self {
        Self { observer, ..self }
    }

    /// Stops when `cancel` is cancelled; after *commit* it is too late.
    pub fn cancel(self, cancel: &Cancel) -> Self {
        let cancel = cancel.clone();
        Self { cancel, ..self }
    }

    /// Lets `tune` change the rate cap while the migration runs.
    pub fn tune(mut self, tune: &Tune) -> Self {
        self.options.tune = tune.clone();
        self
    }

    /// Moves the VM, on this thread. Afterwards the destination has the VM, and the source's copy
    /// is destroyed ([`SourceVm::destroy`]).
    ///
    /// # Errors
    /// [`MigrateError`]: what failed, who is at fault, and where the VM is
    /// ([`MigrateError::vm`]). No thread, socket or running dirty log of the migration
    /// remains. [`MigrateError::doubt`], if set, keeps the session's record locked.
    pub fn run(self) -> Result<Report, MigrateError> {
        let cpu_before = thread_cpu_time();
        let to = &self.to;
        let _session =
            info_span!("session", role = "source", session = Empty, vm = Empty, peer = %to)
                .entered();
        let connecting = Connecting::new(
            &self.vm,
            &self.to,
            self.tls,
            &self.options,
            &self.host,
            self.observer,
            &self.cancel,
        )
        .map_err(|fault| fault.into_error(VmIs::AtSource))?;
        let sender = connecting.session.sender.clone();
        let listening = self.cancel.listen(move || {
            // Sending fails only after the session has ended.
            let _ = sender.send(SessionEvent::Cancelled);
        });
        let work_queue = Arc::clone(&connecting.session.work_queue);
        self.options
            .tune
            .attach(move |rate| work_queue.set_rate(rate));
        let settled = connecting
            .describe()
            .and_then(PreCopy::converge)
            .and_then(|switchover| {
                let _switchover = info_span!("switchover").entered();
                switchover.prepare().map(Committed::settle)
            })
            .unwrap_or_else(|settled| settled);
        drop(listening);
        self.options.tune.detach();
        settled.into_result(|| thread_cpu_time().saturating_sub(cpu_before))
    }
}
