//! The destination of a migration: receives one VM.
//!
//! [`receive`] runs on the caller's thread until a VM has arrived or a session has
//! failed; call it again for the next VM. Each phase is a type that owns its data and
//! that the next phase consumes:
//!
//! ```text
//!   Waiting ──▶ Describing ──▶ Receiving ──▶ Prepared ──▶ Running
//!      └────────────┴──────────────┴────────────┴────────────┴──▶ Settled
//! ```
//! Until *commit* the VM lives at the source. Every path to *Settled* before *commit*
//! drops the copy built here.

mod answer;
mod arriving;
pub(super) mod barrier;
mod event;
mod intake;
mod lane;
mod lanes;
mod options;
mod phase;
mod prepared;
mod received;
mod receiving;
mod refusal;
mod resume;
mod session;
mod settled;
mod waiting;

use std::net::TcpListener;
use std::sync::Arc;

pub use dunlin_proto::control::Verdict;

pub use answer::{Answering, answer};
pub use options::{Options, OptionsBuilder};
pub use received::{DestinationEvent, Received};

use self::event::SessionEvent;
use self::prepared::{Prepared, Running};
use self::receiving::Receiving;
use self::session::Session;
use self::waiting::{Describing, Waiting};
use super::error::MigrateError;
use super::fault::VmIs;
use super::host::{Cancel, Host};
use super::vmm::Builder;
use crate::lane::policy::ServerTls;

/// Accepts on `listener` and receives one VM, which `builder` builds. Call it again for
/// the next VM; to keep the listening socket open in between, clone the listener
/// ([`TcpListener::try_clone`]). Connections from other peers are rejected
/// ([`DestinationEvent::Rejected`]) and do not end the wait.
///
/// # Errors
/// [`MigrateError`]: what failed, who is at fault, and where the VM is.
pub fn receive(
    listener: TcpListener,
    tls: &ServerTls,
    options: &Options,
    builder: &mut dyn Builder,
    host: &Arc<dyn Host>,
    observer: &(dyn Fn(&DestinationEvent) + Send + Sync),
    cancel: &Cancel,
) -> Result<Received, MigrateError> {
    let session = Session::start(listener, tls, options, host, observer)
        .map_err(|fault| fault.into_error(VmIs::AtSource))?;
    let sender = session.sender.clone();
    cancel.listen(move || {
        // Fails once the session has ended.
        let _ = sender.send(SessionEvent::Cancelled);
    });
    let settled = Waiting::new(session)
        .await_source()
        .and_then(|describing: Describing<'_>| describing.build(builder))
        .and_then(Receiving::await_everything)
        .and_then(Prepared::decide)
        .map_or_else(|settled| settled, Running::await_release);
    cancel.unlisten();
    settled.into_result()
}
