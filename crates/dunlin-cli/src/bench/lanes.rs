//! `dunlin bench lanes`: the cost of securing a lane.

use std::io::{Read, Write};

use anyhow::Result;
use clap::Args;
use dunlin::lane::provider::{CipherSuite, Provider};
use dunlin::lane::record::{CONTENT_BYTES, OpenHalf, RECORD_BYTES, SealHalf};

use super::common::Common;
use super::figures::{Figures, Record};
use super::hosts::BetweenHosts;
use super::rig::{Rig, Spent, Work, connection, in_step};
use crate::options::SecurityName;

const LANES: [usize; 3] = [1, 2, 4];
/// Bytes per write of the floor's plain copy.
const WRITE_BYTES: usize = 1 << 20;
/// Records that the floor seals and opens repeatedly: they stay in the cache, the cheapest case of
/// sealing.
const HOT_RECORDS: usize = 16;

#[derive(Debug, Args)]
pub(crate) struct Lanes {
    #[command(flatten)]
    common: Common,
    /// Measure only this number of lanes, instead of 1, 2 and 4.
    #[arg(long)]
    lanes: Option<usize>,
    /// `ipsec` measures TLS and IPsec between two hosts; otherwise plain and TLS on this host.
    #[arg(long, value_enum, default_value_t)]
    security: SecurityName,
    #[command(flatten)]
    between: BetweenHosts,
}

/// The measurements of one round of a variant.
fn measured(spent: Spent, gibibytes: f64) -> [(&'static str, f64); 2] {
    [
        ("gib_per_s", gibibytes / spent.wall_s),
        ("cpu_s_per_gib", spent.cpu_s / gibibytes),
    ]
}

impl Lanes {
    pub(super) fn run(&self) -> Result<()> {
        self.common.check()?;
        let counts = self
            .lanes
            .map_or(LANES.to_vec(), |lanes| vec![lanes.max(1)]);
        if let SecurityName::Ipsec = self.security {
            let Common { rounds, size, .. } = self.common;
            return self.between.run(&counts, rounds, size);
        }
        let rig = Rig::new(self.common.size)?;
        let providers = self.common.providers();
        // Written, to be resident before the measurement.
        let source = vec![5; usize::try_from(rig.bytes)?];
        let mut target = vec![6; source.len()];
        for lanes in counts {
            let mut all: Vec<[Figures; 3]> = Vec::new();
            all.resize_with(providers.len(), Default::default);
            for round in 0..=self.common.rounds {
                let copy = tcp_copy(&source, &mut target, lanes)?;
                let in_clear = rig.transfer(None, lanes, rig.bytes, None)?;
                if round == 0 {
                    rig.verify()?;
                }
                for (&provider, [floors, plain, tls]) in providers.iter().zip(&mut all) {
                    let crypt = seal_and_open(rig.bytes, provider, lanes)?;
                    let floor = Spent {
                        wall_s: copy.wall_s + crypt.wall_s,
                        cpu_s: copy.cpu_s + crypt.cpu_s,
                    };
                    let secured = rig.transfer(Some(provider), lanes, rig.bytes, None)?;
                    if round == 0 {
                        rig.verify()?;
                        continue;
                    }
                    floors.add(measured(floor, rig.gibibytes()));
                    for (figures, spent) in [(plain, in_clear), (tls, secured)] {
                        figures.add(measured(spent, rig.gibibytes()));
                        figures.add([("floor_ratio", spent.cpu_s / floor.cpu_s)]);
                    }
                }
            }
            for (provider, figures) in providers.iter().zip(&all) {
                for (variant, figures) in ["floor", "plain", "tls"].into_iter().zip(figures) {
                    Record::new("lanes", variant)
                        .with("provider", provider.to_string())
                        .with("lanes", lanes)
                        .figures(figures)
                        .with("guest_bytes", rig.bytes)
                        .with("content", "random")
                        .with("dirty_rate", 0)
                        .print();
                }
            }
        }
        Ok(())
    }
}

/// Copies the guest's bytes over plain TCP, with one connection per lane.
fn tcp_copy(source: &[u8], target: &mut [u8], lanes: usize) -> Result<Spent> {
    let share = source.len().div_ceil(lanes);
    let mut work: Vec<Work> = Vec::new();
    for (from, to) in source.chunks(share).zip(target.chunks_mut(share)) {
        let (mut near, mut far) = connection()?;
        work.push(Box::new(move || {
            for piece in from.chunks(WRITE_BYTES) {
                near.write_all(piece)?;
            }
            Ok(())
        }));
        work.push(Box::new(move || Ok(far.read_exact(to)?)));
    }
    in_step(work)
}

/// Seals and opens the guest's bytes, with one thread per lane end.
fn seal_and_open(bytes: u64, provider: Provider, lanes: usize) -> Result<Spent> {
    let ends = 2 * lanes as u64;
    let turns = bytes / (ends * (HOT_RECORDS * CONTENT_BYTES) as u64);
    let work = (0..ends).map(|_| -> Work {
        Box::new(move || {
            let suite = CipherSuite::Aes256Gcm;
            let mut seal = SealHalf::new(provider, suite, &[1; 32], [2; 12], 0)?;
            let mut open = OpenHalf::new(provider, suite, &[1; 32], [2; 12], 0)?;
            let mut records = vec![3; HOT_RECORDS * RECORD_BYTES];
            for _ in 0..turns {
                for record in records.chunks_exact_mut(RECORD_BYTES) {
                    seal.seal(record)?;
                }
                for record in records.chunks_exact_mut(RECORD_BYTES) {
                    open.open(record)?;
                }
            }
            Ok(())
        })
    });
    in_step(work.collect())
}
