//! The fixed part of every message, in the order of the tables in docs/wire/tunnel.md.

use super::{Credit, Header, Kind, LaneAck, Mark, Message, Open};
use crate::limits::{
    MAX_CHANNEL_OFFSET, MAX_CHANNELS, MAX_CREDITS, MAX_LANES, MAX_NAME_BYTES, MAX_TEXT_BYTES,
    MAX_TUNNEL_BODY_BYTES,
};
use crate::wire::codec::{Fields, LANES, List, NOT_ZERO, Plain, Text, Within, layout};
use crate::wire::message::bodies;
use crate::wire::{DecodeError, EncodeError, Start};

/// A position in a channel; the limit makes sums with a length safe from overflow.
const OFFSET: Within = Within(0..=MAX_CHANNEL_OFFSET);
const MARKS: List<Fields> = List {
    most: MAX_CHANNELS,
    item_bytes: 12,
    each: "mark",
    item: Fields,
};
const CREDITS: List<Fields> = List {
    most: MAX_CREDITS,
    item_bytes: 20,
    each: "credit",
    item: Fields,
};
const LANE_ACKS: List<Fields> = List {
    most: MAX_LANES as usize,
    item_bytes: 10,
    each: "lane",
    item: Fields,
};

impl Message {
    /// Appends header and body. The header marks every message of version 1 as mandatory to
    /// understand.
    ///
    /// *accept* writes a secret to `out`, which the caller has to zeroize.
    ///
    /// # Errors
    /// A value that a peer would reject; `out` is unchanged.
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

    /// Decodes the body after `header`. `None` is a message of an unknown kind that may be skipped.
    ///
    /// # Errors
    /// [`DecodeError`], also if the body is not exactly as long as announced.
    pub fn decode(header: &Header, bytes: &[u8]) -> Result<Option<Self>, DecodeError> {
        header.start.decode(bytes, Kind::from_wire, decode_body)
    }
}

bodies! {
    Accept {
        secret: "session secret" as Fields,
        lanes_max: "number of lanes" as LANES,
        port: "port" as Plain,
    };
    Open(open: "open" as Fields);
    Opened { channel: "channel" as Plain, limit: "limit" as OFFSET };
    Refused {
        channel: "channel" as Plain,
        fault: "fault" as Fields,
        text: "text" as Text(MAX_TEXT_BYTES),
    };
    Credit(credits: "credit count" as CREDITS);
    Ack(acks: "lane count" as LANE_ACKS);
    LaneRefused {
        lane: "lane" as NOT_ZERO,
        fault: "fault" as Fields,
        text: "text" as Text(MAX_TEXT_BYTES),
    };
    LaneLost(ack: "lane" as Fields);
    Eof(mark: "mark" as Fields);
    Closed { channel: "channel" as Plain };
    Reset { channel: "channel" as Plain, fault: "fault" as Fields };
    Gone { channel: "channel" as Plain };
    Ping { token: "token" as Plain };
    Pong { token: "token" as Plain };
    Drain;
}

layout! { Open {
    channel: "channel" as Plain,
    limit: "limit" as OFFSET,
    route: "route" as Text(MAX_NAME_BYTES),
    parameter: "parameter" as Text(MAX_NAME_BYTES),
    barrier: "mark count" as MARKS,
} }

layout! { Mark {
    channel: "channel" as Plain,
    offset: "offset" as OFFSET,
} }

layout! { Credit {
    channel: "channel" as Plain,
    delivered: "delivered" as OFFSET,
    limit: "limit" as OFFSET,
} }

layout! { LaneAck {
    lane: "lane" as NOT_ZERO,
    frames: "frames" as Plain,
} }
