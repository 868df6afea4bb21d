//! IPsec between two hosts for the ports of lanes: which objects the kernel is
//! given, in which order, and how two sides agree on them.
//!
//! [`plan`] says what each side installs and takes back, [`message`] what the two
//! say to each other over a control lane, [`exchange`] when. [`ports`] turns ranges
//! of ports into what a selector can say, [`object`] has the kernel's objects as
//! values, which is also how they stand in a record on disk, and [`key`] what a
//! key is derived from. Nothing here has key material.
//!
//! ```text
//!  initiator                                                    responder
//!   │ terms: addresses, ports, mode, encapsulation ───────────────▶ │ blocks its ports
//!   │ ◀──────────────────────────────────────────────────── terms   │
//!   │ blocks its ports                                              │
//!   │ want: the fallback, and one for each CPU that carries a lane ▶│ inbound SAs stand
//!   │ ◀───────────────────────────── granted: an SPI for each       │
//!   │ ◀──────────────────────────────────────────────────── want    │
//!   │ inbound SAs stand; granted ─────────────────────────────────▶ │
//!   │ outbound SAs and policies stand; ready ─────────────────────▶ │ (and the same back)
//!   │                      … want, granted: an SA for another CPU … │
//!   │                      … want of the next epoch, retire: keys … │
//! ```
//!
//! The two directions know nothing of each other: whoever sends asks for SAs, and
//! whoever receives installs the inbound one before it names its SPI. So the
//! sender's outbound SA never leads to a host that cannot open what it seals. New
//! keys are a new *epoch*: all of a direction's SAs once more beside the old ones,
//! one switch of the sender's policies, and then the old ones go.

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
    /// One SA for each CPU that sends, chosen by the kernel (Linux 6.13,
    /// `XFRMA_SA_PCPU`).
    Cpu,
    /// One SA for each connection, chosen by its two ports: for threads that are
    /// not ours to pin, and for older kernels.
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

/// For whom an SA is: what its sender seals with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Sender {
    /// Whatever no other SA is for.
    Fallback,
    /// What leaves from one CPU of the sending host.
    Cpu(u32),
    /// One TCP connection.
    Connection {
        /// Its port at the sending host.
        from: u16,
        /// Its port at the receiving host.
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

/// An SA that a sender asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slot {
    /// Its number in this direction: ascending, and never used twice in a session,
    /// so that no two SAs have one key.
    pub index: u32,
    /// Whom it is for.
    pub sender: Sender,
}

/// A slot with the SPI under which its receiver has installed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grant {
    /// The slot.
    pub slot: Slot,
    /// The SPI: at least [`LEAST_SPI`], in no other use at its receiver.
    pub spi: u32,
}

/// The SPIs below are set aside (RFC 4303, section 2.1).
pub const LEAST_SPI: u32 = 256;
