//! Two hosts with IPsec between them: their namespaces, the SAs and policies by which lanes go,
//! and what leaves either host.
//!
//! - [`Hosts`], [`Host`]: two namespaces with a link
//! - [`Sa`], [`protect`]: what is set up between them
//! - [`lanes`]: connections from and to given CPUs, and which SA has carried them
//! - [`wire`]: frames as they leave
//! - [`statistics`]: what IPsec has dropped
//! - [`acquires`]: policies that ask for SAs, and what the kernel asks for
//! - [`tap`]: the same, counted while sessions of `dunlin ipsec` are under load

pub mod acquires;
pub mod lanes;
mod line;
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

use self::line::Line;
use self::statistics::Statistics;
use crate::Guest;

/// CPUs of a guest whose test is about them.
pub const CPUS: u32 = 4;
/// What policies and SAs of a test have in common.
pub const REQID: u32 = 4242;
/// Ports at which lanes arrive.
pub const LANES: PortBlock = PortBlock {
    port: 0x1000,
    mask: 0xfff0,
};
/// The port at which ESP within UDP arrives (RFC 3948).
pub const ENCAPSULATED: u16 = 4500;
/// The priority of what protects lanes.
pub const PRIORITY: u32 = 1000;
/// The interface of each host.
pub const LINK: &str = "lane0";

/// An address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// A host: a network namespace.
#[derive(Debug)]
pub struct Host {
    /// The namespace's name, for `ip -n`.
    pub name: String,
    namespace: File,
    number: u8,
    /// Its IPsec.
    pub xfrm: Xfrm,
}

/// Two hosts with a link between them.
#[derive(Debug)]
pub struct Hosts {
    /// From which connections go.
    pub a: Host,
    /// At which they arrive.
    pub b: Host,
    /// What carries packets, where that is no veth pair.
    #[expect(dead_code, reason = "held, not read")]
    line: Option<Line>,
}

impl Hosts {
    /// Makes them. `esp4_offload` and `esp6_offload` are loaded before any SA, as on a host that
    /// uses them.
    ///
    /// # Panics
    /// When something is missing; the test needs the package `iproute2`.
    #[must_use]
    pub fn new(guest: &Guest) -> Self {
        guest.command("modprobe", &["-a", "esp4_offload", "esp6_offload"]);
        Self::without_offload(guest)
    }

    /// Makes them, and loads nothing.
    ///
    /// # Panics
    /// As [`Hosts::new`].
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

    /// Makes them with a link whose packets one CPU takes in, as from a network card with one
    /// queue.
    ///
    /// # Panics
    /// As [`Hosts::new`].
    #[must_use]
    pub fn with_one_queue(guest: &Guest, cpu: u32) -> Self {
        guest.command("modprobe", &["-a", "esp4_offload", "esp6_offload", "tun"]);
        let names = namespaces(guest);
        let ends = [&names[0], &names[1]].map(|name| {
            let namespace = File::open(Path::new("/run/netns").join(name)).expect("it was made");
            netns::run_inside(&namespace, || Tun::open(LINK))
                .expect("it can be entered")
                .expect("the kernel has TUN")
        });
        Self::up(guest, names, Some(Line::between(ends, cpu)))
    }

    fn up(guest: &Guest, [a, b]: [String; 2], line: Option<Line>) -> Self {
        for (host, number) in [(&a, 1), (&b, 2)] {
            let v4 = format!("10.0.0.{number}/24");
            let v6 = format!("fd00::{number}/64");
            let ip = |arguments: &[&str]| {
                guest.command("ip", &[&["-n", host], arguments].concat());
            };
            // Addresses that come by themselves come later, and make connections look for their
            // way anew.
            ip(&["link", "set", LINK, "addrgenmode", "none"]);
            ip(&["addr", "add", &v4, "dev", LINK]);
            ip(&["addr", "add", &v6, "dev", LINK, "nodad"]);
            ip(&["link", "set", "lo", "up"]);
            ip(&["link", "set", LINK, "up"]);
        }
        // The kernel says so up to a second later, and all look for their way anew then.
        let until = Instant::now() + Duration::from_secs(30);
        for host in [&a, &b] {
            let is_up = || {
                let said = guest.output("ip", &["-n", host, "-o", "link", "show", LINK]);
                said.contains("state UP") || line.is_some()
            };
            while !is_up() {
                assert!(Instant::now() < until, "the link does not come up");
            }
        }
        Self {
            a: Host::new(a, 1),
            b: Host::new(b, 2),
            line,
        }
    }

    /// Both, from the first to the second and back.
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
        let namespace = File::open(Path::new("/run/netns").join(&name)).expect("it was made");
        let xfrm = netns::run_inside(&namespace, Xfrm::open)
            .expect("it can be entered")
            .expect("the kernel has IPsec");
        Self {
            name,
            namespace,
            number,
            xfrm,
        }
    }

    /// Its address.
    #[must_use]
    pub fn address(&self, family: Family) -> IpAddr {
        match family {
            Family::V4 => IpAddr::from([10, 0, 0, self.number]),
            Family::V6 => IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, u16::from(self.number)]),
        }
    }

    /// Does something inside, in a thread of its own.
    ///
    /// # Panics
    /// When `task` does.
    pub fn run<T: Send>(&self, task: impl FnOnce() -> T + Send) -> T {
        netns::run_inside(&self.namespace, task).expect("it can be entered")
    }

    /// Does something inside, on one CPU alone.
    ///
    /// # Panics
    /// When `task` does, or there is no such CPU.
    pub fn on_cpu<T: Send>(&self, cpu: u32, task: impl FnOnce() -> T + Send) -> T {
        self.run(|| {
            pin_to(cpu as usize).expect("there is such a CPU");
            task()
        })
    }

    /// What its IPsec has dropped.
    ///
    /// # Panics
    /// The kernel does not count.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        self.run(|| Statistics::read().expect("the kernel counts"))
    }

    /// What an SA has carried; nothing where there is none.
    ///
    /// # Panics
    /// The kernel does not say.
    #[must_use]
    pub fn carried(&self, id: &StateId) -> Counters {
        let held = self.xfrm.state(id).expect("it can be asked");
        held.map(|held| held.counters).unwrap_or_default()
    }
}

/// Does something on one CPU alone, in a thread of its own.
///
/// # Panics
/// When `task` does, or there is no such CPU.
pub fn on_cpu<T: Send>(cpu: u32, task: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        scope
            .spawn(|| {
                pin_to(cpu as usize).expect("there is such a CPU");
                task()
            })
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// An SA from one host to another, as each has it.
#[derive(Clone, Copy, Debug)]
pub struct Sa {
    /// Its number, from 0x100 on; keys go by it.
    pub spi: u32,
    /// The CPU at the sender.
    pub cpu: Option<u32>,
    /// What it is asked for by.
    pub reqid: u32,
    /// Of the receiver, in packets.
    pub replay_window: u32,
    /// ESP within UDP.
    pub encapsulation: Option<Encapsulation>,
    /// The address family.
    pub family: Family,
}

impl Sa {
    /// One of every CPU, of IPv4.
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

    /// The same for one CPU.
    #[must_use]
    pub const fn of_cpu(self, cpu: u32) -> Self {
        Self {
            cpu: Some(cpu),
            ..self
        }
    }

    /// The same of another address family.
    #[must_use]
    pub const fn of(self, family: Family) -> Self {
        Self { family, ..self }
    }

    /// What both hosts know it by.
    #[must_use]
    pub fn id(&self, to: &Host) -> StateId {
        StateId {
            destination: to.address(self.family),
            spi: self.spi,
        }
    }

    /// As the kernel of one of the hosts is to have it.
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
            // The receiver's CPUs are others, and it does not matter which.
            cpu: if outbound { self.cpu } else { None },
            key: KeyAndSalt::new(&key),
            replay_window: if outbound { 0 } else { self.replay_window },
            encapsulation: self.encapsulation,
            selector: None,
        }
    }

    /// Adds it at the receiver, and reads it back.
    ///
    /// # Panics
    /// It is not there.
    pub fn add_in(&self, from: &Host, to: &Host) {
        let state = self.state(from, to, Direction::In);
        to.xfrm.add_state(&state).expect("it is added");
        to.xfrm.verify(&state).expect("it is as it was told");
    }

    /// Adds it at the sender, and reads it back.
    ///
    /// # Panics
    /// It is not there.
    pub fn add_out(&self, from: &Host, to: &Host) {
        let state = self.state(from, to, Direction::Out);
        from.xfrm.add_state(&state).expect("it is added");
        from.xfrm.verify(&state).expect("it is as it was told");
    }

    /// Adds it at both, the receiver first.
    ///
    /// # Panics
    /// It is not there.
    pub fn add(&self, from: &Host, to: &Host) {
        self.add_in(from, to);
        self.add_out(from, to);
    }
}

/// The SAs of one way: a fallback and one for each of some CPUs.
#[derive(Clone, Debug)]
pub struct SaSet {
    /// Of every CPU; added first.
    pub fallback: Sa,
    /// Of one CPU each.
    pub own: Vec<Sa>,
}

impl SaSet {
    /// SPIs from `first` on, the fallback's first, for so many CPUs from 0 on.
    #[must_use]
    pub fn new(first: u32, cpus: u32, family: Family) -> Self {
        Self {
            fallback: Sa::new(first).of(family),
            own: (0..cpus)
                .map(|cpu| Sa::new(first + 1 + cpu).of_cpu(cpu).of(family))
                .collect(),
        }
    }

    /// Adds all of them at both hosts.
    ///
    /// # Panics
    /// One is not there.
    pub fn add(&self, from: &Host, to: &Host) {
        for sa in self.all() {
            sa.add(from, to);
        }
    }

    /// The fallback, then the others.
    pub fn all(&self) -> impl Iterator<Item = &Sa> {
        std::iter::once(&self.fallback).chain(&self.own)
    }

    /// How many packets each has carried at the sender: the fallback, then CPU by CPU.
    #[must_use]
    pub fn packets(&self, from: &Host, to: &Host) -> Vec<u64> {
        self.all()
            .map(|sa| from.carried(&sa.id(to)).packets)
            .collect()
    }
}

/// Whether the kernel has SAs of one CPU; its version does not tell, since older series took them
/// over.
///
/// # Panics
/// The kernel has no IPsec.
#[must_use]
pub fn has_per_cpu() -> bool {
    let xfrm = Xfrm::open().expect("the kernel has IPsec");
    xfrm.has_per_cpu_sas().expect("it can be asked")
}

/// Skips the test where it has none.
///
/// # Panics
/// As [`has_per_cpu`].
pub fn needs_per_cpu(guest: &Guest) {
    if !has_per_cpu() {
        guest.skip("this kernel has no SAs of one CPU");
    }
}

/// What a host's policy for lanes from `from` to `to` selects.
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

/// The same for what comes back.
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

/// The policies of both hosts for what `selector` names on its way from `from` to `to` and back:
/// each host's, out and in.
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

/// Lanes from `a` to `b`, and what comes back on them, need an SA of [`REQID`] at both hosts.
///
/// # Panics
/// A policy is not there.
pub fn protect(hosts: &Hosts, family: Family, protocol: Protocol) -> Vec<(&Host, Policy)> {
    let Hosts { a, b, .. } = hosts;
    let selector = lanes_from(a, b, family, protocol);
    let all = policies(&selector, a, b, REQID);
    for (host, policy) in &all {
        host.xfrm.add_policy(policy).expect("it is added");
        let held = host.xfrm.policy(&policy.selector, policy.direction);
        assert_eq!(held.expect("it can be asked"), Some(*policy));
    }
    all
}
