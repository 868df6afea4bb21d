//! In sessions with an SA for each CPU, every connection uses the SA of its own CPU under load.
//!
//! This also holds on hosts with different numbers of CPUs, and after a repair if SYNs were lost or
//! the link was interrupted. If all connections send the same amount of data, the SAs seal about
//! the same number of frames. If the peer accepts a single SA, that SA carries everything.

use std::net::{TcpListener, TcpStream};
use std::process::ExitCode;
use std::thread;
use std::time::Instant;

use dunlin_kernel_tests::ipsec::lanes::{Lane, look_again, read_all};
use dunlin_kernel_tests::ipsec::on_cpu;
use dunlin_kernel_tests::ipsec::tap::Tap;
use dunlin_kernel_tests::sessions::{
    AT, AT_6, HOSTS, Process, SERVER, SERVER_6, associations, connect, connect_to, credentials,
    inside, netns, nothing_left, until, up_with,
};
use dunlin_kernel_tests::{Guest, Needs, Under, run};
use dunlin_linux::affinity::pin_to;
use dunlin_linux::socket::set_reset_on_close;
use dunlin_linux::tcp::sent_bytes;
use serde_json::Value;

const NEEDS: Needs = Needs {
    cpus: 4,
    packages: &["iproute2"],
    dunlin: true,
    limit_seconds: 300,
    under: Under::Newest,
    ..Needs::NOTHING
};

/// The number of bytes that each connection sends at a time.
const BYTES: usize = 300_000;
/// The size in bytes of a TCP header with a timestamp. An SA's byte counter includes it.
const HEADER: u64 = 32;
/// The value of `tcp_retries1`: the number of unanswered retransmissions after which TCP looks up
/// its route again.
const RETRIES: u32 = 2;
/// The longest time in milliseconds between two retransmissions (`tcp_rto_max_ms`, since Linux
/// 6.15). On a busy machine the time could grow so long during a cut that keep-alive ends the
/// session's control connection.
const RTO_MAX_MS: u32 = 1000;
/// The numbers of connection states in /proc/net/tcp.
const ESTABLISHED: u8 = 1;
const SYN_SENT: u8 = 2;
/// Packets of these ports must never be in the clear.
const PORTS: std::ops::RangeInclusive<u16> = 4444..=4447;

/// The parameters of a test of two hosts with connections between them.
#[derive(Clone, Copy, Debug)]
struct Case {
    /// How many CPUs send on host a and on host b.
    cpus: [u32; 2],
    connections: u32,
    over_ipv6: bool,
}

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        connect(guest);
        credentials(guest);
        set_on_both(guest, &format!("net.ipv4.tcp_rto_max_ms={RTO_MAX_MS}"));
        let hosts = [[2, 4], [4, 2]];
        let mut cases = Vec::new();
        for cpus in hosts {
            for connections in [1, 4] {
                for over_ipv6 in [false, true] {
                    cases.push(Case {
                        cpus,
                        connections,
                        over_ipv6,
                    });
                }
            }
        }
        if !guest.is_soak() {
            cases.retain(|case| {
                matches!(
                    (case.connections, case.cpus, case.over_ipv6),
                    (4, [4, 2], false) | (1, [2, 4], true)
                )
            });
        }
        for case in cases {
            println!("{case:?}");
            each_connection_uses_the_sa_of_its_cpu(guest, case);
        }
        p14_a_peer_with_one_sa_gets_everything_by_the_fallback(guest);
    })
}

/// After a lost SYN or an interruption of the link, a connection may use another SA. The repair of
/// decision 13 moves the connection back to the SA of its CPU.
fn each_connection_uses_the_sa_of_its_cpu(guest: &Guest, case: Case) {
    let lists = case.cpus.map(|count| format!("0-{}", count - 1));
    let serve = Process::serve_with(&["--cpus", &lists[1]]);
    let (server, at) = if case.over_ipv6 {
        (SERVER_6, AT_6)
    } else {
        (SERVER, AT)
    };
    let up = up_with(server, &["--mode", "cpu", "--cpus", &lists[0]]);
    let session = Process::begin(up, "up");
    let tap = Tap::begin();
    let listener = inside("b", || TcpListener::bind(at)).expect("b listens");
    let mut lanes = Vec::new();
    for number in 0..case.connections {
        lanes.push(lane(&listener, at, number % case.cpus[0]));
    }
    let scene = Scene {
        guest,
        case,
        lanes: &lanes,
    };
    // At first, an accepted connection uses the SA of the CPU that received the handshake, so it
    // may need a repair.
    scene.repair();
    scene.check("at first");
    if case.connections > 1 {
        scene.sealed_evenly();
    }
    if case.connections > 1 || guest.is_soak() {
        drop(scene.lose_syn(&listener, at));
        scene.cut(at);
        scene.repair();
        scene.check("after a cut");
    }
    drop(lanes);
    drop(listener);
    session.end(guest);
    serve.end(guest);
    nothing_left(guest);
    let left = tap.end();
    assert!(left.is_sealed(&PORTS), "{left:?}");
}

/// Changes a kernel setting on both hosts.
fn set_on_both(guest: &Guest, setting: &str) {
    for (host, _) in HOSTS {
        guest.command("ip", &netns(host, &["sysctl", "-q", "-w", setting]));
    }
}

/// Opens a connection from the given CPU.
fn lane(listener: &TcpListener, at: &str, cpu: u32) -> Lane {
    let near = inside("a", || {
        pin_to(cpu as usize).expect("the machine has four CPUs");
        connect_to(at)
    });
    let near = near.expect("a connects");
    let (far, _) = listener.accept().expect("b accepts");
    as_lane(near, far)
}

fn as_lane(near: TcpStream, far: TcpStream) -> Lane {
    for end in [&near, &far] {
        end.set_nodelay(true).expect("the socket is connected");
        set_reset_on_close(end).expect("the socket is connected");
    }
    Lane { near, far }
}

struct Scene<'a> {
    guest: &'a Guest,
    case: Case,
    lanes: &'a [Lane],
}

impl Scene<'_> {
    /// The CPUs from which the two ends of a connection send.
    fn cpus(&self, number: usize) -> [u32; 2] {
        self.case.cpus.map(|count| number as u32 % count)
    }

    /// Makes both ends of every connection look up their SAs, each on its own CPU. An
    /// acknowledgement can trigger the lookup earlier, on another CPU. The counters show that, and
    /// then this function repeats the lookup.
    fn repair(&self) {
        for (number, lane) in self.lanes.iter().enumerate() {
            self.repair_one(lane, self.cpus(number));
        }
    }

    fn repair_one(&self, lane: &Lane, [near, far]: [u32; 2]) {
        for (host, from, to, cpu) in [
            ("a", &lane.near, &lane.far, near),
            ("b", &lane.far, &lane.near, far),
        ] {
            let repaired = (0..5).any(|_| {
                look_again(from, cpu, b"x");
                read_all(to, &mut [0; 2]);
                let send = || match host {
                    "a" => lane.send(cpu, BYTES),
                    _ => lane.send_back(cpu, BYTES),
                };
                self.used(host, send)
                    .iter()
                    .all(|used| used.cpu == Some(cpu))
            });
            assert!(repaired, "{host}: CPU {cpu}'s connection stays astray");
        }
    }

    /// Returns the SAs of a host that carried data while `task` ran, according to `dunlin ipsec
    /// status`.
    fn used(&self, host: &str, task: impl FnOnce()) -> Vec<Used> {
        let counters = || outbound(self.guest, host);
        let before = counters();
        task();
        let grown = before.iter().zip(counters()).map(|(before, after)| Used {
            cpu: after.cpu,
            bytes: after.bytes - before.bytes,
            packets: after.packets - before.packets,
        });
        // Leave out SAs that carried only acknowledgements and probes, which have no data.
        grown.filter(|one| one.bytes > 100 * one.packets).collect()
    }

    /// All connections send simultaneously, first in one direction and then in the other. Each
    /// connection sends a different number of bytes. The SA of every CPU must carry exactly the
    /// bytes of that CPU's connections, including retransmissions, and the fallback SA must carry
    /// none.
    fn check(&self, when: &str) {
        for (host, side) in [("a", 0), ("b", 1)] {
            // On a busy machine, a timer may make a connection use another SA, or send while the
            // counters are read. Therefore try several times.
            let exact = (0..4).any(|time| {
                if time > 0 {
                    self.repair();
                }
                let before = self.sent(side);
                let used = self.used(host, || self.send_all(host, |number| BYTES * (number + 1)));
                let expected: Vec<u64> = before
                    .iter()
                    .zip(self.sent(side))
                    .map(|(before, after)| after - before)
                    .collect();
                let of_each: Vec<u64> = (0..self.case.cpus[side])
                    .map(|cpu| {
                        let own = used.iter().filter(|used| used.cpu == Some(cpu));
                        own.map(|used| used.bytes - HEADER * used.packets).sum()
                    })
                    .collect();
                println!("{when}, from {host}: {expected:?}: {used:?}");
                assert!(
                    used.iter().all(|used| used.cpu.is_some()),
                    "the fallback SA carried data: {used:?}"
                );
                of_each == expected
            });
            assert!(exact, "{when}, from {host}: the bytes of the SAs differ");
        }
    }

    /// Returns the number of bytes that TCP has sent so far from each CPU of one side.
    fn sent(&self, side: usize) -> Vec<u64> {
        let mut sent = vec![0; self.case.cpus[side] as usize];
        for (number, lane) in self.lanes.iter().enumerate() {
            let end = [&lane.near, &lane.far][side];
            sent[self.cpus(number)[side] as usize] +=
                sent_bytes(end).expect("the socket is connected");
        }
        sent
    }

    fn send_all(&self, host: &str, bytes: impl Fn(usize) -> usize + Sync) {
        thread::scope(|scope| {
            for (number, lane) in self.lanes.iter().enumerate() {
                let [near, far] = self.cpus(number);
                let bytes = bytes(number);
                scope.spawn(move || match host {
                    "a" => lane.send(near, bytes),
                    _ => lane.send_back(far, bytes),
                });
            }
        });
    }

    /// Sends the same number of bytes on each connection. The SA of each CPU must then seal the
    /// mean number of frames, or at most a tenth more or less.
    fn sealed_evenly(&self) {
        let tap = Tap::begin();
        self.send_all("a", |_| 4 * BYTES);
        let left = tap.end();
        let spis = outbound(self.guest, "a");
        let frames: Vec<u64> = (0..self.case.cpus[0])
            .map(|cpu| {
                let own = spis.iter().find(|one| one.cpu == Some(cpu));
                let spi = own.expect("each CPU has one").spi;
                left.sealed.get(&spi).copied().unwrap_or(0)
            })
            .collect();
        println!("sealed by CPU: {frames:?}");
        let even = frames.iter().sum::<u64>() / frames.len() as u64;
        assert!(even > 100, "{left:?}");
        assert!(
            frames.iter().all(|own| own.abs_diff(even) * 10 <= even),
            "{frames:?}"
        );
    }

    /// Opens one more connection and drops its first SYNs. Prints which SA the connection uses
    /// afterwards, and moves the connection to the SA of its CPU.
    fn lose_syn(&self, listener: &TcpListener, at: &str) -> Lane {
        let cpu = self.case.cpus[0] - 1;
        let far = self.cpus(0)[1];
        let (near, accepted) = thread::scope(|scope| {
            let cut = Cut::begin(self.guest);
            let connecting = scope.spawn(|| {
                inside("a", || {
                    pin_to(cpu as usize).expect("the machine has four CPUs");
                    connect_to(at)
                })
            });
            // The kernel retransmits the SYN after one second, and again after two more seconds.
            until("the SYN is sent again", || {
                let sent = retransmissions(self.guest, "a", SYN_SENT, at);
                sent.iter().any(|times| *times > 0)
            });
            drop(cut);
            let near = connecting.join().expect("the thread does not panic");
            (
                near.expect("a connects"),
                listener.accept().expect("b accepts").0,
            )
        });
        let lane = as_lane(near, accepted);
        let used = self.used("a", || lane.send(cpu, BYTES));
        println!("after a lost SYN from CPU {cpu} by {used:?}");
        let [one] = &used[..] else {
            panic!("not exactly one SA carried data: {used:?}");
        };
        assert!(
            one.bytes >= BYTES as u64,
            "`status` reports too few bytes of the SA in use: {used:?}"
        );
        self.repair_one(&lane, [cpu, far]);
        lane
    }

    /// Drops all packets while all connections send, and then lets packets pass again.
    fn cut(&self, at: &str) {
        // TCP looks up its route again after fewer timeouts than usual, so that the test is faster.
        set_on_both(self.guest, &format!("net.ipv4.tcp_retries1={RETRIES}"));
        let began = Instant::now();
        thread::scope(|scope| {
            let cut = Cut::begin(self.guest);
            for (number, lane) in self.lanes.iter().enumerate() {
                let [near, far] = self.cpus(number);
                scope.spawn(move || lane.send(near, BYTES));
                scope.spawn(move || lane.send_back(far, BYTES));
            }
            until("every connection has looked up its route again", || {
                let sent = retransmissions(self.guest, "a", ESTABLISHED, at);
                sent.len() == self.lanes.len() && sent.iter().all(|times| *times > RETRIES)
            });
            drop(cut);
            println!("the cut lasted {:?}", began.elapsed());
        });
        println!("all data had arrived after {:?}", began.elapsed());
        let mut strayed = 0;
        for (number, lane) in self.lanes.iter().enumerate() {
            let [near, _] = self.cpus(number);
            let used = self.used("a", || lane.send(near, BYTES));
            strayed += usize::from(used.iter().any(|used| used.cpu != Some(near)));
        }
        println!("{strayed} of {} have strayed in a cut", self.lanes.len());
    }
}

/// Returns, for each connection of `host` in `state` to `at`, the number of times that it has
/// retransmitted its oldest segment (proc_net_tcp(5)).
fn retransmissions(guest: &Guest, host: &str, state: u8, at: &str) -> Vec<u32> {
    let (_, port) = at.rsplit_once(':').expect("an address and a port");
    let port: u16 = port.parse().expect("a number");
    let table = guest.output(
        "ip",
        &netns(host, &["cat", "/proc/net/tcp", "/proc/net/tcp6"]),
    );
    let lines = table.lines().filter(|line| !line.contains("rem_address"));
    lines
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .filter(|fields| {
            fields[2].ends_with(&format!(":{port:04X}"))
                && u8::from_str_radix(fields[3], 16).is_ok_and(|number| number == state)
        })
        .map(|fields| u32::from_str_radix(fields[6], 16).expect("retransmissions"))
        .collect()
}

/// While this value exists, all packets that host a or b sends are dropped.
struct Cut<'a>(&'a Guest);

impl<'a> Cut<'a> {
    fn begin(guest: &'a Guest) -> Self {
        let cut = Self(guest);
        cut.tc("add", &["netem", "loss", "100%"]);
        cut
    }

    fn tc(&self, verb: &str, more: &[&str]) {
        for (host, _) in HOSTS {
            let link = format!("link-{host}");
            let words = ["tc", "qdisc", verb, "dev", &link, "root"];
            self.0
                .command("ip", &netns(host, &[&words[..], more].concat()));
        }
    }
}

impl Drop for Cut<'_> {
    fn drop(&mut self) {
        self.tc("del", &[]);
    }
}

/// An outbound SA and its counters.
#[derive(Clone, Copy, Debug)]
struct Outbound {
    cpu: Option<u32>,
    spi: u32,
    bytes: u64,
    packets: u64,
}

/// The growth of the counters of an outbound SA.
#[derive(Clone, Copy, Debug)]
struct Used {
    cpu: Option<u32>,
    bytes: u64,
    packets: u64,
}

/// Returns a host's outbound SAs in a fixed order.
fn outbound(guest: &Guest, host: &str) -> Vec<Outbound> {
    let number = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("{value}"));
    let mut all: Vec<Outbound> = associations(guest, host)
        .iter()
        .filter(|one| one["direction"] == "out")
        .map(|one| Outbound {
            cpu: one["cpu"].as_u64().map(|cpu| cpu as u32),
            spi: number(&one["spi"]) as u32,
            bytes: number(&one["bytes"]),
            packets: number(&one["packets"]),
        })
        .collect();
    all.sort_by_key(|one| one.cpu);
    all
}

/// Four connections send on four CPUs, and the peer accepts only one SA. That SA must carry
/// everything.
fn p14_a_peer_with_one_sa_gets_everything_by_the_fallback(guest: &Guest) {
    let serve = Process::serve_with(&["--sas", "1"]);
    let session = Process::up("cpu");
    let listener = inside("b", || TcpListener::bind(AT)).expect("b listens");
    let lanes: Vec<Lane> = (0..4).map(|cpu| lane(&listener, AT, cpu)).collect();
    let before = outbound(guest, "a");
    thread::scope(|scope| {
        for (lane, cpu) in lanes.iter().zip(0..) {
            scope.spawn(move || on_cpu(cpu, || lane.send(cpu, BYTES)));
        }
    });
    let after = outbound(guest, "a");
    println!("{after:?}");
    let [one] = &after[..] else {
        panic!("host a does not have exactly one outbound SA: {after:?}");
    };
    assert_eq!(one.cpu, None);
    assert!(one.bytes - before[0].bytes >= 4 * BYTES as u64, "{after:?}");
    // The opposite direction has one SA for each CPU of host b, and the fallback SA.
    assert_eq!(outbound(guest, "b").len(), 5);
    drop(lanes);
    drop(listener);
    session.end(guest);
    serve.end(guest);
    nothing_left(guest);
}
