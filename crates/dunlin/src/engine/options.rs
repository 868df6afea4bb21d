//! Errors in options.

use std::time::Duration;

use dunlin_proto::limits::MAX_SOCKET_PATH_BYTES;
use thiserror::Error;

/// An invalid option. The configuration of this side is at fault, and nothing has started. The
/// error has no fault code; [`OptionError::option`] identifies it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("option {option} has the invalid value {value} (at fault: configuration): {advice}")]
#[non_exhaustive]
pub struct OptionError {
    /// The option, by the name of its method.
    pub option: &'static str,
    /// The rejected value.
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

/// Rejects a limit of zero, which would expire before anything can happen.
pub(super) fn check_limit(option: &'static str, limit: Duration) -> Result<(), OptionError> {
    let advice = "use a time limit above zero";
    check(!limit.is_zero(), option, limit, advice)
}

pub(super) fn check_owner(owner: &str) -> Result<(), OptionError> {
    check(
        owner.len() <= MAX_SOCKET_PATH_BYTES,
        "owner",
        owner,
        "a Unix socket path has at most 107 bytes; leave the option empty if there is no socket",
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use crate::engine::source::Options;

    #[test]
    fn an_error_shows_the_value_as_it_was_set() {
        let error = Options::builder().rate(0).build().unwrap_err();
        assert_eq!((error.option, error.value.as_str()), ("rate", "0"));
    }
}
