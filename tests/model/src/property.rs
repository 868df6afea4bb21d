//! What must hold in every state, and which ends must be possible.

use dunlin_proto::journal::SourceRecord;
use dunlin_proto::switchover::{Destination, Source};
use stateright::Property;

use crate::Switchover;
use crate::step::{self, Outcome, Step};
use crate::world::{Copy, World};

/// What must hold in every state.
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
            // Each excuse: the process died in which the VM lived.
            here || there || history.killed_here || history.killed_there
        }),
        Property::always(
            "I2: destroyed only after it lived elsewhere",
            |_, world: &World| !world.history.destroyed_early,
        ),
        Property::always(
            "I2: paused only where somebody will act",
            |_, world: &World| world.source.copy != Copy::Paused || somebody_acts(world),
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
        Property::always("told only what the journal holds", |_, world: &World| {
            !world.history.told_unrecorded
        }),
        Property::always("told only what is so", |_, world: &World| {
            !world.history.told_wrong
        }),
        Property::always("no event that a state cannot take", |_, world: &World| {
            !world.history.impossible
        }),
    ]
}

/// Whether the source is in doubt, or will be when it is started again.
fn in_doubt(world: &World) -> bool {
    match world.source.process {
        Some(_) => world.idle_source() == Some(Source::InDoubt),
        None => world.source.journal == SourceRecord::Committing,
    }
}

/// What becomes of a world in which nothing more fails, everybody who died is
/// started again, and the source goes on asking.
fn without_failures(world: &World) -> World {
    let mut world = world.clone();
    let mut steps = Vec::new();
    let mut patience = 3;
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
            None if patience > 0 && world.idle_source() == Some(Source::InDoubt) => {
                patience -= 1;
                world.budget.epochs = world.source.epoch + 1;
                step::take(&mut world, Step::SourceLosesLane);
            }
            None => return world,
        }
    }
}

/// The VM goes on somewhere, the operator has been asked the right question,
/// or the destination's disk is lost, and nobody but the operator can know; so
/// it is where the source's own disk failed after it had kept the VM.
fn resolved(world: &World) -> bool {
    match world.idle_source() {
        Some(Source::Kept) => world.source.copy == Copy::Live || world.history.killed_here,
        Some(Source::Released | Source::RanThenDied) => true,
        _ => world.history.wiped || world.history.unnoted,
    }
}

/// Whether the process goes on by itself, asks, or has told the operator; or
/// is dead and its record makes the next one do so.
fn somebody_acts(world: &World) -> bool {
    match &world.source.process {
        Some(process) => !process.left.is_empty() || process.state != Source::Kept,
        None => !matches!(
            world.source.journal,
            SourceRecord::Migrating | SourceRecord::Kept
        ),
    }
}

/// Ends that must be possible, for a guest that runs and a budget with one of
/// everything and two inquiries.
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
