//! `cargo xtask bench tunnel`.
//!
//! The two processes of each variant run for the whole benchmark. The variants take turns in each
//! round, which spreads other load on the host over all of them. Work outside the tunnel (sender,
//! reader, opening connections) is the same for all variants and not part of the CPU time.

use std::fs::File;

use anyhow::{Context, Result};
use clap::Args;
use dunlin_bench::{Output, Progress, Results};
use dunlin_rig::debian;
use dunlin_rig::guest::{Content, Guest, Workload};
use dunlin_rig::machine::{Accelerator, Setup};

use super::ends::{Ends, Pair, Site, Variant};
use super::{load, migration, program};

/// Options of the benchmark.
#[derive(Args, Debug)]
pub struct TunnelOptions {
    /// Turns of each variant.
    #[arg(long, value_name = "N", default_value_t = 5)]
    rounds: u32,
    /// MiB that all streams of a turn carry in total.
    #[arg(long, value_name = "MIB", default_value_t = 1024)]
    size: u64,
    /// Round trips of a turn.
    #[arg(long, value_name = "N", default_value_t = 1000)]
    trips: usize,
    /// Skips the measurements with QEMU.
    #[arg(long)]
    without_qemu: bool,
    /// Variants to measure: bare, pipeline, stunnel, relay, stripe-N.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "bare,pipeline,stunnel,relay,stripe-1,stripe-2,stripe-4"
    )]
    variants: Vec<Variant>,
    #[command(flatten)]
    output: Output,
}

/// Numbers of concurrent streams.
const STREAMS: [usize; 2] = [1, 4];
/// Sizes of a round trip in bytes.
const TRIPS: [usize; 2] = [1, 4096];

/// 512 MiB, of which the guest writes to 40 MiB about twice a second.
const WORKLOAD: Workload = Workload {
    memory_mib: 512,
    pages: 120_000,
    hot: 10_000,
    rate: Some(20_000),
    content: Content::Random,
    seed: 0xbe7c,
};

pub(super) fn run(options: &TunnelOptions) -> Result<()> {
    let site = Site::new(program::dunlin()?)?;
    let mut pairs = Vec::new();
    for &variant in &options.variants {
        eprintln!("starting {variant}");
        let pair = Pair::start(&site, variant).with_context(|| format!("{variant}"))?;
        for ends in Ends::BOTH {
            // The first connection sets up state that later ones reuse.
            load::trips(&site, &pair, ends, 1, 10)?;
        }
        pairs.push(pair);
    }
    let mut results = Results::default();
    let qemu = if options.without_qemu {
        None
    } else {
        let qemu = debian::qemu()?;
        let accelerator = match File::open("/dev/kvm") {
            Ok(_) => Accelerator::Kvm,
            Err(_) => Accelerator::Tcg,
        };
        Some(Setup::new(&qemu, Guest::Bare, WORKLOAD, accelerator))
    };
    let mut progress = Progress::new(options.rounds as usize);
    let measured = (0..options.rounds).try_for_each(|_| {
        progress.step("round");
        round(options, &site, &pairs, qemu.as_ref(), &mut results)
    });
    drop(progress);
    // After a failure these are the measurements before it.
    options.output.print(&results)?;
    measured
}

fn round(
    options: &TunnelOptions,
    site: &Site,
    pairs: &[Pair],
    qemu: Option<&Setup>,
    results: &mut Results,
) -> Result<()> {
    bulk(options, site, pairs, results)?;
    ping_pong(options, site, pairs, results)?;
    stalled(options, site, pairs, results)?;
    let Some(setup) = qemu else { return Ok(()) };
    for pair in pairs {
        let moved = migration::migrate(site, pair, setup)?;
        results
            .line("tunnel-qemu", &pair.variant.to_string())
            .with("streams", 1)
            .with("ends", "unix")
            .figure("total_s", moved.total_s)
            .figure("downtime_ms", moved.downtime_ms)
            .figure("guest_downtime_ms", moved.guest_downtime_ms)
            .add();
    }
    Ok(())
}

fn bulk(options: &TunnelOptions, site: &Site, pairs: &[Pair], results: &mut Results) -> Result<()> {
    for ends in Ends::BOTH {
        for streams in STREAMS {
            let mut stunnel = None;
            for pair in pairs {
                let moved = load::bulk(site, pair, ends, streams, options.size << 20)?;
                if pair.variant == Variant::Stunnel {
                    stunnel = Some(moved);
                }
                let mut line = results
                    .line("tunnel-bulk", &pair.variant.to_string())
                    .with("streams", streams)
                    .with("ends", ends.name())
                    .figure("gib_per_s", moved.gib_per_s)
                    .figure("cpu_s_per_gib", moved.cpu_s_per_gib);
                if let Some(stunnel) = stunnel {
                    line = line.figure("against_stunnel", moved.gib_per_s / stunnel.gib_per_s);
                    if pair.variant != Variant::Bare {
                        let ratio = moved.cpu_s_per_gib / stunnel.cpu_s_per_gib;
                        line = line.figure("cpu_against_stunnel", ratio);
                    }
                }
                line.add();
            }
        }
    }
    Ok(())
}

fn ping_pong(
    options: &TunnelOptions,
    site: &Site,
    pairs: &[Pair],
    results: &mut Results,
) -> Result<()> {
    for bytes in TRIPS {
        for pair in pairs {
            let mut times = load::trips(site, pair, Ends::Unix, bytes, options.trips)?;
            times.sort_unstable();
            let at = |share: f64| {
                let position = (times.len() as f64 * share) as usize;
                let time = times.get(position).or(times.last());
                time.map_or(0.0, |time| time.as_secs_f64() * 1e6)
            };
            results
                .line("tunnel-pingpong", &pair.variant.to_string())
                .with("streams", 1)
                .with("ends", "unix")
                .with("bytes", bytes)
                .figure("latency_us_median", at(0.5))
                .figure("latency_us_p99", at(0.99))
                .add();
        }
    }
    Ok(())
}

/// Measures four streams, without and with a fifth channel that its far side does not read.
fn stalled(
    options: &TunnelOptions,
    site: &Site,
    pairs: &[Pair],
    results: &mut Results,
) -> Result<()> {
    for pair in pairs {
        if !matches!(pair.variant, Variant::Stripe(_)) {
            continue;
        }
        let bytes = options.size << 20;
        let free = load::bulk(site, pair, Ends::Unix, 4, bytes)?;
        let held = load::Stalled::new(site, pair, Ends::Unix)?;
        let beside = load::bulk(site, pair, Ends::Unix, 4, bytes)?;
        drop(held);
        results
            .line("tunnel-stalled", &pair.variant.to_string())
            .with("streams", 4)
            .with("ends", "unix")
            .figure("gib_per_s", beside.gib_per_s)
            .figure("against_none_stalled", beside.gib_per_s / free.gib_per_s)
            .add();
    }
    Ok(())
}
