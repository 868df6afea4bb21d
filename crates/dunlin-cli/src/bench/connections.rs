//! `dunlin bench connections`: the benefit of more lanes if the network, or a cloud provider's cap,
//! limits the rate of each connection.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::Args;
use dunlin::lane::fastest::auto;
use dunlin_bench::{Results, Spread};

use super::common::Common;
use super::rig::{Rig, connection};
use crate::options::parse_bytes;

const LANES: [usize; 5] = [1, 2, 4, 8, 16];
/// Bytes that Cloud Hypervisor sends on a connection before it waits for the destination's answer
/// (`CHUNK_SIZE` in vmm/src/migration/transport.rs).
const STOP_AND_WAIT_BYTES: f64 = (64 << 20) as f64;
/// Duration of a transfer in seconds. The transfer is shorter if the bench has too little memory
/// for it. The start-up of a connection's pacing is negligible compared with this duration.
const SECONDS: u64 = 1;
const PINGS: u32 = 200;

#[derive(Debug, Args)]
pub(crate) struct Connections {
    #[command(flatten)]
    common: Common,
    /// Rate at which the kernel paces each connection, in bytes per second.
    #[arg(long, value_parser = parse_bytes, default_value = "100M")]
    rate: u64,
    /// Round-trip time in milliseconds, from which the stop-and-wait rate is computed [default:
    /// measured over loopback].
    #[arg(long)]
    rtt_ms: Option<f64>,
}

impl Connections {
    pub(super) fn run(&self) -> Result<()> {
        self.common.check()?;
        ensure!(self.rate >= 1 << 20, "--rate must be 1M or more");
        let rig = Rig::new(self.common.size)?;
        let provider = self.common.provider;
        let provider = provider.unwrap_or_else(|| auto().provider);
        let rtt_s = match self.rtt_ms {
            Some(rtt_ms) => rtt_ms / 1000.0,
            None => round_trip()?.as_secs_f64(),
        };
        let cpus = std::thread::available_parallelism()?.get();
        let mut results = Results::default();
        let steps = self.common.rounds * LANES.len();
        let mut progress = self.common.output.progress(steps)?;
        for _ in 0..self.common.rounds {
            let mut one_lane = 0.0;
            for lanes in LANES {
                progress.step(&format!("lanes: {lanes}"));
                let bytes = rig.bytes.min(self.rate * SECONDS * lanes as u64) >> 21 << 21;
                let gibibytes = bytes as f64 / f64::from(1 << 30);
                let spent = rig.transfer(Some(provider), lanes, bytes, Some(self.rate))?;
                let gib_per_s = gibibytes / spent.wall_s;
                if lanes == 1 {
                    one_lane = gib_per_s;
                }
                let chunk_s = STOP_AND_WAIT_BYTES / self.rate as f64 + rtt_s;
                let stop_and_wait = lanes as f64 * STOP_AND_WAIT_BYTES / chunk_s;
                results
                    .line("connections", "tls")
                    .with("provider", provider.to_string())
                    .with("lanes", lanes)
                    .with("lane_bytes_per_s", self.rate)
                    .with("rtt_ms", (rtt_s * 1e6).round() / 1e3)
                    .with("cpus", cpus)
                    .with("guest_bytes", bytes)
                    .with("content", "random")
                    .with("dirty_rate", 0)
                    .figure("gib_per_s", gib_per_s)
                    .figure("cpu_s_per_gib", spent.cpu_s / gibibytes)
                    // If this figure is near 1, all CPUs are busy, and more lanes do not help.
                    .figure("cpu_busy", spent.cpu_s / (spent.wall_s * cpus as f64))
                    .figure("one_lane_ratio", gib_per_s / one_lane)
                    .figure(
                        "stop_and_wait_gib_per_s",
                        stop_and_wait / f64::from(1 << 30),
                    )
                    .add();
            }
        }
        drop(progress);
        self.common.output.print(&results)
    }
}

/// The median duration of a one-byte round trip over loopback.
fn round_trip() -> Result<Duration> {
    let (mut near, mut far) = connection()?;
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    std::thread::scope(|scope| {
        let echo = scope.spawn(move || -> std::io::Result<()> {
            let mut byte = [0];
            for _ in 0..PINGS {
                far.read_exact(&mut byte)?;
                far.write_all(&byte)?;
            }
            Ok(())
        });
        let mut times = Vec::new();
        for _ in 0..PINGS {
            let began = Instant::now();
            near.write_all(&[1])?;
            near.read_exact(&mut [0])?;
            times.push(began.elapsed().as_secs_f64());
        }
        match echo.join() {
            Ok(ended) => ended?,
            Err(_) => anyhow::bail!("the echo thread panicked"),
        }
        Ok(Duration::from_secs_f64(Spread::of(&times).median))
    })
}
