//! The options of a migration at the source.

use std::sync::Arc;
use std::time::Duration;

use dunlin_lane::record::RECORD_LIMIT;
use dunlin_lane::security::SealedLanes;
use dunlin_proto::limits::MAX_LANES;
use dunlin_proto::negotiate::LaneSecurity;
use dunlin_proto::precopy::AtTimeLimit;

use super::super::control::SILENCE_LIMIT;
use super::super::journal::Journal;
use super::super::options::{OptionError, check, check_limit, check_owner};
use super::super::tune::Tune;

/// How long the source waits for the destination while the guest is paused: from *final* to
/// *ready*, from *commit* to *running*, and in the last pass for the next acknowledgement. A
/// shorter limit could end a migration while the destination is still loading the state.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// Options of a migration at the source, built and checked by [`Options::builder`]. The
/// default is a valid configuration.
///
/// ```
/// # use std::time::Duration;
/// # use dunlin::engine::source::Options;
/// let options = Options::builder()
///     .lanes(4)
///     .downtime_limit(Duration::from_millis(100))
///     .rate(500 << 20)
///     .build()?;
/// let wrong = options.to_builder().lanes(0).build().unwrap_err();
/// assert_eq!(wrong.option, "lanes");
/// # Ok::<(), dunlin::engine::OptionError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Options {
    pub(in crate::engine) lanes: u16,
    pub(in crate::engine) security: LaneSecurity,
    pub(in crate::engine) ipsec: Option<Arc<dyn SealedLanes>>,
    pub(in crate::engine) downtime_limit: Duration,
    pub(in crate::engine) time_limit: Option<Duration>,
    pub(in crate::engine) at_time_limit: AtTimeLimit,
    pub(in crate::engine) throttle: bool,
    pub(in crate::engine) rate: Option<u64>,
    pub(in crate::engine) tune: Tune,
    pub(in crate::engine) last_pass_rate: Option<u64>,
    pub(in crate::engine) lane_rate: Option<u64>,
    pub(in crate::engine) verify: bool,
    pub(in crate::engine) connect_limit: Duration,
    pub(in crate::engine) lane_stall_limit: Duration,
    pub(in crate::engine) no_lane_limit: Duration,
    pub(in crate::engine) silence_limit: Duration,
    pub(in crate::engine) control_limit: Duration,
    pub(in crate::engine) records_per_lane: u64,
    pub(in crate::engine) answer_limit: Duration,
    pub(in crate::engine) doubt_limit: Duration,
    pub(in crate::engine) journal: Journal,
    pub(in crate::engine) owner: String,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            lanes: 2,
            security: LaneSecurity::Tls,
            ipsec: None,
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
            answer_limit: ANSWER_LIMIT,
            doubt_limit: Duration::from_secs(60),
            journal: Journal::none(),
            owner: String::new(),
        }
    }
}

impl Options {
    /// Starts from the defaults.
    pub fn builder() -> OptionsBuilder {
        OptionsBuilder(Self::default())
    }

    /// Starts from these options.
    pub fn to_builder(&self) -> OptionsBuilder {
        OptionsBuilder(self.clone())
    }
}

/// Builds [`Options`]. An option that is not set keeps its value, which is the default if the
/// builder is from [`Options::builder`].
#[derive(Clone, Debug)]
#[must_use = "a builder has no effect before `build`"]
pub struct OptionsBuilder(Options);

impl OptionsBuilder {
    /// Checks the options.
    ///
    /// # Errors
    /// The first invalid option.
    pub fn build(self) -> Result<Options, OptionError> {
        let options = self.0;
        let lanes = options.lanes;
        let possible = (1..=MAX_LANES).contains(&lanes);
        check(possible, "lanes", lanes, "use 1 to 128 lanes")?;
        check(
            options.security != LaneSecurity::Ipsec || options.ipsec.is_some(),
            "security",
            options.security,
            "lanes over IPsec also need the option `ipsec`",
        )?;
        for (option, rate) in [
            ("rate", options.rate),
            ("last_pass_rate", options.last_pass_rate),
            ("lane_rate", options.lane_rate),
        ] {
            let advice =
                "a migration at rate 0 would never finish; for no cap, leave this option unset";
            check(rate != Some(0), option, rate.unwrap_or(0), advice)?;
        }
        check(
            (512..=RECORD_LIMIT).contains(&options.records_per_lane),
            "records_per_lane",
            options.records_per_lane,
            "use 512 to 2^24 records",
        )?;
        check_limit("connect_limit", options.connect_limit)?;
        check_limit("lane_stall_limit", options.lane_stall_limit)?;
        check_limit("silence_limit", options.silence_limit)?;
        check_owner(&options.owner)?;
        Ok(options)
    }

    /// Number of data lanes, 1 to 128. Default: 2.
    pub fn lanes(mut self, lanes: u16) -> Self {
        self.0.lanes = lanes;
        self
    }

    /// How the data lanes are secured. Plain lanes need the destination's consent;
    /// lanes over IPsec need [`OptionsBuilder::ipsec`] on both sides. Default: TLS.
    pub fn security(mut self, security: LaneSecurity) -> Self {
        self.0.security = security;
        self
    }

    /// The implementation that opens the lanes if [`LaneSecurity::Ipsec`] is chosen. It binds their
    /// connections to the ports of the keying session and keeps their threads on that session's
    /// CPUs.
    pub fn ipsec(mut self, lanes: Option<Arc<dyn SealedLanes>>) -> Self {
        self.0.ipsec = lanes;
        self
    }

    /// Longest acceptable downtime. Pre-copy continues until the remaining work is expected to fit
    /// into this time. Default: 300 ms.
    pub fn downtime_limit(mut self, downtime_limit: Duration) -> Self {
        self.0.downtime_limit = downtime_limit;
        self
    }

    /// Longest time from the start of the migration to the pause of the guest. Default: `None`,
    /// which means no limit.
    pub fn time_limit(mut self, time_limit: impl Into<Option<Duration>>) -> Self {
        self.0.time_limit = time_limit.into();
        self
    }

    /// What to do at the time limit. Default: [`AtTimeLimit::Cancel`].
    pub fn at_time_limit(mut self, at_time_limit: AtTimeLimit) -> Self {
        self.0.at_time_limit = at_time_limit;
        self
    }

    /// Whether to throttle a guest that dirties memory faster than the link can carry
    /// it. Default: yes.
    pub fn throttle(mut self, throttle: bool) -> Self {
        self.0.throttle = throttle;
        self
    }

    /// Rate cap over all data lanes together until the last pass, in bytes per second. Default: no
    /// cap.
    pub fn rate(mut self, rate: impl Into<Option<u64>>) -> Self {
        self.0.rate = rate.into();
        self
    }

    /// Rate cap over all data lanes during the last pass, while the guest is paused, in bytes per
    /// second. Default: no cap.
    pub fn last_pass_rate(mut self, last_pass_rate: impl Into<Option<u64>>) -> Self {
        self.0.last_pass_rate = last_pass_rate.into();
        self
    }

    /// Rate cap of each data lane, enforced by the kernel, in bytes per second. Default: no cap.
    pub fn lane_rate(mut self, lane_rate: impl Into<Option<u64>>) -> Self {
        self.0.lane_rate = lane_rate.into();
        self
    }

    /// Compares digests of both memories before *commit*. This adds downtime in
    /// proportion to the memory that is not zero. Default: no.
    pub fn verify(mut self, verify: bool) -> Self {
        self.0.verify = verify;
        self
    }

    /// Limit for connecting, handshakes and the destination's answer to *describe*.
    /// Default: 10 s.
    pub fn connect_limit(mut self, connect_limit: Duration) -> Self {
        self.0.connect_limit = connect_limit;
        self
    }

    /// A lane counts as lost after this long without an acknowledgement of data that it
    /// carries.
    #[cfg(feature = "unstable-internals")]
    pub fn lane_stall_limit(mut self, lane_stall_limit: Duration) -> Self {
        self.0.lane_stall_limit = lane_stall_limit;
        self
    }

    /// How long the source tries to open a data lane while it has none, and how long it waits for the
    /// destination to fence a lost lane.
    #[cfg(feature = "unstable-internals")]
    pub fn no_lane_limit(mut self, no_lane_limit: Duration) -> Self {
        self.0.no_lane_limit = no_lane_limit;
        self
    }

    /// The control lane counts as lost after this long without a message. The source pings the peer
    /// after each fifth of this time that passes without a message. Set about the same limit on
    /// both sides.
    #[cfg(feature = "unstable-internals")]
    pub fn silence_limit(mut self, silence_limit: Duration) -> Self {
        self.0.silence_limit = silence_limit;
        self
    }

    /// How long to try to replace a lost control lane while the guest runs.
    #[cfg(feature = "unstable-internals")]
    pub fn control_limit(mut self, control_limit: Duration) -> Self {
        self.0.control_limit = control_limit;
        self
    }

    /// Number of TLS records that a lane may send before a new lane replaces it: 512 to 2^24. The
    /// default is 2^24, which is within the limit of AES-GCM (RFC 8446, section 5.5).
    #[cfg(feature = "unstable-internals")]
    pub fn records_per_lane(mut self, records_per_lane: u64) -> Self {
        self.0.records_per_lane = records_per_lane;
        self
    }

    /// How long the destination may take to answer while the guest is paused. Only the workspace's
    /// tests set this limit.
    #[cfg(feature = "unstable-internals")]
    pub fn answer_limit(mut self, answer_limit: Duration) -> Self {
        self.0.answer_limit = answer_limit;
        self
    }

    /// How long to ask the destination for the outcome of an unanswered *commit* before the VM is
    /// left in doubt. Cancelling does not end the inquiries, because only an answer resolves the
    /// doubt. Each attempt to connect, including name resolution, ends at
    /// [`OptionsBuilder::connect_limit`], and the last attempt ends at this limit. Default: 60 s.
    pub fn doubt_limit(mut self, doubt_limit: Duration) -> Self {
        self.0.doubt_limit = doubt_limit;
        self
    }

    /// The journal for this migration's record. Without a journal, this process keeps the record in
    /// memory; if the process dies after *commit*, an operator has to find out where the VM runs.
    pub fn journal(mut self, journal: Journal) -> Self {
        self.0.journal = journal;
        self
    }

    /// Path of this process's control socket, stored in the journal: an operator who finds the
    /// record can query the process there. At most 107 bytes; empty if there is no such socket.
    pub fn owner(mut self, owner: impl Into<String>) -> Self {
        self.0.owner = owner.into();
        self
    }
}
