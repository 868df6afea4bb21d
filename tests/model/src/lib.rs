//! A model of the switchover that uses the state machines of `dunlin_proto::switchover`:
//! two processes with their journals and copies of the VM, and the control lanes between
//! them.
//!
//! ```text
//!   World ─┬─ Source       process (machine, actions left) · journal · copy of the VM
//!          ├─ Destination  likewise
//!          ├─ lanes        one for each epoch: in flight, read, answered
//!          └─ budget       failures that may still occur
//! ```
//!
//! [`step`] lists every possible next step. Examples: an action is executed, a message is read or
//! processed, one side loses a lane while the other still reads it, the write of a record fails
//! with the old or the new content on disk, a process dies at any point and is restarted, an
//! operator cancels or decides. [`property`] has the properties of every state, and the outcomes
//! that must be reachable.

#![forbid(unsafe_code)]

pub mod property;
pub mod step;
pub mod world;

use stateright::{Model, Property};

pub use step::Step;
pub use world::World;

/// Limits on the failures, cancellations and inquiries in one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Budget {
    /// How many times the source's process may die.
    pub source_crashes: u8,
    /// How many times the destination's process may die.
    pub destination_crashes: u8,
    /// How many failures may occur. A failure is one of these: a record, a pause, a load, an
    /// acquisition or a resumption fails; a side fails in another way; or the destination's journal
    /// is lost with its disk.
    pub faults: u8,
    /// How many times an operator may cancel.
    pub cancellations: u8,
    /// How many answers about another migration attempt of the same session may arrive.
    pub strays: u8,
    /// How many control lanes the source may open: one for the migration, and one for each inquiry.
    pub epochs: u8,
}

/// The model: all behaviour within a budget.
#[derive(Clone, Copy, Debug)]
pub struct Switchover {
    /// The limits on failures.
    pub budget: Budget,
    /// Whether the guest runs at the destination after the migration. Otherwise it stays paused.
    pub run: bool,
}

impl Model for Switchover {
    type State = World;
    type Action = Step;

    fn init_states(&self) -> Vec<World> {
        vec![World::new(self.budget, self.run)]
    }

    fn actions(&self, world: &World, steps: &mut Vec<Step>) {
        step::possible(world, steps);
    }

    fn next_state(&self, world: &World, step: Step) -> Option<World> {
        let mut next = world.clone();
        step::take(&mut next, step);
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut properties = property::always();
        if self.run {
            properties.extend(property::sometimes());
        }
        properties
    }
}
