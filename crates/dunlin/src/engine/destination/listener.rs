//! One listener for several sessions, and the function that runs a session.

use std::net::TcpListener;
use std::sync::Arc;

use dunlin_lane::policy::ServerTls;
use dunlin_proto::observe::Observer;
use tracing::field::Empty;
use tracing::{Span, info_span};

use super::super::error::MigrateError;
use super::super::fault::{Fault, VmIs};
use super::super::host::{Cancel, Host};
use super::super::vmm::Builder;
use super::event::SessionEvent;
use super::options::Options;
use super::prepared::{Prepared, Running};
use super::received::{DestinationEvent, Received};
use super::receiving::Receiving;
use super::router::Router;
use super::session::{RouterSlot, Session};
use super::waiting::Describing;

/// A listener on which several VMs may arrive at the same time, made by [`Incoming::share`].
///
/// A `Listener`, and each of its clones, receives one VM at a time, on the thread that calls
/// [`Listener::receive`]. To receive `N` VMs at the same time, make `N - 1` clones, and give each
/// to a thread. A source is refused as *busy* if all `N` are receiving a VM, or if the offered VM
/// is already arriving. If one of the `N` has no call in progress and all others are receiving a
/// VM, the one without a call keeps one offer for its next call. Drop a clone that will receive no
/// more VMs. When it is dropped, the offer that it keeps goes to a free clone, or is refused.
///
/// A session that hangs or fails, or a peer that floods a session, does not delay the others. New
/// connections use the newest settings ([`ServerTls::replace`]), in every session.
///
/// After the last clone has been dropped, the listener stays open until every source has confirmed
/// that it has released its VM ([`Received::answering`]).
///
/// [`Incoming::share`]: super::Incoming::share
#[derive(Clone)]
pub struct Listener {
    handle: Handle,
    options: Options,
    host: Arc<dyn Host>,
}

impl Listener {
    pub(super) fn start(
        listener: TcpListener,
        tls: &ServerTls,
        options: Options,
        host: Arc<dyn Host>,
    ) -> Result<Self, Fault> {
        let (router, accepting) = Router::start(listener, tls, &options, &host)?;
        let slot = router.open();
        let handle = Handle(RouterSlot {
            router,
            accepting,
            slot,
        });
        Ok(Self {
            handle,
            options,
            host,
        })
    }

    /// Receives one VM, which `builder` builds, on this thread, like
    /// [`Incoming::run`](super::Incoming::run). Stops when `cancel` is cancelled. `observer` gets
    /// the events of this session. Events that concern no session, such as a connection that was
    /// rejected, go to the observer of one of the listener's sessions.
    ///
    /// # Errors
    /// Same as [`Incoming::run`](super::Incoming::run). The other sessions go on.
    pub fn receive(
        &mut self,
        builder: &mut dyn Builder,
        observer: &dyn Observer<DestinationEvent>,
        cancel: &Cancel,
    ) -> Result<Received, MigrateError> {
        let _session = span().entered();
        let session = Session::wait(self.handle.0.clone(), &self.options, &self.host, observer)
            .map_err(|fault| fault.into_error(VmIs::AtSource))?;
        receive(session, builder, cancel)
    }
}

/// A slot of the router.
struct Handle(RouterSlot);

impl Clone for Handle {
    fn clone(&self) -> Self {
        let slot = self.0.router.open();
        Self(RouterSlot {
            slot,
            ..self.0.clone()
        })
    }
}

impl Drop for Handle {
    /// If an offer waits for this slot, gives the offer to another slot. Dropping the last handle
    /// closes the listener, unless a source still has to confirm a release.
    fn drop(&mut self) {
        self.0.router.close(self.0.slot);
        // If the count is 1, this is the only reference, so no other thread can clone it.
        if Arc::strong_count(&self.0.accepting) == 1 {
            self.0.accepting.stop();
            self.0.router.join();
        }
    }
}

/// The `tracing` span of a session.
pub(super) fn span() -> Span {
    info_span!(
        "session",
        role = "destination",
        session = Empty,
        vm = Empty,
        peer = Empty
    )
}

/// Runs a session on this thread, from the wait for its source to its end.
pub(super) fn receive(
    session: Session<'_>,
    builder: &mut dyn Builder,
    cancel: &Cancel,
) -> Result<Received, MigrateError> {
    let sender = session.sender.clone();
    let listening = cancel.listen(move || {
        // Sending fails only after the session has ended.
        let _ = sender.send(SessionEvent::Cancelled);
    });
    let settled = Describing::await_source(session)
        .and_then(|describing| describing.build(builder))
        .and_then(Receiving::await_everything)
        .and_then(Prepared::decide)
        .map_or_else(|settled| settled, Running::await_release);
    drop(listening);
    settled.into_result()
}
