//! The data lanes of a migration: opening, loss, and what happens to the work
//! of a lost lane.
//!
//! ```text
//!  source: Sending                              destination: Receiving
//!  open a lane ────────────────────────────────▶ admit
//!  up          ◀──────────────────── lane up ───
//!  next        ──── chunk, mark, end ──────────▶ written, mark, ended
//!  acknowledge ◀──────────────────────── acks ───
//!  lose        ──── fence ─────────────────────▶ close the connection, join its thread
//!  its pages   ◀──────────────── acks, fenced ── gone
//!  pending again
//! ```
//! [`Sending`] at the source owns the schedule and the lanes. `lifecycle` has
//! the states of a lane, for [`Sending`] and for [`crate::stripe`].
//! [`Receiving`] at the destination owns the marks.
//!
//! A lane is stalled if something that it carries is not confirmed in time. A lane that may be
//! waiting at a mark for another lane does not count as stalled, because the other lane causes the
//! delay. The destination confirms chunks with *ack*. It confirms the marks and the end of a lane
//! with [`crate::control::Reached`]. A lane that is lost while it opens is fenced too, because the
//! destination may have admitted it.

pub(crate) mod lifecycle;
mod receiving;
mod sending;

pub use lifecycle::{Action, KeyUsage, Timeouts};
pub use receiving::{CourseError, Fence, Incomplete, LaneRefusal, Receiving};
pub use sending::{ReportError, Sending};
