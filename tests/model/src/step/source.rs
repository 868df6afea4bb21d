//! The source's steps.

use dunlin_proto::journal::SourceRecord;
use dunlin_proto::switchover::{Resolution, Source, SourceAction, SourceEvent};

use super::{Outcome, Step, send};
use crate::world::{Copy, FromSource, Lane, World};

pub(super) fn possible(world: &World, steps: &mut Vec<Step>) {
    let Some(process) = &world.source.process else {
        steps.push(Step::SourceRestarts);
        return;
    };
    if world.budget.source_crashes > 0 {
        steps.push(Step::SourceCrashes { with_vm: true });
        steps.push(Step::SourceCrashes { with_vm: false });
    }
    if let Some(action) = process.left.first() {
        steps.push(Step::SourceActs(Outcome::Done));
        if world.budget.faults > 0 {
            match action {
                SourceAction::Record(_) | SourceAction::Note(_) => {
                    steps.push(Step::SourceActs(Outcome::Failed));
                    steps.push(Step::SourceActs(Outcome::FailedButWritten));
                }
                SourceAction::PauseGuest => steps.push(Step::SourceActs(Outcome::Failed)),
                _ => {}
            }
        }
        return;
    }
    for (place, lane) in world.lanes.iter().enumerate() {
        if !lane.back.is_empty() {
            steps.push(Step::SourceTakes { lane: place });
        }
    }
    match process.state {
        Source::Kept | Source::Released => return,
        Source::Live if world.history.accepted => steps.push(Step::Converge),
        _ => {}
    }
    let inquired_enough = world.source.epoch == world.budget.epochs;
    if !(process.state == Source::InDoubt && inquired_enough) {
        steps.push(Step::SourceLosesLane);
    }
    if world.budget.cancellations > 0 {
        steps.push(Step::SourceCancels);
    }
    if world.budget.faults > 0 {
        steps.push(Step::SourceFails);
    }
    if world.budget.strays > 0 && matches!(process.state, Source::Committed | Source::InDoubt) {
        steps.push(Step::StrayAnswer);
    }
    if process.state.may_resolve() {
        // The operator decides only after finding one of these facts at the destination: the VM
        // lives, the process is dead, or the process is in a state from which the guest cannot run.
        if world.destination.copy == Copy::Live {
            steps.push(Step::Resolve(Resolution::Destroy));
        } else if operator_sees_it_will_not_run(world) && world.source.copy == Copy::Paused {
            steps.push(Step::Resolve(Resolution::RunHere));
        }
    }
}

/// Whether the destination's process is dead, or in a state from which the guest cannot
/// run.
fn operator_sees_it_will_not_run(world: &World) -> bool {
    use dunlin_proto::switchover::Destination;
    match &world.destination.process {
        None => true,
        Some(_) => matches!(
            world.idle_destination(),
            Some(
                Destination::Aborted
                    | Destination::Unrecorded
                    | Destination::Died
                    | Destination::Unknown
            )
        ),
    }
}

pub(super) fn act(world: &mut World, outcome: Outcome) {
    let Some(process) = &mut world.source.process else {
        return;
    };
    let action = process.left.remove(0);
    if outcome != Outcome::Done {
        world.budget.faults -= 1;
    }
    match action {
        SourceAction::Record(record) => {
            write(world, record, outcome);
            event(
                world,
                if outcome == Outcome::Done {
                    SourceEvent::Recorded
                } else {
                    SourceEvent::RecordFailed
                },
            );
        }
        SourceAction::Note(record) => {
            world.history.unnoted |= outcome == Outcome::Failed;
            write(world, record, outcome);
        }
        SourceAction::PauseGuest => {
            world.source.copy = Copy::Paused;
            world.source.devices = false;
            if outcome == Outcome::Done {
                send(world, FromSource::Final);
                event(world, SourceEvent::FinalSent);
            } else {
                event(world, SourceEvent::Failed);
            }
        }
        SourceAction::SendCommit => send(world, FromSource::Commit),
        SourceAction::ResumeGuest => {
            if world.source.copy != Copy::Gone {
                world.source.copy = Copy::Live;
                world.source.devices = true;
            }
        }
        SourceAction::CancelPeer => send(world, FromSource::Cancel),
        SourceAction::Inquire => {
            world.history.doubted = true;
            if world.source.epoch < world.budget.epochs {
                world.source.epoch += 1;
                // Messages in flight on the old lane may still arrive at the destination, and
                // messages already read may still be processed at the source.
                world.lanes.iter_mut().for_each(|lane| lane.heard = false);
                world.lanes.push(Lane {
                    heard: true,
                    open: world.destination.process.is_some(),
                    ..Lane::default()
                });
                send(world, FromSource::Inquire);
            }
        }
        SourceAction::DestroyCopy => {
            if world.source.copy != Copy::Gone {
                world.history.destroyed_early |=
                    !(world.history.ran_there || world.history.given_up);
                world.source.copy = Copy::Gone;
            }
        }
        SourceAction::SendRelease => send(world, FromSource::Release),
        SourceAction::HoldInDoubt | SourceAction::AskOperator | SourceAction::RefuseTooLate => {}
    }
}

fn write(world: &mut World, record: SourceRecord, outcome: Outcome) {
    if outcome != Outcome::Failed {
        world.source.journal = record;
    }
}

pub(super) fn event(world: &mut World, event: SourceEvent) {
    let Some(process) = &mut world.source.process else {
        return;
    };
    match process.state.on(event) {
        Ok((state, actions)) => {
            process.state = state;
            process.left.splice(0..0, actions.iter().copied());
        }
        Err(_) => world.history.impossible = true,
    }
}
