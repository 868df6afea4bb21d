//! Changes to a migration while it runs.

use std::fmt;
use std::sync::Arc;

use thiserror::Error;

use super::sync::Mutex;

type Apply = Box<dyn Fn(Option<u64>) + Send>;

/// Changes the rate cap of a migration from another thread. Clones change the same cap. A handle
/// and its clones are for one migration only.
#[derive(Clone, Default)]
pub struct Tune(Arc<Mutex<State>>);

#[derive(Default)]
enum State {
    /// The lanes do not send yet. If the cap is changed now, the new cap is kept for the lanes.
    #[default]
    Early,
    Pending(Option<u64>),
    Attached(Apply),
    Over,
}

/// The error for a rate that cannot be set; the variant gives the reason. Like an
/// [`OptionError`](super::OptionError), the error rejects an argument and changes nothing, so it
/// has no fault code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TuneError {
    /// At this rate no data would ever arrive.
    #[error("a migration at rate 0 would never finish; remove the cap instead")]
    Zero,
    /// The migration has ended, or its last pass has begun. The last pass has its own cap.
    #[error("too late to change the rate: pre-copy has ended")]
    TooLate,
}

impl Tune {
    /// A handle that changes nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Caps the total rate of all data lanes at `bytes_per_s`, or removes the cap. The cap applies
    /// from now until the last pass. If called before the migration starts, it replaces
    /// [`super::source::OptionsBuilder::rate`].
    ///
    /// # Errors
    /// [`TuneError`]; nothing has changed.
    pub fn set_rate(&self, bytes_per_s: Option<u64>) -> Result<(), TuneError> {
        if bytes_per_s == Some(0) {
            return Err(TuneError::Zero);
        }
        let mut state = super::lock(&self.0);
        match &*state {
            State::Early | State::Pending(_) => *state = State::Pending(bytes_per_s),
            State::Attached(apply) => apply(bytes_per_s),
            State::Over => return Err(TuneError::TooLate),
        }
        Ok(())
    }

    /// Passes each later change to `apply`. If the cap was changed before this call, first passes
    /// the newest of those changes.
    pub(crate) fn attach(&self, apply: impl Fn(Option<u64>) + Send + 'static) {
        let mut state = super::lock(&self.0);
        if let State::Pending(rate) = &*state {
            apply(*rate);
        }
        *state = State::Attached(Box::new(apply));
    }

    /// Rejects later changes.
    pub(crate) fn detach(&self) {
        *super::lock(&self.0) = State::Over;
    }
}

impl fmt::Debug for Tune {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &*super::lock(&self.0) {
            State::Early => "early",
            State::Pending(_) => "pending",
            State::Attached(_) => "attached",
            State::Over => "over",
        };
        formatter.debug_tuple("Tune").field(&state).finish()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn a_rate_reaches_the_lanes_before_and_after_attach_but_not_after_detach() {
        let tune = Tune::new();
        assert_eq!(tune.set_rate(Some(0)), Err(TuneError::Zero));
        tune.set_rate(Some(1)).unwrap();
        tune.clone().set_rate(Some(2)).unwrap();
        let (sender, rates) = channel();
        tune.attach(move |rate| sender.send(rate).unwrap());
        tune.set_rate(None).unwrap();
        assert_eq!(rates.try_iter().collect::<Vec<_>>(), [Some(2), None]);
        tune.detach();
        assert_eq!(tune.set_rate(Some(3)), Err(TuneError::TooLate));
    }

    #[test]
    fn a_rate_that_was_never_set_keeps_the_options_rate() {
        let (sender, rates) = channel();
        Tune::new().attach(move |rate| sender.send(rate).unwrap());
        assert_eq!(rates.try_iter().count(), 0);
    }
}
