//! `dunlin ipsec plan`: what one side installs, in order.

use std::net::IpAddr;

use anyhow::{Result, bail};
use clap::Args;
use dunlin_ipsec::{
    Action, Direction, Grant, Object, PortRange, Sender, SessionParameters, Slot, Step, Udp,
};
use serde::Serialize;

use super::ModeName;
use super::control_service::{parts, sender};
use super::run::FIRST_SOURCE_PORT;
use crate::code::DONE;
use crate::options::{Cpus, parse_lanes};

/// Default port of a plan, as in the examples for `dunlin vm receive` and in QEMU's documentation.
const PORT: &str = "4444";
/// First SPI of a plan, as an example. In a session, the receiver chooses SPIs at random.
const FIRST_SPI: u32 = 0x1000;
/// First request id of a plan. A session uses a free range of request ids.
const FIRST_REQID: u32 = 1 << 16;

#[derive(Debug, Args)]
pub(crate) struct Plan {
    /// Number of lanes or connections, 1 to 128.
    #[arg(long, value_name = "N", value_parser = parse_lanes())]
    lanes: u16,
    /// CPUs of this host for the lanes, such as 0,2-3.
    #[arg(long, value_name = "LIST")]
    local_cpus: Cpus,
    /// CPUs of the peer for the lanes.
    #[arg(long, value_name = "LIST")]
    peer_cpus: Cpus,
    /// This host's address.
    #[arg(long, value_name = "ADDR")]
    local: IpAddr,
    /// The peer's address.
    #[arg(long, value_name = "ADDR")]
    peer: IpAddr,
    /// The protected ports.
    #[arg(long, value_name = "A-B", default_value = PORT)]
    ports: PortRange,
    /// How traffic is spread over SAs.
    #[arg(long, value_enum, default_value_t)]
    mode: ModeName,
    /// Encapsulate ESP in UDP, received at this port.
    #[arg(long, value_name = "PORT")]
    udp: Option<u16>,
    /// Print one JSON object per line.
    #[arg(long)]
    json: bool,
}

/// A kernel object, as a line.
#[derive(Debug, Serialize)]
struct ObjectLine {
    /// "policy", "sa" or "listener".
    kind: &'static str,
    /// "in" or "out".
    direction: String,
    /// The CPU of the host that seals the packets; null for a fallback SA, an SA of a connection,
    /// and objects other than SAs.
    cpu: Option<u32>,
    /// The connection's ports: first at the host that seals the packets, then at the host that
    /// decrypts them.
    connection: Option<(u16, u16)>,
    spi: Option<u32>,
    selector: String,
    /// "block" or "protect" for a policy, "open" or "seal" for an SA, "listen" for a listener.
    action: &'static str,
    /// The request id by which a policy selects its SAs.
    reqid: Option<u32>,
}

impl Plan {
    pub(crate) fn run(&self) -> Result<i32> {
        let mut out = String::new();
        for line in self.lines()? {
            if self.json {
                out.push_str(&serde_json::to_string(&line)?);
            } else {
                out.push_str(&line.as_text());
            }
            out.push('\n');
        }
        print!("{out}");
        Ok(DONE)
    }

    fn lines(&self) -> Result<Vec<ObjectLine>> {
        if self.local.is_ipv4() != self.peer.is_ipv4() {
            bail!(
                "addresses {} and {} have different families: give both as IPv4 or both as IPv6",
                self.local,
                self.peer
            );
        }
        if self.local == self.peer {
            bail!(
                "both ends are {}, but packets from a host to itself bypass IPsec: give another --peer",
                self.local
            );
        }
        let udp = |listener| Udp {
            listener,
            first_source: FIRST_SOURCE_PORT,
        };
        let parameters = SessionParameters {
            local: self.local,
            peer: self.peer,
            ports: self.ports,
            mode: self.mode.into(),
            first_reqid: FIRST_REQID,
            udp: self.udp.map(|port| (udp(port), udp(port))),
        };
        let (inbound, outbound) = (
            self.senders(&self.peer_cpus, true),
            self.senders(&self.local_cpus, false),
        );
        let inbound = grants(&inbound, FIRST_SPI);
        let beyond = FIRST_SPI + u32::try_from(inbound.len()).unwrap_or(u32::MAX - FIRST_SPI);
        let outbound = grants(&outbound, beyond);
        let steps = parameters.begin().into_iter();
        let steps = steps.chain(parameters.inbound(1, &inbound));
        let steps = steps.chain(parameters.outbound(1, &outbound, true, &[]));
        Ok(steps.map(|step| ObjectLine::new(&step)).collect())
    }

    /// The senders of one host that need SAs: the fallback and, depending on the mode, each
    /// connection or each CPU that carries a lane. `peers` is true if the host is the peer.
    fn senders(&self, Cpus(cpus): &Cpus, peers: bool) -> Vec<Sender> {
        let lanes = usize::from(self.lanes);
        let mut senders = vec![Sender::Fallback];
        match self.mode {
            ModeName::Cpu => {
                let mut used: Vec<usize> = cpus.iter().copied().take(lanes).collect();
                used.sort_unstable();
                used.dedup();
                let cpu = |cpu: usize| Sender::Cpu(u32::try_from(cpu).unwrap_or(u32::MAX));
                senders.extend(used.into_iter().map(cpu));
            }
            ModeName::Connection => senders.extend((0..self.lanes).map(|lane| {
                // Examples: the ports of real connections are not known in advance.
                let (client, server) = (FIRST_SOURCE_PORT + lane, self.ports.first());
                let (from, to) = if peers {
                    (server, client)
                } else {
                    (client, server)
                };
                Sender::Connection { from, to }
            })),
        }
        senders
    }
}

fn grants(senders: &[Sender], first_spi: u32) -> Vec<Grant> {
    let numbered = (0..).zip(senders);
    let grant = |(index, sender): (u32, &Sender)| Grant {
        slot: Slot {
            index,
            sender: *sender,
        },
        spi: first_spi + index,
    };
    numbered.map(grant).collect()
}

impl ObjectLine {
    fn new(step: &Step) -> Self {
        let object = match step {
            Step::Add(object) | Step::Remove(object) => *object,
            Step::Replace(policy) => Object::Policy(*policy),
        };
        let other = |kind, direction: Direction, selector, action| Self {
            kind,
            direction: direction.to_string(),
            cpu: None,
            connection: None,
            spi: None,
            selector,
            action,
            reqid: None,
        };
        match object {
            Object::Policy(policy) => {
                let (action, reqid) = match policy.action {
                    Action::Block => ("block", None),
                    Action::Protect { reqid } => ("protect", Some(reqid)),
                };
                let selector = format!("tcp {}", policy.selector);
                Self {
                    reqid,
                    ..other("policy", policy.direction, selector, action)
                }
            }
            Object::Association(one) => {
                let udp = one.encapsulation.map_or(String::new(), |ports| {
                    format!(" udp {} {}", ports.source_port, ports.destination_port)
                });
                let selector = format!("esp {} {}{udp}", one.source, one.destination);
                let action = match one.direction {
                    Direction::In => "open",
                    Direction::Out => "seal",
                };
                let (cpu, connection) = parts(one.slot.sender);
                Self {
                    cpu,
                    connection,
                    spi: Some(one.spi),
                    reqid: Some(one.reqid),
                    ..other("sa", one.direction, selector, action)
                }
            }
            Object::Listener(one) => {
                let selector = format!("udp {} port {}", one.address, one.port);
                other("listener", Direction::In, selector, "listen")
            }
        }
    }

    fn as_text(&self) -> String {
        let Self {
            kind,
            direction,
            selector,
            action,
            ..
        } = self;
        let mut text = format!("{kind} {direction} {selector}: {action}");
        if let Some(spi) = self.spi {
            let sender = sender(self.cpu, self.connection);
            text.push_str(&format!(" for {sender}, spi {spi:#x}"));
        }
        if let Some(reqid) = self.reqid {
            text.push_str(&format!(", reqid {reqid}"));
        }
        text
    }
}
