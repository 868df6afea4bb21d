//! `dunlin bench lanes`: what securing a lane costs.

use std::io::{Read, Write};

use anyhow::Result;
use clap::Args;
use dunlin::lane::provider::{CipherSuite, Provider};
use dunlin::lane::record::{CONTENT_BYTES, OpenHalf, RECORD_BYTES, SealHalf};

use super::common::Common;
use super::figures::{Figure, Record};
use super::hosts::BetweenHosts;
use super::rig::{Rig, Security, Spent, Work, connection, in_step};
use crate::options::SecurityName;

const LANES: [usize; 3] = [1, 2, 4];
/// Bytes written at once by the floor's plain copy.
const WRITE_BYTES: usize = 1 << 20;
/// Records that the floor seals and opens again and again: they stay in the
/// cache, which is the cheapest that sealing can be.
const HOT_RECORDS: usize = 16;

#[derive(Debug, Args)]
pub(crate) struct Lanes {
    #[command(flatten)]
    common: Common,
    /// Only this many lanes, instead of 1, 2 and 4.
    #[arg(long)]
    lanes: Option<usize>,
    /// Measure TLS and IPsec between two hosts instead, or plain and TLS on this one (tls).
    #[arg(long, value_enum, default_value_t)]
    security: SecurityName,
    #[command(flatten)]
    between: BetweenHosts,
}

/// The figures of one variant.
#[derive(Default)]
struct Figures {
    gib_per_s: Figure,
    cpu_s_per_gib: Figure,
    floor_ratio: Figure,
}

impl Figures {
    fn add(&mut self, spent: Spent, gibibytes: f64, floor: Option<Spent>) {
        self.gib_per_s.add(gibibytes / spent.wall_s);
        self.cpu_s_per_gib.add(spent.cpu_s / gibibytes);
        if let Some(floor) = floor {
            self.floor_ratio.add(spent.cpu_s / floor.cpu_s);
        }
    }
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
        // Written, so that both stand in memory before anything is timed.
        let source = vec![5; usize::try_from(rig.bytes)?];
        let mut target = vec![6; source.len()];
        for lanes in counts {
            let mut plain: Vec<Figures> = providers.iter().map(|_| Figures::default()).collect();
            let mut floors: Vec<Figures> = providers.iter().map(|_| Figures::default()).collect();
            let mut tls: Vec<Figures> = providers.iter().map(|_| Figures::default()).collect();
            for round in 0..=self.common.rounds {
                let copy = tcp_copy(&source, &mut target, lanes)?;
                let in_clear = rig.transfer(Security::Plain, lanes, rig.bytes, None)?;
                if round == 0 {
                    rig.verify()?;
                }
                for (index, &provider) in providers.iter().enumerate() {
                    let crypt = seal_and_open(rig.bytes, provider, lanes)?;
                    let floor = Spent {
                        wall_s: copy.wall_s + crypt.wall_s,
                        cpu_s: copy.cpu_s + crypt.cpu_s,
                    };
                    let secured = rig.transfer(Security::Tls(provider), lanes, rig.bytes, None)?;
                    if round == 0 {
                        rig.verify()?;
                        continue;
                    }
                    floors[index].add(floor, rig.gibibytes(), None);
                    plain[index].add(in_clear, rig.gibibytes(), Some(floor));
                    tls[index].add(secured, rig.gibibytes(), Some(floor));
                }
            }
            for (index, provider) in providers.iter().enumerate() {
                for (variant, figures) in [
                    ("floor", &floors[index]),
                    ("plain", &plain[index]),
                    ("tls", &tls[index]),
                ] {
                    print(variant, *provider, lanes, &rig, figures);
                }
            }
        }
        Ok(())
    }
}

fn print(variant: &str, provider: Provider, lanes: usize, rig: &Rig, figures: &Figures) {
    let mut record = Record::new("lanes", variant)
        .with("provider", provider.to_string())
        .with("lanes", lanes)
        .figure("gib_per_s", &figures.gib_per_s)
        .figure("cpu_s_per_gib", &figures.cpu_s_per_gib);
    if figures.floor_ratio.rounds() > 0 {
        record = record.figure("floor_ratio", &figures.floor_ratio);
    }
    record
        .with("rounds", figures.gib_per_s.rounds())
        .with("guest_bytes", rig.bytes)
        .with("content", "random")
        .with("dirty_rate", 0)
        .print();
}

/// As many bytes as the guest has, over plain TCP, by as many connections as
/// lanes.
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

/// Seals and opens as many bytes as the guest has, in as many threads as the
/// lanes have ends.
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
