//! The data lanes of a migration: which exist, which are lost, and what happens
//! to the work of a lost lane.
//!
//! ```text
//!  source: Sending                              destination: Receiving
//!  open a lane ────────────────────────────────▶ admit
//!  up          ◀──────────────────── lane up ───
//!  next        ──── chunk, mark, end ──────────▶ written, mark, ended
//!  acknowledge ◀──────────────────────── acks ───
//!  lose        ──── fence ─────────────────────▶ close the connection, join its thread
//!  its pages   ◀──────────────── acks, fenced ── gone
//!  wait again
//! ```
//! [`Sending`] at the source owns the schedule and the lanes; `lifecycle` has
//! their states, for it and for the lanes of [`crate::stripe`]. [`Receiving`] at
//! the destination owns the marks.
//!
//! A lane is stalled if something that it was given is not confirmed in time,
//! unless it may be waiting at a mark for another lane: then that lane is stalled.
//! The destination confirms chunks, and marks and ends by
//! [`crate::control::Reached`]. A lane that is lost while it opens is fenced too,
//! because the destination may have admitted it.

pub(crate) mod lifecycle;
mod receiving;
mod sending;

pub use lifecycle::{Action, KeyUsage, Timeouts};
pub use receiving::{CourseError, Fence, Incomplete, LaneRefusal, Receiving};
pub use sending::{ReportError, Sending};
