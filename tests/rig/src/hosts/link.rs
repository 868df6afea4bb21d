//! A link between two hosts.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use crate::linux::tun::Tun;

use super::delay::Delay;
use super::{Capture, Host, HostsError, Wire, ip, run};

/// The properties of a link.
#[derive(Clone, Copy, Debug, Default)]
pub struct LinkOptions {
    /// Bits per second in each direction; `None` for no limit.
    pub rate_bits: Option<u64>,
    /// The delay of a packet in each direction, half of the round trip. A link with a delay uses
    /// a thread, which consumes CPU time while there is traffic.
    pub delay: Option<Duration>,
    /// The MTU in bytes; `None` for 1500.
    pub mtu_bytes: Option<u32>,
}

/// The number of packets that wait for the thread of a link with a delay, per direction. With the
/// default of 500, packets are lost if the thread does not run for some milliseconds.
const DELAYED_QUEUE: &str = "10000";

/// An address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// A direction, in the order of the hosts in [`Link::new`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the first host to the second.
    There,
    /// From the second host to the first.
    Back,
    /// Both directions.
    Both,
}

/// A link between two hosts, with an address of each family at each end. Dropping it removes the
/// link; the hosts may be dropped first.
#[derive(Debug)]
pub struct Link {
    ends: [End; 2],
    mtu_bytes: u32,
    /// The forwarding thread, for a link with a delay.
    delay: Option<Delay>,
}

/// One end of a link.
#[derive(Debug)]
struct End {
    namespace: String,
    interface: String,
    v4: Ipv4Addr,
    v6: Ipv6Addr,
    /// The MAC address of a veth interface.
    mac: String,
}

impl Link {
    /// Connects two hosts. A pair of hosts may have several links.
    ///
    /// # Errors
    /// Privileges or a tool are missing.
    ///
    /// # Panics
    /// This process has already created 250 links.
    pub fn new(first: &Host, second: &Host, options: &LinkOptions) -> Result<Self, HostsError> {
        static NEXT: AtomicU8 = AtomicU8::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        assert!(
            number < 251,
            "more than 250 links: an address has one byte for the link"
        );
        let end = |host: &Host, last: u8| End {
            namespace: host.namespace().to_owned(),
            interface: format!("link{number}"),
            v4: Ipv4Addr::new(10, 77, number, last),
            v6: Ipv6Addr::new(0xfd77, 0, 0, number.into(), 0, 0, 0, last.into()),
            mac: format!("02:77:00:00:{number:02x}:{last:02x}"),
        };
        let ends = [end(first, 1), end(second, 2)];
        let delay = match options.delay {
            None => {
                let [near, far] = &ends;
                ip(&[
                    "link",
                    "add",
                    "name",
                    &near.interface,
                    "netns",
                    &near.namespace,
                    "address",
                    &near.mac,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    &far.interface,
                    "netns",
                    &far.namespace,
                    "address",
                    &far.mac,
                ])?;
                None
            }
            Some(delay) => {
                let open = |host: &Host| {
                    let interface = &ends[0].interface;
                    host.run(|| Tun::open(interface))?
                        .map_err(|error| HostsError::Kernel("a TUN device".to_owned(), error))
                };
                let thread = Delay::start(open(first)?, open(second)?, delay)
                    .map_err(|error| HostsError::Kernel("a thread".to_owned(), error))?;
                Some(thread)
            }
        };
        let link = Self {
            ends,
            mtu_bytes: options.mtu_bytes.unwrap_or(1500),
            delay,
        };
        link.restore()?;
        link.set_rate(options.rate_bits)?;
        Ok(link)
    }

    /// The address of a host on this link.
    ///
    /// # Panics
    /// The link does not connect this host.
    #[must_use]
    pub fn address(&self, host: &Host, family: Family) -> IpAddr {
        let end = self.end(host);
        match family {
            Family::V4 => end.v4.into(),
            Family::V6 => end.v6.into(),
        }
    }

    /// The name of a host's interface on this link.
    ///
    /// # Panics
    /// The link does not connect this host.
    #[must_use]
    pub fn interface(&self, host: &Host) -> &str {
        &self.end(host).interface
    }

    /// Limits each direction to `rate_bits` bits per second, or lifts the limit. The sending host
    /// queues up to 50 ms of packets; further packets are lost.
    ///
    /// # Errors
    /// `tc` failed.
    pub fn set_rate(&self, rate_bits: Option<u64>) -> Result<(), HostsError> {
        for End {
            namespace,
            interface,
            ..
        } in &self.ends
        {
            let tc = |arguments: &[&str]| {
                run(Command::new("tc")
                    .args(["-n", namespace, "qdisc"])
                    .args(arguments))
            };
            let Some(rate) = rate_bits else {
                // Ignore an error: the command fails if there was no limit.
                let _ = tc(&["delete", "dev", interface, "root"]);
                continue;
            };
            // The burst size: 10 ms at this rate, but at least four packets.
            let burst = (rate / 8 / 100).max(u64::from(self.mtu_bytes) * 4);
            tc(&[
                "replace",
                "dev",
                interface,
                "root",
                "tbf",
                "rate",
                &format!("{rate}bit"),
                "burst",
                &format!("{burst}b"),
                "latency",
                "50ms",
            ])?;
        }
        Ok(())
    }

    /// Unplugs the link: both interfaces go down, and senders get an error.
    ///
    /// # Errors
    /// `ip` failed.
    pub fn cut(&self) -> Result<(), HostsError> {
        for End {
            namespace,
            interface,
            ..
        } in &self.ends
        {
            ip(&["-n", namespace, "link", "set", interface, "down"])?;
        }
        Ok(())
    }

    /// Drops every packet in a direction without an error.
    ///
    /// # Errors
    /// `nft` failed.
    pub fn swallow(&self, direction: Direction) -> Result<(), HostsError> {
        for (
            index,
            End {
                namespace,
                interface,
                ..
            },
        ) in self.ends.iter().enumerate()
        {
            // Drop the packets at the receiving end. If a host dropped its own outgoing packets,
            // the sender would get an error.
            let arriving = [Direction::Back, Direction::There][index];
            if direction != arriving && direction != Direction::Both {
                continue;
            }
            let table = format!(
                "table inet {interface}\n\
                 delete table inet {interface}\n\
                 table inet {interface} {{\n\
                 chain lost {{ type filter hook prerouting priority -300; \
                 iifname \"{interface}\" drop; }}\n}}\n"
            );
            run(Command::new("ip").args(["netns", "exec", namespace, "nft", &table]))?;
        }
        Ok(())
    }

    /// Restores a link after [`Link::cut`] or [`Link::swallow`].
    ///
    /// # Errors
    /// `ip` or `nft` failed.
    pub fn restore(&self) -> Result<(), HostsError> {
        for (index, end) in self.ends.iter().enumerate() {
            let End {
                namespace,
                interface,
                ..
            } = end;
            let table = format!("table inet {interface}\ndelete table inet {interface}\n");
            run(Command::new("ip").args(["netns", "exec", namespace, "nft", &table]))?;

            let name = ["-n", namespace];
            let mtu = self.mtu_bytes.to_string();
            let ip = |arguments: &[&str]| ip(&[&name, arguments].concat());
            ip(&["link", "set", interface, "mtu", &mtu, "up"])?;
            if self.delay.is_some() {
                ip(&["link", "set", interface, "txqueuelen", DELAYED_QUEUE])?;
            }
            ip(&[
                "address",
                "replace",
                &format!("{}/24", end.v4),
                "dev",
                interface,
            ])?;
            // Restore what an interface loses when it goes down: its IPv6 addresses here, and its
            // neighbour entries below.
            ip(&[
                "address",
                "replace",
                &format!("{}/64", end.v6),
                "dev",
                interface,
                "nodad",
            ])?;
            if self.delay.is_none() {
                // Use static neighbour entries. Without them, the lookup of the neighbour would
                // fail on a link that drops all packets. The sender would then get an error, which
                // it does not get on a path with routers.
                let other = &self.ends[1 - index];
                for address in [IpAddr::from(other.v4), IpAddr::from(other.v6)] {
                    ip(&[
                        "neighbour",
                        "replace",
                        &address.to_string(),
                        "lladdr",
                        &other.mac,
                        "dev",
                        interface,
                        "nud",
                        "permanent",
                    ])?;
                }
            }
        }
        Ok(())
    }

    /// Starts to write the packets at a host's end of this link to `file` (pcap).
    ///
    /// # Errors
    /// tcpdump does not start.
    ///
    /// # Panics
    /// The link does not connect this host.
    pub fn capture(&self, host: &Host, file: &Path) -> Result<Capture, HostsError> {
        let end = self.end(host);
        let peer = self.ends.iter().find(|other| other.v4 != end.v4);
        let peer = peer.expect("a link has two ends").v4;
        Capture::start(host, &end.interface, peer.into(), file)
    }

    /// Starts to count the bytes of payload at a host's end of this link. Also searches the payload
    /// for these 64-bit words.
    ///
    /// # Errors
    /// The packets cannot be read.
    ///
    /// # Panics
    /// The link has a delay, or does not connect this host.
    pub fn count(&self, host: &Host, words: HashSet<u64>) -> Result<Wire, HostsError> {
        assert!(self.delay.is_none(), "cannot count on a link with a delay");
        Wire::start(host, &self.end(host).interface, words)
    }

    fn end(&self, host: &Host) -> &End {
        self.ends
            .iter()
            .find(|end| end.namespace == host.namespace())
            .expect("the host is on one end of this link")
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // A link with a delay has TUN devices, which are removed when its thread ends. Other links
        // are veth pairs: deleting one end removes both.
        if self.delay.is_none() {
            let End {
                namespace,
                interface,
                ..
            } = &self.ends[0];
            let _ = ip(&["-n", namespace, "link", "delete", interface]);
        }
    }
}
