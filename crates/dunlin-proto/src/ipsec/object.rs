//! The kernel's IPsec objects as values and as lines of text.
//!
//! A line has everything that identifies an object or is compared with the kernel's object, but
//! no secret. A record on disk gets the line before the object is installed, so that a later
//! process removes exactly that object:
//!
//! ```text
//! sa out 192.0.2.1 192.0.2.2 spi 0x00001001 reqid 65538 epoch 1 index 2 cpu 3
//! sa in 192.0.2.2 192.0.2.1 spi 0x00001002 reqid 65536 epoch 1 index 0 fallback udp 49152 4500
//! policy out 192.0.2.1 192.0.2.2 ports 0/0x0000 4444/0xffff priority 103 block
//! policy in 192.0.2.2 192.0.2.1 ports 0/0x0000 4444/0xffff priority 103 protect 65536
//! listener 192.0.2.1 4500
//! ```

use std::fmt;
use std::net::IpAddr;
use std::str::{FromStr, SplitWhitespace};

use thiserror::Error;

use super::ports::PortBlock;
use super::{LEAST_SPI, Sender, Slot};

/// The direction of packets, from the point of view of the host on which the object is installed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Direction {
    /// To this host.
    In,
    /// From this host.
    Out,
}

impl fmt::Display for Direction {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::In => "in",
            Self::Out => "out",
        })
    }
}

/// The TCP packets that a policy applies to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Selector {
    /// The source address.
    pub source: IpAddr,
    /// The destination address.
    pub destination: IpAddr,
    /// The source ports.
    pub source_ports: PortBlock,
    /// The destination ports.
    pub destination_ports: PortBlock,
}

impl Selector {
    /// Whether some packet matches both selectors.
    #[must_use]
    pub fn meets(&self, other: &Self) -> bool {
        self.source == other.source
            && self.destination == other.destination
            && self.source_ports.meets(other.source_ports)
            && self.destination_ports.meets(other.destination_ports)
    }

    /// Whether every packet that matches `other` also matches this selector.
    #[must_use]
    pub fn covers(&self, other: &Self) -> bool {
        self.source == other.source
            && self.destination == other.destination
            && self.source_ports.covers(other.source_ports)
            && self.destination_ports.covers(other.destination_ports)
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            source,
            destination,
            source_ports,
            destination_ports,
        } = self;
        write!(
            formatter,
            "{source} {destination} ports {source_ports} {destination_ports}"
        )
    }
}

/// What a policy does with its packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Drops the packets.
    Block,
    /// Seals outgoing packets with an SA that has this request id, and accepts incoming packets
    /// that such an SA opened. Drops all other packets.
    Protect {
        /// The request id.
        reqid: u32,
    },
}

/// A policy. A host has at most one for each direction and selector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Policy {
    /// The direction of the policy's packets.
    pub direction: Direction,
    /// The packets to which the policy applies.
    pub selector: Selector,
    /// What the policy does with these packets.
    pub action: Action,
    /// Of two policies that match, the one with the lower number applies.
    pub priority: u32,
}

impl Policy {
    /// Whether this policy and a policy of another session protect some of the same ports. A policy
    /// for source ports is not a rival of a policy for destination ports: a packet that matches
    /// both is sealed or blocked by either.
    #[must_use]
    pub fn is_rival_of(&self, other: &Self) -> bool {
        let for_sources = |policy: &Self| policy.selector.source_ports != PortBlock::ANY;
        self.direction == other.direction
            && for_sources(self) == for_sources(other)
            && self.selector.meets(&other.selector)
    }

    /// Whether the policy lets packets leave this host through an SA.
    #[must_use]
    pub fn lets_out(&self) -> bool {
        self.direction == Direction::Out && self.action != Action::Block
    }

    /// Whether the policy selects a single connection, by both ports.
    #[must_use]
    pub fn is_for_connection(&self) -> bool {
        let selector = &self.selector;
        selector.source_ports != PortBlock::ANY && selector.destination_ports != PortBlock::ANY
    }

    /// Whether the kernel treats both policies as the same entry, so that one replaces the other.
    #[must_use]
    pub fn is_in_place_of(&self, other: &Self) -> bool {
        self.direction == other.direction && self.selector == other.selector
    }
}

/// The UDP ports of ESP in UDP (RFC 3948).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Encapsulation {
    /// The port of the sealing host.
    pub source_port: u16,
    /// The port of the host that opens the packets. This host listens on it.
    pub destination_port: u16,
}

/// A security association: ESP in transport mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Association {
    /// Inbound if this host opens packets with the SA; outbound if it seals packets.
    pub direction: Direction,
    /// The host that seals the packets.
    pub source: IpAddr,
    /// The host that opens the packets. This address and the SPI identify the SA.
    pub destination: IpAddr,
    /// The SPI, chosen by the host that opens the packets.
    pub spi: u32,
    /// The request id by which policies find the SA.
    pub reqid: u32,
    /// The epoch of the SA's key.
    pub epoch: u32,
    /// The SA's number in its direction, and the packets that it seals. A CPU in the slot is a CPU
    /// of the sealing host.
    pub slot: Slot,
    /// The SA's UDP ports, if it uses ESP in UDP.
    pub encapsulation: Option<Encapsulation>,
}

/// A UDP socket that receives ESP in UDP. It is closed when its process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Listener {
    /// The address on which the socket listens.
    pub address: IpAddr,
    /// The port of the socket.
    pub port: u16,
}

/// An object that a session installs and later removes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Object {
    /// See [`Policy`].
    Policy(Policy),
    /// See [`Association`].
    Association(Association),
    /// See [`Listener`].
    Listener(Listener),
}

impl Object {
    /// Returns the policy, if the object is a policy.
    #[must_use]
    pub fn policy(&self) -> Option<&Policy> {
        match self {
            Self::Policy(policy) => Some(policy),
            _ => None,
        }
    }

    /// Returns the SA, if the object is an SA.
    #[must_use]
    pub fn association(&self) -> Option<&Association> {
        match self {
            Self::Association(association) => Some(association),
            _ => None,
        }
    }
}

impl fmt::Display for Object {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Policy(policy) => policy.fmt(formatter),
            Self::Association(association) => association.fmt(formatter),
            Self::Listener(Listener { address, port }) => {
                write!(formatter, "listener {address} {port}")
            }
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            direction,
            selector,
            action,
            priority,
        } = self;
        write!(
            formatter,
            "policy {direction} {selector} priority {priority} "
        )?;
        match action {
            Action::Block => formatter.write_str("block"),
            Action::Protect { reqid } => write!(formatter, "protect {reqid}"),
        }
    }
}

impl fmt::Display for Association {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "sa {} {} {} spi {:#010x} reqid {} epoch {} index {} ",
            self.direction,
            self.source,
            self.destination,
            self.spi,
            self.reqid,
            self.epoch,
            self.slot.index
        )?;
        match self.slot.sender {
            Sender::Fallback => formatter.write_str("fallback")?,
            Sender::Cpu(cpu) => write!(formatter, "cpu {cpu}")?,
            Sender::Connection { from, to } => write!(formatter, "connection {from} {to}")?,
        }
        match &self.encapsulation {
            None => Ok(()),
            Some(ports) => write!(
                formatter,
                " udp {} {}",
                ports.source_port, ports.destination_port
            ),
        }
    }
}

/// The line does not describe an object.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("the line does not describe a policy, SA or listener")]
pub struct NotAnObject;

impl FromStr for Object {
    type Err = NotAnObject;

    fn from_str(line: &str) -> Result<Self, NotAnObject> {
        let mut words = Words(line.split_whitespace());
        let object = match words.next()? {
            "policy" => Self::Policy(words.policy()?),
            "sa" => Self::Association(words.association()?),
            "listener" => Self::Listener(Listener {
                address: words.parse()?,
                port: words.parse()?,
            }),
            _ => return Err(NotAnObject),
        };
        match words.0.next() {
            None => Ok(object),
            Some(_) => Err(NotAnObject),
        }
    }
}

struct Words<'a>(SplitWhitespace<'a>);

impl<'a> Words<'a> {
    fn next(&mut self) -> Result<&'a str, NotAnObject> {
        self.0.next().ok_or(NotAnObject)
    }

    fn parse<T: FromStr>(&mut self) -> Result<T, NotAnObject> {
        self.next()?.parse().map_err(|_| NotAnObject)
    }

    fn expect(&mut self, word: &str) -> Result<(), NotAnObject> {
        (self.next()? == word).then_some(()).ok_or(NotAnObject)
    }

    fn named<T: FromStr>(&mut self, word: &str) -> Result<T, NotAnObject> {
        self.expect(word)?;
        self.parse()
    }

    fn direction(&mut self) -> Result<Direction, NotAnObject> {
        match self.next()? {
            "in" => Ok(Direction::In),
            "out" => Ok(Direction::Out),
            _ => Err(NotAnObject),
        }
    }

    fn policy(&mut self) -> Result<Policy, NotAnObject> {
        Ok(Policy {
            direction: self.direction()?,
            selector: Selector {
                source: self.parse()?,
                destination: self.parse()?,
                source_ports: self.named("ports")?,
                destination_ports: self.parse()?,
            },
            priority: self.named("priority")?,
            action: match self.next()? {
                "block" => Action::Block,
                "protect" => Action::Protect {
                    reqid: self.parse()?,
                },
                _ => return Err(NotAnObject),
            },
        })
    }

    fn association(&mut self) -> Result<Association, NotAnObject> {
        let direction = self.direction()?;
        let (source, destination) = (self.parse()?, self.parse()?);
        self.expect("spi")?;
        let spi = self.next()?.strip_prefix("0x").ok_or(NotAnObject)?;
        let spi = u32::from_str_radix(spi, 16).map_err(|_| NotAnObject)?;
        if spi < LEAST_SPI {
            return Err(NotAnObject);
        }
        let (reqid, epoch) = (self.named("reqid")?, self.named("epoch")?);
        let index = self.named("index")?;
        let sender = match self.next()? {
            "fallback" => Sender::Fallback,
            "cpu" => Sender::Cpu(self.parse()?),
            "connection" => Sender::Connection {
                from: self.parse()?,
                to: self.parse()?,
            },
            _ => return Err(NotAnObject),
        };
        let encapsulation = match self.0.clone().next() {
            None => None,
            Some(_) => Some(Encapsulation {
                source_port: self.named("udp")?,
                destination_port: self.parse()?,
            }),
        };
        Ok(Association {
            direction,
            source,
            destination,
            spi,
            reqid,
            epoch,
            slot: Slot { index, sender },
            encapsulation,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::option;
    use proptest::prelude::*;

    use super::*;

    fn address() -> impl Strategy<Value = IpAddr> {
        prop_oneof![
            any::<[u8; 4]>().prop_map(IpAddr::from),
            any::<[u8; 16]>().prop_map(IpAddr::from),
        ]
    }

    fn direction() -> impl Strategy<Value = Direction> {
        prop_oneof![Just(Direction::In), Just(Direction::Out)]
    }

    fn block() -> impl Strategy<Value = PortBlock> {
        any::<(u16, u16)>().prop_map(|(port, mask)| PortBlock {
            port: port & mask,
            mask,
        })
    }

    fn sender() -> impl Strategy<Value = Sender> {
        prop_oneof![
            Just(Sender::Fallback),
            any::<u32>().prop_map(Sender::Cpu),
            any::<(u16, u16)>().prop_map(|(from, to)| Sender::Connection { from, to }),
        ]
    }

    prop_compose! {
        fn policy()(
            direction in direction(),
            source in address(),
            destination in address(),
            source_ports in block(),
            destination_ports in block(),
            reqid in option::of(any::<u32>()),
            priority in any::<u32>(),
        ) -> Policy {
            let selector = Selector { source, destination, source_ports, destination_ports };
            let action = reqid.map_or(Action::Block, |reqid| Action::Protect { reqid });
            Policy { direction, selector, action, priority }
        }
    }

    prop_compose! {
        fn association()(
            direction in direction(),
            source in address(),
            destination in address(),
            spi in LEAST_SPI..,
            (reqid, epoch, index) in any::<(u32, u32, u32)>(),
            sender in sender(),
            udp in option::of(any::<(u16, u16)>()),
        ) -> Association {
            Association {
                direction, source, destination, spi, reqid, epoch,
                slot: Slot { index, sender },
                encapsulation: udp.map(|(source_port, destination_port)| Encapsulation {
                    source_port,
                    destination_port,
                }),
            }
        }
    }

    fn object() -> impl Strategy<Value = Object> {
        prop_oneof![
            policy().prop_map(Object::Policy),
            association().prop_map(Object::Association),
            (address(), any::<u16>())
                .prop_map(|(address, port)| Object::Listener(Listener { address, port })),
        ]
    }

    proptest! {
        #[test]
        fn an_object_survives_a_round_trip_through_its_line(object in object()) {
            prop_assert_eq!(object.to_string().parse(), Ok(object));
        }

        /// A record can end with an incomplete line. Such a line is rejected.
        #[test]
        fn a_line_without_its_last_words_is_rejected(object in object(), cut in 1..8_usize) {
            let line = object.to_string();
            let words: Vec<&str> = line.split(' ').collect();
            let kept = words.len().saturating_sub(cut);
            let cut = words[..kept].join(" ");
            // If the line of an SA is cut before the UDP ports, the rest is a valid line of another
            // SA.
            if let Ok(other) = cut.parse::<Object>() {
                prop_assert!(matches!(other, Object::Association(one) if one.encapsulation.is_none()));
            }
        }
    }
}
