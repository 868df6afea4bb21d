//! IPsec between two hosts for the ports of lanes: which objects the kernel gets, in which order,
//! and how two sides agree on them.
//!
//! [`plan`] lists what each side installs and removes. [`message`] defines the messages that the
//! two sides exchange over a control lane. [`exchange`] decides when a side installs, removes or
//! sends something. [`ports`] splits ranges of ports into blocks that a selector can express.
//! [`object`] has the kernel's objects as values and in the text form of records on disk. [`key`]
//! has the context from which a key is derived. None of these modules holds key material.
//!
//! ```text
//!  initiator                                                    responder
//!   │ terms: addresses, ports, mode, encapsulation ───────────────▶ │ blocks its ports
//!   │ ◀──────────────────────────────────────────────────── terms   │
//!   │ blocks its ports                                              │
//!   │ want: the fallback, and one for each CPU that carries a lane ▶│ installs inbound SAs
//!   │ ◀───────────────────────────── granted: an SPI for each       │
//!   │ ◀──────────────────────────────────────────────────── want    │
//!   │ inbound SAs installed; granted ─────────────────────────────▶ │
//!   │ outbound SAs and policies installed; ready ─────────────────▶ │ (and the same back)
//!   │                      … want, granted: an SA for another CPU … │
//!   │                      … want of the next epoch, retire: keys … │
//! ```
//!
//! The two directions are independent: the sending side requests SAs, and the receiving side
//! installs each inbound SA before it sends the SA's SPI. Therefore the receiver can open every
//! packet that the sender seals. New keys are a new *epoch*: all SAs of a direction are installed
//! again beside the old ones, the sender switches its policies once, and then the old SAs are
//! removed.

pub mod exchange;
pub mod key;
pub mod message;
#[cfg(test)]
mod model;
pub mod object;
pub mod plan;
#[cfg(all(test, feature = "mistakes"))]
mod planted;
pub mod ports;

use std::fmt;

/// How traffic is spread over SAs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// One SA for each CPU that sends. For each packet, the kernel chooses the SA of the CPU that
    /// sends the packet (`XFRMA_SA_PCPU`, Linux 6.13 or a backport).
    Cpu,
    /// One SA for each connection, selected by the connection's two ports. This mode is for threads
    /// that this process cannot pin to a CPU, and for older kernels.
    Connection,
}

impl fmt::Display for Mode {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Cpu => "cpu",
            Self::Connection => "connection",
        })
    }
}

/// The packets that the sending host seals with an SA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Sender {
    /// All packets for which there is no other SA.
    Fallback,
    /// Packets that leave from one CPU of the sending host.
    Cpu(u32),
    /// One TCP connection.
    Connection {
        /// The port on the sending host.
        from: u16,
        /// The port on the receiving host.
        to: u16,
    },
}

impl fmt::Display for Sender {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fallback => formatter.write_str("fallback"),
            Self::Cpu(cpu) => write!(formatter, "CPU {cpu}"),
            Self::Connection { from, to } => write!(formatter, "connection {from} to {to}"),
        }
    }
}

/// An SA that the sending side requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slot {
    /// The SA's number in this direction. The numbers ascend and are never reused in a session, so
    /// that no two SAs share a key.
    pub index: u32,
    /// Which packets of the sending host the SA seals.
    pub sender: Sender,
}

impl Slot {
    /// The slot with its SPI.
    #[must_use]
    pub fn granted(self, spi: u32) -> Grant {
        Grant { slot: self, spi }
    }
}

/// A slot with the SPI under which the receiver installed its SA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grant {
    /// The slot.
    pub slot: Slot,
    /// The SPI: at least [`LEAST_SPI`], and unique on the receiver.
    pub spi: u32,
}

/// Smaller SPIs are reserved (RFC 4303, section 2.1).
pub const LEAST_SPI: u32 = 256;
