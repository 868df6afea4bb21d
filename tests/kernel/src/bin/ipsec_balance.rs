//! Measures how much of the receiver's work for IPsec the busiest CPU does.
//! The test compares one SA with one SA for each CPU.
//!
//! Receive packet steering (RPS) distributes packets by the SPI. The busy time of a CPU is the time
//! in which it was not idle. The guest's own clock measures this time. The emulator counts
//! instructions, and this clock advances by one nanosecond for each. Such an emulator runs the CPUs
//! in turn, and a CPU that waits for its turn would count as busy. Therefore only one lane sends at
//! a time.

use std::fs;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use dunlin_ipsec::xfrm::{PortBlock, Protocol};
use dunlin_kernel_tests::ipsec::lanes::{Acceptor, Lane, read_all, write_all};
use dunlin_kernel_tests::ipsec::{
    Family, Hosts, LANES, LINK, REQID, Sa, lanes_from, on_cpu, policies,
};
use dunlin_kernel_tests::{Guest, Needs, Under, run};
use dunlin_test_base::pattern;

/// The CPU of the senders, of the readers and of the link. The other CPUs only receive packets.
const SENDER: u32 = 0;
/// The number of CPUs that receive packets, one number for each measurement. The receivers are CPU
/// 1 and the CPUs after it.
const RECEIVERS: [u32; 3] = [1, 2, 4];
/// The bytes of a run, which the lanes share.
const BYTES: usize = 24 << 20;
const RUNS: u32 = 3;

const NEEDS: Needs = Needs {
    under: Under::Named,
    cpus: 5,
    packages: &["iproute2"],
    limit_seconds: 900,
    ..Needs::NOTHING
};

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        let counting = std::env::var_os("RIG_COUNTING").is_some();
        // Without counted instructions, times are meaningless, and one run is enough to count
        // packets.
        let runs = if counting { RUNS } else { 1 };
        // Discard the first run, which also loads modules.
        load(guest, 1, 0xf00, false);
        for receivers in RECEIVERS {
            for number in 0..runs {
                let one = load(guest, receivers, number << 8, false);
                let each = load(guest, receivers, number << 8, true);
                assert!(one.share() > 0.95, "{one:?}");
                println!(
                    "receivers: {receivers}, run {number}: the busiest CPU had {:.0} % of the packets \
                     with one SA, {:.0} % with one for each CPU",
                    100.0 * one.share(),
                    100.0 * each.share(),
                );
                if counting {
                    let ratio = one.busiest().as_secs_f64() / each.busiest().as_secs_f64();
                    println!(
                        "receivers: {receivers}, run {number}: the busiest CPU was busy for {:?} with one \
                         SA, {:?} with one for each CPU, ratio {ratio:.2}",
                        one.busiest(),
                        each.busiest(),
                    );
                    // If the measured times were exact, this would be 1.
                    let error = ratio * each.share();
                    assert!((0.6..=1.6).contains(&error), "{one:?}, {each:?}");
                }
            }
        }
    })
}

/// The work of each receiving CPU.
#[derive(Debug)]
struct Load {
    packets: Vec<u64>,
    busy: Vec<Duration>,
}

impl Load {
    /// The part of the packets that the CPU with the most packets received.
    fn share(&self) -> f64 {
        let most = self.packets.iter().max().copied().unwrap_or_default();
        most as f64 / self.packets.iter().sum::<u64>() as f64
    }

    fn busiest(&self) -> Duration {
        self.busy.iter().max().copied().unwrap_or_default()
    }
}

/// Sends over one lane for each receiving CPU. If `each` is set, each lane has its own SA.
/// Otherwise they share one SA.
fn load(guest: &Guest, receivers: u32, spi: u32, each: bool) -> Load {
    let hosts = Hosts::with_one_queue(guest, SENDER);
    let (a, b) = (&hosts.a, &hosts.b);
    let mask: u32 = (1..=receivers).map(|cpu| 1 << cpu).sum();
    let steer = format!("echo {mask:x} >/sys/class/net/{LINK}/queues/rx-0/rps_cpus");
    guest.command("ip", &["netns", "exec", &b.name, "sh", "-c", &steer]);
    let lanes: Vec<_> = (0..receivers)
        .map(|number| {
            let own = if each { number } else { 0 };
            let reqid = REQID + own;
            if number == 0 || each {
                let sa = |spi| Sa {
                    reqid,
                    ..Sa::new(spi)
                };
                sa(0x1000 + spi + own).add(a, b);
                sa(0x2000 + spi + own).add(b, a);
            }
            let number = u16::try_from(number).expect("there are few CPUs");
            let mut selector = lanes_from(a, b, Family::V4, Protocol::TCP);
            selector.destination_ports = PortBlock::only(LANES.port + number);
            for (host, policy) in policies(&selector, a, b, reqid) {
                host.xfrm.add_policy(&policy).expect("the kernel adds it");
            }
            Lane::connect(a, SENDER, &Acceptor::open(b, Family::V4, number))
        })
        .collect();
    let data = pattern(BYTES / lanes.len(), 1);
    let before = Clocks::now();
    for lane in &lanes {
        thread::scope(|scope| {
            scope.spawn(|| {
                on_cpu(SENDER, || {
                    let mut all = vec![0; data.len()];
                    read_all(&lane.far, &mut all);
                    assert!(all == data, "the received data differs");
                });
            });
            on_cpu(SENDER, || write_all(&lane.near, &data));
        });
    }
    let after = Clocks::now();
    let elapsed = after.uptime.saturating_sub(before.uptime);
    let cpus = 1..=receivers as usize;
    Load {
        packets: cpus
            .clone()
            .map(|cpu| after.packets[cpu] - before.packets[cpu])
            .collect(),
        busy: cpus
            .map(|cpu| elapsed.saturating_sub(after.idle[cpu].saturating_sub(before.idle[cpu])))
            .collect(),
    }
}

/// The machine's clock and the counters of each CPU.
struct Clocks {
    /// Since the start (proc_uptime(5)), in steps of 10 ms.
    uptime: Duration,
    /// The idle time (proc_stat(5)), in steps of 10 ms.
    idle: Vec<Duration>,
    /// The received packets, including those that ESP passes to the stack again after decryption
    /// (the first column of /proc/net/softnet_stat).
    packets: Vec<u64>,
}

impl Clocks {
    fn now() -> Self {
        let read = |path| fs::read_to_string(path).expect("the kernel has the file");
        let uptime = read("/proc/uptime");
        let uptime = uptime
            .split(' ')
            .next()
            .and_then(|seconds| seconds.parse().ok());
        let idle = |line: &str| {
            let fields = line.split_whitespace().skip(1);
            let fields: Vec<u64> = fields.map_while(|field| field.parse().ok()).collect();
            // The fields are user, nice, system, idle and iowait.
            Duration::from_millis(10 * (fields[3] + fields[4]))
        };
        let stat = read("/proc/stat");
        let lines = stat
            .lines()
            .filter(|line| line.starts_with("cpu") && !line.starts_with("cpu "));
        let packets = |line: &str| {
            let first = line.split_whitespace().next().expect("the line has fields");
            u64::from_str_radix(first, 16).expect("the field is hexadecimal")
        };
        Self {
            uptime: Duration::from_secs_f64(uptime.expect("the first field is a number")),
            idle: lines.map(idle).collect(),
            packets: read("/proc/net/softnet_stat")
                .lines()
                .map(packets)
                .collect(),
        }
    }
}
