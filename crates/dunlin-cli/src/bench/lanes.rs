//! `dunlin bench lanes`: the cost of securing a lane.

use anyhow::Result;
use clap::Args;
use dunlin_bench::Results;

use super::common::Common;
use super::floor;
use super::hosts::BetweenHosts;
use super::rig::{Rig, Spent};
use crate::options::{SecurityName, parse_lanes};

const LANES: [usize; 3] = [1, 2, 4];
/// Index of the measurement that moves no guest memory.
const CACHE_FLOOR: usize = 3;

#[derive(Debug, Args)]
pub(crate) struct Lanes {
    #[command(flatten)]
    common: Common,
    /// Number of lanes; repeatable [default: 1, 2 and 4].
    #[arg(long, value_name = "N", value_parser = parse_lanes())]
    lanes: Vec<u16>,
    /// `ipsec` measures TLS and IPsec between two hosts; `tls` and `plain` both measure plain and
    /// TLS lanes on this host.
    #[arg(long, value_enum, default_value_t)]
    security: SecurityName,
    #[command(flatten)]
    between: BetweenHosts,
}

impl Lanes {
    pub(super) fn run(&self) -> Result<()> {
        self.common.check()?;
        let counts: Vec<_> = match &self.lanes[..] {
            [] => LANES.to_vec(),
            some => some.iter().copied().map(usize::from).collect(),
        };
        if let SecurityName::Ipsec = self.security {
            return self.between.run(&counts, &self.common);
        }
        let rig = Rig::new(self.common.size)?;
        let providers = self.common.providers();
        let mut results = Results::default();
        let rounds = 0..=self.common.rounds;
        let steps = rounds.clone().count() * counts.len() * providers.len();
        let mut progress = self.common.output.progress(steps)?;
        let mut configurations = 0;
        for round in rounds {
            for &lanes in &counts {
                for &provider in &providers {
                    progress.step(&format!("{provider}, lanes: {lanes}"));
                    let (source, target) = (&rig.source, &rig.target);
                    configurations += 1;
                    let mut spent = [Spent::default(); 5];
                    // The order changes each time, so that no measurement always follows the same
                    // one. Five is prime, so each stride from 1 to 4 visits all of them.
                    for turn in 0..spent.len() {
                        let at = (configurations + turn * (1 + configurations % 4)) % spent.len();
                        let is_verified = round == 0 && at != CACHE_FLOOR;
                        if is_verified {
                            rig.refill()?;
                        }
                        spent[at] = match at {
                            0 => rig.transfer(None, lanes, rig.bytes, None)?,
                            1 => floor::copy(source, target, rig.bytes, lanes)?,
                            2 => floor::seal_and_open(source, target, rig.bytes, provider, lanes)?,
                            CACHE_FLOOR => floor::cached(rig.bytes, provider, lanes)?,
                            _ => rig.transfer(Some(provider), lanes, rig.bytes, None)?,
                        };
                        if is_verified {
                            rig.verify()?;
                        }
                    }
                    if round == 0 {
                        continue;
                    }
                    let [plain, copied, sealed, cached, tls] = spent;
                    let floor = copied + sealed;
                    let mut add = |variant: &str, spent: Spent| {
                        results
                            .line("lanes", variant)
                            .with("provider", provider.to_string())
                            .with("lanes", lanes)
                            .with("guest_bytes", rig.bytes)
                            .with("content", "random")
                            .with("dirty_rate", 0)
                            .figure("gib_per_s", rig.gibibytes() / spent.wall_s)
                            .figure("cpu_s_per_gib", spent.cpu_s / rig.gibibytes())
                            .figure("floor_ratio", spent.cpu_s / floor.cpu_s)
                            .figure("cache_floor_ratio", spent.cpu_s / cached.cpu_s)
                            .figure("plain_floor_ratio", spent.cpu_s / copied.cpu_s)
                            .figure("stolen_s", spent.stolen_s)
                            .add();
                    };
                    add("plain-floor", copied);
                    add("floor", floor);
                    add("cache-floor", cached);
                    add("plain", plain);
                    add("tls", tls);
                }
            }
        }
        drop(progress);
        self.common.output.print(&results)
    }
}
