//! The destination of a migration: receives one VM.
//!
//! [`Incoming::run`] runs on the caller's thread until a VM has arrived or a session has failed.
//! The next VM needs another [`Incoming`]. [`Listener::receive`] does the same for one of several
//! sessions, on a listener that they share. Each phase is a type that owns its data and that the
//! next phase consumes:
//!
//! ```text
//!   Waiting ──▶ Describing ──▶ Receiving ──▶ Prepared ──▶ Running
//!      └────────────┴──────────────┴────────────┴────────────┴──▶ Settled
//! ```
//! Until *commit* the source has the VM. Every path to *Settled* before *commit* drops the copy
//! that was built here.
//!
//! The steps *describe*, *receive*, *load*, *commit*, *release* and *close*, and each lane, are
//! `tracing` spans in the span of the session. The session's span begins with the wait for a
//! source.

mod answer;
mod arriving;
pub(super) mod barrier;
mod event;
mod intake;
mod lane;
mod lanes;
mod listener;
mod options;
mod pacer;
mod phase;
mod prepared;
mod received;
mod receiving;
mod refusal;
mod resume;
mod router;
mod session;
mod settled;
mod waiting;

use std::net::TcpListener;
use std::sync::Arc;

use dunlin_lane::policy::ServerTls;
pub use dunlin_proto::control::Verdict;
use dunlin_proto::observe::Observer;

pub use answer::Answering;
pub use listener::Listener;
pub use options::{Options, OptionsBuilder};
pub use received::{DestinationEvent, Received};

use self::session::Session;
use super::error::MigrateError;
use super::fault::VmIs;
use super::host::{Cancel, Host, StandardHost};
use super::vmm::Builder;

/// An incoming migration: accepts on a listener and receives one VM.
///
/// A host that keeps receiving VMs runs one `Incoming` after another, each with a clone of the
/// listener. The next one can run whether the previous one received a VM or failed. To receive
/// several VMs at the same time on one listener, use [`Incoming::share`].
///
/// ```no_run
/// # use dunlin::engine::{MigrateError, destination::{Incoming, Received}, vmm::Builder};
/// # fn f(listener: std::net::TcpListener, tls: &dunlin::lane::ServerTls, vms: &mut dyn Builder)
/// # -> Result<Received, MigrateError> {
/// Incoming::builder(listener, tls).run(vms)
/// # }
/// ```
#[must_use = "nothing is received before `run`"]
pub struct Incoming<'a> {
    listener: TcpListener,
    tls: &'a ServerTls,
    options: Options,
    host: Arc<dyn Host>,
    observer: &'a dyn Observer<DestinationEvent>,
    cancel: Cancel,
}

impl<'a> Incoming<'a> {
    /// Accepts on `listener`, with default options, [`StandardHost`] and no observer. To keep
    /// the listening socket open for the next VM, clone the listener
    /// ([`TcpListener::try_clone`]).
    pub fn builder(listener: TcpListener, tls: &'a ServerTls) -> Self {
        Self {
            listener,
            tls,
            options: Options::default(),
            host: Arc::new(StandardHost),
            observer: &|_: &DestinationEvent| (),
            cancel: Cancel::new(),
        }
    }

    /// Sets the options.
    pub fn options(self, options: Options) -> Self {
        Self { options, ..self }
    }

    /// Takes threads and connections from `host`.
    pub fn host(self, host: Arc<dyn Host>) -> Self {
        Self { host, ..self }
    }

    /// Reports events to `observer`.
    pub fn observer(self, observer: &'a dyn Observer<DestinationEvent>) -> Self {
        Self { observer, ..self }
    }

    /// Stops when `cancel` is cancelled; after *commit* it is too late.
    pub fn cancel(self, cancel: &Cancel) -> Self {
        let cancel = cancel.clone();
        Self { cancel, ..self }
    }

    /// Receives one VM, which `builder` builds, on this thread. A connection that is rejected
    /// ([`DestinationEvent::Rejected`]) does not end the wait. Without a source, the call waits
    /// until it is cancelled.
    ///
    /// # Errors
    /// [`MigrateError`]: what failed, who is at fault, and where the VM is. The VM does not run
    /// here, and any part of it that was built has been discarded
    /// ([`DestinationVm::discard`](super::vmm::DestinationVm::discard)).
    pub fn run(self, builder: &mut dyn Builder) -> Result<Received, MigrateError> {
        let _session = listener::span().entered();
        let session = Session::start(
            self.listener,
            self.tls,
            &self.options,
            &self.host,
            self.observer,
        )
        .map_err(|fault| fault.into_error(VmIs::AtSource))?;
        listener::receive(session, builder, &self.cancel)
    }

    /// Accepts connections for several sessions on this one listener, with these options and this
    /// host. Each [`Listener::receive`] has its own observer and its own [`Cancel`]. The observer
    /// and the `Cancel` of this `Incoming` are not used.
    ///
    /// # Errors
    /// No thread or descriptor was available.
    pub fn share(self) -> Result<Listener, MigrateError> {
        Listener::start(self.listener, self.tls, self.options, self.host)
            .map_err(|fault| fault.into_error(VmIs::AtSource))
    }

    /// Receives no VM. Answers sources that ask for the outcome of an earlier session, from the
    /// journal in the options, until the [`Cancel`] is cancelled. [`Incoming::run`] answers such
    /// sources too. The observer gets no events.
    ///
    /// # Errors
    /// The listener failed, or no descriptor was available.
    pub fn answer(self) -> Result<(), MigrateError> {
        let Self {
            listener,
            tls,
            options,
            host,
            cancel,
            ..
        } = self;
        answer::answer(&listener, tls, &options.journal, &host, &cancel)
            .map_err(|fault| fault.into_error(VmIs::AtSource))
    }
}
