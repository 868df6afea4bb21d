//! The operator's choice of what encrypts the records of data lanes: the kernel or this process.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// What seals and opens the TLS records of data lanes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Offload {
    /// The kernel if it supports the cipher and has a fast implementation, otherwise this process.
    #[default]
    Auto,
    /// The kernel only; fail if it cannot seal and open the records.
    Kernel,
    /// This process.
    Process,
}

/// The text does not name an [`Offload`].
#[derive(Debug, Error)]
#[error("unknown offload {0:?}: use auto, kernel or process")]
pub struct UnknownOffload(String);

impl fmt::Display for Offload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Kernel => "kernel",
            Self::Process => "process",
        })
    }
}

#[cfg(feature = "unstable-internals")]
impl FromStr for Offload {
    type Err = UnknownOffload;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        [Self::Auto, Self::Kernel, Self::Process]
            .into_iter()
            .find(|offload| offload.to_string() == text)
            .ok_or_else(|| UnknownOffload(text.to_owned()))
    }
}
