//! Processes that are killed or stopped at each step of a switchover.
//!
//! ```text
//!   tests/switchover.rs ── starts, holds, kills, stops ──┐
//!      ▲ "at STEP", "ended …"                            ▼
//!      └──────────── party source ══ TLS lanes ══ party destination
//!                        │ asks, maps                (has its VM in itself)
//!                    party vm  (or the source has its VM in itself)
//! ```
//! `party` is one program that can take the role of each process. It prints the name of each step
//! that it reaches, and waits at the step that the test has chosen. The test acts on these lines.
//! It waits for a fixed time only while it has stopped both processes. The VM itself shows which
//! side runs it ([`guest`]), and detects if it runs twice or goes back in time.
#![forbid(unsafe_code)]

pub mod files;
pub mod guest;
pub mod step;
