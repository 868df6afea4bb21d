//! The fixed part of every message. The tables of docs/wire.md say the same in
//! the same order.

use super::{Credit, Header, Kind, LaneAck, Mark, Message, Open};
use crate::fault::FaultCode;
use crate::limits::{
    MAX_CHANNEL_OFFSET, MAX_CHANNELS, MAX_CREDITS, MAX_LANES, MAX_NAME_BYTES, MAX_TUNNEL_BODY_BYTES,
};
use crate::negotiate::SessionSecret;
use crate::wire::message::{
    bounded, decode_fault, decode_lane, encode_fault, encode_lane, invalid,
};
use crate::wire::{DecodeError, EncodeError, Reader, Start, Writer, bad_value, within};

const MARK_BYTES: usize = 12;
const CREDIT_BYTES: usize = 20;
const LANE_ACK_BYTES: usize = 10;

impl Message {
    /// Appends header and body. Every message of version 1 must be understood,
    /// and says so in its header.
    ///
    /// *accept* puts a secret into `out`; the caller wipes it.
    ///
    /// # Errors
    /// Something that a peer would refuse; `out` is then unchanged.
    pub fn encode(&self, epoch: u32, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let kind = self.kind().to_wire();
        Start::write(
            out,
            kind,
            MAX_TUNNEL_BODY_BYTES,
            |writer| {
                writer.u32(epoch);
                writer.u32(0);
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
        Message::Accept {
            secret,
            lanes_max,
            port,
        } => {
            if *lanes_max == 0 {
                return Err(invalid("number of lanes", "there is at least one"));
            }
            bounded(
                "number of lanes",
                u64::from(*lanes_max),
                u64::from(MAX_LANES),
            )?;
            writer.bytes(&secret.0);
            writer.u16(*lanes_max);
            writer.u16(*port);
        }
        Message::Open(open) => encode_open(open, writer)?,
        Message::Opened { channel, limit } => {
            writer.u32(*channel);
            encode_offset("limit", *limit, writer)?;
        }
        Message::Refused {
            channel,
            fault,
            text,
        } => {
            writer.u32(*channel);
            encode_fault(*fault, text, writer)?;
        }
        Message::Credit(credits) => {
            writer.count("credit count", credits.len(), MAX_CREDITS)?;
            for credit in credits {
                writer.u32(credit.channel);
                encode_offset("delivered", credit.delivered, writer)?;
                encode_offset("limit", credit.limit, writer)?;
            }
        }
        Message::Ack(acks) => {
            writer.count("lane count", acks.len(), usize::from(MAX_LANES))?;
            for ack in acks {
                encode_ack(ack, writer)?;
            }
        }
        Message::LaneRefused { lane, fault, text } => {
            encode_lane(*lane, writer)?;
            encode_fault(*fault, text, writer)?;
        }
        Message::LaneLost(ack) => encode_ack(ack, writer)?,
        Message::Eof(mark) => encode_mark(mark, writer)?,
        Message::Closed { channel } | Message::Gone { channel } => writer.u32(*channel),
        Message::Reset { channel, fault } => {
            writer.u32(*channel);
            writer.u16(fault.to_wire());
        }
        Message::Ping { token } | Message::Pong { token } => writer.u64(*token),
        Message::Drain => {}
    }
    Ok(())
}

/// Reads the body of a message of this kind to its end.
fn decode_body(kind: Kind, mut body: Reader<'_>) -> Result<Message, DecodeError> {
    let reader = &mut body;
    let message = match kind {
        Kind::Accept => {
            let secret = SessionSecret(reader.array("session secret")?);
            let offset = reader.offset();
            let lanes_max = reader.u16("number of lanes")?;
            if lanes_max == 0 {
                return Err(bad_value("number of lanes", 0, offset));
            }
            let most = u64::from(MAX_LANES);
            within("number of lanes", u64::from(lanes_max), most, offset)?;
            Message::Accept {
                secret,
                lanes_max,
                port: reader.u16("port")?,
            }
        }
        Kind::Open => Message::Open(decode_open(reader)?),
        Kind::Opened => Message::Opened {
            channel: reader.u32("channel")?,
            limit: decode_offset("limit", reader)?,
        },
        Kind::Refused => {
            let channel = reader.u32("channel")?;
            let (fault, text) = decode_fault(reader)?;
            Message::Refused {
                channel,
                fault,
                text,
            }
        }
        Kind::Credit => {
            let count = reader.count("credit count", MAX_CREDITS, CREDIT_BYTES)?;
            let credits = (0..count).map(|_| {
                Ok(Credit {
                    channel: reader.u32("channel")?,
                    delivered: decode_offset("delivered", reader)?,
                    limit: decode_offset("limit", reader)?,
                })
            });
            Message::Credit(credits.collect::<Result<_, DecodeError>>()?)
        }
        Kind::Ack => {
            let count = reader.count("lane count", usize::from(MAX_LANES), LANE_ACK_BYTES)?;
            let acks = (0..count).map(|_| decode_ack(reader));
            Message::Ack(acks.collect::<Result<_, DecodeError>>()?)
        }
        Kind::LaneRefused => {
            let lane = decode_lane(reader)?;
            let (fault, text) = decode_fault(reader)?;
            Message::LaneRefused { lane, fault, text }
        }
        Kind::LaneLost => Message::LaneLost(decode_ack(reader)?),
        Kind::Eof => Message::Eof(decode_mark(reader)?),
        Kind::Closed => Message::Closed {
            channel: reader.u32("channel")?,
        },
        Kind::Reset => Message::Reset {
            channel: reader.u32("channel")?,
            fault: FaultCode::from_wire(reader.u16("fault")?),
        },
        Kind::Gone => Message::Gone {
            channel: reader.u32("channel")?,
        },
        Kind::Ping => Message::Ping {
            token: reader.u64("token")?,
        },
        Kind::Pong => Message::Pong {
            token: reader.u64("token")?,
        },
        Kind::Drain => Message::Drain,
    };
    body.fields(|_, _| Ok(false))?;
    Ok(message)
}

fn encode_open(open: &Open, writer: &mut Writer<'_>) -> Result<(), EncodeError> {
    writer.u32(open.channel);
    encode_offset("limit", open.limit, writer)?;
    writer.text("route", &open.route, MAX_NAME_BYTES)?;
    writer.text("parameter", &open.parameter, MAX_NAME_BYTES)?;
    writer.count("mark count", open.barrier.len(), MAX_CHANNELS)?;
    for mark in &open.barrier {
        encode_mark(mark, writer)?;
    }
    Ok(())
}

fn decode_open(reader: &mut Reader<'_>) -> Result<Open, DecodeError> {
    let channel = reader.u32("channel")?;
    let limit = decode_offset("limit", reader)?;
    let route = reader.text("route", MAX_NAME_BYTES)?;
    let parameter = reader.text("parameter", MAX_NAME_BYTES)?;
    let count = reader.count("mark count", MAX_CHANNELS, MARK_BYTES)?;
    let barrier = (0..count).map(|_| decode_mark(reader));
    Ok(Open {
        channel,
        limit,
        route: route.to_owned(),
        parameter: parameter.to_owned(),
        barrier: barrier.collect::<Result<_, DecodeError>>()?,
    })
}

fn encode_mark(mark: &Mark, writer: &mut Writer<'_>) -> Result<(), EncodeError> {
    writer.u32(mark.channel);
    encode_offset("offset", mark.offset, writer)
}

fn decode_mark(reader: &mut Reader<'_>) -> Result<Mark, DecodeError> {
    Ok(Mark {
        channel: reader.u32("channel")?,
        offset: decode_offset("offset", reader)?,
    })
}

fn encode_ack(ack: &LaneAck, writer: &mut Writer<'_>) -> Result<(), EncodeError> {
    encode_lane(ack.lane, writer)?;
    writer.u64(ack.frames);
    Ok(())
}

fn decode_ack(reader: &mut Reader<'_>) -> Result<LaneAck, DecodeError> {
    Ok(LaneAck {
        lane: decode_lane(reader)?,
        frames: reader.u64("frames")?,
    })
}

fn encode_offset(
    what: &'static str,
    offset: u64,
    writer: &mut Writer<'_>,
) -> Result<(), EncodeError> {
    bounded(what, offset, MAX_CHANNEL_OFFSET)?;
    writer.u64(offset);
    Ok(())
}

/// A place in a channel, which no sum with a length can overflow.
fn decode_offset(what: &'static str, reader: &mut Reader<'_>) -> Result<u64, DecodeError> {
    let at = reader.offset();
    let offset = reader.u64(what)?;
    within(what, offset, MAX_CHANNEL_OFFSET, at)?;
    Ok(offset)
}
