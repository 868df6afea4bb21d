//! A second simulator, for the state machines of `dunlin_proto::stripe`. It simulates two tunnels,
//! the sockets of their users, and lanes that are lost.
//!
//! Every piece of data carries its true origin, independent of the protocol's headers. The socket
//! to which a piece is written therefore detects missing, duplicate and reordered bytes.

mod channel;
mod check;
mod control;
mod holder;
mod lane;
mod plan;
mod world;

pub use plan::{Ending, Plan, Strike, StrikeKind, Talk};
pub use world::Tally;

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::check::Violation;
use world::World;

/// Runs a plan to its end.
///
/// # Errors
/// [`Violation::invariant`] lists the reasons.
pub fn run(plan: &Plan) -> Result<Tally, Violation> {
    let played = catch_unwind(AssertUnwindSafe(|| World::new(plan, None).play()));
    played.unwrap_or_else(|panic| Err(Violation::of_panic(panic.as_ref())))
}

/// Like [`run`], and passes lines that describe the run to `line`. A panic is not caught.
///
/// # Errors
/// Same as [`run`], except for panics.
pub fn trace(plan: &Plan, line: &mut dyn FnMut(&str)) -> Result<Tally, Violation> {
    World::new(plan, Some(line)).play()
}
