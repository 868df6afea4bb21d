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
//! number. A new control lane can therefore continue where the old one stopped,
//! and no side applies a message twice. A receiver skips a message of an unknown
//! kind, unless the message's header says that the receiver must understand the
//! message.

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
    /// The number of the control lane within the attempt, as in the *offer* of this lane.
    pub epoch: u32,
    /// A sender numbers its messages in the session in ascending order, possibly with gaps. A new
    /// epoch continues the count. A repeated message is not applied again.
    pub sequence: u64,
}

/// The header of a control message. [`Header::decode`] has checked the body's length against
/// [`MAX_CONTROL_BODY_BYTES`]. The message's kind may be unknown to the receiver.
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
/// The peer chooses the count, and it can be as large as `u32::MAX`. Therefore compare the set with
/// the chunks in flight, and never iterate over the set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkSet {
    /// The first chunk.
    pub first: u64,
    /// Number of chunks, at least one; `first + count` does not overflow.
    pub count: u32,
}

/// How far the destination has read on a lane: the last mark, or the end. From this report the
/// source can distinguish a stalled lane from a lane that waits at a mark until another lane
/// reaches it. Chunks are acknowledged separately ([`ChunkSet`]).
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
    /// The mark that ends the iteration with this number; 0 before the lane's first mark.
    Mark(u32),
    /// The lane's end: the destination has read everything that was sent on this lane.
    End,
}

/// The outcome of an attempt, according to the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// The destination has the VM: it runs there, or stays paused as *commit* requested.
    Running,
    /// The destination has recorded that it will never run this attempt's VM.
    Aborted,
    /// The VM ran, or may have run, at the destination, and no longer runs there.
    RanThenDied,
    /// The destination has no record of the attempt, so nothing can be concluded.
    NoRecord,
}

/// The first message: the description from which the destination builds the VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Describe {
    /// The VM's UUID, with the bytes in the order of its text form (RFC 9562).
    pub vm_uuid: [u8; 16],
    /// The VM's name, at most [`crate::limits::MAX_NAME_BYTES`].
    pub vm_name: String,
    /// Bytes of a page, the unit of every page count in the session. Version 1 accepts only
    /// [`crate::limits::PAGE_BYTES`].
    pub page_bytes: u32,
    /// Whether the VM's owner had paused it when it was described. *commit* says whether the
    /// destination resumes it.
    pub paused: bool,
    /// The VMM's description of the VM, such as configuration, CPU features and TSC rate.
    /// Dunlin does not interpret it. At most [`crate::limits::MAX_DESCRIPTION_BYTES`].
    pub description: Vec<u8>,
    /// The regions of the VM's memory. They do not change during the session.
    pub regions: RegionTable,
}

/// The destination has built the VM and waits for lanes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Accept {
    /// The secret with which lanes prove that they belong to the session.
    pub secret: SessionSecret,
    /// The maximum number of data lanes that are open at the same time, 1 to
    /// [`crate::limits::MAX_LANES`].
    pub lanes_max: u16,
    /// The addresses, as `host:port`, to which the source connects lanes. If the list is empty, the
    /// source connects lanes to the control lane's address. At most
    /// [`crate::limits::MAX_ENDPOINTS`] addresses.
    pub endpoints: Vec<String>,
}

/// One piece of device state.
#[derive(Clone, PartialEq, Eq)]
pub struct Section {
    /// The name of the device or subsystem, at most [`crate::limits::MAX_NAME_BYTES`].
    pub name: String,
    /// The number of the device, if the VM has several devices with this name; otherwise 0.
    pub instance: u32,
    /// The version of the content's layout.
    pub version: u32,
    /// Whether a destination that does not support this section must refuse it, and with it the VM.
    /// Otherwise the destination may ignore the section.
    pub required: bool,
    /// The content, at most [`crate::limits::MAX_SECTION_BYTES`].
    pub bytes: Vec<u8>,
}

impl Section {
    /// Creates a section of a device with one instance. A destination that does not support the
    /// section must refuse it.
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
    /// The content may hold secrets of the guest, such as registers, so only its length is printed.
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

/// Everything has been sent. The message contains the totals that the destination must have
/// received.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Final {
    /// Chunks of the whole session, not counting those that were lost with a lane.
    pub chunks: u64,
    /// The number of the last iteration.
    pub iteration: u32,
    /// Sections sent, at most [`crate::limits::MAX_SECTIONS`].
    pub sections: u32,
    /// Pages sent in the whole session, including zero pages and repetitions, but not those that
    /// were lost with a lane.
    pub pages: u64,
    /// The number of lanes for which the source has received *fenced*. If the destination has
    /// fenced more lanes, this *final* is outdated, and the source sends another.
    pub fenced: u32,
    /// The digest of the source's memory, if verification was negotiated.
    pub digest: Option<Digest>,
}

/// A control message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// From the source; see [`Describe`].
    Describe(Describe),
    /// From the destination; see [`Accept`].
    Accept(Accept),
    /// The destination refuses the VM or the session.
    Refuse {
        /// The reason as a code.
        fault: FaultCode,
        /// The reason as text, at most [`crate::limits::MAX_TEXT_BYTES`].
        text: String,
    },
    /// The destination has accepted a lane's proof and reads the lane.
    LaneUp {
        /// The lane's number.
        lane: u16,
    },
    /// The destination has closed a lane without reading it.
    LaneRefused {
        /// The lane's number.
        lane: u16,
        /// The reason as a code.
        fault: FaultCode,
        /// The reason as text, at most [`crate::limits::MAX_TEXT_BYTES`].
        text: String,
    },
    /// The destination has written these chunks to guest memory and has read these lanes up to
    /// these positions. Chunks and positions may be repeated.
    Ack {
        /// The chunks, at most [`crate::limits::MAX_ACK_SETS`] sets.
        sets: Vec<ChunkSet>,
        /// The positions, of at most [`crate::limits::MAX_LANES`] lanes.
        reached: Vec<Reached>,
    },
    /// From the source; see [`Section`].
    Section(Section),
    /// From the source; see [`Final`].
    Final(Final),
    /// The destination has received everything, joined every lane thread, and loaded and checked
    /// the state.
    Ready {
        /// The digest of the destination's memory, if verification was negotiated.
        digest: Option<Digest>,
    },
    /// The source hands the VM over. This is the point of no return: from now on the destination,
    /// or an operator, decides where the VM runs.
    Commit {
        /// Whether the destination resumes the VM; otherwise the VM stays paused.
        run: bool,
    },
    /// The destination has recorded *running*, and has resumed the guest if *commit* requires it.
    Running {
        /// CPU time of the session's threads at the destination, in
        /// nanoseconds, for the source's report.
        cpu_ns: u64,
        /// The downtime as the guest sees it, in nanoseconds; 0 if it is unknown.
        downtime_ns: u64,
    },
    /// The source has destroyed its copy, and the destination may forget the session.
    Release,
    /// Either side cancels the migration, before *commit*. The destination records *aborted* before
    /// it sends *cancel*. If the destination's *cancel* crosses the source's *commit*, the source
    /// treats this *cancel* as the answer *aborted*.
    Cancel {
        /// The reason as a code.
        fault: FaultCode,
        /// The reason as text, at most [`crate::limits::MAX_TEXT_BYTES`].
        text: String,
    },
    /// Either side requests *pong* with the same token.
    Ping {
        /// Any number.
        token: u64,
    },
    /// Either side answers *ping*.
    Pong {
        /// The ping's token.
        token: u64,
    },
    /// The source asks the destination to end all writes of a lane that is lost or not needed (I4).
    Fence {
        /// The lane's number.
        lane: u16,
    },
    /// The destination answers *fence*, or reports without a *fence* that it has lost the lane. The
    /// lane is closed and its thread joined. Chunks of the lane that neither this message nor an
    /// earlier one acknowledges are lost.
    Fenced {
        /// The lane's number.
        lane: u16,
        /// The lane's last acknowledgements, at most [`crate::limits::MAX_ACK_SETS`] sets.
        acks: Vec<ChunkSet>,
    },
    /// The source asks, on a new control lane after *commit*, which side runs the VM.
    Inquire {
        /// The attempt that is in doubt.
        attempt: u32,
    },
    /// The destination answers *inquire*, or reports without an inquiry that the VM could not be
    /// resumed after *running* was recorded. The message names the attempt, so that the source does
    /// not apply the *aborted* of an earlier attempt to a new one (I1).
    Answer {
        /// The attempt to which the verdict applies.
        attempt: u32,
        /// The outcome of the attempt.
        verdict: Verdict,
    },
}

#[cfg(test)]
mod tests;
