//! Changing a migration while it runs.

use std::fmt;
use std::sync::Arc;

use thiserror::Error;

use super::sync::Mutex;

type Apply = Box<dyn Fn(Option<u64>) + Send>;

/// Changes the rate cap of a migration from another thread. Clones change the
/// same one; it serves one migration.
#[derive(Clone, Default)]
pub struct Tune(Arc<Mutex<State>>);

#[derive(Default)]
enum State {
    /// The lanes do not send yet; a cap that was set by then is kept for them.
    #[default]
    Early,
    Asked(Option<u64>),
    Attached(Apply),
    Over,
}

/// A rate that cannot be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum TuneError {
    /// Nothing would ever arrive.
    #[error("a rate of 0 would never end: ask for no cap instead")]
    Zero,
    /// The guest stands still for the last pass, which has a cap of its own,
    /// or the migration has ended.
    #[error("too late for another rate: pre-copy is over")]
    TooLate,
}

impl Tune {
    /// A handle that has changed nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Caps all data lanes together at `bytes_per_s`, or lifts the cap, from
    /// now on until the last pass. Called before the migration begins, it
    /// takes the place of [`super::source::OptionsBuilder::rate`].
    ///
    /// # Errors
    /// [`TuneError`]; nothing has been changed then.
    pub fn set_rate(&self, bytes_per_s: Option<u64>) -> Result<(), TuneError> {
        if bytes_per_s == Some(0) {
            return Err(TuneError::Zero);
        }
        let mut state = super::lock(&self.0);
        match &*state {
            State::Early | State::Asked(_) => *state = State::Asked(bytes_per_s),
            State::Attached(apply) => apply(bytes_per_s),
            State::Over => return Err(TuneError::TooLate),
        }
        Ok(())
    }

    /// From now on changes go to `apply`; one that was asked for before goes
    /// there at once.
    pub(crate) fn attach(&self, apply: impl Fn(Option<u64>) + Send + 'static) {
        let mut state = super::lock(&self.0);
        if let State::Asked(rate) = &*state {
            apply(*rate);
        }
        *state = State::Attached(Box::new(apply));
    }

    /// From now on it is too late.
    pub(crate) fn detach(&self) {
        *super::lock(&self.0) = State::Over;
    }
}

impl fmt::Debug for Tune {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &*super::lock(&self.0) {
            State::Early => "early",
            State::Asked(_) => "asked",
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
    fn a_rate_reaches_the_lanes_whenever_it_is_set_until_it_is_too_late() {
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
    fn what_was_never_set_leaves_the_options_rate_alone() {
        let (sender, rates) = channel();
        Tune::new().attach(move |rate| sender.send(rate).unwrap());
        assert_eq!(rates.try_iter().count(), 0);
    }
}
