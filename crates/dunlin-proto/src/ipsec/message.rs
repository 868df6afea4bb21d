//! The messages between the two sides of a keying session after a version is selected. The parent
//! module shows their order.
//!
//! A message is a header of 8 bytes, the kind's fixed part, and extension fields ([`crate::wire`]).
//! A message out of order is the peer's fault and ends the session ([`super::exchange`]).

mod body;

use std::net::IpAddr;

pub use body::Kind;

use super::plan::Udp;
use super::ports::PortRange;
use super::{Mode, Slot};
use crate::fault::FaultCode;
use crate::limits::MAX_IPSEC_BODY_BYTES;
use crate::wire::{DecodeError, Reader, Start};

/// The length of a message's header.
pub const MESSAGE_HEADER_BYTES: usize = 8;

/// The header of a message. The length of the body is within the limit; the kind may be unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    start: Start,
}

impl Header {
    /// Decodes a header.
    ///
    /// # Errors
    /// The body exceeds [`MAX_IPSEC_BODY_BYTES`], or a reserved bit is set.
    pub fn decode(bytes: &[u8; MESSAGE_HEADER_BYTES]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(bytes);
        let start = Start::read(&mut reader, MAX_IPSEC_BODY_BYTES)?;
        Ok(Self { start })
    }

    /// Returns the length of the body, at most [`MAX_IPSEC_BODY_BYTES`].
    #[must_use]
    pub fn body_bytes(&self) -> usize {
        self.start.body_bytes()
    }
}

/// The terms that a side requests or accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// How traffic is spread over SAs. The responder repeats the value.
    pub mode: Mode,
    /// The ports. The responder repeats the value.
    pub ports: PortRange,
    /// The source address of this side's packets, as this side sees it. If the other side sees
    /// another address, the path translates addresses.
    pub own: IpAddr,
    /// The address of the other side, as this side sees it.
    pub other: IpAddr,
    /// The maximum number of SAs that this side installs in one epoch for the other side's traffic:
    /// at least 1, at most [`crate::limits::MAX_SAS`].
    pub sas_max: u16,
    /// This side's ports, if the session uses ESP in UDP. The responder sets this field if and only
    /// if the initiator does.
    pub udp: Option<Udp>,
}

/// A message between the two sides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// The first message, from either side.
    Terms(Terms),
    /// Requests SAs for the sender's traffic: at most [`crate::limits::MAX_SLOTS`].
    Want {
        /// The epoch of the SAs: the current or the next one.
        epoch: u32,
        /// The SAs, their indices ascending.
        slots: Vec<Slot>,
    },
    /// The answering side has installed the requested SAs. It lists the SPI that it chose for each
    /// of them, in the order of the request.
    Granted {
        /// The requested epoch.
        epoch: u32,
        /// The index and the SPI of each SA.
        spis: Vec<(u32, u32)>,
    },
    /// From now on, all traffic of the sender is protected. Sent once.
    Ready,
    /// The sender no longer sends with the SAs of an epoch.
    Retire {
        /// The previous epoch.
        epoch: u32,
    },
    /// The sender no longer sends with these SAs of the current epoch.
    Release {
        /// The indices of the SAs, ascending: at most [`crate::limits::MAX_SLOTS`].
        indices: Vec<u32>,
    },
    /// The session has ended, or is refused.
    End {
        /// The fault code.
        fault: FaultCode,
        /// The reason as text, at most [`crate::limits::MAX_TEXT_BYTES`].
        text: String,
    },
}
