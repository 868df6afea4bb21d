//! What seals and opens the records of data lanes: the choice of an operator.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// Who seals and opens the bulk of a lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Offload {
    /// The kernel where it can and has a fast cipher, else this process.
    #[default]
    Auto,
    /// The kernel, or nobody.
    Kernel,
    /// This process.
    Process,
}

/// No name of an [`Offload`].
#[derive(Debug, Error)]
#[error("{0:?} is none of auto, kernel, process")]
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

impl FromStr for Offload {
    type Err = UnknownOffload;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        [Self::Auto, Self::Kernel, Self::Process]
            .into_iter()
            .find(|offload| offload.to_string() == text)
            .ok_or_else(|| UnknownOffload(text.to_owned()))
    }
}
