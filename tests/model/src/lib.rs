//! A model of the switchover over the machines of `dunlin_proto::switchover`
//! themselves: two processes with their journals and their copies of the VM,
//! and control lanes between them.
//!
//! ```text
//!   World ─┬─ Source       process (machine, actions left) · journal · copy of the VM
//!          ├─ Destination  the same
//!          ├─ lanes        one for each epoch: under way, read, answered
//!          └─ budget       what may still go wrong
//! ```
//!
//! [`step`] lists everything that can happen next: an action is done, a
//! message is read or taken, a lane is lost to one side while the other goes
//! on reading, a record fails with either content on the disk, a process dies
//! at any point and is started again, somebody cancels, an operator decides.
//! [`property`] says what must hold in every state, and which ends must be
//! possible.

#![forbid(unsafe_code)]

pub mod property;
pub mod step;
pub mod world;

use stateright::{Model, Property};

pub use step::Step;
pub use world::World;

/// How much may go wrong in one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Budget {
    /// Deaths of the source's process.
    pub source_crashes: u8,
    /// Deaths of the destination's process.
    pub destination_crashes: u8,
    /// Failed records, pauses, loads, acquisitions and resumptions, and a
    /// destination's journal lost with its disk.
    pub faults: u8,
    /// Cancellations by an operator.
    pub cancellations: u8,
    /// Answers about another attempt.
    pub strays: u8,
    /// Control lanes: that of the attempt, and the inquiries.
    pub epochs: u8,
}

/// The whole: everything that can happen within a budget.
#[derive(Clone, Copy, Debug)]
pub struct Switchover {
    /// What may go wrong.
    pub budget: Budget,
    /// Whether the guest shall run at the destination, or stay paused.
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
