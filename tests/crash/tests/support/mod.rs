//! One run: its processes, what is done to them, and what is true at its end.
#![allow(unreachable_pub, clippy::unwrap_used)]

mod credentials;
mod party;
mod run;

pub use credentials::Credentials;
pub use run::{Case, Ending, Signal, Victim, run};
