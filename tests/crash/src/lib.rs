//! Processes that are killed and stopped at each step of a switchover.
//!
//! ```text
//!   tests/switchover.rs ── starts, holds, kills, stops ──┐
//!      ▲ "at STEP", "ended …"                            ▼
//!      └──────────── party source ══ TLS lanes ══ party destination
//!                        │ asks, maps                (has its VM in itself)
//!                    party vm  (or the source has its VM in itself)
//! ```
//! `party` is one program with a role for each of them. It says on standard
//! output which step it is about to take, and waits there when it was told to
//! hold at that step: the test acts on these lines and never on the clock. What
//! the test believes about who runs the VM comes from the VM itself
//! ([`guest`]), which notices when it runs twice or goes back in time.
#![forbid(unsafe_code)]

pub mod guest;
pub mod place;
pub mod step;
