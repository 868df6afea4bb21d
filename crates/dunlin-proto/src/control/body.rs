//! The fixed part and the extension fields of every control message. The
//! tables of docs/wire.md say the same in the same order.

use super::{
    Accept, ChunkSet, Describe, Digest, Envelope, Final, Header, Kind, Message, Place, Reached,
    RegionTable, Section, Verdict,
};
use crate::limits::{
    MAX_ACK_SETS, MAX_CONTROL_BODY_BYTES, MAX_DESCRIPTION_BYTES, MAX_ENDPOINT_BYTES, MAX_ENDPOINTS,
    MAX_LANES, MAX_NAME_BYTES, MAX_SECTION_BYTES, MAX_SECTIONS, PAGE_BYTES,
};
use crate::negotiate::SessionSecret;
use crate::wire::message::{decode_fault, decode_lane, encode_fault, encode_lane};
use crate::wire::{
    DecodeError, DecodeReason, EncodeError, Reader, Start, Writer, bad_value, within,
};

/// Bytes of a set of chunk numbers.
const CHUNK_SET_BYTES: usize = 12;
/// Bytes of how far a lane has come.
const REACHED_BYTES: usize = 6;
/// How a lane's end is written where otherwise an iteration stands.
const REACHED_END: u32 = u32::MAX;

/// The extension field of *final* and *ready* that holds the digest.
const TAG_DIGEST: u16 = 1;

impl Message {
    /// Appends header and body. Every message of version 1 must be understood,
    /// and says so in its header.
    ///
    /// *accept* puts the session's secret into `out`; the caller wipes it.
    ///
    /// # Errors
    /// Something that a peer would refuse; `out` is then unchanged.
    pub fn encode(&self, envelope: &Envelope, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let kind = self.kind().to_wire();
        Start::write(
            out,
            kind,
            MAX_CONTROL_BODY_BYTES,
            |writer| {
                writer.u32(envelope.epoch);
                writer.u32(0);
                writer.u64(envelope.sequence);
                writer.bytes(&envelope.session);
            },
            |writer| encode_body(self, writer),
        )
    }

    /// Reads the body that follows `header`; `None` is a message that this
    /// release does not know and may skip.
    ///
    /// # Errors
    /// [`DecodeError`]; a body that is not exactly as long as announced is
    /// one.
    pub fn decode(header: &Header, bytes: &[u8]) -> Result<Option<Self>, DecodeError> {
        header.start.decode(bytes, Kind::from_wire, decode_body)
    }
}

/// Appends a message's body.
fn encode_body(message: &Message, writer: &mut Writer<'_>) -> Result<(), EncodeError> {
    match message {
        Message::Describe(describe) => encode_describe(describe, writer)?,
        Message::Accept(accept) => encode_accept(accept, writer)?,
        Message::Refuse { fault, text } | Message::Cancel { fault, text } => {
            encode_fault(*fault, text, writer)?;
        }
        Message::LaneUp { lane } | Message::Fence { lane } => encode_lane(*lane, writer)?,
        Message::LaneRefused { lane, fault, text } => {
            encode_lane(*lane, writer)?;
            encode_fault(*fault, text, writer)?;
        }
        Message::Ack { sets, reached } => {
            encode_sets(sets, writer)?;
            encode_reached(reached, writer)?;
        }
        Message::Section(section) => encode_section(section, writer)?,
        Message::Final(last) => encode_final(last, writer)?,
        Message::Ready { digest } => encode_digest(digest.as_ref(), writer)?,
        Message::Commit { run } => writer.flag(*run),
        Message::Running {
            cpu_ns,
            downtime_ns,
        } => {
            writer.u64(*cpu_ns);
            writer.u64(*downtime_ns);
        }
        Message::Release => {}
        Message::Ping { token } | Message::Pong { token } => writer.u64(*token),
        Message::Fenced { lane, acks } => {
            encode_lane(*lane, writer)?;
            encode_sets(acks, writer)?;
        }
        Message::Inquire { attempt } => writer.u32(*attempt),
        Message::Answer { attempt, verdict } => {
            writer.u32(*attempt);
            writer.u8(match verdict {
                Verdict::Running => 1,
                Verdict::Aborted => 2,
                Verdict::RanThenDied => 3,
                Verdict::NoRecord => 4,
            });
        }
    }
    Ok(())
}

/// Reads the body of a message of this kind to its end.
fn decode_body(kind: Kind, mut body: Reader<'_>) -> Result<Message, DecodeError> {
    let reader = &mut body;
    let message = match kind {
        Kind::Describe => Message::Describe(decode_describe(reader)?),
        Kind::Accept => Message::Accept(decode_accept(reader)?),
        Kind::Refuse => {
            let (fault, text) = decode_fault(reader)?;
            Message::Refuse { fault, text }
        }
        Kind::LaneUp => Message::LaneUp {
            lane: decode_lane(reader)?,
        },
        Kind::LaneRefused => {
            let lane = decode_lane(reader)?;
            let (fault, text) = decode_fault(reader)?;
            Message::LaneRefused { lane, fault, text }
        }
        Kind::Ack => Message::Ack {
            sets: decode_sets(reader)?,
            reached: decode_reached(reader)?,
        },
        Kind::Section => Message::Section(decode_section(reader)?),
        Kind::Final => return decode_final(body),
        Kind::Ready => {
            let digest = decode_digest(body)?;
            return Ok(Message::Ready { digest });
        }
        Kind::Commit => Message::Commit {
            run: reader.flag("run")?,
        },
        Kind::Running => Message::Running {
            cpu_ns: reader.u64("CPU time")?,
            downtime_ns: reader.u64("downtime")?,
        },
        Kind::Release => Message::Release,
        Kind::Cancel => {
            let (fault, text) = decode_fault(reader)?;
            Message::Cancel { fault, text }
        }
        Kind::Ping => Message::Ping {
            token: reader.u64("token")?,
        },
        Kind::Pong => Message::Pong {
            token: reader.u64("token")?,
        },
        Kind::Fence => Message::Fence {
            lane: decode_lane(reader)?,
        },
        Kind::Fenced => Message::Fenced {
            lane: decode_lane(reader)?,
            acks: decode_sets(reader)?,
        },
        Kind::Inquire => Message::Inquire {
            attempt: reader.u32("attempt")?,
        },
        Kind::Answer => Message::Answer {
            attempt: reader.u32("attempt")?,
            verdict: decode_verdict(reader)?,
        },
    };
    body.fields(|_, _| Ok(false))?;
    Ok(message)
}

fn encode_describe(describe: &Describe, writer: &mut Writer<'_>) -> Result<(), EncodeError> {
    if u64::from(describe.page_bytes) != PAGE_BYTES {
        return Err(EncodeError::Invalid {
            what: "page length",
            why: "version 1 has pages of 4096 bytes alone",
        });
    }
    writer.bytes(&describe.vm_uuid);
    writer.text("VM name", &describe.vm_name, MAX_NAME_BYTES)?;
    writer.u32(describe.page_bytes);
    writer.flag(describe.paused);
    writer.blob("description", &describe.description, MAX_DESCRIPTION_BYTES)?;
    describe.regions.encode(writer)
}

fn decode_describe(reader: &mut Reader<'_>) -> Result<Describe, DecodeError> {
    let vm_uuid = reader.array("VM UUID")?;
    let vm_name = reader.text("VM name", MAX_NAME_BYTES)?;
    let offset = reader.offset();
    let page_bytes = reader.u32("page length")?;
    if u64::from(page_bytes) != PAGE_BYTES {
        return Err(DecodeError {
            what: "page length",
            why: DecodeReason::Unsupported {
                value: u64::from(page_bytes),
            },
            offset,
        });
    }
    let paused = reader.flag("paused")?;
    let description = reader.blob("description", MAX_DESCRIPTION_BYTES)?;
    let regions = RegionTable::decode(reader)?;
    Ok(Describe {
        vm_uuid,
        vm_name: vm_name.to_owned(),
        page_bytes,
        paused,
        description: description.to_vec(),
        regions,
    })
}

fn encode_accept(accept: &Accept, writer: &mut Writer<'_>) -> Result<(), EncodeError> {
    if accept.lanes_max == 0 {
        return Err(EncodeError::Invalid {
            what: "number of lanes",
            why: "a session has at least one data lane",
        });
    }
    if accept.lanes_max > MAX_LANES {
        return Err(EncodeError::OverLimit {
            what: "number of lanes",
            value: u64::from(accept.lanes_max),
            limit: u64::from(MAX_LANES),
        });
    }
    writer.bytes(&accept.secret.0);
    writer.u16(accept.lanes_max);
    writer.count("endpoint count", accept.endpoints.len(), MAX_ENDPOINTS)?;
    for endpoint in &accept.endpoints {
        writer.text("endpoint", endpoint, MAX_ENDPOINT_BYTES)?;
    }
    Ok(())
}

fn decode_accept(reader: &mut Reader<'_>) -> Result<Accept, DecodeError> {
    let secret = SessionSecret(reader.array("session secret")?);
    let offset = reader.offset();
    let lanes_max = reader.u16("number of lanes")?;
    if lanes_max == 0 {
        return Err(bad_value("number of lanes", 0, offset));
    }
    within(
        "number of lanes",
        u64::from(lanes_max),
        u64::from(MAX_LANES),
        offset,
    )?;
    let count = reader.count("endpoint count", MAX_ENDPOINTS, 2)?;
    let mut endpoints = Vec::with_capacity(count);
    for _ in 0..count {
        endpoints.push(reader.text("endpoint", MAX_ENDPOINT_BYTES)?.to_owned());
    }
    Ok(Accept {
        secret,
        lanes_max,
        endpoints,
    })
}

fn encode_sets(sets: &[ChunkSet], writer: &mut Writer<'_>) -> Result<(), EncodeError> {
    writer.count("set count", sets.len(), MAX_ACK_SETS)?;
    for set in sets {
        if set.count == 0 || set.first.checked_add(u64::from(set.count)).is_none() {
            return Err(EncodeError::Invalid {
                what: "set of chunks",
                why: "it is empty or goes beyond the last chunk number",
            });
        }
        writer.u64(set.first);
        writer.u32(set.count);
    }
    Ok(())
}

fn decode_sets(reader: &mut Reader<'_>) -> Result<Vec<ChunkSet>, DecodeError> {
    const WHAT: &str = "set of chunks";
    let count = reader.count("set count", MAX_ACK_SETS, CHUNK_SET_BYTES)?;
    let mut sets = Vec::with_capacity(count);
    for _ in 0..count {
        let offset = reader.offset();
        let set = ChunkSet {
            first: reader.u64(WHAT)?,
            count: reader.u32(WHAT)?,
        };
        if set.count == 0 {
            return Err(bad_value(WHAT, 0, offset));
        }
        if set.first.checked_add(u64::from(set.count)).is_none() {
            return Err(DecodeError {
                what: WHAT,
                why: DecodeReason::Inconsistent("it goes beyond the last chunk number"),
                offset,
            });
        }
        sets.push(set);
    }
    Ok(sets)
}

fn encode_reached(reached: &[Reached], writer: &mut Writer<'_>) -> Result<(), EncodeError> {
    writer.count("lane count", reached.len(), usize::from(MAX_LANES))?;
    for Reached { lane, place } in reached {
        encode_lane(*lane, writer)?;
        writer.u32(match place {
            Place::Mark(REACHED_END) => {
                return Err(EncodeError::Invalid {
                    what: "iteration",
                    why: "it stands for a lane's end",
                });
            }
            Place::Mark(iteration) => *iteration,
            Place::End => REACHED_END,
        });
    }
    Ok(())
}

fn decode_reached(reader: &mut Reader<'_>) -> Result<Vec<Reached>, DecodeError> {
    let count = reader.count("lane count", usize::from(MAX_LANES), REACHED_BYTES)?;
    let mut reached = Vec::with_capacity(count);
    for _ in 0..count {
        reached.push(Reached {
            lane: decode_lane(reader)?,
            place: match reader.u32("iteration")? {
                REACHED_END => Place::End,
                iteration => Place::Mark(iteration),
            },
        });
    }
    Ok(reached)
}

fn encode_section(section: &Section, writer: &mut Writer<'_>) -> Result<(), EncodeError> {
    writer.text("section name", &section.name, MAX_NAME_BYTES)?;
    writer.u32(section.instance);
    writer.u32(section.version);
    writer.flag(section.required);
    writer.blob("section", &section.bytes, MAX_SECTION_BYTES)
}

fn decode_section(reader: &mut Reader<'_>) -> Result<Section, DecodeError> {
    Ok(Section {
        name: reader.text("section name", MAX_NAME_BYTES)?.to_owned(),
        instance: reader.u32("section instance")?,
        version: reader.u32("section version")?,
        required: reader.flag("section required")?,
        bytes: reader.blob("section", MAX_SECTION_BYTES)?.to_vec(),
    })
}

fn encode_final(last: &Final, writer: &mut Writer<'_>) -> Result<(), EncodeError> {
    if last.sections > MAX_SECTIONS {
        return Err(EncodeError::OverLimit {
            what: "section count",
            value: u64::from(last.sections),
            limit: u64::from(MAX_SECTIONS),
        });
    }
    writer.u64(last.chunks);
    writer.u32(last.iteration);
    writer.u32(last.sections);
    writer.u64(last.pages);
    writer.u32(last.fenced);
    encode_digest(last.digest.as_ref(), writer)
}

fn decode_final(mut body: Reader<'_>) -> Result<Message, DecodeError> {
    let chunks = body.u64("chunk count")?;
    let iteration = body.u32("iteration")?;
    let offset = body.offset();
    let sections = body.u32("section count")?;
    within(
        "section count",
        u64::from(sections),
        u64::from(MAX_SECTIONS),
        offset,
    )?;
    let pages = body.u64("page count")?;
    let fenced = body.u32("fenced lanes")?;
    let digest = decode_digest(body)?;
    Ok(Message::Final(Final {
        chunks,
        iteration,
        sections,
        pages,
        fenced,
        digest,
    }))
}

fn encode_digest(digest: Option<&Digest>, writer: &mut Writer<'_>) -> Result<(), EncodeError> {
    digest.map_or(Ok(()), |digest| writer.field(TAG_DIGEST, true, digest))
}

/// Reads the extension fields of a message that may carry a digest.
fn decode_digest(body: Reader<'_>) -> Result<Option<Digest>, DecodeError> {
    let mut digest = None;
    body.fields(|tag, value| {
        if tag == TAG_DIGEST {
            digest = Some(value.array("digest")?);
        }
        Ok(tag == TAG_DIGEST)
    })?;
    Ok(digest)
}

fn decode_verdict(reader: &mut Reader<'_>) -> Result<Verdict, DecodeError> {
    let offset = reader.offset();
    match reader.u8("verdict")? {
        1 => Ok(Verdict::Running),
        2 => Ok(Verdict::Aborted),
        3 => Ok(Verdict::RanThenDied),
        4 => Ok(Verdict::NoRecord),
        value => Err(bad_value("verdict", u64::from(value), offset)),
    }
}
