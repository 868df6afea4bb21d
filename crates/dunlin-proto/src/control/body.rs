//! The fixed part and the extension fields of every control message, in the
//! order of the tables in docs/wire/.

use super::{
    Accept, ChunkSet, Describe, Digest, Envelope, Final, Header, Message, Position, Reached,
    Section, Verdict,
};
use crate::limits::{
    MAX_ACK_SETS, MAX_CONTROL_BODY_BYTES, MAX_DESCRIPTION_BYTES, MAX_ENDPOINT_BYTES, MAX_ENDPOINTS,
    MAX_LANES, MAX_NAME_BYTES, MAX_SECTION_BYTES, MAX_SECTIONS, MAX_TEXT_BYTES, PAGE_BYTES,
};
use crate::wire::codec::{
    Blob, Codec, Fields, LANES, Layout, List, NOT_ZERO, OneOf, Plain, Text, Within, layout,
};
use crate::wire::message::messages;
use crate::wire::{
    DecodeError, EncodeError, Encoded, Reader, Writer, bad_value, inconsistent, invalid,
    unsupported,
};

/// On the wire, this value in place of an iteration means the lane's end.
const REACHED_END: u32 = u32::MAX;

/// The tag of the extension field that holds the digest, in *final* and *ready*.
const TAG_DIGEST: u16 = 1;

const CHUNK_SETS: List<Fields> = List {
    most: MAX_ACK_SETS,
    item_bytes: 12,
    each: "set of chunks",
    item: Fields,
};
const REACHED: List<Fields> = List {
    most: MAX_LANES as usize,
    item_bytes: 6,
    each: "lane",
    item: Fields,
};
const ENDPOINTS: List<Text> = List {
    most: MAX_ENDPOINTS,
    item_bytes: 2,
    each: "endpoint",
    item: Text(MAX_ENDPOINT_BYTES),
};
const SECTIONS: Within = Within(0..=MAX_SECTIONS as u64);
const VERDICT: OneOf<u8, Verdict> = OneOf {
    rows: &[
        (1, Verdict::Running),
        (2, Verdict::Aborted),
        (3, Verdict::RanThenDied),
        (4, Verdict::NoRecord),
    ],
    grows: false,
};

impl Message {
    /// Appends header and body. The header of every message of version 1 says that the receiver
    /// must understand the message.
    ///
    /// *accept* writes the session's secret to `out`, which the caller has to wipe.
    ///
    /// # Errors
    /// The message has a value that a peer would reject; `out` is then unchanged.
    pub fn encode(&self, envelope: &Envelope, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        self.append(out, MAX_CONTROL_BODY_BYTES, |writer| {
            writer.u32(envelope.epoch);
            writer.u32(0);
            writer.u64(envelope.sequence);
            writer.bytes(&envelope.session);
        })
    }
}

messages! {
    Describe = 1, "describe" (describe: "describe" as Fields);
    Accept = 2, "accept" (accept: "accept" as Fields);
    Refuse = 3, "refuse" { fault: "fault" as Fields, text: "text" as Text(MAX_TEXT_BYTES) };
    LaneUp = 4, "lane up" { lane: "lane" as NOT_ZERO };
    LaneRefused = 5, "lane refused" {
        lane: "lane" as NOT_ZERO,
        fault: "fault" as Fields,
        text: "text" as Text(MAX_TEXT_BYTES),
    };
    Ack = 6, "ack" { sets: "set count" as CHUNK_SETS, reached: "lane count" as REACHED };
    Section = 7, "section" (section: "section" as Fields);
    Final = 8, "final" (last: "final" as Fields);
    Ready = 9, "ready" { digest: "digest" as Fields };
    Commit = 10, "commit" { run: "run" as Plain };
    Running = 11, "running" { cpu_ns: "CPU time" as Plain, downtime_ns: "downtime" as Plain };
    Release = 12, "release";
    Cancel = 13, "cancel" { fault: "fault" as Fields, text: "text" as Text(MAX_TEXT_BYTES) };
    Ping = 14, "ping" { token: "token" as Plain };
    Pong = 15, "pong" { token: "token" as Plain };
    Fence = 16, "fence" { lane: "lane" as NOT_ZERO };
    Fenced = 17, "fenced" { lane: "lane" as NOT_ZERO, acks: "set count" as CHUNK_SETS };
    Inquire = 18, "inquire" { attempt: "attempt" as Plain };
    Answer = 19, "answer" { attempt: "attempt" as Plain, verdict: "verdict" as VERDICT };
}

layout! { Describe {
    vm_uuid: "VM UUID" as Plain,
    vm_name: "VM name" as Text(MAX_NAME_BYTES),
    page_bytes: "page length" as PageLength,
    paused: "paused" as Plain,
    description: "description" as Blob(MAX_DESCRIPTION_BYTES),
    regions: "regions" as Fields,
} }

layout! { Accept {
    secret: "session secret" as Fields,
    lanes_max: "number of lanes" as LANES,
    endpoints: "endpoint count" as ENDPOINTS,
} }

layout! { Reached {
    lane: "lane" as NOT_ZERO,
    position: "iteration" as Fields,
} }

layout! { Section {
    name: "section name" as Text(MAX_NAME_BYTES),
    instance: "section instance" as Plain,
    version: "section version" as Plain,
    required: "section required" as Plain,
    bytes: "section" as Blob(MAX_SECTION_BYTES),
} }

layout! { Final {
    chunks: "chunk count" as Plain,
    iteration: "iteration" as Plain,
    sections: "section count" as SECTIONS,
    pages: "page count" as Plain,
    fenced: "fenced lanes" as Plain,
    digest: "digest" as Fields,
} }

impl Layout for ChunkSet {
    fn encode_fields(&self, writer: &mut Writer<'_>) -> Encoded {
        if self.count == 0 || self.first.checked_add(u64::from(self.count)).is_none() {
            let why = "empty, or beyond the last chunk number";
            return Err(invalid("set of chunks", why));
        }
        writer.u64(self.first);
        writer.u32(self.count);
        Ok(())
    }

    fn decode_fields(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        const WHAT: &str = "set of chunks";
        let offset = reader.offset();
        let set = Self {
            first: reader.u64(WHAT)?,
            count: reader.u32(WHAT)?,
        };
        if set.count == 0 {
            return Err(bad_value(WHAT, 0, offset));
        }
        if set.first.checked_add(u64::from(set.count)).is_none() {
            let why = "beyond the last chunk number";
            return Err(inconsistent(WHAT, why, offset));
        }
        Ok(set)
    }
}

/// The page size. Version 1 allows only one value.
struct PageLength;

impl Codec<u32> for PageLength {
    fn encode(&self, what: &'static str, value: &u32, writer: &mut Writer<'_>) -> Encoded {
        if u64::from(*value) != PAGE_BYTES {
            return Err(invalid(what, "version 1 supports only pages of 4096 bytes"));
        }
        writer.u32(*value);
        Ok(())
    }

    fn decode(&self, what: &'static str, reader: &mut Reader<'_>) -> Result<u32, DecodeError> {
        let offset = reader.offset();
        let page_bytes = reader.u32(what)?;
        let value = u64::from(page_bytes);
        if value != PAGE_BYTES {
            return Err(unsupported(what, value, offset));
        }
        Ok(page_bytes)
    }
}

impl Layout for Position {
    fn encode_fields(&self, writer: &mut Writer<'_>) -> Encoded {
        writer.u32(match self {
            Self::Mark(REACHED_END) => {
                let why = "this number is reserved for the end of a lane";
                return Err(invalid("iteration", why));
            }
            Self::Mark(iteration) => *iteration,
            Self::End => REACHED_END,
        });
        Ok(())
    }

    fn decode_fields(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(match reader.u32("iteration")? {
            REACHED_END => Self::End,
            iteration => Self::Mark(iteration),
        })
    }
}

/// The extension fields of a message that may carry a digest. They come last in the message.
impl Layout for Option<Digest> {
    fn encode_fields(&self, writer: &mut Writer<'_>) -> Encoded {
        match self {
            Some(digest) => writer.field(TAG_DIGEST, true, digest),
            None => Ok(()),
        }
    }

    fn decode_fields(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut digest = None;
        reader.rest().fields(|tag, value| {
            if tag == TAG_DIGEST {
                digest = Some(value.array("digest")?);
            }
            Ok(tag == TAG_DIGEST)
        })?;
        Ok(digest)
    }
}
