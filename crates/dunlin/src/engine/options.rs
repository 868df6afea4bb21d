//! Options that cannot be.

use std::time::Duration;

use dunlin_proto::limits::MAX_SOCKET_PATH_BYTES;
use thiserror::Error;

/// An option that cannot be: the fault is in the configuration of this side.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("the option {option} cannot be {value} (at fault: the configuration here): {advice}")]
#[non_exhaustive]
pub struct OptionError {
    /// The option, as its method is called.
    pub option: &'static str,
    /// What it was set to.
    pub value: String,
    /// What to set instead.
    pub advice: &'static str,
}

/// Checks one option.
pub(super) fn check(
    sound: bool,
    option: &'static str,
    value: impl std::fmt::Debug,
    advice: &'static str,
) -> Result<(), OptionError> {
    if sound {
        return Ok(());
    }
    Err(OptionError {
        option,
        value: format!("{value:?}"),
        advice,
    })
}

/// A limit that is over before anything can happen.
pub(super) fn check_limit(option: &'static str, limit: Duration) -> Result<(), OptionError> {
    let advice = "give it the longest time that you would wait";
    check(!limit.is_zero(), option, limit, advice)
}

pub(super) fn check_owner(owner: &str) -> Result<(), OptionError> {
    check(
        owner.len() <= MAX_SOCKET_PATH_BYTES,
        "owner",
        owner,
        "a unix socket's path has at most 107 bytes; leave it empty for none",
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use crate::engine::source::Options;

    #[test]
    fn a_value_is_told_as_it_was_set() {
        let error = Options::builder().rate(0).build().unwrap_err();
        assert_eq!((error.option, error.value.as_str()), ("rate", "0"));
    }
}
