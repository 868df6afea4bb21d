//! What a session tells while it runs and when it is over.

use std::time::Duration;

use dunlin_proto::journal::SourceRecord;
use dunlin_proto::negotiate::LaneSecurity;

/// Bytes by kind, counted at the source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Traffic {
    /// Guest pages that went out as they are.
    pub raw_pages: u64,
    /// Guest pages that were all zero and went out as ranges.
    pub zero_pages: u64,
    /// Headers and ranges of chunks, marks and ends.
    pub header_bytes: u64,
    /// Everything that the data lanes put on their sockets, security included.
    pub wire_bytes: u64,
}

impl Traffic {
    /// Adds another lane's or iteration's share.
    pub fn add(&mut self, other: &Self) {
        self.raw_pages += other.raw_pages;
        self.zero_pages += other.zero_pages;
        self.header_bytes += other.header_bytes;
        self.wire_bytes += other.wire_bytes;
    }
}

/// One pass of pre-copy, or the last one.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Iteration {
    /// Counted from 1.
    pub number: u32,
    /// How long its pages took to be cut.
    pub duration: Duration,
    /// Pages that waited when it began.
    pub pages: u64,
    /// Pages that were dirty when it ended: the next one's.
    pub dirtied_pages: u64,
    /// Bytes on the wire while it lasted.
    pub wire_bytes: u64,
    /// Downtime to expect if the guest were paused at its end.
    pub predicted_downtime: Duration,
    /// How much the guest was slowed down meanwhile, in percent.
    pub throttle: u8,
}

/// Where the downtime went, as the source measured it.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct Downtime {
    /// From asking the VMM to pause until it had.
    pub pause: Duration,
    /// Until the last page had been handed to the kernel.
    pub last_pages: Duration,
    /// Saving the state and sending it; it overlaps with the last pages.
    pub state: Duration,
    /// From *final* to *ready*: the destination takes in, joins its lanes,
    /// loads, and compares digests where asked.
    pub ready: Duration,
    /// From *commit* to *running*.
    pub resume: Duration,
    /// From the pause to *running*: what somebody outside would see.
    pub total: Duration,
    /// As the guest saw it, where the destination could tell.
    pub guest: Option<Duration>,
}

/// A migration that went through, as the source saw it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Report {
    /// Every iteration, the last one with the guest paused.
    pub iterations: Vec<Iteration>,
    /// Bytes by kind.
    pub traffic: Traffic,
    /// Bytes of guest memory by lane number, zero pages left out. Numbers of
    /// lanes that were lost or replaced are not used again.
    pub lanes: Vec<(u16, u64)>,
    /// Lanes that were lost on the way; others took over.
    pub lanes_lost: u32,
    /// How often the control lane was lost and made anew.
    pub control_resumed: u32,
    /// Pages that lost lanes took along and that were sent again.
    pub pages_again: u64,
    /// How the data lanes are secured.
    pub security: LaneSecurity,
    /// From connecting to *running*.
    pub total: Duration,
    /// Where the downtime went.
    pub downtime: Downtime,
    /// CPU time of this session's threads at the source.
    pub source_cpu: Duration,
    /// The same at the destination.
    pub destination_cpu: Duration,
    /// Whether both memories' digests were compared and equal; `None` when
    /// verification was not asked for.
    pub digests_equal: Option<bool>,
    /// Whether the guest runs at the destination, or is paused as it was.
    pub runs: bool,
}

/// Something that happened during a session at the source.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// The control lane stands and the destination has accepted the VM.
    Accepted {
        /// Who the destination is, by certificate.
        peer: String,
    },
    /// A data lane stands.
    LaneUp {
        /// Its number.
        lane: u16,
    },
    /// A data lane is lost. What it took along goes out on the others, and
    /// another is opened in its place.
    LaneLost {
        /// Its number.
        lane: u16,
        /// Why, as far as it is known.
        why: String,
    },
    /// The control lane is lost, and a new one is being made. Lanes and guest
    /// go on.
    ControlLost {
        /// Why.
        why: String,
    },
    /// A new control lane stands.
    ControlResumed,
    /// How it goes, some times a second.
    Progress(Progress),
    /// An iteration has ended.
    Iterated(Iteration),
    /// The guest is slowed down, or let go again.
    Throttled {
        /// Percent; 0 is full speed.
        percent: u8,
    },
    /// The journal holds this, and it is on the disk. Where no journal was
    /// given, nothing is; the session has come that far.
    Recorded(SourceRecord),
    /// The guest is paused.
    Paused,
    /// *commit* goes out: the point of no return.
    Committing,
    /// *commit* has been handed to the kernel.
    Committed,
    /// *commit* was sent and there is no answer to build on: the guest stays
    /// paused, and the destination is asked.
    InDoubt {
        /// Why.
        why: String,
    },
    /// The destination runs the VM.
    Running,
    /// Something that does no harm to the migration but should be known.
    Warning(String),
}

/// How a migration is going.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Progress {
    /// The iteration under way.
    pub iteration: u32,
    /// Bytes of guest memory per second that the destination took in lately.
    pub bytes_per_s: u64,
    /// Bytes that still have to go in this iteration.
    pub remaining_bytes: u64,
    /// Pages per second that the guest dirtied during the last iteration.
    pub dirty_pages_per_s: u64,
    /// Downtime to expect if the guest were paused now.
    pub predicted_downtime: Duration,
    /// Bytes of guest memory by lane number so far.
    pub lanes: Vec<(u16, u64)>,
}

/// Takes a session's events. Called from the session's own threads: return
/// quickly.
pub trait Observer: Send + Sync {
    /// Something happened.
    fn event(&self, event: &Event);
}

impl<F: Fn(&Event) + Send + Sync> Observer for F {
    fn event(&self, event: &Event) {
        self(event);
    }
}
