//! What the control lane carries once a version is selected.
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
//! fields ([`crate::wire`]). Its envelope names session, epoch and sequence
//! number, so that a new control lane can go on where the old one stopped and
//! nothing is applied twice. A kind that is not known is skipped unless its
//! header says that it must be understood.

mod body;
mod regions;

use std::fmt;

pub use regions::{Region, RegionError, RegionKind, RegionTable};

use crate::fault::FaultCode;
use crate::limits::{DIGEST_BYTES, MAX_CONTROL_BODY_BYTES, SESSION_ID_BYTES};
use crate::negotiate::{SessionId, SessionSecret};
use crate::wire::message::kinds;
use crate::wire::{DecodeError, Reader, Start};

/// Bytes of a control message's header.
pub const CONTROL_HEADER_BYTES: usize = 40;

/// XXH3-128 over the memory of the VM, as the engine lays it out.
pub type Digest = [u8; DIGEST_BYTES];

/// Where a message belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Envelope {
    /// The session.
    pub session: SessionId,
    /// The control lane of the attempt, as in its offer.
    pub epoch: u32,
    /// Counts the sender's messages in the session from 1, across epochs. A
    /// message that was seen before is not applied again.
    pub sequence: u64,
}

/// The header of a control message: within its limits, the kind perhaps
/// unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    start: Start,
    envelope: Envelope,
}

impl Header {
    /// Reads a header.
    ///
    /// # Errors
    /// A body over [`MAX_CONTROL_BODY_BYTES`], or a reserved bit that is set.
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

    /// Bytes that follow, at most [`MAX_CONTROL_BODY_BYTES`].
    #[must_use]
    pub fn body_bytes(&self) -> usize {
        self.start.body_bytes()
    }

    /// Where the message belongs.
    #[must_use]
    pub fn envelope(&self) -> Envelope {
        self.envelope
    }
}

/// Chunk numbers that follow one another.
///
/// The count is the peer's and may be any: compare the set with what is
/// outstanding, never walk through it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkSet {
    /// The first chunk.
    pub first: u64,
    /// How many, at least one; `first + count` does not overflow.
    pub count: u32,
}

/// How far the destination has read on a lane. Chunks are acknowledged by
/// themselves; this tells of marks and ends, so that a lane that stands still
/// can be told from one that waits for another at a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reached {
    /// The lane's number.
    pub lane: u16,
    /// How far.
    pub position: Position,
}

/// A position in the stream of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Position {
    /// The mark that ends this iteration; 0 before the first.
    Mark(u32),
    /// The lane's end: nothing of it is under way.
    End,
}

/// What the destination says about an attempt that was in doubt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// The VM runs at the destination.
    Running,
    /// The destination has recorded that it will never run this attempt's VM.
    Aborted,
    /// The VM ran at the destination, and its process has died since.
    RanThenDied,
    /// The destination knows nothing of it: no answer to build on.
    NoRecord,
}

/// Comes first and moves no memory: what the destination builds the VM from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Describe {
    /// The VM's UUID, in the order of RFC 9562's text form.
    pub vm_uuid: [u8; 16],
    /// The VM's name, at most [`crate::limits::MAX_NAME_BYTES`].
    pub vm_name: String,
    /// Bytes of a page in every count of pages; version 1 accepts
    /// [`crate::limits::PAGE_BYTES`] alone.
    pub page_bytes: u32,
    /// Whether its owner had paused the VM when the migration started; then it
    /// arrives paused.
    pub paused: bool,
    /// Opaque to Dunlin, from VMM to VMM: configuration, CPU features, TSC
    /// rate; at most [`crate::limits::MAX_DESCRIPTION_BYTES`].
    pub description: Vec<u8>,
    /// The VM's memory; frozen for the session.
    pub regions: RegionTable,
}

/// The destination has built the VM and waits for lanes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Accept {
    /// Under which lanes prove that they belong here.
    pub secret: SessionSecret,
    /// Data lanes that may be alive at the same time, 1 to
    /// [`crate::limits::MAX_LANES`].
    pub lanes_max: u16,
    /// Where lanes may connect, as `host:port`; empty means where the control
    /// lane went. At most [`crate::limits::MAX_ENDPOINTS`].
    pub endpoints: Vec<String>,
}

/// One piece of device state.
#[derive(Clone, PartialEq, Eq)]
pub struct Section {
    /// Which device or subsystem, at most [`crate::limits::MAX_NAME_BYTES`].
    pub name: String,
    /// Which of several alike.
    pub instance: u32,
    /// The version of the content's layout.
    pub version: u32,
    /// Whether a destination that does not know the section must refuse.
    pub required: bool,
    /// The content, at most [`crate::limits::MAX_SECTION_BYTES`].
    pub bytes: Vec<u8>,
}

impl fmt::Debug for Section {
    /// The content may be a guest's secret (its registers), so that only its
    /// length prints.
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

/// Everything has been sent; what the destination must have received.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Final {
    /// Chunks of the whole session, without those that a lost lane took with
    /// it.
    pub chunks: u64,
    /// The last iteration.
    pub iteration: u32,
    /// Sections sent, at most [`crate::limits::MAX_SECTIONS`].
    pub sections: u32,
    /// Pages sent in the whole session, zero pages and repetitions included,
    /// without those of lost chunks.
    pub pages: u64,
    /// Lanes that the destination has reported as fenced, as far as the source
    /// had heard: a *final* that names fewer than the destination has fenced
    /// was overtaken, and another follows.
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
    /// Destination: it will not take this VM.
    Refuse {
        /// The reason as a code.
        fault: FaultCode,
        /// The reason in words, at most [`crate::limits::MAX_TEXT_BYTES`].
        text: String,
    },
    /// Destination: a lane has proved itself and is read from.
    LaneUp {
        /// The lane's number.
        lane: u16,
    },
    /// Destination: a lane was closed and not read from.
    LaneRefused {
        /// The lane's number.
        lane: u16,
        /// The reason as a code.
        fault: FaultCode,
        /// The reason in words, at most [`crate::limits::MAX_TEXT_BYTES`].
        text: String,
    },
    /// Destination: these chunks are in guest memory, and so far have lanes
    /// come. Both may be repeated.
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
    /// Destination: it has everything, every lane thread is joined, state is
    /// loaded and checked.
    Ready {
        /// The destination's memory, if verification was negotiated.
        digest: Option<Digest>,
    },
    /// Source, the point of no return: the VM is the destination's.
    Commit {
        /// Whether the VM shall run, or stay paused.
        run: bool,
    },
    /// Destination: recorded, and resumed if *commit* said so.
    Running {
        /// CPU time of the session's threads at the destination, in
        /// nanoseconds, for the source's report.
        cpu_ns: u64,
        /// How long the guest stood still as it saw it itself, in
        /// nanoseconds; 0 is unknown.
        downtime_ns: u64,
    },
    /// Source: its copy is destroyed; the destination may forget the session.
    Release,
    /// Either side, before *commit*. The destination has recorded *aborted*
    /// before it says so: where it crosses *commit*, it is an answer.
    Cancel {
        /// The reason as a code.
        fault: FaultCode,
        /// The reason in words, at most [`crate::limits::MAX_TEXT_BYTES`].
        text: String,
    },
    /// Either side: answer with the same token.
    Ping {
        /// Any number.
        token: u64,
    },
    /// The answer to a ping.
    Pong {
        /// The ping's token.
        token: u64,
    },
    /// Source: a lane is given up; make sure that it writes no more (I4).
    Fence {
        /// The lane's number.
        lane: u16,
    },
    /// Destination, as the answer to *fence* or of its own accord when it has
    /// lost the lane itself: the lane is closed and its thread joined. What is
    /// not acknowledged now never will be.
    Fenced {
        /// The lane's number.
        lane: u16,
        /// The lane's last acknowledgements, at most
        /// [`crate::limits::MAX_ACK_SETS`].
        acks: Vec<ChunkSet>,
    },
    /// Source, on a new control lane after *commit*: who runs the VM?
    Inquire {
        /// The attempt that is in doubt.
        attempt: u32,
    },
    /// Destination: the answer to *inquire*, or unasked when the VM could not
    /// be resumed after *running* was recorded; and which attempt it is about,
    /// lest an old *aborted* be taken for a new one (I1).
    Answer {
        /// The attempt that was asked about.
        attempt: u32,
        /// What became of it.
        verdict: Verdict,
    },
}

/// Which side sends a kind of message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sender {
    /// The source alone.
    Source,
    /// The destination alone.
    Destination,
    /// Either.
    Either,
}

kinds! {
    Describe = 1, "describe", Source;
    Accept = 2, "accept", Destination;
    Refuse = 3, "refuse", Destination;
    LaneUp = 4, "lane up", Destination;
    LaneRefused = 5, "lane refused", Destination;
    Ack = 6, "ack", Destination;
    Section = 7, "section", Source;
    Final = 8, "final", Source;
    Ready = 9, "ready", Destination;
    Commit = 10, "commit", Source;
    Running = 11, "running", Destination;
    Release = 12, "release", Source;
    Cancel = 13, "cancel", Either;
    Ping = 14, "ping", Either;
    Pong = 15, "pong", Either;
    Fence = 16, "fence", Source;
    Fenced = 17, "fenced", Destination;
    Inquire = 18, "inquire", Source;
    Answer = 19, "answer", Destination;
}

#[cfg(test)]
mod tests;
