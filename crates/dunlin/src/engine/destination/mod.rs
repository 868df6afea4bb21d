//! The destination of a migration: takes one VM in.
//!
//! [`receive`] runs on the caller's thread until a VM has come, or one that
//! tried has failed; call it again for the next. Each phase is a type that owns what the phase
//! has, and that the next phase consumes:
//!
//! ```text
//!   Waiting ──▶ Describing ──▶ Receiving ──▶ Prepared ──▶ Running
//!      └────────────┴──────────────┴────────────┴────────────┴──▶ Settled
//! ```
//! Until *commit* the VM lives at the source, and every way to *Settled* before it drops what was
//! built here.

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

/// Accepts on `listener` and takes in one VM, which `builder` builds. For the
/// next one call it again: a listener that shall stay open meanwhile is cloned
/// ([`TcpListener::try_clone`]). Strangers are turned away
/// ([`DestinationEvent::Rejected`]) and waited past.
///
/// # Errors
/// [`MigrateError`] says what failed, whose fault it is, and where the VM is.
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
