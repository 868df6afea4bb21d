//! The fixed part of every message, in the order of the tables in docs/wire/tunnel.md.

use super::{Credit, Header, LaneAck, Mark, Message, Open};
use crate::limits::{
    MAX_CHANNEL_OFFSET, MAX_CHANNELS, MAX_CREDITS, MAX_LANES, MAX_NAME_BYTES, MAX_TEXT_BYTES,
    MAX_TUNNEL_BODY_BYTES,
};
use crate::wire::EncodeError;
use crate::wire::codec::{Fields, LANES, List, NOT_ZERO, Plain, Text, Within, layout};
use crate::wire::message::messages;

/// A position in a channel. Because of the limit, a position plus a length cannot overflow.
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
    /// Appends header and body. A flag in the header forbids the receiver to skip the message.
    ///
    /// *accept* writes a secret to `out`, which the caller has to zeroize.
    ///
    /// # Errors
    /// The message has a value that a peer would reject; `out` is unchanged.
    pub fn encode(&self, epoch: u32, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        self.append(out, MAX_TUNNEL_BODY_BYTES, |writer| {
            writer.u32(epoch);
            writer.u32(0);
        })
    }
}

messages! {
    Accept = 65, "accept" {
        secret: "session secret" as Fields,
        lanes_max: "number of lanes" as LANES,
        port: "port" as Plain,
    };
    Open = 66, "open" (open: "open" as Fields);
    Opened = 67, "opened" { channel: "channel" as Plain, limit: "limit" as OFFSET };
    Refused = 68, "refused" {
        channel: "channel" as Plain,
        fault: "fault" as Fields,
        text: "text" as Text(MAX_TEXT_BYTES),
    };
    Credit = 69, "credit" (credits: "credit count" as CREDITS);
    Ack = 70, "acknowledgements" (acks: "lane count" as LANE_ACKS);
    LaneRefused = 71, "lane refused" {
        lane: "lane" as NOT_ZERO,
        fault: "fault" as Fields,
        text: "text" as Text(MAX_TEXT_BYTES),
    };
    LaneLost = 72, "lane lost" (ack: "lane" as Fields);
    Eof = 73, "eof" (mark: "mark" as Fields);
    Closed = 74, "closed" { channel: "channel" as Plain };
    Reset = 75, "reset" { channel: "channel" as Plain, fault: "fault" as Fields };
    Gone = 76, "gone" { channel: "channel" as Plain };
    Ping = 77, "ping" { token: "token" as Plain };
    Pong = 78, "pong" { token: "token" as Plain };
    Drain = 79, "drain";
    LaneWanted = 80, "lane wanted" { lane: "lane" as NOT_ZERO };
    LaneFailed = 81, "lane failed" {
        lane: "lane" as NOT_ZERO,
        fault: "fault" as Fields,
        text: "text" as Text(MAX_TEXT_BYTES),
    };
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
