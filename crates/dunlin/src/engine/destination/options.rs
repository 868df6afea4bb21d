//! The options of a destination.

use std::sync::Arc;
use std::time::Duration;

use dunlin_lane::security::SealedLanes;
use dunlin_proto::limits::{MAX_ENDPOINT_BYTES, MAX_ENDPOINTS, MAX_LANES};

use super::super::control::SILENCE_LIMIT;
use super::super::journal::Journal;
use super::super::options::{OptionError, check, check_limit};

/// The lowest rate cap. With it, each of four lanes gets one chunk (256 KiB) per second.
const LEAST_RATE: u64 = 1 << 20;

/// Options of a destination, built and checked by [`Options::builder`]. The default is
/// a valid configuration.
///
/// ```
/// # use std::time::Duration;
/// # use dunlin::engine::destination::Options;
/// let options = Options::builder().lanes_max(8).build()?;
/// let wrong = options.to_builder().lanes_max(0).build().unwrap_err();
/// assert_eq!(wrong.option, "lanes_max");
/// # Ok::<(), dunlin::engine::OptionError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Options {
    pub(in crate::engine) allow_plain: bool,
    pub(in crate::engine) ipsec: Option<Arc<dyn SealedLanes>>,
    pub(in crate::engine) lanes_max: u16,
    pub(in crate::engine) rate: Option<u64>,
    pub(in crate::engine) endpoints: Vec<String>,
    pub(in crate::engine) silence_limit: Duration,
    pub(in crate::engine) control_limit: Duration,
    pub(in crate::engine) idle_limit: Duration,
    pub(in crate::engine) journal: Journal,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            allow_plain: false,
            ipsec: None,
            lanes_max: MAX_LANES,
            rate: None,
            endpoints: Vec::new(),
            silence_limit: SILENCE_LIMIT,
            control_limit: Duration::from_secs(40),
            idle_limit: Duration::from_secs(300),
            journal: Journal::none(),
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
        let lanes = options.lanes_max;
        let possible = (1..=MAX_LANES).contains(&lanes);
        check(possible, "lanes_max", lanes, "use 1 to 128 lanes")?;
        let rate = options.rate;
        let possible = rate.is_none_or(|rate| rate >= LEAST_RATE);
        check(possible, "rate", rate, "use at least 1 MiB/s, or no cap")?;
        let endpoints = &options.endpoints;
        check(
            endpoints.len() <= MAX_ENDPOINTS
                && endpoints
                    .iter()
                    .all(|one| (1..=MAX_ENDPOINT_BYTES).contains(&one.len())),
            "endpoints",
            endpoints,
            "use at most 16 addresses with port, or none to use the address of the control lane",
        )?;
        check_limit("silence_limit", options.silence_limit)?;
        check_limit("control_limit", options.control_limit)?;
        check_limit("idle_limit", options.idle_limit)?;
        Ok(options)
    }

    /// Whether to allow plain data lanes if the source asks for them. The control lane
    /// is always encrypted. Default: no.
    pub fn allow_plain(mut self, allow_plain: bool) -> Self {
        self.0.allow_plain = allow_plain;
        self
    }

    /// The implementation that admits lanes over IPsec if the source asks for them. If it is
    /// `None`, a source that asks for such lanes is refused.
    pub fn ipsec(mut self, lanes: Option<Arc<dyn SealedLanes>>) -> Self {
        self.0.ipsec = lanes;
        self
    }

    /// Maximum number of data lanes of one session, 1 to 128. Default: 128.
    pub fn lanes_max(mut self, lanes_max: u16) -> Self {
        self.0.lanes_max = lanes_max;
        self
    }

    /// Caps the rate, in bytes per second, at which memory arrives; at least 1 MiB/s. The sessions
    /// of a [`Listener`](super::Listener) share the cap in equal parts. What one session does not
    /// use, the others may use. The cap also applies while the guest is paused. Allow at least
    /// 256 KiB/s for each lane, because a source replaces a lane on which no chunk is acknowledged
    /// for 5 s. Default: no cap.
    pub fn rate(mut self, rate: impl Into<Option<u64>>) -> Self {
        self.0.rate = rate.into();
        self
    }

    /// Addresses to which the source opens data lanes. If the list is empty, as by default, the
    /// source uses the address of the control lane.
    pub fn endpoints(mut self, endpoints: Vec<String>) -> Self {
        self.0.endpoints = endpoints;
        self
    }

    /// The control lane counts as lost after this long without a message; see [the source's
    /// option].
    ///
    /// [the source's option]: crate::engine::source::OptionsBuilder::silence_limit
    #[cfg(feature = "unstable-internals")]
    pub fn silence_limit(mut self, silence_limit: Duration) -> Self {
        self.0.silence_limit = silence_limit;
        self
    }

    /// How long to wait for the source to replace a lost control lane while memory and state
    /// arrive. Set it longer than the source's [`control_limit`], which begins only when the source
    /// notices the loss.
    ///
    /// [`control_limit`]: crate::engine::source::OptionsBuilder::control_limit
    #[cfg(feature = "unstable-internals")]
    pub fn control_limit(mut self, control_limit: Duration) -> Self {
        self.0.control_limit = control_limit;
        self
    }

    /// The session ends if the source sends no chunk, mark or new control message for this long,
    /// even if it answers pings. The limit exists because a session occupies an
    /// [`Incoming`](super::Incoming), or one clone of a [`Listener`](super::Listener): during the
    /// session it can receive no other VM. Set the limit longer than a chunk (256 KiB) takes at the
    /// source's rate cap, and longer than
    /// [`SourceVm::hold`](crate::engine::vmm::SourceVm::hold) may block at the source.
    /// Default: 300 s.
    pub fn idle_limit(mut self, idle_limit: Duration) -> Self {
        self.0.idle_limit = idle_limit;
        self
    }

    /// The journal of this host's sessions, from which the destination answers inquiries. Without
    /// one, this process keeps the records in memory; if the process dies after *commit*, an
    /// operator has to find out where the VM runs.
    pub fn journal(mut self, journal: Journal) -> Self {
        self.0.journal = journal;
        self
    }
}
