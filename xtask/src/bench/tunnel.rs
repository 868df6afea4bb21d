//! `cargo xtask bench tunnel`: compares the tunnel with stunnel, OpenSSH, a proxy in Go, a direct
//! connection and minimal tunnels.
//!
//! The two processes of each variant run for the whole benchmark. The variants take turns in each
//! round, which spreads other load on the host over all of them. Work outside the tunnel (sender,
//! reader, opening connections) is the same for all variants and not part of the CPU time.

use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use dunlin_bench::{Comparison, Output, Results};
use dunlin_rig::debian;
use dunlin_rig::guest::{Content, Guest, Workload};
use dunlin_rig::machine::{Accelerator, Setup};

use super::cloud_hypervisor::{self, Way};
use super::ends::{Ends, Site, Variant};
use super::load::{self, Moved};
use super::migration::{self, Limits};
use super::pair::Pair;
use super::{program, turns, vcpu};

/// Options of the benchmark.
#[derive(Args, Debug)]
pub struct TunnelOptions {
    /// Number of turns of each variant.
    #[arg(long, value_name = "N", default_value_t = 5)]
    rounds: usize,
    /// The data that all streams of a turn carry in total, in MiB.
    #[arg(long, value_name = "MIB", default_value_t = 1024)]
    size: u64,
    /// Number of round trips of a turn.
    #[arg(long, value_name = "N", default_value_t = 1000)]
    trips: usize,
    /// Skips the measurements with QEMU.
    #[arg(long)]
    without_qemu: bool,
    /// Skips the measurements with Cloud Hypervisor, even if CLOUD_HYPERVISOR=PATH is set.
    #[arg(long)]
    without_cloud_hypervisor: bool,
    /// MiB of memory of QEMU's guest, 512 to 2048. QEMU estimates the bandwidth every 100 ms, so the
    /// time of a small guest depends on the first tenths of a second.
    #[arg(long, value_name = "MIB", default_value_t = WORKLOAD.memory_mib,
        value_parser = clap::value_parser!(u32).range(512..=2048))]
    guest_size: u32,
    /// QEMU's downtime limits, each measured in every round: QEMU switches over as soon as it
    /// predicts no more than this downtime.
    #[arg(long, value_name = "MS", value_delimiter = ',', default_value = "300")]
    downtime_limit: Vec<u32>,
    /// If QEMU's guest still runs at the source after this many seconds, the migration is ended and
    /// counts as one that does not converge.
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    migration_limit: u32,
    /// Variants to measure: bare, floor, pipeline, stunnel, openssh, go-proxy, relay, stripe-N, and
    /// qemu-tls, which is QEMU's own TLS without a tunnel.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "bare,floor,pipeline,stunnel,openssh,go-proxy,relay,stripe-1,stripe-2,stripe-4,qemu-tls"
    )]
    variants: Vec<Variant>,
    /// A built dunlin to measure, instead of a release build of this tree.
    #[arg(long, value_name = "FILE")]
    dunlin: Option<PathBuf>,
    #[command(flatten)]
    output: Output,
}

/// The numbers of concurrent streams that are measured.
const STREAMS: [usize; 2] = [1, 4];
/// The numbers of bytes in each direction of a round trip.
const TRIPS: [usize; 2] = [1, 4096];
/// The number of streams that are measured beside a stalled channel.
const BESIDE: usize = 4;
/// The number of QEMU's multifd channels in addition to its main connection. With `None`, all
/// memory is sent over the main connection.
const CHANNELS: [Option<u8>; 2] = [None, Some(4)];

/// A guest that fills 469 MiB, and then writes to 39 MiB of them about twice a second.
const WORKLOAD: Workload = Workload {
    memory_mib: 512,
    pages: 120_000,
    hot: 10_000,
    rate: Some(20_000),
    content: Content::Random,
    seed: 0xbe7c,
};

/// A part of a round that is measured on its own.
#[derive(Clone, Copy)]
enum Turn<'a> {
    /// Runs all variants one after the other, so that their ratios come from the same
    /// round.
    Bulk {
        ends: Ends,
        streams: usize,
    },
    PingPong {
        bytes: usize,
    },
    Stalled(&'a Pair),
    Qemu {
        pair: &'a Pair,
        channels: Option<u8>,
        downtime_limit: u32,
    },
    CloudHypervisor(&'a Pair),
}

impl fmt::Display for Turn<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bulk { ends, streams } => write!(out, "{} ends, streams: {streams}", ends.name()),
            Self::PingPong { bytes } => write!(out, "round trips, bytes: {bytes}"),
            Self::Stalled(pair) => write!(out, "{}, stalled channel", pair.variant),
            Self::CloudHypervisor(pair) => write!(out, "{}, Cloud Hypervisor", pair.variant),
            Self::Qemu {
                pair,
                channels,
                downtime_limit,
            } => {
                write!(out, "{}, QEMU, {downtime_limit} ms", pair.variant)?;
                match channels {
                    None => Ok(()),
                    Some(channels) => write!(out, ", multifd: {channels}"),
                }
            }
        }
    }
}

pub(super) fn run(options: &TunnelOptions) -> Result<()> {
    let dunlin = match &options.dunlin {
        Some(dunlin) => dunlin
            .canonicalize()
            .context("cannot find the file of --dunlin")?,
        None => program::dunlin()?,
    };
    let site = Site::new(dunlin)?;
    let pairs = start(options, &site)?;
    let qemu = if options.without_qemu {
        None
    } else {
        let qemu = debian::qemu()?;
        let accelerator = match File::open("/dev/kvm") {
            Ok(_) => Accelerator::Kvm,
            Err(_) => Accelerator::Tcg,
        };
        if accelerator == Accelerator::Kvm {
            vcpu::check()?;
        }
        // The memory that the guest does not fill stays the same.
        let more = options.guest_size - WORKLOAD.memory_mib;
        let workload = Workload {
            memory_mib: options.guest_size,
            pages: WORKLOAD.pages + (u64::from(more) << 8),
            ..WORKLOAD
        };
        let setup = Setup::new(&qemu, Guest::Bare, workload, accelerator);
        Some((setup, qemu.version()?))
    };
    let mut turns = Vec::new();
    for ends in Ends::BOTH {
        turns.extend(STREAMS.map(|streams| Turn::Bulk { ends, streams }));
    }
    turns.extend(TRIPS.map(|bytes| Turn::PingPong { bytes }));
    let shared = pairs
        .iter()
        .filter(|pair| pair.variant.shares_connections());
    turns.extend(shared.map(Turn::Stalled));
    if qemu.is_some() {
        for channels in CHANNELS {
            for &downtime_limit in &options.downtime_limit {
                turns.extend(pairs.iter().map(|pair| Turn::Qemu {
                    pair,
                    channels,
                    downtime_limit,
                }));
            }
        }
    }
    if !options.without_cloud_hypervisor {
        if dunlin_rig::cloud_hypervisor::program().is_some() {
            vcpu::check()?;
            let ends = pairs.iter().filter(|pair| pair.variant.carries_streams());
            turns.extend(ends.map(Turn::CloudHypervisor));
        } else {
            eprintln!("the variable CLOUD_HYPERVISOR is not set: Cloud Hypervisor is left out");
        }
    }
    let mut results = Results::default();
    let mut progress = options.output.progress(options.rounds * turns.len())?;
    let measured = turns::rounds(options.rounds, &turns, &mut results, |turn, results| {
        progress.step(&turn.to_string());
        match (*turn, &qemu) {
            (Turn::Bulk { ends, streams }, _) => {
                bulk(options, &site, &pairs, ends, streams, results)
            }
            (Turn::PingPong { bytes }, _) => ping_pong(options, &site, &pairs, bytes, results),
            (Turn::Stalled(pair), _) => stalled(options, &site, pair, results),
            (
                Turn::Qemu {
                    pair,
                    channels,
                    downtime_limit,
                },
                Some((setup, version)),
            ) => {
                let limits = Limits {
                    downtime: Duration::from_millis(downtime_limit.into()),
                    migration: Duration::from_secs(options.migration_limit.into()),
                };
                let moved = migration::migrate(&site, pair, setup, channels, limits)?;
                add_migration(pair, version, channels, limits, moved, results);
                Ok(())
            }
            (Turn::CloudHypervisor(pair), _) => migrate_cloud_hypervisor(&site, pair, results),
            (Turn::Qemu { .. }, None) => unreachable!("QEMU has turns only if it is available"),
        }
    });
    drop(progress);
    compare_migrations(&mut results);
    options.output.print(&results)?;
    measured
}

/// Compares QEMU's migrations through tunnels with those without: plain, and with QEMU's own TLS.
fn compare_migrations(results: &mut Results) {
    let comparison = |peer, figure, ratio| Comparison {
        scenario: "tunnel-qemu",
        peer,
        same: &["streams", "downtime_limit_ms"],
        figure,
        is_rate: false,
        ratio,
    };
    let is_tunnel = |name: &str| name.parse().is_ok_and(Variant::is_tunnel);
    let is_compared = |name: &str| is_tunnel(name) || name == Variant::Pipeline.to_string();
    results.compare(
        &comparison("bare", "total_s", "total_against_plain"),
        is_compared,
    );
    results.compare(
        &comparison("qemu-tls", "total_s", "total_against_tls"),
        is_tunnel,
    );
    results.compare(
        &comparison("qemu-tls", "downtime_ms", "downtime_against_tls"),
        is_tunnel,
    );
}

/// Starts the ends of each variant. Leaves the Go proxy out if there is no Go compiler.
fn start(options: &TunnelOptions, site: &Site) -> Result<Vec<Pair>> {
    let mut pairs = Vec::new();
    for &variant in &options.variants {
        if variant == Variant::GoProxy && !program::has_go()? {
            eprintln!("{variant} is left out: there is no Go compiler (`go`) to build it with");
            continue;
        }
        eprintln!("starting {variant}");
        let pair = Pair::start(site, variant).with_context(|| format!("{variant}"))?;
        let ends = Ends::BOTH.into_iter();
        for ends in ends.filter(|_| variant.carries_streams()) {
            // Connect once before the measurements, because the first connection sets up state that
            // later ones reuse.
            load::trips(site, &pair, ends, 1, 10).with_context(|| format!("{variant}"))?;
        }
        pairs.push(pair);
    }
    Ok(pairs)
}

fn streaming(pairs: &[Pair]) -> impl Iterator<Item = &Pair> {
    pairs.iter().filter(|pair| pair.variant.carries_streams())
}

fn bulk(
    options: &TunnelOptions,
    site: &Site,
    pairs: &[Pair],
    ends: Ends,
    streams: usize,
    results: &mut Results,
) -> Result<()> {
    let mut measured = Vec::new();
    for pair in streaming(pairs) {
        let moved = load::bulk(site, pair, ends, streams, options.size << 20)
            .with_context(|| format!("{}", pair.variant))?;
        measured.push((pair.variant, moved));
    }
    for (pair, &(variant, moved)) in streaming(pairs).zip(&measured) {
        let mut line = results
            .line("tunnel-bulk", &variant.to_string())
            .with("streams", streams)
            .with("ends", ends.name())
            .figure("gib_per_s", moved.gib_per_s)
            .figure("cpu_s_per_gib", moved.cpu_s_per_gib);
        for (name, ratio) in ratios(variant, moved, &measured) {
            line = line.figure(name, ratio);
        }
        if let Some(version) = &pair.version {
            line = line.detail("version", version.clone());
        }
        line.add();
    }
    Ok(())
}

/// Divides a tunnel's result by that of stunnel and by that of the floor. Leaves a ratio out if
/// stunnel or the floor was not measured.
fn ratios(
    variant: Variant,
    moved: Moved,
    measured: &[(Variant, Moved)],
) -> Vec<(&'static str, f64)> {
    let mut ratios = Vec::new();
    if !variant.is_tunnel() {
        return ratios;
    }
    let of = |wanted: Variant| {
        let found = measured.iter().find(|(variant, _)| *variant == wanted);
        found.map(|&(_, moved)| moved)
    };
    if let Some(stunnel) = of(Variant::Stunnel) {
        let cpu = moved.cpu_s_per_gib / stunnel.cpu_s_per_gib;
        ratios.push(("against_stunnel", moved.gib_per_s / stunnel.gib_per_s));
        ratios.push(("cpu_against_stunnel", cpu));
    }
    if let Some(floor) = of(Variant::Floor) {
        ratios.push(("floor_ratio", moved.cpu_s_per_gib / floor.cpu_s_per_gib));
    }
    ratios
}

fn ping_pong(
    options: &TunnelOptions,
    site: &Site,
    pairs: &[Pair],
    bytes: usize,
    results: &mut Results,
) -> Result<()> {
    for pair in streaming(pairs) {
        let mut times = load::trips(site, pair, Ends::Unix, bytes, options.trips)
            .with_context(|| format!("{}", pair.variant))?;
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
    Ok(())
}

/// Measures streams, first alone and then next to a channel that the far side does not
/// read.
fn stalled(options: &TunnelOptions, site: &Site, pair: &Pair, results: &mut Results) -> Result<()> {
    let bytes = options.size << 20;
    let free = load::bulk(site, pair, Ends::Unix, BESIDE, bytes)?;
    let held = load::Stalled::new(site, pair, Ends::Unix)?;
    let beside = load::bulk(site, pair, Ends::Unix, BESIDE, bytes)?;
    drop(held);
    results
        .line("tunnel-stalled", &pair.variant.to_string())
        .with("streams", BESIDE)
        .with("ends", "unix")
        .figure("gib_per_s", beside.gib_per_s)
        .figure("against_none_stalled", beside.gib_per_s / free.gib_per_s)
        .add();
    Ok(())
}

/// Adds the measurements of a migration by QEMU; `None` if the guest stayed at the source.
fn add_migration(
    pair: &Pair,
    version: &str,
    channels: Option<u8>,
    limits: Limits,
    moved: Option<migration::Moved>,
    results: &mut Results,
) {
    let limit_ms = u64::try_from(limits.downtime.as_millis()).unwrap_or(u64::MAX);
    let mut line = results
        .line("tunnel-qemu", &pair.variant.to_string())
        .with("streams", channels.unwrap_or(1))
        .with("ends", "unix")
        .with("downtime_limit_ms", limit_ms)
        .detail("version", format!("QEMU {version}"))
        .figure("ended", f64::from(u8::from(moved.is_some())));
    if let Some(moved) = moved {
        line = line
            .figure("total_s", moved.total_s)
            .figure("downtime_ms", moved.downtime_ms)
            .figure("guest_downtime_ms", moved.guest_downtime_ms);
    }
    line.add();
}

/// Migrates over a single stream between unix sockets, without Cloud Hypervisor's own TLS.
fn migrate_cloud_hypervisor(site: &Site, pair: &Pair, results: &mut Results) -> Result<()> {
    // An earlier destination may have left its socket behind.
    let _ = fs::remove_file(site.qemu());
    let url = |path: &Path| format!("unix:{}", path.display());
    let way = Way {
        urls: [url(&pair.qemu), url(&site.qemu())],
        connections: 1,
        tls: None,
    };
    let tunnel = pair.cpu_s()?;
    let moved = cloud_hypervisor::migrate(&WORKLOAD, None, &way)
        .with_context(|| format!("cannot migrate Cloud Hypervisor through {}", pair.variant))?;
    let gibibytes = f64::from(WORKLOAD.memory_mib) / 1024.0;
    results
        .line("tunnel-cloud-hypervisor", &pair.variant.to_string())
        .with("streams", 1)
        .with("ends", "unix")
        .figure("total_s", moved.total_s)
        .figure("cpu_s_per_gib", (pair.cpu_s()? - tunnel) / gibibytes)
        .figure("guest_downtime_ms", moved.downtime_ms)
        .add();
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_of_tunnels_only_and_of_the_same_round() {
        let moved = |gib_per_s, cpu_s_per_gib| Moved {
            gib_per_s,
            cpu_s_per_gib,
        };
        let floor = (Variant::Floor, moved(2.0, 0.5));
        let relay = (Variant::Relay, moved(1.5, 0.75));
        let stunnel = (Variant::Stunnel, moved(0.5, 1.5));
        let all = [floor, relay, stunnel];
        assert_eq!(
            ratios(relay.0, relay.1, &all),
            [
                ("against_stunnel", 3.0),
                ("cpu_against_stunnel", 0.5),
                ("floor_ratio", 1.5)
            ]
        );
        let own = ratios(stunnel.0, stunnel.1, &all);
        assert_eq!(own.last(), Some(&("floor_ratio", 3.0)));
        assert!(ratios(floor.0, floor.1, &all).is_empty());
        assert!(ratios(relay.0, relay.1, &[relay]).is_empty());
    }
}
