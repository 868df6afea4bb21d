//! A seeded simulator of a migration over the real decisions of `dunlin-proto`.
//!
//! Two hosts, a network between them and a guest that writes, in virtual time
//! and on one thread. What `dunlin-proto` decides is asked of it; what the
//! engine does around it is written here a second time, as thin as it goes.
//! One `u64` decides a whole run: [`Plan::new`] draws sizes, paces and faults
//! from it, [`run`] plays the plan and asserts the invariants at every step,
//! [`shrink`] makes a plan that fails as small as it gets.
//!
//! README.md says how to read, replay and extend it.
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

/// Real pages for which one page of the simulation stands, where bandwidth and
/// downtime are weighed: 512 KiB, so that a small array takes a guest's time.
pub const PAGES_EACH: u64 = 128;

/// Plays a plan to its end.
///
/// # Errors
/// An invariant did not hold, an honest peer was accused, or something
/// panicked.
pub fn run(plan: &Plan) -> Result<Tally, Violation> {
    let played = catch_unwind(AssertUnwindSafe(|| play(plan, None)));
    played.unwrap_or_else(|panic| Err(Violation::of_panic(panic.as_ref())))
}

/// The same, with a line for everything that happens.
///
/// # Errors
/// As [`run`].
pub fn trace(plan: &Plan, line: &mut dyn FnMut(&str)) -> Result<Tally, Violation> {
    play(plan, Some(line))
}

fn play<'a>(
    plan: &'a Plan,
    line: Option<&'a mut (dyn FnMut(&str) + 'a)>,
) -> Result<Tally, Violation> {
    World::new(plan, line).play()
}
