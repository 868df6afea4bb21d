//! `cargo xtask bench long-line`: migrations over a network path with a long round trip.
//!
//! Source and destination run in two network namespaces. A thread delays the packets between them
//! by half of the round trip, so TCP sees a path ("line") with a long round trip. The guest is
//! idle, and each lane is paced by the kernel, so the path's capacity is the same at every round
//! trip. The benchmark measures the rate of the first pass, and the duration of the whole
//! migration.
//!
//! With a socket buffer of B bytes, a lane carries at most B bytes in each round trip. Two figures
//! of the kernel show which buffer limits a lane. Both are parts of the time in which the lane has
//! data to send: in one part the peer's receive window is full (`tcpi_rwnd_limited`, tcp(7)), in
//! the other the lane's own send buffer is full (`tcpi_sndbuf_limited`). A third figure shows
//! whether packets were lost: the share of the bytes that TCP sent again.

use std::fmt;
use std::fs;
use std::net::SocketAddr;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use dunlin_bench::{Output, Results, TouchedMemory};
use dunlin_rig::hosts::{Family, Host, Link, LinkOptions};

use super::vm::{DESTINATION, Files, Process, SOURCE, number};
use super::{program, turns};

/// Options of the benchmark.
#[derive(Args, Debug)]
pub struct LongLineOptions {
    /// Number of migrations for each round trip time and each setting of the socket buffers.
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: usize,
    /// MiB of guest memory.
    #[arg(long, value_name = "MIB", default_value_t = 2048)]
    size: u32,
    /// Round trip times in milliseconds.
    #[arg(long, value_name = "MS", value_delimiter = ',', default_values_t = [0, 10, 50, 100])]
    rtt_ms: Vec<u16>,
    /// Number of lanes.
    #[arg(long, value_name = "N", default_value_t = 8)]
    lanes: u16,
    /// Rate of each lane in MiB/s.
    #[arg(long, value_name = "MIB", default_value_t = 50)]
    lane_rate: u16,
    /// Congestion controls of TCP, for instance `cubic,bbr`. The default is the kernel's.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    congestion_control: Vec<String>,
    #[command(flatten)]
    output: Output,
}

/// The MTU of the line. A TCP packet on the line can be larger, because the kernel need not segment
/// it.
const MTU_BYTES: u32 = 9000;
/// The time between two readings of the kernel's figures.
const BETWEEN_READINGS: Duration = Duration::from_millis(100);
const LIMIT: Duration = Duration::from_secs(120);

/// The kernel's limits of socket buffers.
#[derive(Clone, Copy)]
enum Buffers {
    /// The limits that the host's kernel sets in a new network namespace.
    Default,
    /// At most 16 MiB for sending and for receiving.
    Large,
}

#[derive(Clone)]
struct Turn {
    buffers: Buffers,
    congestion_control: String,
    rtt_ms: u16,
}

impl fmt::Display for Turn {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (buffers, rtt_ms) = (self.buffers.name(), self.rtt_ms);
        let congestion_control = &self.congestion_control;
        write!(
            out,
            "{buffers}, {congestion_control}, round trip {rtt_ms} ms"
        )
    }
}

/// The file with the congestion control of new connections, in each network namespace.
const CONGESTION_CONTROL: &str = "/proc/sys/net/ipv4/tcp_congestion_control";

impl Buffers {
    fn name(self) -> &'static str {
        match self {
            Self::Default => "default buffers",
            Self::Large => "buffers of 16 MiB",
        }
    }

    /// Sets the limits in the network namespace of the calling thread.
    fn set(self) -> std::io::Result<()> {
        match self {
            Self::Default => Ok(()),
            Self::Large => ["tcp_rmem", "tcp_wmem"].iter().try_for_each(|name| {
                fs::write(
                    format!("/proc/sys/net/ipv4/{name}"),
                    format!("4096 131072 {}", 16 << 20),
                )
            }),
        }
    }
}

pub(super) fn run(options: &LongLineOptions) -> Result<()> {
    ensure!(options.rounds > 0, "--rounds must be 1 or more");
    let bench = Bench::new(options)?;
    let congestion_controls = match options.congestion_control.as_slice() {
        [] => {
            let own = fs::read_to_string(CONGESTION_CONTROL)
                .with_context(|| format!("cannot read {CONGESTION_CONTROL}"))?;
            vec![own.trim().to_owned()]
        }
        named => named.to_vec(),
    };
    let mut turns = Vec::new();
    for buffers in [Buffers::Large, Buffers::Default] {
        for congestion_control in &congestion_controls {
            let of = |&rtt_ms| Turn {
                buffers,
                congestion_control: congestion_control.clone(),
                rtt_ms,
            };
            turns.extend(options.rtt_ms.iter().map(of));
        }
    }
    let mut results = Results::default();
    let mut progress = options.output.progress(options.rounds * turns.len())?;
    let measured = turns::rounds(options.rounds, &turns, &mut results, |turn, results| {
        progress.step(&turn.to_string());
        let measured = bench.migrate(turn)?;
        results
            .line("long-line", turn.buffers.name())
            .with("congestion_control", turn.congestion_control.as_str())
            .with("rtt_ms", turn.rtt_ms)
            .with("lanes", options.lanes)
            .with("lane_rate", u64::from(options.lane_rate) << 20)
            .with("guest_bytes", u64::from(options.size) << 20)
            .with("content", "random")
            .figure("gib_per_s", measured.gib_per_s)
            .figure("total_s", measured.total_s)
            .figure("downtime_ms", measured.downtime_ms)
            .figure("rwnd_limited_percent", measured.held.rwnd_percent())
            .figure("sndbuf_limited_percent", measured.held.sndbuf_percent())
            .figure(
                "retransmitted_percent",
                measured.held.retransmitted_percent(),
            )
            .add();
        Ok(())
    });
    drop(progress);
    options.output.print(&results)?;
    measured
}

/// What all migrations share: the options, the program and the certificates.
struct Bench<'a> {
    options: &'a LongLineOptions,
    files: Files,
}

/// The measurements of one migration.
struct Measured {
    /// The rate of the first pass.
    gib_per_s: f64,
    total_s: f64,
    downtime_ms: f64,
    held: Held,
}

impl<'a> Bench<'a> {
    fn new(options: &'a LongLineOptions) -> Result<Self> {
        let files = Files::new(program::dunlin()?)?;
        Ok(Self { options, files })
    }

    /// A command of `dunlin vm` on a host, with a control socket of its own.
    fn vm(&self, host: &Host, name: &str, command: &str) -> Command {
        let mut vm = host.enter(&self.files.vm(command));
        vm.arg("--control")
            .arg(self.files.path(&format!("{name}.sock")));
        vm
    }

    fn migrate(&self, turn: &Turn) -> Result<Measured> {
        let (source, destination) = (Host::new("source")?, Host::new("destination")?);
        let line = LinkOptions {
            delay: Some(Duration::from_micros(500 * u64::from(turn.rtt_ms))),
            mtu_bytes: Some(MTU_BYTES),
            ..LinkOptions::default()
        };
        let link = Link::new(&source, &destination, &line)?;
        for host in [&source, &destination] {
            host.run(|| turn.buffers.set())?
                .context("cannot set the limits of socket buffers")?;
            let name = &turn.congestion_control;
            host.run(|| fs::write(CONGESTION_CONTROL, name))?
                .with_context(|| {
                    format!(
                        "cannot use the congestion control {name}: it must be in \
                         net.ipv4.tcp_allowed_congestion_control"
                    )
                })?;
        }
        let there = SocketAddr::new(link.address(&destination, Family::V4), 7400);
        let size = format!("{}M", self.options.size);
        let mut receive = self.vm(&destination, "destination", "receive");
        receive
            .args(["--listen", &there.to_string(), "--peer", SOURCE])
            .arg("--identity")
            .arg(self.files.path("destination"))
            .arg("--state-dir")
            .arg(self.files.path("destination-state"));
        let _receiving = Process::start(receive, "listening")?;
        let mut run = self.vm(&source, "source", "run");
        run.args(["--name", "bench", "--memory", &size, "--workload", "idle"])
            .arg("--state-dir")
            .arg(self.files.path("source-state"));
        let _running = Process::start(run, "started")?;
        let mut migrate = self.vm(&source, "source", "migrate");
        migrate
            .args(["--name", "bench", "--to", &there.to_string()])
            .args(["--peer", DESTINATION])
            .args(["--lanes", &self.options.lanes.to_string()])
            .args(["--lane-rate", &format!("{}M", self.options.lane_rate)])
            .arg("--identity")
            .arg(self.files.path("source"));
        let memory = Memory::new(self.options)?;
        let ended = AtomicBool::new(false);
        let (held, moved, total) = thread::scope(|scope| {
            let readings = scope.spawn(|| held_back(&source, &there, memory, &ended));
            let began = Instant::now();
            let moved = Process::spawn(migrate).and_then(|mut it| it.wait_for("moved"));
            let total = began.elapsed();
            ended.store(true, Ordering::Release);
            let held = readings
                .join()
                .unwrap_or_else(|_| bail!("the thread that runs ss panicked"));
            (held, moved, total)
        });
        let (held, moved) = (held?, moved?);
        let first = &moved["iterations"][0];
        Ok(Measured {
            gib_per_s: number(first, "wire_bytes")? / number(first, "duration_ms")? * 1000.0
                / f64::from(1 << 30),
            total_s: total.as_secs_f64(),
            downtime_ms: number(&moved["downtime"], "total_ms")?,
            held,
        })
    }
}

/// Memory for the destination, which takes it during the migration.
struct Memory {
    touched: TouchedMemory,
    total_bytes: u64,
}

/// The destination may take this much more memory than the lanes have sent, for buffers and for what
/// the lanes send between two readings.
const MEMORY_AHEAD_BYTES: u64 = 512 << 20;

impl Memory {
    fn new(options: &LongLineOptions) -> Result<Self> {
        let total_bytes = (u64::from(options.size) << 20) + MEMORY_AHEAD_BYTES;
        Ok(Self {
            touched: TouchedMemory::new(total_bytes)?,
            total_bytes,
        })
    }

    /// Frees what the destination may have taken after the lanes have sent `bytes`.
    fn free(&mut self, bytes: u64) {
        let taken = bytes + MEMORY_AHEAD_BYTES;
        self.touched.free_to(self.total_bytes.saturating_sub(taken));
    }
}

/// Times in milliseconds and bytes, summed over all connections to an address, from the output of
/// `ss --tcp --info`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Held {
    /// The time in which there was data to send.
    busy_ms: f64,
    /// The time in which the peer's receive window was full.
    rwnd_limited_ms: f64,
    /// The time in which this side's send buffer was full and all data in it was in flight.
    sndbuf_limited_ms: f64,
    sent_bytes: f64,
    /// The part of `sent_bytes` that was sent again.
    retransmitted_bytes: f64,
}

impl Held {
    fn read(text: &str) -> Self {
        let sum = |name: &str| {
            text.split_whitespace()
                .filter_map(|field| field.strip_prefix(name))
                // Some times are followed by a share in parentheses: `300ms(20.0%)`.
                .filter_map(|value| value.split("ms").next()?.parse::<f64>().ok())
                // `Iterator::sum` would return -0 if there are no numbers.
                .fold(0.0, |sum, one| sum + one)
        };
        Self {
            busy_ms: sum("busy:"),
            rwnd_limited_ms: sum("rwnd_limited:"),
            sndbuf_limited_ms: sum("sndbuf_limited:"),
            sent_bytes: sum("bytes_sent:"),
            retransmitted_bytes: sum("bytes_retrans:"),
        }
    }

    fn rwnd_percent(self) -> f64 {
        100.0 * self.rwnd_limited_ms / self.busy_ms.max(1.0)
    }

    fn sndbuf_percent(self) -> f64 {
        100.0 * self.sndbuf_limited_ms / self.busy_ms.max(1.0)
    }

    fn retransmitted_percent(self) -> f64 {
        100.0 * self.retransmitted_bytes / self.sent_bytes.max(1.0)
    }
}

/// Reads the figures of a host's connections, and frees `memory`, until `ended`. Returns the reading
/// with the longest busy time, because later readings lack the lanes that have closed before the
/// migration ends.
fn held_back(host: &Host, to: &SocketAddr, mut memory: Memory, ended: &AtomicBool) -> Result<Held> {
    let mut last = Held::default();
    let began = Instant::now();
    while !ended.load(Ordering::Acquire) && began.elapsed() < LIMIT {
        let said = host
            .command("ss")
            .args(["--tcp", "--info", "--no-header", "--numeric", "dst"])
            .arg(to.to_string())
            .output()
            .context("cannot start ss")?;
        ensure!(said.status.success(), "ss failed: {said:?}");
        let read = Held::read(&String::from_utf8_lossy(&said.stdout));
        memory.free((read.sent_bytes - read.retransmitted_bytes) as u64);
        if read.busy_ms >= last.busy_ms {
            last = read;
        }
        thread::sleep(BETWEEN_READINGS);
    }
    Ok(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_times_of_all_connections_are_added() {
        let text = "ESTAB 0 1 10.77.1.1:5 10.77.1.2:7400 \n\t cubic wscale:7,7 rto:204 \
                    bytes_sent:900 bytes_retrans:100 bytes_acked:800 \
                    busy:1500ms rwnd_limited:300ms(20.0%) sndbuf_limited:900ms(60.0%) retrans:0/1\n\
                    ESTAB 0 0 10.77.1.1:6 10.77.1.2:7400 \n\t cubic bytes_sent:1100 busy:500ms \
                    sndbuf_limited:100ms(20.0%)\n";
        let held = Held::read(text);
        assert_eq!(
            held,
            Held {
                busy_ms: 2000.0,
                rwnd_limited_ms: 300.0,
                sndbuf_limited_ms: 1000.0,
                sent_bytes: 2000.0,
                retransmitted_bytes: 100.0,
            }
        );
        assert_eq!((held.rwnd_percent(), held.sndbuf_percent()), (15.0, 50.0));
        assert!((held.retransmitted_percent() - 5.0).abs() < f64::EPSILON);
    }

    #[test]
    fn without_connections_nothing_holds_them_back() {
        assert_eq!(Held::read(""), Held::default());
        assert!(Held::default().rwnd_percent().abs() < f64::EPSILON);
    }
}
