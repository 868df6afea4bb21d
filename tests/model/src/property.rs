//! Properties of every state, and outcomes that must be reachable.

use dunlin_proto::journal::SourceRecord;
use dunlin_proto::switchover::{Destination, Source};
use stateright::Property;

use crate::Switchover;
use crate::step::{self, Outcome, Step};
use crate::world::{Copy, World};

/// Properties of every state.
#[must_use]
pub fn always() -> Vec<Property<Switchover>> {
    vec![
        Property::always("I1: never on both sides", |_, world: &World| {
            !(world.source.copy == Copy::Live && world.destination.copy == Copy::Live)
        }),
        Property::always(
            "I1: never back in time without the operator",
            |_, world: &World| {
                world.source.copy != Copy::Live
                    || !world.history.ran_there
                    || world.history.run_here
            },
        ),
        Property::always(
            "I1: disks and devices never on both sides",
            |_, world: &World| !(world.source.devices && world.destination.devices),
        ),
        Property::always("I2: never lost", |_, world: &World| {
            let history = &world.history;
            let here = matches!(world.source.copy, Copy::Live | Copy::Paused);
            let there = world.destination.copy == Copy::Live;
            // If the VM is on neither side, a process must have died with the VM in it.
            here || there || history.killed_here || history.killed_there
        }),
        Property::always(
            "I2: destroyed only after it lived elsewhere",
            |_, world: &World| !world.history.destroyed_early,
        ),
        Property::always(
            "I2: paused only if a next step is certain",
            |_, world: &World| world.source.copy != Copy::Paused || next_step_is_certain(world),
        ),
        Property::always(
            "I2: not forgotten while it may be asked",
            |_, world: &World| {
                let history = &world.history;
                !history.forgotten
                    || history.unnoted
                    || world.source.journal != SourceRecord::Committing
            },
        ),
        Property::always(
            "I2: a doubt is resolved once nothing more fails",
            |_, world: &World| !in_doubt(world) || resolved(&without_failures(world)),
        ),
        Property::always("reports only what the journal holds", |_, world: &World| {
            !world.history.reported_unrecorded
        }),
        Property::always("reports only the truth", |_, world: &World| {
            !world.history.reported_wrong
        }),
        Property::always("no event that a state cannot take", |_, world: &World| {
            !world.history.impossible
        }),
    ]
}

/// Whether the source is in doubt, or will be in doubt after a restart.
fn in_doubt(world: &World) -> bool {
    match world.source.process {
        Some(_) => world.idle_source() == Some(Source::InDoubt),
        None => world.source.journal == SourceRecord::Committing,
    }
}

/// Returns the state that the model reaches if nothing fails from now on. Dead processes are
/// restarted, and the source inquires up to three more times.
fn without_failures(world: &World) -> World {
    let mut world = world.clone();
    let mut steps = Vec::new();
    let mut inquiries = 3;
    loop {
        steps.clear();
        step::possible(&world, &mut steps);
        let next = steps.iter().copied().find(|step| {
            matches!(
                step,
                Step::SourceActs(Outcome::Done)
                    | Step::SourceTakes { .. }
                    | Step::SourceRestarts
                    | Step::DestinationActs(Outcome::Done)
                    | Step::DestinationReads { .. }
                    | Step::DestinationTakes { .. }
                    | Step::DestinationRestarts
            )
        });
        match next {
            Some(next) => step::take(&mut world, next),
            None if inquiries > 0 && world.idle_source() == Some(Source::InDoubt) => {
                inquiries -= 1;
                world.budget.epochs = world.source.epoch + 1;
                step::take(&mut world, Step::SourceLosesLane);
            }
            None => return world,
        }
    }
}

/// Whether the source's doubt is resolved: the source has the VM, has died with it, has released
/// it, or has received the report that the VM ran and died at the destination. Also true if the
/// destination's disk is lost or the source failed to write a record, because then perhaps only the
/// operator can decide.
fn resolved(world: &World) -> bool {
    match world.idle_source() {
        Some(Source::Kept) => world.source.copy == Copy::Live || world.history.killed_here,
        Some(Source::Released | Source::RanThenDied) => true,
        _ => world.history.wiped || world.history.unnoted,
    }
}

/// Whether the source's process continues, inquires or has notified the operator. If the
/// process is dead, whether its record makes the next process do so.
fn next_step_is_certain(world: &World) -> bool {
    match &world.source.process {
        Some(process) => !process.left.is_empty() || process.state != Source::Kept,
        None => !matches!(
            world.source.journal,
            SourceRecord::Migrating | SourceRecord::Kept
        ),
    }
}

/// Outcomes that must be reachable, for a running guest and a budget of one
/// failure of each kind and two inquiries.
#[must_use]
pub fn sometimes() -> Vec<Property<Switchover>> {
    vec![
        Property::sometimes("moved, released and forgotten", |_, world: &World| {
            ends(world, Source::Released, Destination::Released)
                && world.destination.copy == Copy::Live
        }),
        Property::sometimes("cancelled, aborted", |_, world: &World| {
            ends(world, Source::Kept, Destination::Aborted) && !world.history.doubted
        }),
        Property::sometimes("in doubt, then aborted", |_, world: &World| {
            ends(world, Source::Kept, Destination::Aborted)
                && world.history.doubted
                && !world.history.run_here
        }),
        Property::sometimes("in doubt, then running", |_, world: &World| {
            ends(world, Source::Released, Destination::Released) && world.history.doubted
        }),
        Property::sometimes(
            "ran, then died: the operator runs it here",
            |_, world: &World| {
                ends(world, Source::Kept, Destination::Died) && world.history.run_here
            },
        ),
        Property::sometimes("could not be resumed there", |_, world: &World| {
            ends(world, Source::RanThenDied, Destination::Died) && !world.history.killed_there
        }),
        Property::sometimes("in doubt for want of a record", |_, world: &World| {
            ends(world, Source::InDoubt, Destination::Unknown)
        }),
        Property::sometimes(
            "in doubt: the operator gives the copy up",
            |_, world: &World| {
                ends(world, Source::Released, Destination::Running) && world.history.given_up
            },
        ),
        Property::sometimes(
            "both died, and the journals resolved it",
            |model: &Switchover, world: &World| {
                ends(world, Source::Kept, Destination::Aborted)
                    && world.budget.source_crashes < model.budget.source_crashes
                    && world.budget.destination_crashes < model.budget.destination_crashes
                    && world.source.copy == Copy::Live
                    && world.history.doubted
            },
        ),
        Property::sometimes(
            "aborted could not be recorded at once",
            |_, world: &World| world.idle_destination() == Some(Destination::Unrecorded),
        ),
    ]
}

fn ends(world: &World, source: Source, destination: Destination) -> bool {
    world.idle_source() == Some(source) && world.idle_destination() == Some(destination)
}
