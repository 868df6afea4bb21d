//! The switchover: which side runs the VM, decided without a gap or an
//! overlap (I1, I2), whatever crashes, is lost or comes late.
//!
//! ```text
//!  source                                         destination
//!  Live (*migrating*)                              Accepting
//!    │ converged                                     │ records *prepared*
//!  Recording                                       Receiving
//!    │ records *committing*                          │
//!  Paused ── last pages, state, final ────────────▶ Loading
//!    │                                               │ lanes joined, state
//!  AwaitingReady ◀──────── ready ──────────────── Prepared   loaded, checked
//!    │
//!    ══════════ commit: the point of no return ════════▶
//!  Committed                                       Acquiring
//!    │                                               │ has disks and devices
//!    │                                             Recording
//!    │                                               │ records *running*
//!    │                                             Starting
//!    │                                               │ resumes
//!  Releasing ◀──────────── running ──────────────── Running
//!    │ records *released*, destroys its copy         │
//!  Released ───────────── release ───────────────▶ Released, forgets
//!
//!  up to AwaitingReady, anything fails ▶ Kept: resumes, asks nobody
//!  up to Recording, anything fails     ▶ Aborting ▶ Aborted: records
//!                                        *aborted*, and only then tells it
//!  control lost in Committed ▶ InDoubt: stays paused and asks
//!     answer running         ▶ Releasing, as above
//!     answer aborted         ▶ Kept
//!     answer ran, then died  ▶ RanThenDied: stays paused, the operator decides
//!     no record, no answer   ▶ InDoubt
//!
//!  asked before it decided  ▶ Draining: closes the old control lane, joins its
//!                             reader and takes what that had read; a *commit*
//!                             among it counts, else Aborting
//!  cannot resume after *running* was recorded ▶ Died: answers *ran, then died*
//! ```
//!
//! **The destination decides**, by what its journal says: *prepared* is "I
//! know this attempt and have decided nothing", and exactly one of *running*
//! and *aborted* follows. Each is synced before anybody is told. The source
//! may resume without asking only while it has not sent *commit*.
//!
//! Each role is one state, consumed by an event that gives the next state and
//! what must be done, in order. Three rules for whoever drives it:
//!
//! 1. Actions are done in their order, and all of them before another event
//!    is taken. An action that says which event it ends with is followed by
//!    that event before any other; it is the last of its list, except that
//!    the drained messages come before [`DestinationEvent::Drained`].
//! 2. What cannot be sent, because the peer is gone, counts as sent.
//! 3. After a crash the machine goes on from what the journal holds:
//!    [`Source::restarted`], [`Destination::restarted`].
//!
//! An event that a state cannot take is an error that changes nothing; the
//! table of all of them is a snapshot in `tests/it/switchover_table.rs`. That the
//! two hold I1 and I2 in every order of deliveries, crashes and failures is
//! checked over this very code in `tests/model` of the workspace.

mod destination;
mod source;

pub use destination::{Destination, DestinationAction, DestinationEvent};
pub use source::{Resolution, Source, SourceAction, SourceEvent};

use thiserror::Error;

/// An event that the state cannot take.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{event} is not possible while the {role} is {state}")]
pub struct Impossible {
    role: &'static str,
    state: String,
    event: String,
}

impl Impossible {
    fn new(role: &'static str, state: impl std::fmt::Debug, event: impl std::fmt::Debug) -> Self {
        Self {
            role,
            state: format!("{state:?}"),
            event: format!("{event:?}"),
        }
    }
}
