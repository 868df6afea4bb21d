//! The flags of `dunlin demo`, and what its variants share.

use std::time::Duration;

use anyhow::Result;
use clap::Args;
use dunlin::engine::vmm::FaultCode;
use dunlin_microvm::GuestKind;

use crate::code::FAILED;
use crate::line::FailedLine;
use crate::options::{GUESTS, LaneCount, SecurityName, named, parse_bytes};

/// Run time of the guest at the source before the move, and at the destination afterwards.
pub(super) const RUNS_FOR: Duration = Duration::from_millis(1500);

#[derive(Debug, Args)]
pub(crate) struct Demo {
    /// Kind of guest [default: kvm, or process if /dev/kvm is missing].
    #[arg(long, value_parser = named(GUESTS))]
    pub(super) guest: Option<GuestKind>,
    /// The guest's memory [default: 1G, or 256M for each guest with --evacuate].
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub(super) memory: Option<u64>,
    /// Move N guests at the same time, 1 to 16, as when a host is emptied. All of them arrive in
    /// one process.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=16))]
    pub(super) evacuate: Option<u16>,
    /// Number of data lanes, 1 to 128; `auto` takes one for each CPU, from 2 to 8.
    #[arg(long, value_name = "N|auto", default_value = "auto")]
    pub(super) lanes: LaneCount,
    /// Security of the data lanes.
    #[arg(long, value_enum, default_value_t)]
    pub(super) security: SecurityName,
    /// Pages that the guest writes per second.
    #[arg(long, value_name = "PAGES_PER_S", default_value_t = 20_000)]
    pub(super) dirty_rate: u64,
    /// Print one JSON object per line; the last one is the demo's result.
    #[arg(long)]
    pub(super) json: bool,
}

impl Demo {
    /// The memory of a guest.
    pub(super) fn memory(&self) -> u64 {
        let of_several = self.evacuate.map(|_| 256 << 20);
        self.memory.or(of_several).unwrap_or(1 << 30)
    }

    /// Flags of `vm run`.
    pub(super) fn run_flags(&self, guest: GuestKind) -> Vec<String> {
        let (memory, rate) = (self.memory().to_string(), self.dirty_rate.to_string());
        let run = ["--workload", "hot-set", "--guest", name_of(guest)];
        let sizes = ["--memory", &memory, "--dirty-rate", &rate];
        run.into_iter().chain(sizes).map(str::to_owned).collect()
    }

    /// Flags of `vm receive`.
    pub(super) fn receive_flags(&self) -> Vec<&'static str> {
        match self.security {
            SecurityName::Plain => vec!["--digests", "--allow-plain"],
            _ => vec!["--digests"],
        }
    }
}

pub(super) fn name_of(guest: GuestKind) -> &'static str {
    match guest {
        GuestKind::Kvm => "kvm",
        GuestKind::Process => "process",
    }
}

/// Compares digests of both memories, one for each 2 MiB.
///
/// # Errors
/// The digests differ, or are missing.
pub(super) fn compare(source: &[u64], destination: &[u64]) -> Result<()> {
    let blocks = source.len();
    let differ: Vec<usize> = (0..blocks)
        .filter(|&block| source.get(block) != destination.get(block))
        .collect();
    let text = match differ.first() {
        _ if blocks == 0 || blocks != destination.len() => {
            "the memories were not compared, because a process could not digest its memory".into()
        }
        None => return Ok(()),
        Some(first) => format!(
            "the memory at the destination differs from the source's in {} of {blocks} blocks of 2 \
             MiB; the first is block {first}, counted from 0 without the hole below 4 GiB",
            differ.len()
        ),
    };
    Err(FailedLine::new(FaultCode::VerificationFailed, "", text, FAILED).into())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn i3_the_demo_fails_unless_all_blocks_are_equal() {
        let fault = |source: &[u64], destination: &[u64]| {
            let error = compare(source, destination).unwrap_err();
            let failed: FailedLine = (&error).into();
            (failed.fault, failed.code)
        };
        let verification_failed = (FaultCode::VerificationFailed.to_string(), FAILED);
        compare(&[1, 2, 3], &[1, 2, 3]).unwrap();
        for (source, destination) in [
            (&[1, 2, 3][..], &[1, 2, 4][..]),
            (&[1, 2], &[1, 2, 3]),
            (&[1, 2], &[]),
            (&[], &[1]),
            (&[], &[]),
        ] {
            assert_eq!(fault(source, destination), verification_failed);
        }
    }
}
