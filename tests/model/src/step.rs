//! The possible next steps, and their effects.

mod destination;
mod source;

use dunlin_proto::control::Verdict;
use dunlin_proto::switchover::{DestinationEvent, Resolution, Source, SourceEvent};

use crate::world::{Copy, FromDestination, FromSource, Process, World};

/// The outcome of an action that can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The action succeeded.
    Done,
    /// The action failed. A record was not written.
    Failed,
    /// The write of a record returned an error although the record is on disk. This is possible
    /// because the error of a sync does not show what was written.
    FailedButWritten,
}

/// One step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// The source executes its next action.
    SourceActs(Outcome),
    /// Pre-copy converges.
    Converge,
    /// The source processes the next message of a lane.
    SourceTakes {
        /// The lane's index.
        lane: usize,
    },
    /// The source finds that its newest lane is lost, or waits for a message in vain until its time
    /// limit. Messages in flight can still arrive.
    SourceLosesLane,
    /// An operator cancels at the source.
    SourceCancels,
    /// Something fails at the source.
    SourceFails,
    /// An answer *aborted* about another migration attempt of the same session arrives.
    StrayAnswer,
    /// The operator decides, after checking both sides.
    Resolve(Resolution),
    /// The source's process dies.
    SourceCrashes {
        /// Whether the VM dies with it.
        with_vm: bool,
    },
    /// The source's process is restarted.
    SourceRestarts,
    /// The destination executes its next action.
    DestinationActs(Outcome),
    /// The destination's reader reads the next message of a lane.
    DestinationReads {
        /// The lane's index.
        lane: usize,
    },
    /// The destination processes the next message that was read.
    DestinationTakes {
        /// The lane's index.
        lane: usize,
    },
    /// The destination finds that its newest lane is lost. The messages in flight to the
    /// destination are lost too.
    DestinationLosesLane,
    /// An operator cancels at the destination.
    DestinationCancels,
    /// Something fails at the destination.
    DestinationFails,
    /// The destination's process and the VM in it die.
    DestinationCrashes,
    /// The destination's process is restarted.
    DestinationRestarts,
    /// The destination's disk is lost while its process is dead.
    DestinationLosesJournal,
}

/// Lists all possible next steps.
pub fn possible(world: &World, steps: &mut Vec<Step>) {
    source::possible(world, steps);
    destination::possible(world, steps);
}

/// Applies a step.
pub fn take(world: &mut World, step: Step) {
    match step {
        Step::SourceActs(outcome) => source::act(world, outcome),
        Step::Converge => source::event(world, SourceEvent::Converged),
        Step::SourceTakes { lane } => {
            let event = match world.lanes[lane].back.remove(0) {
                FromDestination::Ready => SourceEvent::Ready { same_memory: true },
                FromDestination::Running => SourceEvent::Running,
                FromDestination::Cancel => SourceEvent::PeerCancelled,
                FromDestination::Answer(verdict) => SourceEvent::answer(2, 2, verdict),
            };
            source::event(world, event);
        }
        Step::SourceLosesLane => source::event(world, SourceEvent::ControlLost),
        Step::SourceCancels => {
            world.budget.cancellations -= 1;
            source::event(world, SourceEvent::Cancelled);
        }
        Step::SourceFails => {
            world.budget.faults -= 1;
            source::event(world, SourceEvent::Failed);
        }
        Step::StrayAnswer => {
            world.budget.strays -= 1;
            source::event(world, SourceEvent::answer(2, 1, Verdict::Aborted));
        }
        Step::Resolve(resolution) => {
            match resolution {
                Resolution::RunHere => world.history.run_here = true,
                Resolution::Destroy => world.history.given_up = true,
            }
            source::event(world, SourceEvent::Resolve(resolution));
        }
        Step::SourceCrashes { with_vm } => {
            world.budget.source_crashes -= 1;
            world.source.process = None;
            for lane in &mut world.lanes {
                lane.heard = false;
                lane.back.clear();
            }
            if with_vm {
                world.history.killed_here |= world.source.copy != Copy::Gone;
                world.source.copy = Copy::Gone;
                world.source.devices = false;
            }
        }
        Step::SourceRestarts => {
            let (state, actions) = Source::restarted(world.source.journal);
            world.source.process = Some(Process {
                state,
                left: actions.to_vec(),
            });
        }
        Step::DestinationActs(outcome) => destination::act(world, outcome),
        Step::DestinationReads { lane } => {
            let message = world.lanes[lane].under_way.remove(0);
            world.lanes[lane].read.push(message);
        }
        Step::DestinationTakes { lane } => destination::take_read(world, lane),
        Step::DestinationLosesLane => {
            let newest = usize::from(world.destination.epoch) - 1;
            world.lanes[newest].close();
            destination::event(world, DestinationEvent::ControlLost);
        }
        Step::DestinationCancels => {
            world.budget.cancellations -= 1;
            destination::event(world, DestinationEvent::Cancelled);
        }
        Step::DestinationFails => {
            world.budget.faults -= 1;
            destination::event(world, DestinationEvent::Failed);
        }
        Step::DestinationCrashes => {
            world.budget.destination_crashes -= 1;
            destination::crash(world);
        }
        Step::DestinationRestarts => destination::restart(world),
        Step::DestinationLosesJournal => {
            world.budget.faults -= 1;
            world.history.wiped = true;
            world.destination.journal = None;
        }
    }
}

/// Sends a message on the source's newest lane.
fn send(world: &mut World, message: FromSource) {
    let newest = usize::from(world.source.epoch) - 1;
    let lane = &mut world.lanes[newest];
    if lane.open {
        lane.under_way.push(message);
    }
}
