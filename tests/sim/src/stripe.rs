//! A second simulator, over `dunlin_proto::stripe`: two tunnels, the sockets of
//! those whom they serve, and lanes that are lost.
//!
//! Every piece carries where it was read, apart from what the protocol says of
//! it, so that a byte too many, too few or out of order is seen at the socket
//! that it is written to.

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

/// Plays a plan to its end.
///
/// # Errors
/// Something did not hold, an honest peer was accused, or something panicked.
pub fn run(plan: &Plan) -> Result<Tally, Violation> {
    let played = catch_unwind(AssertUnwindSafe(|| World::new(plan, None).play()));
    played.unwrap_or_else(|panic| Err(Violation::of_panic(panic.as_ref())))
}

/// The same, with a line for everything that happens.
///
/// # Errors
/// As [`run`].
pub fn trace(plan: &Plan, line: &mut dyn FnMut(&str)) -> Result<Tally, Violation> {
    World::new(plan, Some(line)).play()
}
