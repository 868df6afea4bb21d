//! The switchover: which side runs the VM, decided without a gap or an
//! overlap (I1, I2).
//!
//! ```text
//!  source                                         destination
//!  Live ── pause ──▶ Paused                        Receiving
//!                      │ last pages, state             │
//!                      ├──────────── final ───────────▶│ lanes joined, state
//!                      ▼                               ▼ loaded and checked
//!                AwaitingReady ◀───────── ready ──── Prepared
//!                      │                               │
//!      ══════ commit: the point of no return ══════════▶
//!                      ▼                               ▼ resumes (or stays
//!                  Committed ◀────────── running ─── Running    paused)
//!                      │ destroys its copy             │
//!                      └──────────── release ─────────▶▼
//!                  Released                        Released
//!
//!  any failure up to AwaitingReady ▶ Kept (the VM goes on at the source)
//!  control lost in Committed       ▶ InDoubt (stays paused; an operator asks
//!                                    the destination)
//!  any failure before commit       ▶ Aborted (destination drops its copy)
//! ```
//!
//! Each role is one state, consumed by the event that leaves it. An event
//! that the state cannot take is an error that changes nothing; the table of
//! all of them is a snapshot in `tests/switchover_table.rs`.

use thiserror::Error;

/// The source's part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Pre-copy; the guest runs here (or was paused by its owner).
    Live,
    /// The guest is paused for the switchover; last pages and state go out.
    Paused,
    /// *final* is sent.
    AwaitingReady,
    /// *commit* is sent. From here the VM must not run at the source unless
    /// the destination is known to have aborted.
    Committed,
    /// The destination runs the VM; the copy here may be destroyed.
    Released,
    /// The migration ended early; the VM lives on at the source.
    Kept,
    /// *commit* is sent and no answer will come on this control lane.
    InDoubt,
}

/// What happens at the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceEvent {
    /// Pre-copy has converged.
    Converged,
    /// Every lane has ended and *final* is on its way.
    FinalSent,
    /// The destination has everything; whether the digests agree, where they
    /// were asked for.
    Ready {
        /// False only when verification was negotiated and failed.
        same_memory: bool,
    },
    /// The destination runs the VM, or keeps it paused as told.
    Running,
    /// The destination refuses or cancels.
    PeerCancelled,
    /// The operator cancels, or something failed here.
    Failed,
    /// The control lane is lost.
    ControlLost,
}

/// What the engine must do after an event at the source, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceAction {
    /// Pause the guest, then send last pages and state.
    PauseGuest,
    /// Wait for *ready*.
    AwaitReady,
    /// Send *commit*: the point of no return.
    SendCommit,
    /// Destroy the copy here, then send *release*.
    DestroyAndRelease,
    /// Tell the destination to drop its copy, if it can be told; the guest
    /// has never stopped.
    CancelPeer,
    /// Tell the destination to drop its copy, if it can be told, and resume
    /// the guest here.
    CancelPeerAndResume,
    /// Keep the guest paused and tell the operator what to ask.
    HoldInDoubt,
    /// Answer that it is too late to cancel.
    RefuseTooLate,
}

/// The destination's part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination {
    /// Memory and state come in.
    Receiving,
    /// *final* has come and adds up; lanes are joined, state is being loaded.
    Loading,
    /// *ready* is sent; nothing runs before *commit*.
    Prepared,
    /// The VM lives here.
    Running,
    /// The source has let go.
    Released,
    /// The copy here is dropped.
    Aborted,
}

/// What happens at the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DestinationEvent {
    /// *final* has come, every lane thread is joined and the counts agree.
    Complete,
    /// State is loaded and checked.
    Loaded,
    /// The source commits.
    Commit {
        /// Whether the guest shall run, or stay paused as it was.
        run: bool,
    },
    /// The source has destroyed its copy.
    Release,
    /// The source cancels.
    PeerCancelled,
    /// Something failed here.
    Failed,
    /// The control lane is lost.
    ControlLost,
}

/// What the engine must do after an event at the destination, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DestinationAction {
    /// Load and check the state.
    LoadState,
    /// Send *ready*.
    SendReady,
    /// Resume the guest, then send *running*.
    ResumeAndSendRunning,
    /// Keep the guest paused, then send *running*.
    StayPausedAndSendRunning,
    /// Nothing remains to be said; close.
    Close,
    /// Drop the copy here and close.
    Discard,
    /// Drop the copy here and tell the source why.
    DiscardAndTell,
    /// The VM lives here whatever became of the source: go on without it.
    KeepRunning,
}

/// An event that the state cannot take.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{event} is not possible while the {role} is {state}")]
pub struct Impossible {
    role: &'static str,
    state: String,
    event: String,
}

impl Source {
    /// Whether the VM may run, or be resumed, at the source in this state.
    #[must_use]
    pub fn may_run(self) -> bool {
        matches!(self, Self::Live | Self::Kept)
    }

    /// Whether the migration can still be cancelled: *commit* is not sent.
    #[must_use]
    pub fn may_cancel(self) -> bool {
        matches!(self, Self::Live | Self::Paused | Self::AwaitingReady)
    }

    /// Takes an event; returns the state after it and what must be done.
    ///
    /// # Errors
    /// The state cannot take the event. Coming from the peer it breaks the
    /// protocol; the session must be ended by `Failed` or `ControlLost`.
    pub fn on(self, event: SourceEvent) -> Result<(Self, SourceAction), Impossible> {
        use SourceAction as Do;
        use SourceEvent as On;
        Ok(match (self, event) {
            (Self::Live, On::Converged) => (Self::Paused, Do::PauseGuest),
            (Self::Live, On::PeerCancelled | On::Failed | On::ControlLost) => {
                (Self::Kept, Do::CancelPeer)
            }
            (Self::Paused, On::FinalSent) => (Self::AwaitingReady, Do::AwaitReady),
            (Self::AwaitingReady, On::Ready { same_memory: true }) => {
                (Self::Committed, Do::SendCommit)
            }
            (Self::AwaitingReady, On::Ready { same_memory: false })
            | (
                Self::Paused | Self::AwaitingReady,
                On::PeerCancelled | On::Failed | On::ControlLost,
            ) => (Self::Kept, Do::CancelPeerAndResume),
            (Self::Committed, On::Running) => (Self::Released, Do::DestroyAndRelease),
            (Self::Committed, On::ControlLost) => (Self::InDoubt, Do::HoldInDoubt),
            (Self::Committed | Self::Released, On::Failed) => (self, Do::RefuseTooLate),
            (state, event) => return Err(Impossible::new("source", state, event)),
        })
    }
}

impl Destination {
    /// Whether the VM may run at the destination in this state.
    #[must_use]
    pub fn may_run(self) -> bool {
        matches!(self, Self::Running | Self::Released)
    }

    /// Takes an event; returns the state after it and what must be done.
    ///
    /// # Errors
    /// The state cannot take the event. Coming from the peer it breaks the
    /// protocol; the session must be ended by `Failed` or `ControlLost`.
    pub fn on(self, event: DestinationEvent) -> Result<(Self, DestinationAction), Impossible> {
        use DestinationAction as Do;
        use DestinationEvent as On;
        Ok(match (self, event) {
            (Self::Receiving, On::Complete) => (Self::Loading, Do::LoadState),
            (Self::Loading, On::Loaded) => (Self::Prepared, Do::SendReady),
            (Self::Prepared, On::Commit { run: true }) => (Self::Running, Do::ResumeAndSendRunning),
            (Self::Prepared, On::Commit { run: false }) => {
                (Self::Running, Do::StayPausedAndSendRunning)
            }
            (Self::Receiving | Self::Loading | Self::Prepared, On::Failed) => {
                (Self::Aborted, Do::DiscardAndTell)
            }
            (
                Self::Receiving | Self::Loading | Self::Prepared,
                On::PeerCancelled | On::ControlLost,
            ) => (Self::Aborted, Do::Discard),
            (Self::Running, On::Release) => (Self::Released, Do::Close),
            (Self::Running, On::ControlLost | On::Failed) => (Self::Running, Do::KeepRunning),
            (state, event) => return Err(Impossible::new("destination", state, event)),
        })
    }
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
