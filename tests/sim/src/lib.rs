//! A simulator of a migration. [`stripe`] is a second simulator, of two tunnels.
//!
//! The simulator of a migration simulates two hosts, a network between them and a running guest. It
//! uses virtual time and one thread. `dunlin-proto` makes the decisions; the engine's own work is
//! implemented here a second time, as simply as possible. One `u64` seed determines a whole run:
//! [`Plan::new`] draws sizes, rates and faults from it, [`run`] executes the plan and checks the
//! invariants, and [`shrink`] minimises a failing plan.
//!
//! README.md explains how to run and replay the simulations, and what they check.
#![forbid(unsafe_code)]

mod check;
mod destination;
mod fault;
mod guest;
mod journal;
mod network;
mod plan;
mod random;
mod shrink;
mod source;
pub mod stripe;
mod tally;
mod world;

pub use check::Violation;
pub use plan::{Fault, MS, Moment, Plan};
pub use random::Random;
pub use shrink::shrink;
pub use tally::{End, FaultKind, Passage, Tally};

use std::panic::{AssertUnwindSafe, catch_unwind};

use world::World;

/// The number of real pages that one simulated page represents in calculations of bandwidth and
/// downtime. A simulated page thus counts as 512 KiB, so a small array of simulated pages takes as
/// long to migrate as a real guest.
pub const PAGES_EACH: u64 = 128;

/// Runs a plan to its end.
///
/// # Errors
/// [`Violation::invariant`] lists the reasons.
pub fn run(plan: &Plan) -> Result<Tally, Violation> {
    let played = catch_unwind(AssertUnwindSafe(|| play(plan, None)));
    played.unwrap_or_else(|panic| Err(Violation::of_panic(panic.as_ref())))
}

/// Like [`run`], and passes lines that describe the run to `line`. A panic is not caught.
///
/// # Errors
/// Same as [`run`], except for panics.
pub fn trace(plan: &Plan, line: &mut dyn FnMut(&str)) -> Result<Tally, Violation> {
    play(plan, Some(line))
}

fn play<'a>(
    plan: &'a Plan,
    line: Option<&'a mut (dyn FnMut(&str) + 'a)>,
) -> Result<Tally, Violation> {
    World::new(plan, line).play()
}
