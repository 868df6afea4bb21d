//! The messages of the control lane after a version is selected.
//!
//! ```text
//!  source                                              destination
//!    │ describe ──────────────────────────────────────────▶ │ builds the VM
//!    │ ◀──────────────────────────────── accept (or refuse) │
//!    │          … data lanes open …                         │
//!    │ ◀─────────────────────────────── lane up, ack, ack … │
//!    │ section, section … final ──────────────────────────▶ │ loads, checks
//!    │ ◀───────────────────────────────────────────── ready │
//!    │ commit ────────────────────────────────────────────▶ │ runs the VM
//!    │ ◀─────────────────────────────────────────── running │
//!    │ release ───────────────────────────────────────────▶ │
//!
//!  either side before commit: cancel        either side: ping, pong
//!  a lane is given up:        fence ▶ ◀ fenced
//!  after a lost control lane: inquire ▶ ◀ answer
//! ```
//!
//! A message is a header of 40 bytes, the kind's fixed part, and extension
//! fields ([`crate::wire`]). Its envelope has session, epoch and sequence
//! number, so a new control lane can continue where the old one stopped, and no
//! message is applied twice. An unknown kind is skipped unless its header says
//! that it must be understood.

mod body;
mod regions;

use std::fmt;

pub use body::Kind;
pub use regions::{Region, RegionError, RegionKind, RegionTable};

use crate::fault::FaultCode;
use crate::limits::{DIGEST_BYTES, MAX_CONTROL_BODY_BYTES, SESSION_ID_BYTES};
use crate::negotiate::{SessionId, SessionSecret};
use crate::wire::{DecodeError, Reader, Start};

/// Bytes of a control message's header.
pub const CONTROL_HEADER_BYTES: usize = 40;

/// XXH3-128 over the VM's memory, in the order that the engine defines.
pub type Digest = [u8; DIGEST_BYTES];

/// Identifies a message within a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Envelope {
    /// The session.
    pub session: SessionId,
    /// The control lane of the attempt, as in its offer.
    pub epoch: u32,
    /// Counts the sender's messages in the session from 1, across epochs. A
    /// repeated message is not applied again.
    pub sequence: u64,
}

/// The header of a control message, within its limits; the kind may be unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    start: Start,
    envelope: Envelope,
}

impl Header {
    /// Reads a header.
    ///
    /// # Errors
    /// The body exceeds [`MAX_CONTROL_BODY_BYTES`], or a reserved bit is set.
    pub fn decode(bytes: &[u8; CONTROL_HEADER_BYTES]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(bytes);
        let start = Start::read(&mut reader, MAX_CONTROL_BODY_BYTES)?;
        let epoch = reader.u32("epoch")?;
        reader.reserved::<4>("reserved")?;
        let sequence = reader.u64("sequence number")?;
        let session = reader.array::<SESSION_ID_BYTES>("session")?;
        Ok(Self {
            start,
            envelope: Envelope {
                session,
                epoch,
                sequence,
            },
        })
    }

    /// Length of the body, at most [`MAX_CONTROL_BODY_BYTES`].
    #[must_use]
    pub fn body_bytes(&self) -> usize {
        self.start.body_bytes()
    }

    /// The message's envelope.
    #[must_use]
    pub fn envelope(&self) -> Envelope {
        self.envelope
    }
}

/// Consecutive chunk numbers.
///
/// The peer chooses the count: compare the set with the chunks in flight, never
/// iterate over it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkSet {
    /// The first chunk.
    pub first: u64,
    /// Number of chunks, at least one; `first + count` does not overflow.
    pub count: u32,
}

/// How far the destination has read on a lane. *ack* confirms chunks; this confirms marks
/// and ends, so that the source can tell a stalled lane from one that waits at a mark for
/// another lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reached {
    /// The lane's number.
    pub lane: u16,
    /// The position.
    pub position: Position,
}

/// A position in the stream of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Position {
    /// The mark that ends this iteration; 0 before the first.
    Mark(u32),
    /// The lane's end: nothing on this lane is in flight.
    End,
}

/// The outcome of an attempt, according to the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// The VM runs at the destination.
    Running,
    /// The destination has recorded that it will never run this attempt's VM.
    Aborted,
    /// The VM ran at the destination, and its process has ended.
    RanThenDied,
    /// The destination has no record of the attempt, so nothing can be concluded.
    NoRecord,
}

/// The first message: the description from which the destination builds the VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Describe {
    /// The VM's UUID, in the order of RFC 9562's text form.
    pub vm_uuid: [u8; 16],
    /// The VM's name, at most [`crate::limits::MAX_NAME_BYTES`].
    pub vm_name: String,
    /// Page size in bytes for every count of pages; version 1 accepts only
    /// [`crate::limits::PAGE_BYTES`].
    pub page_bytes: u32,
    /// Whether the VM's owner had paused it when the migration started. If so, it arrives
    /// paused.
    pub paused: bool,
    /// Opaque to Dunlin, passed from VMM to VMM: configuration, CPU features,
    /// TSC rate; at most [`crate::limits::MAX_DESCRIPTION_BYTES`].
    pub description: Vec<u8>,
    /// The VM's memory; frozen for the session.
    pub regions: RegionTable,
}

/// The destination has built the VM and waits for lanes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Accept {
    /// The secret with which lanes prove that they belong to the session.
    pub secret: SessionSecret,
    /// Data lanes that may be open at the same time, 1 to
    /// [`crate::limits::MAX_LANES`].
    pub lanes_max: u16,
    /// Addresses for lanes as `host:port`; empty means the control lane's
    /// address. At most [`crate::limits::MAX_ENDPOINTS`].
    pub endpoints: Vec<String>,
}

/// One piece of device state.
#[derive(Clone, PartialEq, Eq)]
pub struct Section {
    /// Which device or subsystem, at most [`crate::limits::MAX_NAME_BYTES`].
    pub name: String,
    /// The instance, if there are several.
    pub instance: u32,
    /// The version of the content's layout.
    pub version: u32,
    /// Whether a destination must refuse the section if it is unknown.
    pub required: bool,
    /// The content, at most [`crate::limits::MAX_SECTION_BYTES`].
    pub bytes: Vec<u8>,
}

impl Section {
    /// A section that a destination must support, of a device with one instance.
    #[must_use]
    pub fn required(name: &str, version: u32, bytes: Vec<u8>) -> Self {
        Self {
            name: name.to_owned(),
            instance: 0,
            version,
            required: true,
            bytes,
        }
    }
}

impl fmt::Debug for Section {
    /// The content may hold guest secrets (its registers), so only its length is printed.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Section")
            .field("name", &self.name)
            .field("instance", &self.instance)
            .field("version", &self.version)
            .field("required", &self.required)
            .field("bytes", &self.bytes.len())
            .finish()
    }
}

/// Everything has been sent. The fields are the totals that the destination must have
/// received.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Final {
    /// Chunks of the whole session, not counting those of lost lanes.
    pub chunks: u64,
    /// The last iteration.
    pub iteration: u32,
    /// Sections sent, at most [`crate::limits::MAX_SECTIONS`].
    pub sections: u32,
    /// Pages sent in the whole session, including zero pages and repetitions, but not those
    /// of lost lanes.
    pub pages: u64,
    /// Number of *fenced* reports that the source has received. A *final* with
    /// fewer than the destination has sent is outdated, and another follows.
    pub fenced: u32,
    /// The source's memory, if verification was negotiated.
    pub digest: Option<Digest>,
}

/// A control message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Source: see [`Describe`].
    Describe(Describe),
    /// Destination: see [`Accept`].
    Accept(Accept),
    /// Destination: this VM is refused.
    Refuse {
        /// The reason as a code.
        fault: FaultCode,
        /// The reason as text, at most [`crate::limits::MAX_TEXT_BYTES`].
        text: String,
    },
    /// Destination: a lane's proof is valid, and the lane is being read.
    LaneUp {
        /// The lane's number.
        lane: u16,
    },
    /// Destination: a lane was closed without being read.
    LaneRefused {
        /// The lane's number.
        lane: u16,
        /// The reason as a code.
        fault: FaultCode,
        /// The reason as text, at most [`crate::limits::MAX_TEXT_BYTES`].
        text: String,
    },
    /// Destination: these chunks are in guest memory, and these lanes have
    /// reached these positions. Both may be repeated.
    Ack {
        /// At most [`crate::limits::MAX_ACK_SETS`].
        sets: Vec<ChunkSet>,
        /// At most [`crate::limits::MAX_LANES`].
        reached: Vec<Reached>,
    },
    /// Source: see [`Section`].
    Section(Section),
    /// Source: see [`Final`].
    Final(Final),
    /// Destination: everything has arrived, every lane thread is joined, and the
    /// state is loaded and checked.
    Ready {
        /// The destination's memory, if verification was negotiated.
        digest: Option<Digest>,
    },
    /// Source, the point of no return: the VM is the destination's.
    Commit {
        /// Whether the VM is to run or stay paused.
        run: bool,
    },
    /// Destination: *running* is recorded, and the guest is resumed if *commit*
    /// said so.
    Running {
        /// CPU time of the session's threads at the destination, in
        /// nanoseconds, for the source's report.
        cpu_ns: u64,
        /// How long the guest was paused as seen by the guest, in nanoseconds;
        /// 0 is unknown.
        downtime_ns: u64,
    },
    /// Source: the copy there is destroyed, and the destination may forget the
    /// session.
    Release,
    /// Either side, before *commit*: the migration is cancelled. The destination
    /// has recorded *aborted* before it sends this: if the message crosses
    /// *commit*, it counts as an answer.
    Cancel {
        /// The reason as a code.
        fault: FaultCode,
        /// The reason as text, at most [`crate::limits::MAX_TEXT_BYTES`].
        text: String,
    },
    /// Either side: requests *pong* with the same token.
    Ping {
        /// Any number.
        token: u64,
    },
    /// Either side: the answer to *ping*.
    Pong {
        /// The ping's token.
        token: u64,
    },
    /// Source: a lane is lost or not needed, and the destination ends all writes
    /// on it (I4).
    Fence {
        /// The lane's number.
        lane: u16,
    },
    /// Destination: the answer to *fence*, or unprompted when the destination has lost the
    /// lane. The lane is closed and its thread joined. Chunks not acknowledged by now never
    /// will be.
    Fenced {
        /// The lane's number.
        lane: u16,
        /// The lane's last acknowledgements, at most
        /// [`crate::limits::MAX_ACK_SETS`].
        acks: Vec<ChunkSet>,
    },
    /// Source, on a new control lane after *commit*: asks which side runs the VM.
    Inquire {
        /// The attempt that is in doubt.
        attempt: u32,
    },
    /// Destination: the answer to *inquire*, or unsolicited if the VM could not
    /// be resumed after *running* was recorded. It names the attempt, so an old
    /// *aborted* does not answer for a new attempt (I1).
    Answer {
        /// The attempt in the inquiry.
        attempt: u32,
        /// The outcome of the attempt.
        verdict: Verdict,
    },
}

#[cfg(test)]
mod tests;
