//! What a session reports while it runs and when it has ended.

use std::time::Duration;

use dunlin_proto::journal::SourceRecord;
use dunlin_proto::negotiate::LaneSecurity;

/// Pages and bytes by kind, counted at the source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Traffic {
    /// Guest pages sent with their content.
    pub raw_pages: u64,
    /// Guest pages that were all zero and were sent as ranges, without content.
    pub zero_pages: u64,
    /// Bytes of chunk headers with their ranges, of marks and of end frames.
    pub header_bytes: u64,
    /// Bytes that the data lanes wrote to their sockets after they were opened, including the
    /// overhead of encryption.
    pub wire_bytes: u64,
}

impl Traffic {
    /// Adds the counts of another lane.
    pub(super) fn add(&mut self, other: &Self) {
        self.raw_pages += other.raw_pages;
        self.zero_pages += other.zero_pages;
        self.header_bytes += other.header_bytes;
        self.wire_bytes += other.wire_bytes;
    }
}

/// One pass of pre-copy, or the last pass.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Iteration {
    /// Counted from 1.
    pub number: u32,
    /// From the start of the iteration until the dirty logs are read; for the last iteration,
    /// [`Downtime::last_pages`].
    pub duration: Duration,
    /// Pages pending at the start of the iteration.
    pub pages: u64,
    /// Pages dirtied during the iteration; the next iteration sends them.
    pub dirtied_pages: u64,
    /// Bytes that the data lanes wrote to their sockets during the iteration.
    pub wire_bytes: u64,
    /// Expected downtime if the guest were paused at the end of the iteration. The last iteration,
    /// during which the guest is paused, has the value of the iteration before it.
    pub predicted_downtime: Duration,
    /// How much the guest was throttled, in percent.
    pub throttle: u8,
}

/// The parts of the downtime, measured at the source.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct Downtime {
    /// From the call of `SourceVm::pause` until its return.
    pub pause: Duration,
    /// From the return of `SourceVm::pause` until no data lane has anything left to send. Then each
    /// has sent its end, or is lost and all of its chunks are confirmed.
    pub last_pages: Duration,
    /// Time to deactivate the VM, and to save and send its state. It overlaps with `last_pages`.
    pub state: Duration,
    /// From *final* to *ready*: the destination receives the remaining data, joins its lanes, loads
    /// the state and, with verification, computes the digest of its memory.
    pub ready: Duration,
    /// From *commit* to *running*.
    pub resume: Duration,
    /// From the pause to *running*: the downtime as seen from outside.
    pub total: Duration,
    /// Downtime as the guest saw it, if the destination reported it.
    pub guest: Option<Duration>,
}

/// A successful migration, as seen by the source.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Report {
    /// Every iteration; the last one ran with the guest paused.
    pub iterations: Vec<Iteration>,
    /// Bytes by kind.
    pub traffic: Traffic,
    /// Bytes of guest memory by lane number, excluding zero pages. The numbers of lost or
    /// replaced lanes are not reused.
    pub lanes: Vec<(u16, u64)>,
    /// Number of lost lanes. Other lanes took over their work.
    pub lanes_lost: u32,
    /// Number of control lanes that were lost and replaced while the guest ran.
    pub control_resumed: u32,
    /// Pages sent again because their lane was lost.
    pub pages_again: u64,
    /// How the data lanes are secured.
    pub security: LaneSecurity,
    /// From the start of the migration to *running*.
    pub total: Duration,
    /// The parts of the downtime.
    pub downtime: Downtime,
    /// CPU time of this session's threads at the source.
    pub source_cpu: Duration,
    /// CPU time of this session's threads at the destination; zero if only an inquiry showed the
    /// outcome.
    pub destination_cpu: Duration,
    /// `Some(true)` if the digests of both memories are equal; `None` without verification.
    /// Different digests are an error.
    pub digests_equal: Option<bool>,
    /// Whether the guest runs at the destination. If not, it is paused there, because its
    /// owner had paused it.
    pub runs: bool,
}

/// An event of a session at the source.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// The control lane is established and the destination has accepted the VM.
    Accepted {
        /// The destination's names, from its certificate.
        peer: String,
    },
    /// A data lane is established.
    LaneUp {
        /// The lane's number.
        lane: u16,
    },
    /// A data lane is lost. Its unconfirmed pages are sent again on other lanes.
    LaneLost {
        /// The lane's number.
        lane: u16,
        /// The reason, if known.
        why: String,
    },
    /// The control lane is lost and is being replaced. Data lanes and guest continue.
    ControlLost {
        /// The reason.
        why: String,
    },
    /// A new control lane is established.
    ControlResumed,
    /// Progress, several times a second.
    Progress(Progress),
    /// An iteration has ended.
    Iterated(Iteration),
    /// The throttle has changed.
    Throttled {
        /// Percent; 0 is full speed.
        percent: u8,
    },
    /// The session has reached the state that this record names. If the session has a journal on
    /// disk, the record is synced.
    Recorded(SourceRecord),
    /// The guest is paused.
    Paused,
    /// *commit* is about to be sent: the point of no return.
    Committing,
    /// *commit* has been passed to the kernel, or sending it has failed. Such a failure ends the
    /// control lane.
    Committed,
    /// The source began to send *commit*, and no usable answer has arrived. The guest stays paused,
    /// and the source asks the destination.
    InDoubt {
        /// The reason.
        why: String,
    },
    /// The destination has the VM, and the copy at the source is destroyed.
    Running,
    /// A problem that does not make the migration fail but that an operator should see.
    Warning(String),
}

/// Progress of a migration.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Progress {
    /// The current iteration.
    pub iteration: u32,
    /// The measured bandwidth in bytes per second. Before the first measurement, the average of
    /// what the lanes have sent.
    pub bytes_per_s: u64,
    /// Bytes still to send in this iteration.
    pub remaining_bytes: u64,
    /// Pages per second that the guest dirtied during the previous iteration.
    pub dirty_pages_per_s: u64,
    /// Expected downtime as of the end of the previous iteration; zero during the first.
    pub predicted_downtime: Duration,
    /// Bytes of guest memory by lane number so far.
    pub lanes: Vec<(u16, u64)>,
    /// TCP segments sent again so far, by lane number. Lost lanes are included.
    pub retransmits: Vec<(u16, u32)>,
}
