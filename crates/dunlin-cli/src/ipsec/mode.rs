//! The flag `--mode`.

use clap::ValueEnum;
use dunlin_ipsec::Mode;
use serde::{Deserialize, Serialize};

/// How traffic is spread over SAs.
#[derive(Clone, Copy, Debug, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ModeName {
    /// One SA per sending CPU (Linux 6.13, or an older kernel with a backport).
    #[default]
    Cpu,
    /// One SA per connection.
    Connection,
}

impl From<ModeName> for Mode {
    fn from(name: ModeName) -> Self {
        match name {
            ModeName::Cpu => Self::Cpu,
            ModeName::Connection => Self::Connection,
        }
    }
}
