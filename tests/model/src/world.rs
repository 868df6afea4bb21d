//! The state of the model.

use dunlin_proto::control::Verdict;
use dunlin_proto::journal::{DestinationRecord, SourceRecord};
use dunlin_proto::switchover::{Destination, DestinationAction, Source, SourceAction};

use crate::Budget;

/// The state of the model.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct World {
    /// The source's side.
    pub source: SourceSide,
    /// The destination's side.
    pub destination: DestinationSide,
    /// The control lane of each epoch, the first at index 0.
    pub lanes: Vec<Lane>,
    /// Failures that may still occur.
    pub budget: Budget,
    /// Whether the guest runs at the destination after the migration. Otherwise it stays paused.
    pub run: bool,
    /// Past events, which only the checks in `property` read.
    pub history: History,
}

/// The state of a copy of the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Copy {
    /// Absent or incomplete.
    Absent,
    /// Complete and paused.
    Paused,
    /// The VM is on this side. It runs, or its owner has paused it.
    Live,
    /// Destroyed, dropped, or dead with its process.
    Gone,
}

/// The source's side.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SourceSide {
    /// The migrating process, if alive.
    pub process: Option<Process<Source, SourceAction>>,
    /// The record on disk.
    pub journal: SourceRecord,
    /// The epoch of the newest control lane. It is on disk too.
    pub epoch: u8,
    /// The state of this side's copy of the VM.
    pub copy: Copy,
    /// Whether this side holds the disks and devices.
    pub devices: bool,
}

/// The destination's side.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DestinationSide {
    /// The receiving process, which contains the VM; `None` if it is dead.
    pub process: Option<Process<Destination, DestinationAction>>,
    /// The record on disk.
    pub journal: Option<DestinationRecord>,
    /// The newest epoch of a control lane that this process has seen.
    pub epoch: u8,
    /// The state of this side's copy of the VM.
    pub copy: Copy,
    /// Whether this side holds at least one of the disks and devices.
    pub devices: bool,
}

/// A process: its state machine and its pending actions.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Process<S, A> {
    /// The state machine of `dunlin_proto::switchover`.
    pub state: S,
    /// Pending actions, in order.
    pub left: Vec<A>,
}

/// Messages from the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FromSource {
    /// *final*, together with all messages that precede it.
    Final,
    /// *commit*.
    Commit,
    /// *release*.
    Release,
    /// *cancel*.
    Cancel,
    /// *inquire*, the first message on its lane.
    Inquire,
}

/// Messages from the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FromDestination {
    /// *ready*.
    Ready,
    /// *running*.
    Running,
    /// *cancel* or *refuse*.
    Cancel,
    /// *answer* about this migration attempt.
    Answer(Verdict),
}

/// A control lane, which preserves the order of messages. When one side ends it, the newest
/// messages in flight may be lost, and the other side can still read what has arrived.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Lane {
    /// Sent by the source, not yet read.
    pub under_way: Vec<FromSource>,
    /// Read by the destination's reader, not yet processed.
    pub read: Vec<FromSource>,
    /// Sent by the destination, not yet processed.
    pub back: Vec<FromDestination>,
    /// Whether the destination still reads from this lane and writes to it.
    pub open: bool,
    /// Whether new messages on this lane still reach the source.
    pub heard: bool,
}

/// Past events, which only the checks in `property` read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct History {
    /// *accept* was sent.
    pub accepted: bool,
    /// The VM has lived at the destination.
    pub ran_there: bool,
    /// The source's process died with the VM in it.
    pub killed_here: bool,
    /// The destination's process died with the VM in it.
    pub killed_there: bool,
    /// The operator decided that the VM continues at the source.
    pub run_here: bool,
    /// The operator gave up the source's copy.
    pub given_up: bool,
    /// The destination lost its journal with its disk.
    pub wiped: bool,
    /// The destination removed its record.
    pub forgotten: bool,
    /// A [`SourceAction::Note`] failed, so its record did not reach the disk.
    pub unnoted: bool,
    /// The destination sent a report that was not in its journal.
    pub reported_unrecorded: bool,
    /// The destination reported an outcome that was not true.
    pub reported_wrong: bool,
    /// The source destroyed its copy although the VM had not run elsewhere and the operator had not
    /// given up the copy.
    pub destroyed_early: bool,
    /// A state machine received an event that it does not accept.
    pub impossible: bool,
    /// The source was in doubt.
    pub doubted: bool,
}

impl World {
    /// The initial state: the VM runs at the source, and the destination has built its copy and is
    /// about to accept the migration.
    #[must_use]
    pub fn new(budget: Budget, run: bool) -> Self {
        let (state, actions) = Destination::begin();
        Self {
            source: SourceSide {
                process: Some(Process {
                    state: Source::Live,
                    left: Vec::new(),
                }),
                journal: SourceRecord::Migrating,
                epoch: 1,
                copy: Copy::Live,
                devices: true,
            },
            destination: DestinationSide {
                process: Some(Process {
                    state,
                    left: actions.to_vec(),
                }),
                journal: None,
                epoch: 1,
                copy: Copy::Absent,
                devices: false,
            },
            lanes: vec![Lane {
                open: true,
                heard: true,
                ..Lane::default()
            }],
            budget,
            run,
            history: History::default(),
        }
    }

    /// The state of the source, if its process is alive and idle.
    #[must_use]
    pub fn idle_source(&self) -> Option<Source> {
        self.source.process.as_ref().and_then(Process::idle)
    }

    /// The state of the destination, if its process is alive and idle.
    #[must_use]
    pub fn idle_destination(&self) -> Option<Destination> {
        self.destination.process.as_ref().and_then(Process::idle)
    }
}

impl<S: std::marker::Copy, A> Process<S, A> {
    fn idle(&self) -> Option<S> {
        self.left.is_empty().then_some(self.state)
    }
}

impl Lane {
    /// The destination ends the lane and reads nothing more from it.
    pub fn close(&mut self) {
        self.open = false;
        self.under_way.clear();
    }
}
