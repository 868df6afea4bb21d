//! What the two sides of an IPsec session say to each other once a version is
//! selected. The module above has the order.
//!
//! A message is a header of 8 bytes, the kind's fixed part, and extension fields
//! ([`crate::wire`]). Whatever breaks the order is the peer's fault and ends the
//! session ([`super::exchange`]).

mod body;

use std::net::IpAddr;

use super::plan::Udp;
use super::ports::PortRange;
use super::{Mode, Slot};
use crate::fault::FaultCode;
use crate::limits::MAX_IPSEC_BODY_BYTES;
use crate::wire::message::kinds;
use crate::wire::{DecodeError, Reader, Start};

/// Bytes of a message's header.
pub const MESSAGE_HEADER_BYTES: usize = 8;

/// The header of a message: within its limits, the kind perhaps unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    start: Start,
}

impl Header {
    /// Reads a header.
    ///
    /// # Errors
    /// A body over [`MAX_IPSEC_BODY_BYTES`], or a reserved bit that is set.
    pub fn decode(bytes: &[u8; MESSAGE_HEADER_BYTES]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(bytes);
        let start = Start::read(&mut reader, MAX_IPSEC_BODY_BYTES)?;
        Ok(Self { start })
    }

    /// Bytes that follow, at most [`MAX_IPSEC_BODY_BYTES`].
    #[must_use]
    pub fn body_bytes(&self) -> usize {
        self.start.body_bytes()
    }
}

/// What a side wants of the session, or consents to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// How traffic is spread. The responder repeats it.
    pub mode: Mode,
    /// The ports. The responder repeats them.
    pub ports: PortRange,
    /// The address that this side's packets bear, as it sees it: where the other side
    /// sees another, something on the path translates addresses.
    pub own: IpAddr,
    /// The other side's address, as this side sees it.
    pub other: IpAddr,
    /// SAs that this side installs for what the other side sends, in one epoch: at
    /// least 1, at most [`crate::limits::MAX_SAS`].
    pub sas_max: u16,
    /// Whether ESP goes in UDP, and this side's ports for it. The responder has some
    /// exactly where the initiator has.
    pub udp: Option<Udp>,
}

/// A message between the two sides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// First, from either side.
    Terms(Terms),
    /// The sender wants to send by these SAs: at most [`crate::limits::MAX_SLOTS`].
    Want {
        /// Their epoch: the current one, or the next one.
        epoch: u32,
        /// The SAs, their indices ascending.
        slots: Vec<Slot>,
    },
    /// They stand at the side that answers, each under an SPI, in the order in which
    /// they were wanted.
    Granted {
        /// The epoch that was wanted.
        epoch: u32,
        /// Index and SPI.
        spis: Vec<(u32, u32)>,
    },
    /// What the side sends is protected from here on. Once.
    Ready,
    /// Nothing is sent any more by the SAs of an epoch.
    Retire {
        /// The epoch before the current one.
        epoch: u32,
    },
    /// Nothing is sent any more by these SAs of the current epoch.
    Release {
        /// Their indices, ascending: at most [`crate::limits::MAX_SLOTS`].
        indices: Vec<u32>,
    },
    /// The session is over, or does not begin.
    End {
        /// The reason as a code.
        fault: FaultCode,
        /// The reason in words, at most [`crate::limits::MAX_TEXT_BYTES`].
        text: String,
    },
}

kinds! {
    Terms = 129, "terms";
    Want = 130, "want";
    Granted = 131, "granted";
    Ready = 132, "ready";
    Retire = 133, "retire";
    Release = 134, "release";
    End = 135, "end";
}
