//! The source of a migration: from a running VM here to a running VM there.
//!
//! ```text
//!   connect ▶ offer, select ▶ describe, accept ▶ lanes up ▶ pre-copy ▶ switchover
//!                                                           (iterations)
//! ```
//! [`migrate`] runs on the caller's thread. Every way out of it joins every
//! thread, stops the dirty logs, lifts the throttle and leaves the guest as
//! it was, unless the destination has it, or may have it: then it stays paused
//! ([`Doubt`]).
//!
//! Around *commit* the events come in this order, for whoever hooks in:
//! `Recorded(Committing)`, `Paused`, `Committing`, `Committed`, then `Running`
//! after `Recorded(Released)`, or `InDoubt` any number of times before it. At
//! the destination: `Recorded(Prepared)`, `Ready`, `Committed`,
//! `Recorded(Running)`, `Told(Running)`, `Running`.

mod ask;
mod decide;
mod doubt;
mod lane;
mod lanes;
mod precopy;
mod resume;
mod session;
mod set_up;
mod switchover;

use std::sync::Arc;
use std::time::Duration;

use dunlin_proto::fault::FaultCode;
use dunlin_proto::limits::MAX_LANES;
pub use dunlin_proto::negotiate::LaneSecurity;
pub use dunlin_proto::precopy::AtTimeLimit;
pub use dunlin_proto::switchover::Resolution;

pub use ask::Standing;
pub use doubt::{Doubt, ResolveError};

use super::control::{FromPeer, SILENCE_LIMIT};
use super::error::{Fault, MigrateError, VmIs};
use super::host::{Cancel, Host};
use super::journal::Journal;
use super::report::{Observer, Report};
use super::tune::Tune;
use super::vmm::SourceVm;
use crate::lane::identity::ClientTls;
use crate::lane::record::RECORD_LIMIT;

/// What the operator can choose at the source.
#[derive(Clone, Debug)]
pub struct Options {
    /// Data lanes, 1 to 128.
    pub lanes: u16,
    /// How the data lanes are secured; plain needs the destination's consent.
    pub security: LaneSecurity,
    /// Longest acceptable downtime.
    pub downtime_limit: Duration,
    /// Longest time for the whole migration.
    pub time_limit: Option<Duration>,
    /// What happens at the time limit.
    pub at_time_limit: AtTimeLimit,
    /// Whether a guest that outruns the link may be slowed down.
    pub throttle: bool,
    /// Cap over all data lanes, in bytes per second.
    pub rate: Option<u64>,
    /// Changes that cap while the migration runs.
    pub tune: Tune,
    /// The same for the last pass, when the guest stands still.
    pub last_pass_rate: Option<u64>,
    /// Cap for each data lane, kept by the kernel, in bytes per second.
    pub lane_rate: Option<u64>,
    /// Compare both memories by digest before *commit*. It costs downtime in
    /// proportion to the memory that is not zero.
    pub verify: bool,
    /// For connecting, handshakes and the destination's answer to *describe*.
    pub connect_limit: Duration,
    /// After this long without any confirmation of what it carries a lane
    /// counts as lost.
    pub lane_stall_limit: Duration,
    /// For how long a migration without any lane tries to get one.
    pub no_lane_limit: Duration,
    /// After this long without a message the control lane counts as lost. The
    /// peer is asked for one five times as often; both sides shall have about
    /// the same limit.
    pub silence_limit: Duration,
    /// For how long a lost control lane is tried to be made anew while the
    /// guest runs.
    pub control_limit: Duration,
    /// Records after which a lane is replaced by a fresh one; at most, and by
    /// default, what its cipher allows. At least 512.
    pub records_per_lane: u64,
    /// For how long the destination is asked what became of a *commit* that it
    /// has not answered, before the VM is left in doubt.
    pub doubt_limit: Duration,
    /// Where this migration is remembered. Without, an operator has to find
    /// out what became of the VM if a process dies after *commit*.
    pub journal: Journal,
    /// The control socket of this process, for the journal: where somebody who
    /// finds the record can ask. At most 107 bytes; empty for none.
    pub owner: String,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            lanes: 2,
            security: LaneSecurity::Tls,
            downtime_limit: Duration::from_millis(300),
            time_limit: None,
            at_time_limit: AtTimeLimit::Cancel,
            throttle: true,
            rate: None,
            tune: Tune::new(),
            last_pass_rate: None,
            lane_rate: None,
            verify: false,
            connect_limit: Duration::from_secs(10),
            lane_stall_limit: Duration::from_secs(5),
            no_lane_limit: Duration::from_secs(30),
            silence_limit: SILENCE_LIMIT,
            control_limit: Duration::from_secs(20),
            records_per_lane: RECORD_LIMIT,
            doubt_limit: Duration::from_secs(60),
            journal: Journal::none(),
            owner: String::new(),
        }
    }
}

impl Options {
    fn check(&self) -> Result<(), Fault> {
        let refuse = |what: &str| {
            Err(Fault {
                at_fault: dunlin_proto::fault::AtFault::Configuration,
                ..Fault::new(FaultCode::LaneLimit, what)
            })
        };
        if self.lanes == 0 || self.lanes > MAX_LANES {
            return refuse("the number of lanes must be 1 to 128");
        }
        if self.rate == Some(0) || self.last_pass_rate == Some(0) || self.lane_rate == Some(0) {
            return refuse("a rate of 0 would never end: leave it out for no cap");
        }
        if !(512..=RECORD_LIMIT).contains(&self.records_per_lane) {
            return refuse("a lane is replaced after 512 to 2^24 records");
        }
        Ok(())
    }
}

/// Moves `vm` to the destination that listens at `to`, a host and port.
///
/// # Errors
/// [`MigrateError`] says what failed, whose fault it is, and where the VM is.
pub fn migrate(
    vm: &Arc<dyn SourceVm>,
    to: &str,
    tls: &ClientTls,
    options: &Options,
    host: &Arc<dyn Host>,
    observer: &dyn Observer,
    cancel: &Cancel,
) -> Result<Report, MigrateError> {
    options
        .check()
        .map_err(|fault| fault.into_error(VmIs::AtSource))?;
    session::run(vm, to, tls, options, host, observer, cancel)
}

/// What the session's thread waits for.
enum SessionEvent {
    /// From the control lane of this epoch.
    Control(u32, FromPeer),
    LaneEnded {
        lane: u16,
        result: Result<(), Fault>,
        cpu: Duration,
    },
    /// A lane is near the limit of its key.
    LaneWorn,
    /// Something was done about lanes that whoever waits may have to see.
    Tended,
    /// The last chunk of an iteration has been given to a lane.
    Cut {
        iteration: u32,
    },
    Cancelled,
}
