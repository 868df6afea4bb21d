//! The destination's steps.

use dunlin_proto::control::Verdict;
use dunlin_proto::journal::DestinationRecord;
use dunlin_proto::switchover::{Destination, DestinationAction, DestinationEvent};

use super::{Outcome, Step};
use crate::world::{Copy, FromDestination, FromSource, Lane, Process, World};

pub(super) fn possible(world: &World, steps: &mut Vec<Step>) {
    let Some(process) = &world.destination.process else {
        steps.push(Step::DestinationRestarts);
        if world.budget.faults > 0 && world.destination.journal.is_some() {
            steps.push(Step::DestinationLosesJournal);
        }
        return;
    };
    if world.budget.destination_crashes > 0 {
        steps.push(Step::DestinationCrashes);
    }
    for (place, lane) in world.lanes.iter().enumerate() {
        if lane.open && !lane.under_way.is_empty() {
            steps.push(Step::DestinationReads { lane: place });
        }
    }
    if let Some(action) = process.left.first() {
        steps.push(Step::DestinationActs(Outcome::Done));
        if world.budget.faults > 0 {
            match action {
                DestinationAction::Record(_) => {
                    steps.push(Step::DestinationActs(Outcome::Failed));
                    steps.push(Step::DestinationActs(Outcome::FailedButWritten));
                }
                DestinationAction::LoadState
                | DestinationAction::Acquire
                | DestinationAction::Resume => steps.push(Step::DestinationActs(Outcome::Failed)),
                _ => {}
            }
        }
        return;
    }
    for (place, lane) in world.lanes.iter().enumerate() {
        if !lane.read.is_empty() {
            steps.push(Step::DestinationTakes { lane: place });
        }
    }
    let newest = newest_lane(world);
    if newest.is_some_and(|lane| world.lanes[lane].open && world.lanes[lane].read.is_empty()) {
        steps.push(Step::DestinationLosesLane);
    }
    if process.state.may_cancel() || process.state.may_run() {
        if world.budget.cancellations > 0 {
            steps.push(Step::DestinationCancels);
        }
        if world.budget.faults > 0 {
            steps.push(Step::DestinationFails);
        }
    }
}

pub(super) fn act(world: &mut World, outcome: Outcome) {
    let Some(process) = &mut world.destination.process else {
        return;
    };
    let done = outcome == Outcome::Done;
    if !done {
        world.budget.faults -= 1;
    }
    let either = |yes, no| if done { yes } else { no };
    let action = process.left.remove(0);
    match action {
        DestinationAction::Record(record) => {
            if outcome != Outcome::Failed {
                world.destination.journal = Some(record);
            }
            event(
                world,
                either(DestinationEvent::Recorded, DestinationEvent::RecordFailed),
            );
            if !world.run && state(world) == Some(Destination::Running) {
                live(world);
            }
        }
        DestinationAction::SendAccept => world.history.accepted = true,
        DestinationAction::Refuse => answer(world, FromDestination::Cancel),
        DestinationAction::LoadState => {
            if done {
                world.destination.copy = Copy::Paused;
            }
            event(
                world,
                either(DestinationEvent::Loaded, DestinationEvent::Failed),
            );
        }
        DestinationAction::SendReady => answer(world, FromDestination::Ready),
        DestinationAction::Acquire => {
            // An acquisition that fails may still have acquired some devices.
            world.destination.devices = true;
            event(
                world,
                either(DestinationEvent::Acquired, DestinationEvent::Failed),
            );
        }
        DestinationAction::Resume => {
            // Even after a failed resumption, part of the guest may have run.
            world.history.ran_there = true;
            if done {
                live(world);
            }
            event(
                world,
                either(DestinationEvent::Resumed, DestinationEvent::Failed),
            );
        }
        DestinationAction::Tell(verdict) => tell(world, verdict),
        DestinationAction::CloseOld => {
            let newest = newest_lane(world).unwrap_or(0);
            world.lanes[..newest].iter_mut().for_each(Lane::close);
        }
        DestinationAction::Drain => {
            let newest = newest_lane(world).unwrap_or(0);
            let drained = (0..newest).find(|lane| !world.lanes[*lane].read.is_empty());
            match drained {
                Some(lane) => {
                    if let Some(process) = &mut world.destination.process {
                        process.left.insert(0, DestinationAction::Drain);
                    }
                    take_read(world, lane);
                }
                None => event(world, DestinationEvent::Drained),
            }
        }
        DestinationAction::Close => world.lanes.iter_mut().for_each(Lane::close),
        DestinationAction::Discard => {
            world.destination.copy = Copy::Gone;
            world.destination.devices = false;
        }
        DestinationAction::Forget => {
            world.destination.journal = None;
            world.history.forgotten = true;
        }
        DestinationAction::RefuseTooLate => {}
    }
}

pub(super) fn take_read(world: &mut World, lane: usize) {
    let message = world.lanes[lane].read.remove(0);
    let taken = match message {
        FromSource::Final => DestinationEvent::Complete,
        FromSource::Commit => DestinationEvent::Commit { run: world.run },
        FromSource::Release => DestinationEvent::Release,
        FromSource::Cancel => {
            event(world, DestinationEvent::PeerCancelled);
            // After *cancel* the source does not inquire, so the engine removes the session's
            // record after all other pending actions.
            if let Some(process) = &mut world.destination.process
                && process.state == Destination::Aborting
            {
                process.left.push(DestinationAction::Forget);
            }
            return;
        }
        FromSource::Inquire => {
            let epoch = u8::try_from(lane + 1).unwrap_or(u8::MAX);
            if epoch <= world.destination.epoch {
                world.lanes[lane].close();
                return;
            }
            world.destination.epoch = epoch;
            DestinationEvent::Inquired
        }
    };
    event(world, taken);
}

pub(super) fn crash(world: &mut World) {
    world.history.killed_there |= world.destination.copy == Copy::Live;
    world.destination.process = None;
    world.destination.copy = Copy::Gone;
    world.destination.devices = false;
    world.destination.epoch = 0;
    for lane in &mut world.lanes {
        lane.close();
        lane.read.clear();
    }
}

pub(super) fn restart(world: &mut World) {
    let (state, actions) = Destination::restarted(world.destination.journal);
    world.destination.process = Some(Process {
        state,
        left: actions.to_vec(),
    });
}

pub(super) fn event(world: &mut World, event: DestinationEvent) {
    let Some(process) = &mut world.destination.process else {
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

fn state(world: &World) -> Option<Destination> {
    world
        .destination
        .process
        .as_ref()
        .map(|process| process.state)
}

fn live(world: &mut World) {
    world.destination.copy = Copy::Live;
    world.history.ran_there = true;
}

/// The lane of the newest epoch; `None` between a restart and an inquiry.
fn newest_lane(world: &World) -> Option<usize> {
    usize::from(world.destination.epoch).checked_sub(1)
}

fn tell(world: &mut World, verdict: Verdict) {
    let (record, so) = match verdict {
        Verdict::Running => (
            Some(DestinationRecord::Running),
            world.destination.copy == Copy::Live,
        ),
        Verdict::Aborted => (Some(DestinationRecord::Aborted), !world.history.ran_there),
        Verdict::RanThenDied => (
            Some(DestinationRecord::Running),
            world.destination.copy != Copy::Live,
        ),
        Verdict::NoRecord => (None, true),
    };
    // The destination may repeat a report after it has removed the record with the reported
    // outcome.
    let held = world.destination.journal == record || world.history.forgotten;
    world.history.reported_unrecorded |= !held;
    world.history.reported_wrong |= !so;
    let asked = world.destination.epoch > 1;
    answer(
        world,
        match verdict {
            Verdict::Running if !asked => FromDestination::Running,
            Verdict::Aborted if !asked => FromDestination::Cancel,
            verdict => FromDestination::Answer(verdict),
        },
    );
}

/// Sends a message on the destination's newest lane.
fn answer(world: &mut World, message: FromDestination) {
    let Some(newest) = newest_lane(world) else {
        return;
    };
    let lane = &mut world.lanes[newest];
    if lane.open && lane.heard {
        lane.back.push(message);
    }
}
