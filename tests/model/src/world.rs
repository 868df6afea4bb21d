//! What there is at one moment.

use dunlin_proto::control::Verdict;
use dunlin_proto::journal::{DestinationRecord, SourceRecord};
use dunlin_proto::switchover::{Destination, DestinationAction, Source, SourceAction};

use crate::Budget;

/// Everything at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct World {
    /// The source's side.
    pub source: SourceSide,
    /// The destination's side.
    pub destination: DestinationSide,
    /// The control lane of each epoch, the first at place 0.
    pub lanes: Vec<Lane>,
    /// What may still go wrong.
    pub budget: Budget,
    /// Whether the guest shall run at the destination, or stay paused.
    pub run: bool,
    /// What has happened, for the properties alone.
    pub history: History,
}

/// Where a copy of the VM stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Copy {
    /// Nothing here, or not everything yet.
    Absent,
    /// Whole, and standing still.
    Paused,
    /// The VM lives here: it runs, or stands still by its owner's wish.
    Live,
    /// Destroyed, or dropped.
    Gone,
}

/// The source's side.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SourceSide {
    /// The process that migrates, while it lives.
    pub process: Option<Process<Source, SourceAction>>,
    /// What is on the disk.
    pub journal: SourceRecord,
    /// The newest epoch, which is on the disk as well.
    pub epoch: u8,
    /// The VM, which may live in the process or elsewhere.
    pub copy: Copy,
    /// Whether disks and devices are held here.
    pub devices: bool,
}

/// The destination's side.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DestinationSide {
    /// The process that receives, and has the VM, while it lives.
    pub process: Option<Process<Destination, DestinationAction>>,
    /// What is on the disk.
    pub journal: Option<DestinationRecord>,
    /// The newest epoch that this process has seen.
    pub epoch: u8,
    /// The VM.
    pub copy: Copy,
    /// Whether disks and devices are held here.
    pub devices: bool,
}

/// A process: its machine, and what that has told it to do.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Process<S, A> {
    /// The machine of `dunlin_proto::switchover`.
    pub state: S,
    /// Actions that are still to be done, in order.
    pub left: Vec<A>,
}

/// From the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FromSource {
    /// *final*, with everything before it.
    Final,
    /// *commit*.
    Commit,
    /// *release*.
    Release,
    /// *cancel*.
    Cancel,
    /// *inquire*, the first on its lane.
    Inquire,
}

/// From the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FromDestination {
    /// *ready*.
    Ready,
    /// *running*.
    Running,
    /// *cancel* or *refuse*.
    Cancel,
    /// *answer* about this attempt.
    Answer(Verdict),
}

/// A control lane. It keeps order, and may lose any tail of what is under way
/// when one side ends it, with the other still reading what had arrived.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Lane {
    /// Sent by the source, and not yet read.
    pub under_way: Vec<FromSource>,
    /// Read by the destination's reader, and not yet taken.
    pub read: Vec<FromSource>,
    /// Sent by the destination, and not yet taken.
    pub back: Vec<FromDestination>,
    /// Whether the destination still reads and writes it.
    pub open: bool,
    /// Whether the source still reads it.
    pub heard: bool,
}

/// What has happened, for the properties alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct History {
    /// *accept* was sent.
    pub accepted: bool,
    /// The VM has lived at the destination.
    pub ran_there: bool,
    /// The source's process died with the VM in it.
    pub killed_here: bool,
    /// The destination's process died with the VM living in it.
    pub killed_there: bool,
    /// The operator decided that the VM goes on at the source.
    pub run_here: bool,
    /// The operator gave the source's copy up.
    pub given_up: bool,
    /// The destination lost its journal with its disk.
    pub wiped: bool,
    /// The destination removed its record.
    pub forgotten: bool,
    /// A record that the source only notes did not reach its disk.
    pub unnoted: bool,
    /// Something was told that the teller's journal did not hold.
    pub told_unrecorded: bool,
    /// Something was told that was not so.
    pub told_wrong: bool,
    /// The source destroyed its copy when the VM had not lived elsewhere.
    pub destroyed_early: bool,
    /// A machine was given an event that it could not take.
    pub impossible: bool,
    /// The source was in doubt.
    pub doubted: bool,
}

impl World {
    /// The beginning: the VM runs at the source, the destination has built its
    /// own and is about to accept.
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

    /// The source's machine, while its process lives and has nothing to do.
    #[must_use]
    pub fn idle_source(&self) -> Option<Source> {
        self.source.process.as_ref().and_then(Process::idle)
    }

    /// The same at the destination.
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
    /// The destination ends the lane: nothing more is read from it.
    pub fn close(&mut self) {
        self.open = false;
        self.under_way.clear();
    }
}
