//! Flags of the benches that measure lanes.

use anyhow::{Result, ensure};
use clap::Args;
use dunlin::lane::provider::Provider;
use dunlin_bench::{Output, available_bytes};

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
        check_size(self.size, 2 * u128::from(self.size))
    }

    /// The crypto libraries to measure.
    pub(super) fn providers(&self) -> Vec<Provider> {
        match self.provider {
            Some(provider) => vec![provider],
            None => Provider::built_in().to_vec(),
        }
    }
}

/// Checks a `--size` of memory and the amount of memory that both ends need for it, in bytes.
pub(super) fn check_size(size: u64, needed: u128) -> Result<()> {
    ensure!(
        size >= 64 << 20 && size.is_multiple_of(2 << 20),
        "--size must be a multiple of 2 MiB, and 64M or more"
    );
    let available = u128::from(available_bytes()?);
    ensure!(
        needed <= available,
        "--size is too large for this host, use a smaller one: both ends need {} MiB together, and {} \
         MiB are available",
        needed >> 20,
        available >> 20
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_whole_huge_pages_that_fit_into_this_host() {
        assert!(check_size(64 << 20, 0).is_ok());
        assert!(check_size(62 << 20, 0).is_err());
        assert!(check_size((64 << 20) + 4096, 0).is_err());
        assert!(check_size(64 << 20, 1 << 80).is_err());
    }
}
