//! What an operator can choose at the destination.

use std::sync::Arc;
use std::time::Duration;

use dunlin_proto::limits::{MAX_ENDPOINT_BYTES, MAX_ENDPOINTS, MAX_LANES};

use super::super::control::SILENCE_LIMIT;
use super::super::journal::Journal;
use super::super::options::{OptionError, check, check_limit};
use crate::lane::security::SealedLanes;

/// What the operator can choose at the destination; made and checked by
/// [`Options::builder`]. The default is what an operator has who chooses
/// nothing.
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

    /// Starts from these.
    pub fn to_builder(&self) -> OptionsBuilder {
        OptionsBuilder(self.clone())
    }
}

/// Chooses [`Options`]. What it is not told stays as it was.
#[derive(Clone, Debug)]
#[must_use = "nothing is chosen before `build`"]
pub struct OptionsBuilder(Options);

impl OptionsBuilder {
    /// Checks what was chosen.
    ///
    /// # Errors
    /// The first option that cannot be.
    pub fn build(self) -> Result<Options, OptionError> {
        let options = self.0;
        let lanes = options.lanes_max;
        let possible = (1..=MAX_LANES).contains(&lanes);
        check(possible, "lanes_max", lanes, "1 to 128 lanes are possible")?;
        let endpoints = &options.endpoints;
        check(
            endpoints.len() <= MAX_ENDPOINTS
                && endpoints
                    .iter()
                    .all(|one| (1..=MAX_ENDPOINT_BYTES).contains(&one.len())),
            "endpoints",
            endpoints,
            "name at most 16 addresses, each with its port, or none for the control lane's",
        )?;
        check_limit("silence_limit", options.silence_limit)?;
        check_limit("control_limit", options.control_limit)?;
        check_limit("idle_limit", options.idle_limit)?;
        Ok(options)
    }

    /// Whether data lanes without security are allowed when the source asks
    /// for them. The control lane is secured in any case.
    pub fn allow_plain(mut self, allow_plain: bool) -> Self {
        self.0.allow_plain = allow_plain;
        self
    }

    /// By what lanes come over IPsec where the source asks for that; without, such a source is
    /// refused.
    pub fn ipsec(mut self, lanes: Option<Arc<dyn SealedLanes>>) -> Self {
        self.0.ipsec = lanes;
        self
    }

    /// Data lanes of one session, at most.
    pub fn lanes_max(mut self, lanes_max: u16) -> Self {
        self.0.lanes_max = lanes_max;
        self
    }

    /// Addresses for the data lanes; empty for the control lane's.
    pub fn endpoints(mut self, endpoints: Vec<String>) -> Self {
        self.0.endpoints = endpoints;
        self
    }

    /// After this long without a message the control lane counts as lost; see
    /// [its option].
    ///
    /// [its option]: crate::engine::source::OptionsBuilder::silence_limit
    pub fn silence_limit(mut self, silence_limit: Duration) -> Self {
        self.0.silence_limit = silence_limit;
        self
    }

    /// How long a lost control lane is waited for before everything has come.
    /// Longer than the source's [`control_limit`], which has to notice the
    /// loss as well.
    ///
    /// [`control_limit`]: crate::engine::source::OptionsBuilder::control_limit
    pub fn control_limit(mut self, control_limit: Duration) -> Self {
        self.0.control_limit = control_limit;
        self
    }

    /// After this long in which the source sent neither a chunk nor a mark nor a
    /// control message, however well it answers, it is given up: nobody else can
    /// move a VM here meanwhile. Longer than a chunk (256 KiB) takes at its rate
    /// cap, and than it holds its VM before *commit*.
    pub fn idle_limit(mut self, idle_limit: Duration) -> Self {
        self.0.idle_limit = idle_limit;
        self
    }

    /// Where this host's sessions are remembered, and what inquiries are
    /// answered from. Without, they are while this process lives, and an
    /// operator has to find out what became of a VM if that dies after
    /// *commit*.
    pub fn journal(mut self, journal: Journal) -> Self {
        self.0.journal = journal;
        self
    }
}
