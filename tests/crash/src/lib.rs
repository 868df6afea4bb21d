//! Processes that are killed and stopped at each step of a switchover.
//!
//! ```text
//!   tests/switchover.rs ── starts, holds, kills, stops ──┐
//!      ▲ "at STEP", "ended …"                            ▼
//!      └──────────── party source ══ TLS lanes ══ party destination
//!                        │ asks, maps                (has its VM in itself)
//!                    party vm  (or the source has its VM in itself)
//! ```
//! `party` is one program that can take the role of each process. It prints the name of each step
//! before executing the step. Before the step that the test has chosen, the process then waits. The
//! test acts on these lines and never on the clock. The VM itself shows which side runs it
//! ([`guest`]), and detects if it runs twice or goes back in time.
#![forbid(unsafe_code)]

pub mod files;
pub mod guest;
pub mod step;
