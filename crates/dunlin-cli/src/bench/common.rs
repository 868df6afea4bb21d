//! Flags of the benches that measure lanes.

use anyhow::{Result, ensure};
use clap::Args;
use dunlin::lane::provider::Provider;
use dunlin_bench::Output;

use crate::options::parse_bytes;

/// Flags of the benches that measure lanes.
#[derive(Debug, Args)]
pub(super) struct Common {
    /// Number of measured rounds, after one warm-up round.
    #[arg(long, default_value_t = 5)]
    pub(super) rounds: usize,
    /// Size of the source's memory and of the destination's memory; both are touched before the
    /// measurement.
    #[arg(long, value_parser = parse_bytes, default_value = "1G")]
    pub(super) size: u64,
    /// Measure only this crypto library: ring or aws-lc-rs.
    #[arg(long)]
    pub(super) provider: Option<Provider>,
    #[command(flatten)]
    pub(super) output: Output,
}

impl Common {
    pub(super) fn check(&self) -> Result<()> {
        ensure!(self.rounds > 0, "--rounds must be 1 or more");
        ensure!(
            self.size >= 64 << 20 && self.size.is_multiple_of(2 << 20),
            "--size must be a multiple of 2 MiB, and 64M or more"
        );
        Ok(())
    }

    /// The crypto libraries to measure.
    pub(super) fn providers(&self) -> Vec<Provider> {
        match self.provider {
            Some(provider) => vec![provider],
            None => Provider::built_in().to_vec(),
        }
    }
}
