//! The switchover: decides which side runs the VM, without a gap or an overlap
//! (I1, I2), despite crashes, losses and delays.
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
//!  up to AwaitingReady, anything fails ▶ Kept: resumes without asking
//!  up to Recording, anything fails     ▶ Aborting ▶ Aborted: records
//!                                        *aborted*, and only then sends it
//!  control lost in Committed ▶ InDoubt: stays paused and asks
//!     answer running         ▶ Releasing, as above
//!     answer aborted         ▶ Kept
//!     answer ran, then died  ▶ RanThenDied: stays paused, the operator decides
//!     no record, no answer   ▶ InDoubt
//!
//!  asked before deciding    ▶ Draining: closes the old control lane, joins its
//!                             reader and applies the messages that the reader
//!                             had read; without a *commit* ▶ Aborting
//!  cannot resume after *running* was recorded ▶ Died: answers *ran, then died*
//! ```
//!
//! **The destination decides**, by its journal. *prepared* means "this attempt
//! is known and undecided"; exactly one of *running* and *aborted* follows it.
//! Each record is synced before any message reports it. The source may resume
//! without asking only if it has not sent *commit*.
//!
//! Each role is a state. An event consumes it and returns the next state and a
//! list of actions. Three rules for the caller:
//!
//! 1. Execute the actions in order, and all of them before the next event. If an action ends
//!    with an event, the action is the last of its list, and this event is the next one. The
//!    exception is [`DestinationEvent::Drained`], which comes after the drained messages.
//! 2. If a message cannot be sent because the peer is gone, treat the message as sent.
//! 3. After a crash, continue from the journal: [`Source::restarted`],
//!    [`Destination::restarted`].
//!
//! An event that is not possible in a state is an error and changes nothing. A
//! snapshot in `tests/it/switchover_table.rs` has the whole table.
//! `tests/model` of the workspace checks this code for I1 and I2 under every
//! order of deliveries, crashes and failures.

mod destination;
mod source;

pub use destination::{Destination, DestinationAction, DestinationEvent};
pub use source::{Resolution, Source, SourceAction, SourceEvent};

use thiserror::Error;

/// An event that is not possible in the state.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("event {event} is not possible in {role} state {state}")]
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
