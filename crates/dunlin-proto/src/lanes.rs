//! Which lanes there are, when one is lost, and what becomes of what it
//! carried.
//!
//! ```text
//!  source: Sending                                  destination: Receiving
//!  Opening ── lane up ─────────────────────────────── admit
//!     │         ▼
//!     │        Up ── worn: another comes ─▶ Leaving    chunk, mark, end
//!     │         │                            │
//!     ├─────────┴──── failed, stalled ───────┤         thread failed
//!     ▼                                      │              │
//!  Fencing ──────── fence ───────────────────────▶ closed, thread joined
//!     ▼                                      │              ▼
//!  (its pages wait again) ◀─────────────── acks, fenced ── fenced
//! ```
//! A lane counts as stalled when something that it was given has not been
//! confirmed for a while, unless it may be waiting at a mark for another lane:
//! then that one is the culprit. The confirmations are chunks' and, for marks
//! and ends, [`crate::control::Reached`]. A lane that is given up is fenced
//! even where it never stood, since it might have been let in unnoticed.
//!
//! Two ends of one thing: [`Sending`] at the source owns the schedule,
//! [`Receiving`] at the destination the marks.

mod receiving;
mod sending;

pub use receiving::{CourseError, Fence, Incomplete, LaneRefusal, Receiving};
pub use sending::{Action, KeyUsage, ReportError, Sending, Timeouts};
