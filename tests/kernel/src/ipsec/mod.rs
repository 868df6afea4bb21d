//! Two hosts with IPsec between them: their namespaces, the SAs and policies of lanes, and the
//! frames that leave either host.
//!
//! - [`Hosts`], [`Host`]: two namespaces with a link
//! - [`Sa`], [`protect`]: SAs and policies between them
//! - [`lanes`]: connections from and to given CPUs, and the SAs that they use
//! - [`wire`]: the frames that leave a host
//! - [`statistics`]: packets that IPsec dropped
//! - [`acquires`]: policies that request SAs, and the kernel's requests
//! - [`tap`]: frame counts while sessions of `dunlin ipsec` are under load

pub mod acquires;
pub mod lanes;
mod link;
pub mod statistics;
pub mod tap;
pub mod wire;

use std::fs::File;
use std::net::IpAddr;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use dunlin_ipsec::xfrm::{
    Action, Counters, Direction, Encapsulation, KeyAndSalt, Network, Policy, PortBlock, Protocol,
    Selector, State, StateId, Xfrm,
};
use dunlin_linux::affinity::pin_to;
use dunlin_rig::linux::netns;
use dunlin_rig::linux::tun::Tun;

use self::link::Link;
use self::statistics::Statistics;
use crate::Guest;

/// The number of CPUs of the virtual machine in tests that depend on that number.
pub const CPUS: u32 = 4;
/// The request id of a test's policies and SAs.
pub const REQID: u32 = 4242;
/// The destination ports of lanes.
pub const LANES: PortBlock = PortBlock {
    port: 0x1000,
    mask: 0xfff0,
};
/// The destination port of ESP in UDP (RFC 3948).
pub const ENCAPSULATED: u16 = 4500;
/// The priority of policies for lanes.
pub const PRIORITY: u32 = 1000;
/// The name of the link's interface on each host.
pub const LINK: &str = "lane0";

/// An address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// A host, which is a network namespace.
#[derive(Debug)]
pub struct Host {
    /// The namespace's name, for `ip -n`.
    pub name: String,
    namespace: File,
    number: u8,
    /// The kernel's IPsec tables for this host.
    pub xfrm: Xfrm,
}

/// Two hosts with a link between them.
#[derive(Debug)]
pub struct Hosts {
    /// The host that connects.
    pub a: Host,
    /// The host that accepts.
    pub b: Host,
    /// The thread of the link; `None` if the link is a veth pair, which needs none.
    #[expect(dead_code, reason = "held, not read")]
    link: Option<Link>,
}

impl Hosts {
    /// Creates two hosts. Loads `esp4_offload` and `esp6_offload` before any SA is added.
    ///
    /// # Panics
    /// A step fails, for instance because the test does not request the package `iproute2`.
    #[must_use]
    pub fn new(guest: &Guest) -> Self {
        guest.command("modprobe", &["-a", "esp4_offload", "esp6_offload"]);
        Self::without_offload(guest)
    }

    /// Creates two hosts without loading a module.
    ///
    /// # Panics
    /// Same as [`Hosts::new`].
    #[must_use]
    pub fn without_offload(guest: &Guest) -> Self {
        let [a, b] = namespaces(guest);
        guest.command(
            "ip",
            &[
                "link", "add", LINK, "netns", &a, "type", "veth", "peer", "name", LINK, "netns", &b,
            ],
        );
        Self::up(guest, [a, b], None)
    }

    /// Creates two hosts that are connected by a link with a single receiving CPU, like a network
    /// card with one queue.
    ///
    /// # Panics
    /// Same as [`Hosts::new`].
    #[must_use]
    pub fn with_one_queue(guest: &Guest, cpu: u32) -> Self {
        guest.command("modprobe", &["-a", "esp4_offload", "esp6_offload", "tun"]);
        let names = namespaces(guest);
        let ends = [&names[0], &names[1]].map(|name| {
            let namespace =
                File::open(Path::new("/run/netns").join(name)).expect("the namespace exists");
            netns::run_inside(&namespace, || Tun::open(LINK))
                .expect("the namespace can be entered")
                .expect("the kernel has TUN")
        });
        Self::up(guest, names, Some(Link::between(ends, cpu)))
    }

    fn up(guest: &Guest, [a, b]: [String; 2], link: Option<Link>) -> Self {
        for (host, number) in [(&a, 1), (&b, 2)] {
            let v4 = format!("10.0.0.{number}/24");
            let v6 = format!("fd00::{number}/64");
            let ip = |arguments: &[&str]| {
                guest.command("ip", &[&["-n", host], arguments].concat());
            };
            // Automatic addresses would be added later and cause connections to look up their
            // routes again.
            ip(&["link", "set", LINK, "addrgenmode", "none"]);
            ip(&["addr", "add", &v4, "dev", LINK]);
            ip(&["addr", "add", &v6, "dev", LINK, "nodad"]);
            ip(&["link", "set", "lo", "up"]);
            ip(&["link", "set", LINK, "up"]);
        }
        // The kernel reports the link as up within a second. All connections would look up their
        // routes again at that moment, so wait for it.
        let until = Instant::now() + Duration::from_secs(30);
        for host in [&a, &b] {
            let is_up = || {
                let said = guest.output("ip", &["-n", host, "-o", "link", "show", LINK]);
                said.contains("state UP") || link.is_some()
            };
            while !is_up() {
                assert!(Instant::now() < until, "the link does not come up");
            }
        }
        Self {
            a: Host::new(a, 1),
            b: Host::new(b, 2),
            link,
        }
    }

    /// Returns both directions, from the first host to the second and back.
    #[must_use]
    pub fn ways(&self) -> [(&Host, &Host); 2] {
        [(&self.a, &self.b), (&self.b, &self.a)]
    }
}

fn namespaces(guest: &Guest) -> [String; 2] {
    static MADE: AtomicU32 = AtomicU32::new(0);
    let made = MADE.fetch_add(1, Ordering::Relaxed);
    ["a", "b"].map(|host| {
        let name = format!("{}-{made}-{host}", std::process::id());
        guest.command("ip", &["netns", "add", &name]);
        name
    })
}

impl Host {
    fn new(name: String, number: u8) -> Self {
        let namespace =
            File::open(Path::new("/run/netns").join(&name)).expect("the namespace exists");
        let xfrm = netns::run_inside(&namespace, Xfrm::open)
            .expect("the namespace can be entered")
            .expect("the kernel has IPsec");
        Self {
            name,
            namespace,
            number,
            xfrm,
        }
    }

    /// Returns the host's address.
    #[must_use]
    pub fn address(&self, family: Family) -> IpAddr {
        match family {
            Family::V4 => IpAddr::from([10, 0, 0, self.number]),
            Family::V6 => IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, u16::from(self.number)]),
        }
    }

    /// Runs `task` in the host's namespace, in a new thread.
    ///
    /// # Panics
    /// If `task` panics.
    pub fn run<T: Send>(&self, task: impl FnOnce() -> T + Send) -> T {
        netns::run_inside(&self.namespace, task).expect("the namespace can be entered")
    }

    /// Runs `task` in the host's namespace, on one CPU.
    ///
    /// # Panics
    /// If `task` panics, or the CPU does not exist.
    pub fn on_cpu<T: Send>(&self, cpu: u32, task: impl FnOnce() -> T + Send) -> T {
        self.run(|| {
            pin_to(cpu as usize).expect("the CPU exists");
            task()
        })
    }

    /// Returns the host's IPsec counters.
    ///
    /// # Panics
    /// The kernel has no such counters.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        self.run(|| Statistics::read().expect("the kernel counts"))
    }

    /// Returns the counters of an SA, or zeros if the host does not have it.
    ///
    /// # Panics
    /// The kernel's tables cannot be read.
    #[must_use]
    pub fn carried(&self, id: &StateId) -> Counters {
        let held = self.xfrm.state(id).expect("the kernel answers");
        held.map(|held| held.counters).unwrap_or_default()
    }
}

/// Runs `task` on one CPU, in a new thread.
///
/// # Panics
/// If `task` panics, or the CPU does not exist.
pub fn on_cpu<T: Send>(cpu: u32, task: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        scope
            .spawn(|| {
                pin_to(cpu as usize).expect("the CPU exists");
                task()
            })
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// The parameters of an SA for packets from one host to another. [`Sa::state`] builds each host's
/// SA from them.
#[derive(Clone, Copy, Debug)]
pub struct Sa {
    /// The SPI, which is at least 0x100. The key is derived from the SPI and the sending host.
    pub spi: u32,
    /// The sender's CPU, or `None` for all CPUs.
    pub cpu: Option<u32>,
    /// The request id.
    pub reqid: u32,
    /// The receiver's replay window, in packets.
    pub replay_window: u32,
    /// The UDP ports, if ESP is sent in UDP.
    pub encapsulation: Option<Encapsulation>,
    /// The address family.
    pub family: Family,
}

impl Sa {
    /// Returns an IPv4 SA for all CPUs.
    #[must_use]
    pub const fn new(spi: u32) -> Self {
        Self {
            spi,
            cpu: None,
            reqid: REQID,
            replay_window: 4096,
            encapsulation: None,
            family: Family::V4,
        }
    }

    /// Returns the same SA for one CPU.
    #[must_use]
    pub const fn of_cpu(self, cpu: u32) -> Self {
        Self {
            cpu: Some(cpu),
            ..self
        }
    }

    /// Returns the same SA with another address family.
    #[must_use]
    pub const fn of(self, family: Family) -> Self {
        Self { family, ..self }
    }

    /// Returns the SA's identifier, which is the same on both hosts.
    #[must_use]
    pub fn id(&self, to: &Host) -> StateId {
        StateId {
            destination: to.address(self.family),
            spi: self.spi,
        }
    }

    /// Returns the SA for one host's kernel: for `Direction::Out` that of `from`, otherwise that of
    /// `to`.
    #[must_use]
    pub fn state(&self, from: &Host, to: &Host, direction: Direction) -> State {
        let mut key = [0; KeyAndSalt::BYTES];
        key[..4].copy_from_slice(&self.spi.to_be_bytes());
        key[4] = from.number;
        let outbound = direction == Direction::Out;
        State {
            id: self.id(to),
            source: from.address(self.family),
            reqid: self.reqid,
            direction,
            // Only the sender's SA has a CPU. The kernel ignores the CPU of an inbound SA, and the
            // two hosts may have different CPUs.
            cpu: if outbound { self.cpu } else { None },
            key: KeyAndSalt::new(&key),
            replay_window: if outbound { 0 } else { self.replay_window },
            encapsulation: self.encapsulation,
            selector: None,
        }
    }

    /// Adds the SA on the receiver and reads it back.
    ///
    /// # Panics
    /// The SA is not added.
    pub fn add_in(&self, from: &Host, to: &Host) {
        let state = self.state(from, to, Direction::In);
        to.xfrm.add_state(&state).expect("the kernel adds it");
        to.xfrm.verify(&state).expect("the SA matches the request");
    }

    /// Adds the SA on the sender and reads it back.
    ///
    /// # Panics
    /// The SA is not added.
    pub fn add_out(&self, from: &Host, to: &Host) {
        let state = self.state(from, to, Direction::Out);
        from.xfrm.add_state(&state).expect("the kernel adds it");
        from.xfrm
            .verify(&state)
            .expect("the SA matches the request");
    }

    /// Adds the SA on both hosts, the receiver first.
    ///
    /// # Panics
    /// The SA is not added.
    pub fn add(&self, from: &Host, to: &Host) {
        self.add_in(from, to);
        self.add_out(from, to);
    }
}

/// The SAs of one direction: a fallback SA and one SA for each of several CPUs.
#[derive(Clone, Debug)]
pub struct SaSet {
    /// The fallback SA for all CPUs, which is added first.
    pub fallback: Sa,
    /// One SA for each CPU.
    pub own: Vec<Sa>,
}

impl SaSet {
    /// Creates a set for `cpus` CPUs, starting at CPU 0. The fallback has the SPI `first`, and the
    /// other SPIs follow.
    #[must_use]
    pub fn new(first: u32, cpus: u32, family: Family) -> Self {
        Self {
            fallback: Sa::new(first).of(family),
            own: (0..cpus)
                .map(|cpu| Sa::new(first + 1 + cpu).of_cpu(cpu).of(family))
                .collect(),
        }
    }

    /// Adds all SAs on both hosts.
    ///
    /// # Panics
    /// An SA is not added.
    pub fn add(&self, from: &Host, to: &Host) {
        for sa in self.all() {
            sa.add(from, to);
        }
    }

    /// Returns the fallback SA, then the SAs of CPUs.
    pub fn all(&self) -> impl Iterator<Item = &Sa> {
        std::iter::once(&self.fallback).chain(&self.own)
    }

    /// Returns the number of packets that each SA carried at the sender: first for the fallback SA,
    /// then by CPU.
    #[must_use]
    pub fn packets(&self, from: &Host, to: &Host) -> Vec<u64> {
        self.all()
            .map(|sa| from.carried(&sa.id(to)).packets)
            .collect()
    }
}

/// Returns whether the kernel has per-CPU SAs. Probes for them, because kernels of older series may
/// have a backport.
///
/// # Panics
/// The kernel has no IPsec.
#[must_use]
pub fn has_per_cpu() -> bool {
    let xfrm = Xfrm::open().expect("the kernel has IPsec");
    xfrm.probe().expect("the kernel answers").cpu.is_some()
}

/// Skips the test if the kernel has no per-CPU SAs.
///
/// # Panics
/// Same as [`has_per_cpu`].
pub fn needs_per_cpu(guest: &Guest) {
    if !has_per_cpu() {
        guest.skip("this kernel has no per-CPU SAs");
    }
}

/// Returns the selector of the packets of lanes from `from` to `to`.
#[must_use]
pub fn lanes_from(from: &Host, to: &Host, family: Family, protocol: Protocol) -> Selector {
    Selector {
        source: Network::one(from.address(family)),
        destination: Network::one(to.address(family)),
        source_ports: PortBlock::ANY,
        destination_ports: LANES,
        protocol,
    }
}

/// Returns the selector for the opposite direction.
#[must_use]
pub fn back(selector: &Selector) -> Selector {
    Selector {
        source: selector.destination,
        destination: selector.source,
        source_ports: selector.destination_ports,
        destination_ports: selector.source_ports,
        protocol: selector.protocol,
    }
}

/// Returns the outgoing and incoming policies of both hosts. They apply to packets from `from` to
/// `to` that match `selector`, and to packets in the opposite direction.
#[must_use]
pub fn policies<'a>(
    selector: &Selector,
    from: &'a Host,
    to: &'a Host,
    reqid: u32,
) -> Vec<(&'a Host, Policy)> {
    let mut all = Vec::new();
    for selector in [*selector, back(selector)] {
        let out = if selector.source == Network::one(from.address(family_of(&selector))) {
            from
        } else {
            to
        };
        for host in [from, to] {
            let direction = if host.number == out.number {
                Direction::Out
            } else {
                Direction::In
            };
            let policy = Policy {
                selector,
                direction,
                action: Action::Protect {
                    reqid,
                    from: selector.source.address,
                    to: selector.destination.address,
                },
                priority: PRIORITY,
            };
            all.push((host, policy));
        }
    }
    all
}

fn family_of(selector: &Selector) -> Family {
    match selector.source.address {
        IpAddr::V4(_) => Family::V4,
        IpAddr::V6(_) => Family::V6,
    }
}

/// Adds policies on both hosts that require an SA with the request id [`REQID`] for lanes from `a`
/// to `b`, in both directions. Returns each policy with its host.
///
/// # Panics
/// A policy is not added.
pub fn protect(hosts: &Hosts, family: Family, protocol: Protocol) -> Vec<(&Host, Policy)> {
    let Hosts { a, b, .. } = hosts;
    let selector = lanes_from(a, b, family, protocol);
    let all = policies(&selector, a, b, REQID);
    for (host, policy) in &all {
        host.xfrm.add_policy(policy).expect("the kernel adds it");
        let held = host.xfrm.policy(&policy.selector, policy.direction);
        let held = held.expect("the kernel answers");
        assert_eq!(held.map(|(policy, _)| policy), Some(*policy));
    }
    all
}
