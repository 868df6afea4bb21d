//! One run: its processes, the actions on them, and the conditions that hold at its end.
#![allow(unreachable_pub, clippy::unwrap_used)]

mod credentials;
mod party;
mod run;

pub use credentials::Credentials;
pub use run::{Case, Ending, Signal, Victim, run};
